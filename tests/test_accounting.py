"""The accountant against closed forms, second engines and published reference values."""

import json
import math
import threading

import numpy as np
import pytest
import torch
from scipy.stats import norm

from pyro_dp import engines
from pyro_dp.accounting import PrivacyAccountant, SubsampledGaussian
from pyro_dp.errors import ConfigurationError, PrivacyBudgetExceeded, PrivacyError

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


def spend(events, relation=ADD, engine="pld", delta=DELTA):
    accountant = PrivacyAccountant(neighboring=relation, engine=engine, delta=delta)
    for event, count in events:
        accountant.record(event, count)
    return accountant


@pytest.mark.parametrize("sigma, rate, steps, poisson, fixed, swapped", REFERENCE)
def test_reference_rows_and_their_renyi_bounds(sigma, rate, steps, poisson, fixed, swapped):
    rows = [
        (SubsampledGaussian(sigma, rate), ADD, poisson, 1e-3),
        (SubsampledGaussian(2 * sigma, rate, "fixed"), REPLACE, fixed, 1e-3),
        (SubsampledGaussian(2 * sigma, rate), REPLACE, swapped, 5e-3),
    ]
    for event, relation, expected, tolerance in rows:
        accountant = spend([(event, steps)], relation)
        assert accountant.get_epsilon() == pytest.approx(expected, rel=tolerance)
        assert accountant.get_delta(accountant.get_epsilon()) == pytest.approx(DELTA, rel=5e-3)
        for engine in ("rdp", "advanced", "basic"):
            other = spend([(event, steps)], relation, engine).get_epsilon()
            assert expected * 0.995 < other < math.inf
        bound = engines.epsilon_bound({event: steps}, DELTA, relation, "pld")
        assert expected * 0.995 < bound


@pytest.mark.parametrize(
    "ratio, steps, expected", [(1, 1, 4.377178), (10, 1, 0.340669), (5, 100, 9.997256)]
)
def test_full_batches_are_one_gaussian(ratio, steps, expected):
    for relation, unit in ((ADD, 1), (REPLACE, 2)):
        for sampling in ("poisson", "full"):
            event = SubsampledGaussian(unit * ratio, 1.0, sampling)
            assert spend([(event, steps)], relation).get_epsilon() == pytest.approx(
                expected, abs=1e-6
            )
    # Balle & Wang's formula in plain floating point
    mu, eps = math.sqrt(steps) / ratio, expected
    plain = norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu)
    got = spend([(SubsampledGaussian(ratio), steps)]).get_delta(eps)
    assert got == pytest.approx(plain, rel=1e-7)


def test_composed_ledger_in_any_order():
    events = [
        (SubsampledGaussian(1.2, 0.01), 500),
        (SubsampledGaussian(10.0), 1),
        (SubsampledGaussian(1.5, 0.005), 300),
    ]
    first = spend(events).get_epsilon()
    assert first == pytest.approx(1.0216, rel=1e-3)
    assert spend(events[::-1]).get_epsilon() == first


def test_against_dp_accounting():
    from dp_accounting.pld import privacy_loss_distribution as pld

    for sigma, rate, steps in [(1.0, 0.1, 20), (0.6, 0.02, 50), (3.0, 0.5, 10)]:
        theirs = pld.from_gaussian_mechanism(sigma, sampling_prob=rate).self_compose(steps)
        accountant = spend([(SubsampledGaussian(sigma, rate), steps)])
        assert accountant.get_epsilon() == pytest.approx(
            theirs.get_epsilon_for_delta(DELTA), rel=1e-3
        )
        for eps in (0.3, 1.0, 3.0):
            expected = theirs.get_delta_for_epsilon(eps)
            assert accountant.get_delta(eps) == pytest.approx(expected, rel=5e-3)


