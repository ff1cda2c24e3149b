"""The engines against closed forms, second engines, bounds from both sides and reference values."""

import importlib.util
import math
from pathlib import Path

import mpmath
import numpy as np
import pytest
from ledgers import ledger
from scipy.stats import norm

from pyro_dp.accounting import composition, gaussian_pairs, pld
from pyro_dp.accounting.budget import least_noise
from pyro_dp.accounting.events import ApproximateDP, NonPrivateLook, SubsampledGaussian
from pyro_dp.accounting.gaussian_pairs import DominatingPair

pytestmark = pytest.mark.filterwarnings("error")

ADD, REPLACE = "add_or_remove_one", "replace_one"
DELTA = 1e-5
# noise / sensitivity, sample rate, steps; epsilon at delta 1e-5: Poisson add/remove and fixed-size
# replace-one from an independent accountant (6 digits), Poisson replace-one (3 digits).
REFERENCE = [
    (1.0, 0.01, 1000, 1.82824, 2.19891, 1.205),
    (1.5, 0.01, 1000, 0.91756, 1.08952, 0.769),
    (4.0, 0.05, 1000, 1.58376, 1.71542, 1.534),
    (2.0, 0.005, 2000, 0.42209, 0.49246, 0.385),
    (1.1, 0.004, 100, 0.20283, 0.22099, 0.114),
    (0.7, 0.0001, 10000, 0.09958, 0.11936, 0.0414),
    (1.3, 0.008379420144126026, 11934, 3.55736, 4.49328, 2.933),
]


@pytest.mark.slow
@pytest.mark.every_commit
@pytest.mark.parametrize("sigma, rate, steps, poisson, fixed, swapped", REFERENCE)
def test_reference_rows_and_their_renyi_bounds(sigma, rate, steps, poisson, fixed, swapped):
    rows = [
        (SubsampledGaussian(sigma, rate), ADD, poisson, 1e-3),
        (SubsampledGaussian(2 * sigma, rate, "fixed"), REPLACE, fixed, 1e-3),
        (SubsampledGaussian(2 * sigma, rate), REPLACE, swapped, 5e-3),
    ]
    for event, relation, expected, tolerance in rows:
        accountant = ledger((event, steps), neighboring=relation)
        assert accountant.get_epsilon() == pytest.approx(expected, rel=tolerance)
        if rate > 1e-3:  # finer grids than a fast test affords
            assert accountant.get_delta(accountant.get_epsilon()) == pytest.approx(DELTA, rel=5e-3)
        other = ledger((event, steps), neighboring=relation, engine="rdp").get_epsilon()
        assert expected * 0.995 < other < math.inf
        bound = composition.epsilon_bound({event: steps}, DELTA, relation, "pld")
        assert expected * 0.995 < bound


@pytest.mark.parametrize(
    "ratio, steps, expected", [(1, 1, 4.377178), (10, 1, 0.340669), (5, 100, 9.997256)]
)
def test_full_batches_are_one_gaussian(ratio, steps, expected):
    for relation, unit in ((ADD, 1), (REPLACE, 2)):
        for sampling in ("poisson", "full"):
            event = SubsampledGaussian(unit * ratio, 1.0, sampling)
            assert ledger((event, steps), neighboring=relation).get_epsilon() == pytest.approx(
                expected, abs=1e-6
            )
    # Balle & Wang's formula in plain floating point
    mu, eps = math.sqrt(steps) / ratio, expected
    plain = norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu)
    got = ledger((SubsampledGaussian(ratio), steps)).get_delta(eps)
    assert got == pytest.approx(plain, rel=1e-7)


def test_composed_ledger_in_any_order():
    events = [
        (SubsampledGaussian(1.2, 0.01), 500),
        (SubsampledGaussian(10.0), 1),
        (SubsampledGaussian(1.5, 0.005), 300),
    ]
    first = ledger(*events).get_epsilon()
    assert first == pytest.approx(1.0216, rel=1e-3)
    assert ledger(*events[::-1]).get_epsilon() == first


