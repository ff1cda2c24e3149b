"""The distributions against quadrature, and what a grid may and may not do to them."""

import math

import numpy as np
import pytest
from scipy.signal import lfilter
from scipy.stats import norm

from pyro_dp.accounting import pld
from pyro_dp.accounting.gaussian_pairs import DominatingPair
from pyro_dp.accounting.pld import compose, log_moments

pytestmark = pytest.mark.filterwarnings("error")

KINDS = ("remove", "add", "replace", "fixed")
NOISE, RATE = 0.8, 0.2


def densities(kind):
    """P and Q on a fine grid of outcomes, and its spacing; for ``fixed``, with epsilon >= 0."""
    x = np.linspace(-12.0, 14.0, 400_001)
    zero, one, minus = (norm.pdf(x, mean, NOISE) for mean in (0, 1, -1))
    mixed = (1 - RATE) * zero + RATE * one
    swapped = (1 - RATE) * zero + RATE * minus
    pair = {"add": (zero, mixed), "replace": (mixed, swapped)}.get(kind, (mixed, zero))
    return *pair, x[1] - x[0]


@pytest.mark.parametrize("gap", [1e-3, 0.3, 50.0])
def test_hockey_sticks_follow_their_recursion(gap):
    rng = np.random.default_rng(0)
    above = np.cumsum(rng.exponential(size=100_000) * 10.0 ** rng.uniform(-300.0, 0.0, 100_000))
    expected = lfilter([0.0, -math.expm1(-gap)], [1.0, -math.exp(-gap)], above)
    np.testing.assert_allclose(pld._hockey_sticks(above, gap), expected, rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_is_never_below_its_profile(kind):
    p, q, dx = densities(kind)
    side = ((DominatingPair(kind, NOISE, RATE), 1),)
    for spread, tolerance in ((1e-2, 1.0), (1e-6, 1e-4)):
        curve = compose(side, 2.0, math.log(1e-4), spread)
        for eps in (0.1, 0.1234, 0.5, 1.0):
            exact = np.maximum(p - math.exp(eps) * q, 0.0).sum() * dx
            delta = curve.delta(eps)
            assert exact * (1 - 1e-9) <= delta <= exact * (1 + tolerance) + 1e-10
            if exact > 1e-6:
                assert curve.epsilon(exact) >= eps * (1 - 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_epsilon_and_delta_are_inverse_between_grid_points(kind):
    curve = compose(((DominatingPair(kind, NOISE, RATE), 5),), 2.0, math.log(1e-4), 1e-3)
    for eps in np.linspace(1.0, 2.0, 17) if kind != "add" else np.linspace(0.2, 0.9, 17):
        assert curve.epsilon(curve.delta(eps)) == pytest.approx(eps, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_finer_grids_cost_less(kind):
    side = ((DominatingPair(kind, NOISE, RATE), 20), (DominatingPair(kind, 3.0, 0.01), 50))
    costs = [compose(side, 2.0, math.log(1e-5), 1e-2 * 16.0**-k).epsilon(1e-5) for k in range(4)]
    assert costs == sorted(costs, reverse=True)
    assert costs[2] - costs[3] < costs[1] - costs[2] < costs[0] - costs[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noise, rate", [(0.3, 1e-4), (1.0, 0.01), (50.0, 0.9), (1e6, 1e-4)])
def test_grids_keep_the_mass_of_both(kind, noise, rate):
    step = DominatingPair(kind, noise, rate)
    ends = step.span(math.log(1e-15))
    grid = step.on_grid(*ends, np.ptp(ends) / 1000)
    assert np.all(grid.probs >= 0.0) and np.all(np.diff(grid.losses) > 0.0)
    assert grid.probs.sum() + grid.infinity == pytest.approx(1.0, abs=1e-12)
    assert grid.infinity <= 1.1e-15
    dual = (grid.probs * np.exp(-grid.losses)).sum()
    assert dual == pytest.approx(1.0, abs=1e-6) and dual <= 1.0 + 1e-12


@pytest.mark.parametrize("kind", ["remove", "replace"])
@pytest.mark.parametrize("noise, rate", [(0.05, 0.3), (1.0, 1e-6), (30.0, 0.5), (1.0, 1.0)])
def test_outcomes_invert_losses(kind, noise, rate):
    step = DominatingPair(kind, noise, rate)
    x = np.linspace(-1.0 - 5.0 * noise, 1.0 + 5.0 * noise, 101)
    losses = step.losses(x)
    again = step.losses(step.outcomes(losses))
    np.testing.assert_allclose(again, losses, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("kind", ["remove", "add", "replace"])
def test_moments_bound_those_of_quadrature(kind):
    p, q, dx = densities(kind)
    moments, lost = log_moments(((DominatingPair(kind, NOISE, RATE), 3),))
    assert lost < 1e-35
    for i in (0, 10, 20, 23):
        rate = pld.RATES[i]
        some = (p > 0.0) & (q > 0.0)
        exact = 3 * math.log((p[some] * (p[some] / q[some]) ** rate).sum() * dx)
        assert exact - 1e-9 <= moments[i] <= exact * 1.01 + 1e-9


def test_nothing_is_known_below_the_window():
    curve = compose(((DominatingPair("remove", 0.5, 0.5), 1000),), 1.0, math.log(1e-5), 1e-3)
    assert curve.low > 0
    assert curve.delta(0.5 * curve.low * curve.gap) is None and curve.epsilon(0.999999) is None


def test_mass_above_the_window_does_not_come_back():
    # Three steps with rare hits: the tilted distribution has a long tail.
    side = ((DominatingPair("remove", 0.828, 0.00415), 3),)
    coarse, fine = (
        compose(side, 6.3, math.log(1.7e-7), spread).delta(0.636) for spread in (1e-4, 1e-8)
    )
    assert fine <= coarse <= fine * 1.0005


def test_what_is_cut_off_counts_as_infinite():
    """The window and the grids leave out a ten-millionth of delta each, at most."""
    pair, log_delta = DominatingPair("remove", 0.8, 0.2), math.log(1e-5)
    curve = compose(((pair, 10),), 10.0, log_delta, 1e-3)
    tail = log_delta + math.log(1e-7) - math.log(10)
    grid = pair.on_grid(*pair.span(tail), curve.gap)
    assert 0.0 < grid.infinity <= math.exp(tail)
    found = 1e-5 * 1e-7 + 10 * grid.infinity
    assert curve.infinity == pytest.approx(found, rel=1e-3, abs=0.0)