def test_renyi_of_poisson_matches_dp_accounting():
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    step = engines.interpret(SubsampledGaussian(1.3, 0.02), ADD)
    orders = engines._ORDERS[:40]
    theirs = rdp._compute_rdp_poisson_subsampled_gaussian(0.02, 1.3, orders)
    np.testing.assert_allclose(engines._autodp_step(step)[:40], theirs, rtol=1e-6)


def test_renyi_conversion_matches_dp_accounting():
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    orders = engines._ORDERS
    for mu in (0.1, 1.0, 5.0):
        divergences = orders * mu**2 / 2
        theirs, _ = rdp.compute_epsilon(orders, divergences, 1e-5)
        moments = (orders - 1) * divergences
        assert engines._renyi_epsilon(orders - 1, moments, 1e-5) == pytest.approx(theirs)
        theirs, _ = rdp.compute_delta(orders, divergences, 1.0)
        assert engines._renyi_delta(orders - 1, moments, 1.0) == pytest.approx(theirs)


def test_below_its_window_a_composition_knows_nothing():
    step = engines.Step("remove", 0.5, 0.5)
    composed = engines._Composition(((step, 1000),), 1.0, 1e-5, 1.0)
    assert composed.low > 0 and composed.delta(0.5 * composed.low * composed.gap) == 1.0


@pytest.mark.parametrize("kind", ["replace", "fixed", "remove", "add"])
def test_profiles_against_quadrature(kind):
    s, q = 0.8, 0.2
    step = engines.Step(kind, s, q)
    x = np.linspace(-12, 14, 400_001)
    zero, one, minus = (norm.pdf(x, m, s) for m in (0, 1, -1))
    p, low = (1 - q) * zero + q * one, (1 - q) * zero + q * minus
    pair = {"replace": (p, low), "add": (zero, p)}.get(kind, (p, zero))
    composed = engines._Composition(((step, 1),), 2.0, 1e-4, 64.0)
    for eps in (0.1, 0.5, 1.0):
        exact = np.trapezoid(np.maximum(pair[0] - math.exp(eps) * pair[1], 0), x)
        if kind == "add":
            assert composed.delta(eps) == pytest.approx(exact, rel=1e-3, abs=1e-9)
        else:
            assert engines._single_delta(step, eps) == pytest.approx(exact, rel=1e-6)
            # and the grid is never below
            assert exact * (1 - 1e-7) <= composed.delta(eps) <= exact * (1 + 1e-3) + 1e-10


def test_more_costs_more():
    def cost(sigma=1.0, rate=0.02, steps=100, relation=ADD):
        return spend([(SubsampledGaussian(sigma, rate), steps)], relation).get_epsilon()

    assert cost(0.9) > cost() > cost(1.1)
    assert cost(rate=0.03) > cost() > cost(rate=0.01)
    assert cost(steps=120) > cost() > cost(steps=80)
    assert spend([(SubsampledGaussian(1.0, 0.02), 100)], delta=1e-7).get_epsilon() > cost()


@pytest.mark.parametrize(
    "relation, sampling", [(ADD, "poisson"), (REPLACE, "poisson"), (REPLACE, "fixed")]
)
@pytest.mark.parametrize("steps, rate", [(1000, 0.01), (30, 1.0)])
def test_calibration_uses_the_budget(relation, sampling, steps, rate):
    accountant = PrivacyAccountant(1.0, neighboring=relation)
    accountant.record(SubsampledGaussian(6.0, 0.01), 100)  # composition, not subtraction
    sigma = accountant.noise_multiplier(num_steps=steps, sample_rate=rate, sampling=sampling)
    for _ in range(steps):
        accountant.record(SubsampledGaussian(sigma, rate, sampling))
    fresh = spend([(e, n) for e, n in accountant.ledger], relation)
    assert 0.995 <= fresh.get_epsilon() <= 1.0
    assert accountant.get_epsilon() <= 1.0 and accountant.remaining < 0.005