def benchmark():
    path = Path(__file__).parents[2] / "benchmarks" / "accounting.py"
    spec = importlib.util.spec_from_file_location("benchmark_accounting", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The first four are one of each kind.
@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*range(4), *(pytest.param(i, marks=pytest.mark.slow) for i in range(4, 12))]
)
def test_between_independent_bounds(case):
    bounds = benchmark()
    rng = np.random.default_rng([7, case])
    events, relation, delta = bounds.draw(rng, case % len(bounds.KINDS))
    events = {event: min(count, 1000) for event, count in events.items()}
    out = bounds.check(events, relation, delta, points=1 << 15, with_theirs=case % 4 < 3)
    assert not bounds.violations(out)
    assert out["epsilon"] <= 1.01 * out["lower epsilon"] + 1e-6


@pytest.mark.long
@pytest.mark.every_commit
def test_the_bounds_reject_a_wrong_pair():
    bounds = benchmark()
    events = {SubsampledGaussian(2.0, 0.05): 200}
    out = bounds.check(events, REPLACE, DELTA, points=1 << 14)
    assert not bounds.violations(out)
    for noise in (1.02, 0.98):
        wrong = {SubsampledGaussian(2.0 * noise, 0.05): 200}
        out["epsilon"] = composition.epsilon(wrong, DELTA, REPLACE, "pld")
        assert bounds.violations(out)


@pytest.mark.long
def test_renyi_of_poisson_matches_dp_accounting():
    from dp_accounting.rdp import rdp_privacy_accountant as their_rdp

    step = composition.interpret(SubsampledGaussian(1.3, 0.02), ADD)
    orders = pld.ORDERS[:40]
    theirs = their_rdp._compute_rdp_poisson_subsampled_gaussian(0.02, 1.3, orders)
    np.testing.assert_allclose(gaussian_pairs.step_divergences(step)[:40], theirs, rtol=1e-6)


def test_renyi_conversion_matches_dp_accounting():
    from dp_accounting.rdp import rdp_privacy_accountant as their_rdp

    orders = pld.ORDERS
    for mu in (0.1, 1.0, 5.0):
        divergences = orders * mu**2 / 2
        theirs, _ = their_rdp.compute_epsilon(orders, divergences, 1e-5)
        moments = (orders - 1) * divergences
        assert pld.renyi_epsilon(orders - 1, moments, 1e-5) == pytest.approx(theirs)
        theirs, _ = their_rdp.compute_delta(orders, divergences, 1.0)
        assert pld.renyi_delta(orders - 1, moments, 1.0) == pytest.approx(theirs)


def test_single_steps_at_large_epsilon():
    step = DominatingPair("remove", 0.01, 1e-9)  # a hit is in the clear: delta is the rate
    for eps in (0.5, 300.0, 690.0, 710.0):
        assert step.delta(eps) == pytest.approx(1e-9, rel=1e-9)
    assert DominatingPair("fixed", 0.5, 1e-17).delta(1.5) <= 1e-17


@pytest.mark.slow
def test_renyi_of_fixed_subsets_is_above_a_data_set_that_attains_it():
    # All other records at -C, one moved to +C: the pair of Poisson sampling at sensitivity 2C.
    for noise in (0.5, 2.0):
        for rate in (0.001, 0.2):
            fixed = gaussian_pairs.step_divergences(DominatingPair("fixed", noise, rate))
            poisson = gaussian_pairs.step_divergences(DominatingPair("remove", noise, rate))
            assert np.all(fixed >= poisson * (1 - 1e-9))


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.parametrize("rate", [0.9, 0.999])
def test_a_subset_never_costs_more_than_all_records(rate):
    full = gaussian_pairs.step_divergences(DominatingPair("remove", 1.0, 1.0))
    subset = gaussian_pairs.step_divergences(DominatingPair("fixed", 1.0, rate))
    assert np.all(subset <= full * (1 + 1e-12))
    assert np.all(subset >= 0.9 * rate**2 * full)


def test_renyi_of_poisson_replacement_against_its_closed_form():
    step = DominatingPair("replace", 1.3, 1.0 - 1e-14)
    for order in (2.0, 8.0):
        assert gaussian_pairs.replacement_divergence(step, order) == pytest.approx(
            2 * order / 1.69, rel=1e-6
        )


