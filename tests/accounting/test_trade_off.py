"""The trade-off curve against that of a single Gaussian, and its defining inequalities."""

import numpy as np
import pytest
from ledgers import ledger
from scipy.special import ndtr, ndtri

from pyro_dp import PrivacyAccountant, SubsampledGaussian
from pyro_dp.accounting.trade_off import trade_off
from pyro_dp.utils.errors import ConfigurationError

ALPHA = np.concatenate([[0.0, 1.0], np.geomspace(1e-5, 0.999, 60)])


@pytest.mark.parametrize("sigma, missed", [(0.3, 0.006), (1.0, 0.002), (4.0, 0.002)])
def test_gaussian(sigma, missed):
    """Dong, Roth & Su 2022, equation (6): mu is the sensitivity over the noise."""
    exact = ndtr(ndtri(1 - ALPHA) - 1.0 / sigma)
    curve = trade_off(ledger((SubsampledGaussian(sigma), 1)), ALPHA)
    assert np.all(curve <= exact + 1e-12)
    np.testing.assert_allclose(curve, exact, rtol=0.0, atol=missed)


def test_replacement_has_twice_the_sensitivity():
    replaced = trade_off(ledger((SubsampledGaussian(2.0), 1), neighboring="replace_one"), ALPHA)
    removed = trade_off(ledger((SubsampledGaussian(1.0), 1)), ALPHA)
    np.testing.assert_allclose(replaced, removed, atol=1e-12)


def test_supports_of_a_poisson_sample():
    accountant = ledger((SubsampledGaussian(1.0, 0.1), 1))
    curve = trade_off(accountant, ALPHA)
    for epsilon in (0.0, 0.3, 1.0):
        line = 1 - accountant.get_delta(epsilon) - np.exp(epsilon) * ALPHA
        assert np.all(curve >= line - 2e-3)
    assert np.all(np.diff(curve[np.argsort(ALPHA)]) <= 0.0)
    # The two outcomes differ only where the record was sampled.
    assert np.all(curve >= 0.9 - ALPHA - 1e-12)


def test_extremes():
    np.testing.assert_array_equal(trade_off(PrivacyAccountant(), ALPHA), 1 - ALPHA)
    noiseless = trade_off(ledger((SubsampledGaussian(0.0), 1)), ALPHA)
    np.testing.assert_array_equal(noiseless, np.zeros_like(ALPHA))


def test_shape():
    accountant = ledger((SubsampledGaussian(1.0), 1))
    assert trade_off(accountant, 0.5).shape == ()
    assert trade_off(accountant, [[0.1, 0.2]]).shape == (1, 2)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, np.nan, "x", [0.5, None]])
def test_alpha_is_a_rate(alpha):
    with pytest.raises(ConfigurationError, match="alpha"):
        trade_off(PrivacyAccountant(), alpha)
    with pytest.raises(ConfigurationError, match="accountant"):
        trade_off(1.0, 0.5)


def test_an_epsilon_whose_exponential_overflows():
    accountant = ledger((SubsampledGaussian(0.02), 1))
    assert accountant.get_epsilon() > 1000.0
    curve = trade_off(accountant, [0.0, 1e-6, 0.5, 1.0])
    assert ((curve >= 0.0) & (curve <= 1.0)).all() and curve[-1] == 0.0