def test_calibration_reference_and_engines():
    sigma = PrivacyAccountant(1.0).noise_multiplier(num_steps=1000, sample_rate=0.01)
    assert sigma == pytest.approx(1.4146, rel=2e-3)
    for engine in ("rdp", "advanced"):
        accountant = PrivacyAccountant(1.0, engine=engine)
        other = accountant.noise_multiplier(num_steps=1000, sample_rate=0.01)
        assert other > sigma
        accountant.record(SubsampledGaussian(other, 0.01), 1000)
        assert 0.995 <= accountant.get_epsilon() <= 1.0


def test_calibration_refuses():
    with pytest.raises(ConfigurationError, match="epsilon"):
        PrivacyAccountant().noise_multiplier(num_steps=10)
    accountant = PrivacyAccountant(1.0)
    event = SubsampledGaussian(accountant.noise_multiplier(num_steps=1))
    accountant.record(event)
    with pytest.raises(PrivacyBudgetExceeded):
        PrivacyAccountant(1e-9, delta=1e-15).noise_multiplier(num_steps=10**6)
    for bad in (0, -1, 2.5, True, "3", math.nan):
        with pytest.raises(ConfigurationError, match="num_steps"):
            accountant.noise_multiplier(num_steps=bad)
    with pytest.raises(ConfigurationError, match="sample_rate"):
        accountant.noise_multiplier(num_steps=1, sample_rate=1.5)
    with pytest.raises(ConfigurationError, match="fixed"):
        accountant.noise_multiplier(num_steps=1, sample_rate=0.5, sampling="fixed")


@pytest.mark.parametrize("engine", ["pld", "rdp", "basic"])
def test_budget_is_exact(engine):
    event, n = SubsampledGaussian(2.0, 0.05), 37
    budget = spend([(event, n)], engine=engine).get_epsilon() * (1 + 1e-9)
    accountant = PrivacyAccountant(budget, engine=engine)
    for _ in range(n):
        accountant.record(event)
    before = accountant.state_dict()
    with pytest.raises(PrivacyBudgetExceeded):
        accountant.record(event)
    with pytest.raises(PrivacyBudgetExceeded):
        accountant.record(SubsampledGaussian(0.0))
    assert accountant.state_dict() == before
    assert 0.0 <= accountant.remaining < 1e-6


def test_alternating_events_need_few_evaluations(monkeypatch):
    calls = []
    exact = engines.epsilon
    monkeypatch.setattr(engines, "epsilon", lambda *a: calls.append(1) or exact(*a))
    events = SubsampledGaussian(1.0, 0.01), SubsampledGaussian(1.5, 0.02)
    accountant = PrivacyAccountant(2.0)
    with pytest.raises(PrivacyBudgetExceeded):
        for i in range(5000):
            accountant.record(events[i % 2])
    assert len(calls) < 60
    assert [e for e, _ in accountant.ledger] == list(events)
    counts = [n for _, n in accountant.ledger]
    assert sum(counts) == accountant.num_releases > 500 and abs(counts[0] - counts[1]) <= 1
    assert 1.99 < exact(dict(accountant.ledger), DELTA, ADD, "pld") <= 2.0


def test_ledger_merges_and_empty_and_noiseless():
    accountant = PrivacyAccountant()
    assert accountant.get_epsilon() == 0.0 and accountant.get_delta(0.5) == 0.0
    assert accountant.remaining == math.inf and accountant.ledger == ()
    a, b = SubsampledGaussian(1.0, 0.01), SubsampledGaussian(2, 1, "full")
    for event in (a, b, a, SubsampledGaussian(np.float64(1.0), 0.01)):
        accountant.record(event)
    accountant.record(b, 0)
    assert accountant.ledger == ((a, 3), (b, 1))
    assert accountant.ledger[0].count == 3 and accountant.num_releases == 4
    accountant.record(SubsampledGaussian(0.0))
    assert accountant.get_epsilon() == math.inf and accountant.get_delta(3.0) == 1.0
    assert "inf" in repr(accountant)