def test_negligible_noise_and_rate_are_rounded_towards_more_cost():
    rate = composition.interpret(SubsampledGaussian(1.0, 1.0 - 1e-10), ADD).rate
    noise = composition.interpret(SubsampledGaussian(1e12, 0.5), ADD).noise
    assert rate == 1.0 and noise == 1e6
    mixed = {SubsampledGaussian(1e300): 1, SubsampledGaussian(1.0, 0.01): 100}
    alone = {SubsampledGaussian(1.0, 0.01): 100}
    cost = [composition.epsilon(events, DELTA, ADD, "pld") for events in (mixed, alone)]
    assert cost[0] == pytest.approx(cost[1], rel=1e-3)


@pytest.mark.parametrize("delta", [1e-30, 1e-60, 1e-300, 5e-324, 0.3, 0.999])
def test_unusual_delta(delta):
    ledger = {SubsampledGaussian(1.0, 0.01): 100, SubsampledGaussian(30.0): 2}
    got = composition.epsilon(ledger, delta, ADD, "pld")
    assert got >= composition.epsilon(ledger, min(0.9999, 2 * delta), ADD, "pld") >= 0.0


@pytest.mark.parametrize("engine", composition.ENGINES)
@pytest.mark.parametrize(
    "sigma, rate, steps, delta",
    [
        (1.0, 1.0, 10**6, 1e-12),
        (0.05, 1.0, 1, 1e-12),
        (0.05, 0.01, 1000, 1e-12),
        (1.0, 0.01, 10**5, 1e-5),
        (0.01, 0.01, 20, 1e-5),
        (1e4, 0.01, 10, 1e-5),
        (1e8, 0.5, 10, 1e-12),
        (1.0, 1e-9, 10, 1e-5),
    ],
)
def test_extreme_settings_are_answered(engine, sigma, rate, steps, delta):
    for relation, sampling in ((ADD, "poisson"), (REPLACE, "poisson"), (REPLACE, "fixed")):
        accountant = ledger(
            (SubsampledGaussian(sigma, rate, sampling), steps),
            neighboring=relation,
            engine=engine,
            delta=delta,
        )
        assert 0.0 <= accountant.get_epsilon() < math.inf
        assert 0.0 <= accountant.get_delta(1.0) <= 1.0
    assert ledger((SubsampledGaussian(1.0), 0), engine=engine).get_epsilon() == 0.0


def test_delta_at_epsilon_zero():
    """Seven steps of nearly Gaussian losses: their total variation distance."""
    events = {SubsampledGaussian(23.318, 0.00066543): 7}
    mu = math.sqrt(7) * 0.00066543 * math.sqrt(math.expm1(1 / 23.318**2))
    expected = norm.cdf(mu / 2) - norm.cdf(-mu / 2)
    assert composition.delta(events, 0.0, ADD, "pld") == pytest.approx(expected, rel=5e-3)


@pytest.mark.slow
def test_hardly_any_noise():
    tiny = ledger((SubsampledGaussian(1e-3, 0.01), 1000))
    assert tiny.get_delta(1.0) > 0.999  # ten hits in the clear


GAUSSIANS = {SubsampledGaussian(1.2, 0.02): 200, SubsampledGaussian(20.0): 3}


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_what_is_private_by_itself_composes_by_rdp(relation, engine="rdp"):
    own = {ApproximateDP(0.25, 1e-6, "a"): 2, ApproximateDP(0.1, 0.0, "b"): 1}
    both = own | GAUSSIANS
    rest = composition.epsilon(GAUSSIANS, DELTA - 2e-6, relation, engine)
    found = composition.epsilon(both, DELTA, relation, engine)
    assert rest < found <= (0.6 + rest) * (1.0 + 1e-9)
    assert composition.delta(both, found, relation, engine) == pytest.approx(DELTA, rel=1e-4)
    assert composition.epsilon_bound(both, DELTA, relation, engine) == math.inf
    tight = composition.epsilon(both, DELTA, relation, "pld")
    assert tight < found
    assert tight <= composition.epsilon_bound(both, DELTA, relation, "pld") < math.inf


