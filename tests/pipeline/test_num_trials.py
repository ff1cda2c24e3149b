"""How often a private selection tries, and what the best of so many trials costs."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from scipy import stats

from pyro_dp import (
    ConfigurationError,
    PoissonTrials,
    SubsampledGaussian,
    TruncatedNegativeBinomial,
    selection_epsilon,
)
from pyro_dp.accounting import composition
from pyro_dp.accounting.gaussian_pairs import gaussian_epsilon
from pyro_dp.accounting.pld import RATES

KINDS = [
    TruncatedNegativeBinomial(10.0),
    TruncatedNegativeBinomial(10.0, eta=1.0),
    TruncatedNegativeBinomial(40.0, eta=3.5),
    PoissonTrials(1.0),
    PoissonTrials(10.0),
    PoissonTrials(40.0),
]


def at_most(trials, x):
    """Probability generating function of K, from its definition."""
    if isinstance(trials, PoissonTrials):
        return np.exp(trials.mean * (x - 1.0))
    share = 1.0 - (1.0 - trials.gamma) * x
    if trials.eta == 0.0:
        return np.log(share) / math.log(trials.gamma)
    return (share**-trials.eta - 1.0) / (trials.gamma**-trials.eta - 1.0)


def selected(trials, base):
    """Exact distribution of the best of K outcomes; the first is that there was no trial."""
    below = at_most(trials, np.append(0.0, np.cumsum(base) / base.sum()))
    return np.append(below[0], np.diff(below))


def moments(p, q):
    """log E_P exp(rate * loss), for the worse of the two directions."""
    p, q = p[(p > 0) & (q > 0)], q[(p > 0) & (q > 0)]
    loss = np.log(p) - np.log(q)
    exponent = np.multiply.outer(RATES, loss)
    one = np.logaddexp.reduce(exponent + np.log(p), axis=1)
    return np.maximum(one, np.logaddexp.reduce(-exponent + np.log(q), axis=1))


def bases():
    """Randomised response, Gaussians on a grid, rare best outcomes, and random distributions."""
    draws = np.random.default_rng(0)
    for eps in (0.1, 1.0, 3.0):
        share = 1.0 / (1.0 + math.exp(eps))
        yield np.array([share, 1.0 - share]), np.array([1.0 - share, share])
        for rare in (0.3, 0.03, 0.001):
            p = np.array([1.0 - rare, rare])
            q = np.array([1.0 - rare * math.exp(-eps), rare * math.exp(-eps)])
            yield p, q
            yield p[::-1], q[::-1]
    edges = np.linspace(-8.0, 9.0, 400)
    for sigma in (0.7, 1.0, 3.0):
        yield np.diff(stats.norm.cdf(edges, 1, sigma)), np.diff(stats.norm.cdf(edges, 0, sigma))
    for size in (3, 5, 30):
        for _ in range(5):
            p = draws.dirichlet(np.ones(size))
            yield p, draws.dirichlet(50.0 * p + 1.0)


@pytest.mark.parametrize("trials", KINDS, ids=repr)
def test_the_bound_holds_for_every_mechanism_and_order_and_is_of_use(trials):
    """Against the exact distribution of the winner; one trial's cost is no bound."""
    tightest, above_one_trial = math.inf, 0.0
    for p, q in bases():
        p, q = p / p.sum(), q / q.sum()
        base = moments(p, q)
        bound = trials.moments(base)
        exact = moments(selected(trials, p), selected(trials, q))
        assert (exact <= bound * (1 + 1e-9) + 1e-9).all()
        tightest = min(tightest, np.min((bound + 1e-3) / (exact + 1e-3)))
        above_one_trial = max(above_one_trial, np.max(exact / base))
    assert tightest < 1.6
    if trials.mean > 1.0:
        assert above_one_trial > 1.7


@pytest.mark.parametrize("sigma", [0.8, 2.0, 10.0])
@pytest.mark.parametrize("trials", [each for each in KINDS if each.mean > 1.0], ids=repr)
def test_agrees_with_dp_accounting(sigma, trials):
    shape = math.inf if isinstance(trials, PoissonTrials) else trials.eta
    accountant = RdpAccountant(list(1.0 + RATES[(RATES > 0.02) & (RATES < 1e4)]))
    event = dp_event.GaussianDpEvent(sigma)
    accountant.compose(dp_event.RepeatAndSelectDpEvent(event, trials.mean, shape))
    found = selection_epsilon({SubsampledGaussian(sigma): 1}, trials=trials, delta=1e-6)
    assert found == pytest.approx(accountant.get_epsilon(1e-6), rel=5e-3)