def test_bad_events():
    for bad in (math.nan, -1.0, math.inf, True, "1", None, torch.tensor(1.0)):
        with pytest.raises(ConfigurationError, match="noise_multiplier"):
            SubsampledGaussian(bad)
    for bad in (math.nan, 0.0, -0.1, 1.1, True, "1", None):
        with pytest.raises(ConfigurationError, match="sample_rate"):
            SubsampledGaussian(1.0, bad)
    with pytest.raises(ConfigurationError, match="sampling"):
        SubsampledGaussian(1.0, 0.5, "shuffle")
    with pytest.raises(ConfigurationError, match="sample_rate"):
        SubsampledGaussian(1.0, 0.5, "full")


def test_bad_settings():
    for bad in (0.0, -1.0, math.nan, math.inf, "1", True):
        with pytest.raises(ConfigurationError, match="epsilon"):
            PrivacyAccountant(bad)
    for bad in (0.0, 1.0, -0.1, math.nan, "1", None, True):
        with pytest.raises(ConfigurationError, match="delta"):
            PrivacyAccountant(1.0, bad)
    with pytest.raises(ConfigurationError, match="neighboring"):
        PrivacyAccountant(neighboring="swap")
    with pytest.raises(ConfigurationError, match="engine"):
        PrivacyAccountant(engine="gdp")
    accountant = PrivacyAccountant(5.0)
    for bad in (-1, 1.5, True, "2", None):
        with pytest.raises(ConfigurationError, match="count"):
            accountant.record(SubsampledGaussian(1.0), bad)
    for bad in (object(), "event", None, 1.0, []):
        with pytest.raises(ConfigurationError, match="unknown"):
            accountant.record(bad)
    with pytest.raises(ConfigurationError, match="fixed"):
        accountant.record(SubsampledGaussian(1.0, 0.5, "fixed"))
    for bad in (-1.0, math.nan, "1"):
        with pytest.raises(ConfigurationError, match="epsilon"):
            accountant.get_delta(bad)
    with pytest.raises(ConfigurationError, match="delta"):
        accountant.get_epsilon(2.0)
    with pytest.raises(ConfigurationError, match="text"):
        accountant.note(3)
    assert accountant.ledger == ()


def test_state_round_trip(tmp_path):
    accountant = PrivacyAccountant(3.0, neighboring=REPLACE)
    accountant.record(SubsampledGaussian(4.0, 0.01, "fixed"), 100)
    accountant.record(SubsampledGaussian(50.0, 1.0, "full"))
    accountant.note("seeded")
    accountant.note("seeded")
    torch.save(accountant.state_dict(), tmp_path / "state.pt")
    loaded = PrivacyAccountant(3.0, neighboring=REPLACE)
    loaded.note("mine")
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert loaded.ledger == accountant.ledger and loaded.notes == ("mine", "seeded")
    assert loaded.get_epsilon() == accountant.get_epsilon()
    accountant.save(tmp_path / "state.json")
    accountant.record(SubsampledGaussian(4.0, 0.01, "fixed"), 5)
    accountant.save(str(tmp_path / "state.json"))
    loaded.load(tmp_path / "state.json")
    assert loaded.ledger == accountant.ledger
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state.json", "state.pt"]


def test_loading_never_lowers():
    event = SubsampledGaussian(4.0, 0.01)
    early, late = spend([(event, 10)]), spend([(event, 11)])
    before = late.state_dict()
    for state in (early.state_dict(), PrivacyAccountant().state_dict()):
        with pytest.raises(PrivacyError):
            late.load_state_dict(state)
    assert late.state_dict() == before
    early.load_state_dict(before)
    assert early.ledger == late.ledger
    budgeted = PrivacyAccountant(1.0)
    budgeted.load_state_dict(budgeted.state_dict())
    for other in (
        PrivacyAccountant(1.5),
        PrivacyAccountant(),
        PrivacyAccountant(1.0, 1e-6),
        PrivacyAccountant(1.0, neighboring=REPLACE),
        PrivacyAccountant(1.0, engine="rdp"),
    ):
        with pytest.raises(ConfigurationError, match="differs"):
            budgeted.load_state_dict(other.state_dict())


