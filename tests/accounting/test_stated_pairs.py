"""Releases that state their epsilon and delta, composed: against brute force and another library.

The brute force lists all outcomes of the four-point pairs, and integrates over a Gaussian beside
them. It has no grid, and does not split off an infinite part.
"""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from dp_accounting.pld import common
from dp_accounting.pld import privacy_loss_distribution as theirs
from scipy.optimize import brentq
from scipy.special import ndtr

from pyro_dp import ApproximateDP, SubsampledGaussian
from pyro_dp.accounting import bounded_pairs, composition
from pyro_dp.accounting.bounded_pairs import Response

pytestmark = pytest.mark.filterwarnings("error")

ADD, REPLACE = "add_or_remove_one", "replace_one"
DELTA = 1e-5


def stated(epsilon, delta=0.0):
    return ApproximateDP(epsilon, delta, "x")


def four_points(epsilon, delta):
    """Pairs (P, Q) of the outcomes' probabilities: Kairouz, Oh & Viswanath 2015, equation 9."""
    true, false = math.exp(epsilon) / (1 + math.exp(epsilon)), 1 / (1 + math.exp(epsilon))
    rest = 1.0 - delta
    return [(delta, 0.0), (rest * true, rest * false), (rest * false, rest * true), (0.0, delta)]


def brute_delta(events, eps, mu=0.0):
    """sup_A P(A) - e^eps Q(A) of the product, beside a Gaussian whose means are mu apart."""
    total = 0.0
    for outcome in itertools.product(*(four_points(*event) for event in events)):
        p, q = math.prod(a for a, _ in outcome), math.prod(b for _, b in outcome)
        if p == 0.0:
            continue
        if mu == 0.0 or q == 0.0:
            total += max(0.0, p - math.exp(eps) * q)
        else:
            rest = eps - math.log(p / q)
            above = ndtr(mu / 2 - rest / mu), ndtr(-mu / 2 - rest / mu)
            total += p * above[0] - math.exp(eps) * q * above[1]
    return total


def draw(rng, kinds):
    most = rng.choice([0.01, 0.3, 3.0])
    deltas = rng.choice([0.0, 1e-7, 1e-6], size=kinds)
    return [(float(most * rng.uniform(0.05, 1.0)), float(delta)) for delta in deltas]


@pytest.mark.one_in(16)
@pytest.mark.parametrize("case", range(48))
def test_random_ledgers_against_all_outcomes(case):
    """The bound is never below what an attacker attains, and within a hundredth of it."""
    rng = np.random.default_rng([38, case])
    events = draw(rng, 1 + case % 3)
    noise = float(rng.uniform(1.0, 10.0)) if case // 4 % 2 else math.inf
    relation = (ADD, REPLACE)[case // 8 % 2]  # a fourth of the cases has each combination
    mu = (1.0 if relation == ADD else 2.0) / noise
    ledger = {stated(*event): 1 for event in events}
    if noise < math.inf:
        ledger[SubsampledGaussian(noise)] = 1
    for delta in (DELTA, 1e-3):
        found = composition.epsilon(ledger, delta, relation, "pld")

        def excess(eps, delta=delta):
            return brute_delta(events, eps, mu) - delta

        exact = brentq(excess, 0.0, 100.0, xtol=1e-13) if excess(0.0) > 0.0 else 0.0
        assert exact * (1 - 1e-9) - 1e-10 <= found <= exact * 1.01 + 1e-9
        assert composition.epsilon_bound(ledger, delta, relation, "pld") >= found * (1 - 1e-9)
    for eps in (0.0, 0.5 * sum(epsilon for epsilon, _ in events)):
        exact = brute_delta(events, eps, mu)
        found = composition.delta(ledger, eps, relation, "pld")
        assert exact * (1 - 1e-7) <= found <= exact * 1.01 + 1e-15


@pytest.mark.slow
def test_many_pure_releases_against_dp_accounting():
    for epsilon, count in ((0.01, 1000), (0.1, 30), (1.0, 5)):
        params = common.DifferentialPrivacyParameters(epsilon, 0.0)
        whole = theirs.from_privacy_parameters(params, epsilon / 100).self_compose(count)
        ours = composition.epsilon({stated(epsilon): count}, DELTA, ADD, "pld")
        assert ours == pytest.approx(whole.get_epsilon_for_delta(DELTA), rel=3e-3)


@pytest.mark.slow
@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_it_never_costs_more_than_the_sum(relation):
    rest = {SubsampledGaussian(1.5, 0.01): 300}
    for epsilon, delta in ((1e-12, 0.0), (0.2, 1e-7), (3.0, 0.0), (49.0, 0.0), (60.0, 1e-6)):
        event = stated(epsilon, delta)
        alone = composition.epsilon(rest, DELTA - 2 * delta, relation, "pld")
        both = composition.epsilon({event: 2} | rest, DELTA, relation, "pld")
        assert both <= (2 * epsilon + alone) * 1.001
        assert composition.epsilon({event: 2}, DELTA, relation, "pld") <= 2 * epsilon


@pytest.mark.parametrize("most, gap", [(0.1, 0.03), (0.1, 0.1), (1e-6, 0.5), (40.0, 0.7)])
def test_the_grid_keeps_both_masses(most, gap):
    losses, probs, infinity = Response(most).on_grid(-most, most, gap)
    assert infinity == 0.0 and np.all(probs >= 0.0)
    assert math.fsum(probs) == pytest.approx(1.0, rel=1e-12)
    assert math.fsum(probs * np.exp(-losses)) == pytest.approx(1.0, rel=1e-9)
    for eps in (0.0, 0.3 * most, 0.9 * most):
        on_grid = math.fsum(probs * np.maximum(0.0, -np.expm1(eps - losses)))
        assert on_grid >= brute_delta([(most, 0.0)], eps) * (1 - 1e-12)


def test_rare_sums_take_their_part_of_delta():
    """The other release is a sum with little noise, in which few records take part."""
    rare, event = SubsampledGaussian(1e-4, 0.9e-3), stated(0.5)
    found = composition.epsilon({rare: 1, event: 1}, 1e-3, ADD, "pld")
    exact = brentq(lambda eps: 0.9e-3 + brute_delta([(0.5, 0.0)], eps) - 1e-3, 0.0, 0.5)
    assert found == pytest.approx(exact, rel=1e-6)


def test_many_kinds_are_rounded_up_to_few():
    losses = Counter(np.random.default_rng(0).uniform(1e-3, 0.5, 300).tolist())
    few = bounded_pairs._few(losses)
    assert len(few) <= bounded_pairs._MOST_KINDS and few.total() == 300
    own, rounded = np.sort([*losses.elements()]), np.sort([*few.elements()])
    assert np.all(own <= rounded) and np.all(rounded <= 1.2 * own)
    assert bounded_pairs._few(Counter([0.1, 0.2])) == Counter([0.1, 0.2])
    more = bounded_pairs._few(losses + Counter([0.3]))  # nested grids: epsilon never falls
    assert sum(e * n for e, n in more.items()) >= sum(e * n for e, n in few.items()) + 0.3