@pytest.mark.parametrize("engine", composition.ENGINES)
@pytest.mark.parametrize("cost", [composition.epsilon, composition.epsilon_bound])
def test_deltas_must_leave_room(engine, cost):
    def of(events, delta=DELTA):
        return cost(events, delta, ADD, engine)

    unit = 2.0**-20
    at_the_edge = of({ApproximateDP(0.5, unit, "a"): 10}, 10 * unit)
    assert 4.9 < at_the_edge <= 5.0
    assert of({ApproximateDP(0.5, unit, "a"): 11}, 10 * unit) == math.inf
    assert of({ApproximateDP(0.5, unit, "a"): 11} | GAUSSIANS, 10 * unit) == math.inf
    assert of({ApproximateDP(0.5, 0.0, "pure"): 3}, 1e-300) == 1.5
    assert of({ApproximateDP(0.5, 0.5, "a"): 0}) == 0.0
    for rest in ({}, GAUSSIANS, {ApproximateDP(0.5, 0.0, "pure"): 1}):
        assert of({NonPrivateLook("loss"): 1} | rest) == math.inf
        assert composition.delta({NonPrivateLook("loss"): 1} | rest, math.inf, ADD, engine) == 1.0
        assert of({NonPrivateLook("loss"): 0} | rest) == of(rest)


def test_deltas_of_what_is_private_by_itself():
    def delta(events, eps):
        return composition.delta(events, eps, ADD, "pld")

    assert delta({ApproximateDP(0.5, 1e-6, "a"): 3}, 1.5) == pytest.approx(3e-6)
    assert delta({ApproximateDP(0.5, 1e-6, "a"): 3}, math.inf) == pytest.approx(3e-6)
    assert delta({ApproximateDP(0.5, 0.3, "a"): 4}, 9.0) == pytest.approx(1.0 - 0.7**4)
    all_true = (1.0 + math.exp(-0.5)) ** -3  # the loss is 1.5 then, and at most 0.5 otherwise
    exact = -math.expm1(1.4 - 1.5) * all_true
    assert delta({ApproximateDP(0.5, 0.0, "a"): 3}, 1.4) == pytest.approx(exact, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("engine", composition.ENGINES)
@pytest.mark.parametrize("relation", composition.NEIGHBORING)
def test_who_hardly_ever_takes_part_has_nothing_to_fear(relation, engine):
    """If a record takes part with probability delta at most, a step is (0, delta)-private."""
    ledger = {SubsampledGaussian(1e-4, 1e-7): 100}
    assert composition.epsilon(ledger, 1e-5, relation, engine) == 0.0
    assert composition.epsilon(ledger, 0.9e-5, relation, engine) > 0.0
    assert 0.0 < composition.delta(ledger, 0.0, relation, engine) <= 1.0000001e-5
    both = ledger | {ApproximateDP(0.5, 1e-6, "other"): 1}
    found = composition.epsilon(both, 1.2e-5, relation, engine)
    assert 0.4999 < found <= 0.5


@pytest.mark.parametrize("rate", [1e-4, 0.3, 1.0])
@pytest.mark.parametrize("sigma", [0.1, 1.0, 100.0])
def test_a_root_is_rounded_up(sigma, rate):
    """The exact profile of one release, at its epsilon, is nowhere above delta."""
    for delta in (1e-12, 1e-5, 1e-2):
        epsilon = composition.epsilon({SubsampledGaussian(sigma, rate): 1}, delta, ADD, "pld")
        with mpmath.workdps(40):
            inner = mpmath.log1p(mpmath.expm1(epsilon) / mpmath.mpf(rate))
            far, half = inner * sigma, 1 / (2 * mpmath.mpf(sigma))
            mass = mpmath.ncdf(half - far), mpmath.ncdf(-half - far)
            assert rate * (mass[0] - mpmath.exp(inner) * mass[1]) <= delta


def test_calibrated_noise_fits_where_the_cost_has_jumps():
    """Grids are refined in steps. So a small change of the noise may change the cost much."""
    for k in range(60):
        budget = 0.1 * 1.07**k
        sigma = least_noise(_jagged, budget)
        assert 0.98 * budget <= _jagged(sigma) <= budget


def _jagged(sigma):
    return (1 + 5e-3 * (round(math.log(sigma) * 1e4) % 2)) / sigma