def test_loaded_ledger_counts_against_the_budget():
    event = SubsampledGaussian(10.0)
    first = PrivacyAccountant(1.0)
    first.record(event, 7)
    second = PrivacyAccountant(1.0)
    second.record(event)
    second.load_state_dict(first.state_dict())
    assert second.get_epsilon() == first.get_epsilon()
    with pytest.raises(PrivacyBudgetExceeded):
        second.record(event)


def test_damaged_state(tmp_path):
    accountant = spend([(SubsampledGaussian(4.0, 0.01), 10)])
    good = accountant.state_dict()

    def line(**changes):
        return good | {"ledger": [good["ledger"][0] | changes]}

    damaged = [
        [],
        {},
        good | {"version": 2},
        good | {"ledger": 3},
        good | {"ledger": [[]]},
        good | {"ledger": [{}]},
        good | {"notes": [1]},
        good | {"notes": "text"},
        line(noise_multiplier=math.nan),
        line(count=10.5),
        line(count=-1),
        line(sampling="fixed"),
        line(mechanism="laplace"),
        line(sample_rate="all"),
    ]
    for state in damaged:
        with pytest.raises(ConfigurationError):
            accountant.load_state_dict(state)
    text = json.dumps(good)
    for content in (text[: len(text) // 2], "", "[1]", "\x00"):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(ConfigurationError):
            accountant.load(tmp_path / "bad.json")
    assert accountant.state_dict() == good


def test_display_has_the_numbers():
    accountant = PrivacyAccountant(3.0)
    accountant.record(SubsampledGaussian(1.25, 0.0125), 777)
    accountant.note("<seeded>")
    spent = accountant.get_epsilon()
    for text in (str(accountant), accountant._repr_html_()):
        for part in ("1.25", "0.0125", "poisson", "777", f"{spent:.6g}", f"{3 - spent:.6g}"):
            assert part in text
        assert "1e-05" in text and ADD in text and "pld" in text
    assert "note: <seeded>" in str(accountant)
    assert "&lt;seeded&gt;" in accountant._repr_html_()


def test_threads_lose_nothing():
    accountant = PrivacyAccountant(50.0)
    events = [SubsampledGaussian(2.0, 0.01), SubsampledGaussian(3.0, 0.01)]

    def work(event):
        for _ in range(500):
            accountant.record(event)

    threads = [threading.Thread(target=work, args=(events[i % 2],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict(accountant.ledger) == {events[0]: 1000, events[1]: 1000}


@pytest.mark.parametrize("engine", engines.ENGINES)
@pytest.mark.parametrize(
    "sigma, rate, steps, delta",
    [
        (1.0, 1.0, 10**6, 1e-12),
        (0.05, 1.0, 1, 1e-12),
        (0.05, 0.01, 1000, 1e-12),
        (1.0, 0.01, 10**6, 1e-5),
        (1e-3, 0.01, 1000, 1e-5),
        (1e4, 0.01, 10, 1e-5),
        (1e8, 0.5, 10, 1e-12),
        (1.0, 1e-9, 10, 1e-5),
    ],
)
def test_extreme_settings_are_answered(engine, sigma, rate, steps, delta):
    for relation, sampling in ((ADD, "poisson"), (REPLACE, "poisson"), (REPLACE, "fixed")):
        accountant = spend(
            [(SubsampledGaussian(sigma, rate, sampling), steps)], relation, engine, delta
        )
        assert 0.0 <= accountant.get_epsilon() < math.inf
        assert 0.0 <= accountant.get_delta(1.0) <= 1.0
    tiny = spend([(SubsampledGaussian(1e-3, 0.01), 1000)])
    assert tiny.get_delta(1.0) > 0.999  # ten thousand hits in the clear
    assert spend([(SubsampledGaussian(1.0), 0)], engine=engine).get_epsilon() == 0.0
