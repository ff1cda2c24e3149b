"""The trade-off curve against a Gaussian's and its inequalities; epsilon against releases."""

import sys

import numpy as np
import pytest
from ledgers import ledger
from scipy.special import ndtr, ndtri

from pyro_dp import ApproximateDP, ConfigurationError, PrivacyAccountant, SubsampledGaussian
from pyro_dp.accounting.figures import growth
from pyro_dp.accounting.trade_off import trade_off
from pyro_dp.utils.display import up

ALPHA = np.concatenate([[0.0, 1.0], np.geomspace(1e-5, 0.999, 60)])
STEP, FULL = SubsampledGaussian(2.0, 0.1), SubsampledGaussian(8.0, 1.0, "full")


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


def test_no_releases_and_no_noise():
    np.testing.assert_array_equal(trade_off(PrivacyAccountant(), ALPHA), 1 - ALPHA)
    noiseless = trade_off(ledger((SubsampledGaussian(0.0), 1)), ALPHA)
    np.testing.assert_array_equal(noiseless, np.zeros_like(ALPHA))
    for alpha, shape in ((0.5, ()), ([[0.1, 0.2]], (1, 2))):
        assert trade_off(PrivacyAccountant(), alpha).shape == shape


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


def test_epsilon_grows_along_the_ledger():
    accountant = ledger((FULL, 2), (STEP, 100), (FULL, 1), (ApproximateDP(0.3, 1e-6, "x"), 1))
    numbers, epsilons = growth(accountant)
    assert (numbers[0], epsilons[0]) == (0, 0.0)
    assert numbers[-1] == 104
    assert epsilons[-1] == pytest.approx(accountant.get_epsilon())
    assert (np.diff(epsilons) > 0).all()
    assert len(numbers) <= 36
    at = dict(zip(numbers.tolist(), epsilons, strict=True))
    # Equal events are one line of the ledger, the first one's.
    assert at[3] == ledger((FULL, 3)).get_epsilon()
    assert at[103] == ledger((FULL, 3), (STEP, 100)).get_epsilon()


def test_points_of_long_and_of_short_ledgers():
    many = ledger(*[(SubsampledGaussian(50.0 + k, 1.0, "full"), 1) for k in range(100)])
    assert len(growth(many)[0]) == 30
    assert growth(many)[0][[0, -1]].tolist() == [0, 100]
    assert growth(PrivacyAccountant())[0].tolist() == [0]
    assert growth(ledger((FULL, 2)))[0].tolist() == [0, 1, 2]


def test_a_look_ends_the_curve():
    accountant = ledger((FULL, 2))
    accountant.record_nonprivate("x")
    numbers, epsilons = growth(accountant)
    assert numbers.tolist() == [0, 1, 2, 3]
    assert np.isfinite(epsilons).tolist() == [True, True, True, False]


def labels(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_panels():
    pytest.importorskip("matplotlib")
    accountant = ledger((STEP, 50), epsilon=3.0)
    left, right = accountant.plot().axes
    lines = {line.get_label(): line.get_xydata() for line in left.lines + right.lines}
    np.testing.assert_array_equal(lines["spent"], np.column_stack(growth(accountant)))
    assert (lines["budget"][:, 1] == 3.0).all()
    np.testing.assert_array_equal(lines["perfect privacy"], [[0.0, 1.0], [1.0, 0.0]])
    curve = lines["least errors of an attacker"]
    np.testing.assert_array_equal(curve[:, 1], trade_off(accountant, curve[:, 0]))
    ((alpha, missed),) = lines["5% false positives"]
    assert (alpha, missed) == (0.05, trade_off(accountant, 0.05))
    assert "1e-05" in left.get_ylabel()
    assert "nats" in left.get_ylabel()
    assert "type I " in right.get_xlabel()
    assert "type II " in right.get_ylabel()
    assert up(accountant.get_epsilon()) in left.get_title()


def test_extremes():
    pytest.importorskip("matplotlib")
    empty = PrivacyAccountant().plot()
    assert empty.axes[0].get_title().endswith("epsilon = 0")
    assert "5.0%" in empty.axes[1].get_title()
    looked = ledger((FULL, 2))
    looked.record_nonprivate("x")
    left, right = looked.plot().axes
    assert "no guarantee" in left.get_title()
    assert "a look without noise" in labels(left)
    assert "100.0%" in right.get_title()
    noiseless = ledger((SubsampledGaussian(0.0, 1.0, "full"), 1)).plot()
    assert "no guarantee from here on" in labels(noiseless.axes[0])
    noiseless.canvas.draw()


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match="matplotlib"):
        PrivacyAccountant().plot()