def test_costs_more_than_one_trial_and_less_than_all_of_them():
    releases, one = {SubsampledGaussian(4.0): 1}, gaussian_epsilon(1 / 4.0, 1e-6)
    previous = one
    for mean in (2.0, 10.0, 100.0):
        found = selection_epsilon(releases, trials=TruncatedNegativeBinomial(mean), delta=1e-6)
        assert previous < found < min(mean, 4.0) * one
        previous = found


def test_moments_of_a_ledger():
    """A Gaussian's are order (order - 1) / (2 sigma^2); under replace-one four times that."""
    for relation, factor in (("add_or_remove_one", 1.0), ("replace_one", 4.0)):
        found, lost = composition.moments({SubsampledGaussian(3.0, 1.0, "full"): 2}, relation)
        some = RATES < 10.0  # beyond, the mass left out is missing
        expected = factor * 2 * (RATES + 1.0) * RATES / (2 * 3.0**2)
        np.testing.assert_allclose(found[some], expected[some], rtol=1e-3)
        assert 0.0 <= lost < 1e-38
    found, lost = composition.moments({}, "replace_one")
    assert not found.any() and lost == 0.0
    found, _ = composition.moments({SubsampledGaussian(0.0): 1}, "replace_one")
    assert np.isinf(found).all()
    # Poisson sampling: the worse of adding and removing
    event = {SubsampledGaussian(1.0, 0.3): 5}
    found, _ = composition.moments(event, "add_or_remove_one")
    for side in composition._sides(composition._parts(event, "add_or_remove_one")[0]):
        assert (found >= composition.log_moments(side)[0]).all()


@pytest.mark.parametrize("trials", KINDS, ids=repr)
def test_numbers_of_trials_have_the_declared_distribution(trials):
    if isinstance(trials, PoissonTrials):
        law = stats.poisson(trials.mean)
    elif trials.eta == 0.0:
        law = stats.logser(1.0 - trials.gamma)
    else:
        law = stats.nbinom(trials.eta, trials.gamma)  # to be conditioned on K > 0
    uniforms = (np.arange(20_000) + 0.5) / 20_000
    draws = np.array([trials.draw(u) for u in uniforms])
    below = law.cdf(0) if isinstance(trials, TruncatedNegativeBinomial) else 0.0
    for k in (0, 1, 2, 5, 10, 40, 100):
        expected = max(0.0, (law.cdf(k) - below) / (1.0 - below))
        assert np.mean(draws <= k) == pytest.approx(expected, abs=1e-4)
    assert draws.mean() == pytest.approx(trials.mean, rel=0.01)


@pytest.mark.parametrize("trials", [*KINDS, TruncatedNegativeBinomial(500.0, eta=100.0)], ids=repr)
def test_the_last_uniform_number_ends_too(trials):
    assert trials.draw(0.0) in (0, 1)
    assert trials.draw(np.nextafter(1.0, 0.0)) < 1000 * trials.mean


@pytest.mark.parametrize("mean", [1.0 + 1e-6, 1.5, 10.0, 500.0])
@pytest.mark.parametrize("eta", [0.0, 1e-6, 0.5, 1.0, 100.0])
def test_gamma_gives_the_mean(mean, eta):
    gamma = TruncatedNegativeBinomial(mean, eta).gamma
    if eta == 1.0:
        assert gamma == pytest.approx(1.0 / mean)
    if mean == 10.0 and eta != 1e-6:
        k = np.arange(1, 5000)
        weights = stats.nbinom.pmf(k, eta, gamma) if eta else stats.logser.pmf(k, 1.0 - gamma)
        assert weights @ k / weights.sum() == pytest.approx(mean, rel=1e-6)
    assert 0.0 < gamma < 1.0


@pytest.mark.parametrize("make", [TruncatedNegativeBinomial, PoissonTrials])
def test_settings_out_of_range(make):
    for mean in (0.5, math.nan, math.inf, 501.0, "many", True):
        with pytest.raises(ConfigurationError, match="mean"):
            make(mean)
    for eta in (-0.5, math.nan, 101.0):
        with pytest.raises(ConfigurationError, match="eta"):
            TruncatedNegativeBinomial(10.0, eta)
