"""The accountant: ledger, budget, calibration, state and display."""

import copy
import functools
import json
import math
import os
import pickle
import sys
import threading
from collections import Counter
from datetime import datetime, timedelta

import numpy as np
import pytest
import torch

from pyro_dp.accounting import composition
from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import ApproximateDP, NonPrivateLook, SubsampledGaussian
from pyro_dp.accounting.journal import Journal
from pyro_dp.accounting.ledger import Description, Ledger, to_line
from pyro_dp.accounting.origins import Origin
from pyro_dp.utils.display import spent_and_left, up
from pyro_dp.utils.errors import ConfigurationError, PrivacyBudgetExceeded, PrivacyError

pytestmark = pytest.mark.filterwarnings("error")

ADD, REPLACE = "add_or_remove_one", "replace_one"
DELTA = 1e-5


def spend(events, relation=ADD, engine="pld", delta=DELTA):
    accountant = PrivacyAccountant(neighboring=relation, engine=engine, delta=delta)
    for event, count in events:
        accountant.record(event, count)
    return accountant


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


@pytest.mark.long
def test_calibration_reference_and_engines():
    sigma = PrivacyAccountant(1.0).noise_multiplier(num_steps=1000, sample_rate=0.01)
    assert sigma == pytest.approx(1.4146, rel=2e-3)
    accountant = PrivacyAccountant(1.0, engine="rdp")
    other = accountant.noise_multiplier(num_steps=1000, sample_rate=0.01)
    assert other > sigma
    accountant.record(SubsampledGaussian(other, 0.01), 1000)
    assert 0.995 <= accountant.get_epsilon() <= 1.0


@pytest.mark.parametrize(
    "rate, sampling, words",
    [
        (0.1, "poisson", "Gaussian noise, Poisson sampling "),
        (0.1, "fixed", "Gaussian noise, subsets of fixed size "),
        (1.0, "full", "Gaussian noise, all records "),
        (1.0, "poisson", "Gaussian noise, all records "),
    ],
)
def test_a_ledger_says_what_is_gaussian_and_what_poisson(rate, sampling, words):
    accountant = PrivacyAccountant(neighboring=REPLACE)
    accountant.record(SubsampledGaussian(2.0, rate, sampling))
    assert words in repr(accountant) and words.strip() in accountant._repr_html_()


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


@pytest.mark.parametrize("engine", ["pld", "rdp"])
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


@pytest.fixture
def evaluations(monkeypatch):
    """The ledgers whose epsilon an engine was asked for."""
    ledgers, exact = [], composition.epsilon
    monkeypatch.setattr(composition, "epsilon", lambda *a: ledgers.append(a[0]) or exact(*a))
    return ledgers


@pytest.mark.parametrize("budget", [None, 2.0])
def test_recording_asks_the_engine_seldom(evaluations, monkeypatch, budget):
    composed = []
    exact = composition.compose
    monkeypatch.setattr(composition, "compose", lambda *a: composed.append(1) or exact(*a))
    accountant = PrivacyAccountant(budget)
    for _ in range(1000):
        accountant.record(SubsampledGaussian(1.25, 0.01))
    assert len(evaluations) <= (0 if budget is None else 20)
    assert len(composed) <= (0 if budget is None else 100)


def test_recording_what_was_calibrated_asks_no_engine(evaluations):
    accountant = PrivacyAccountant(1.0)
    sigma = accountant.noise_multiplier(num_steps=1000, sample_rate=0.01)
    evaluations.clear()
    for _ in range(1000):
        accountant.record(SubsampledGaussian(sigma, 0.01))
    assert not evaluations


def test_alternating_events_need_few_evaluations(evaluations):
    events = SubsampledGaussian(1.0, 0.01), SubsampledGaussian(1.5, 0.02)
    accountant = PrivacyAccountant(2.0)
    with pytest.raises(PrivacyBudgetExceeded):
        for i in range(5000):
            accountant.record(events[i % 2])
    assert len(evaluations) < 60
    assert [e for e, _ in accountant.ledger] == list(events)
    counts = [n for _, n in accountant.ledger]
    assert sum(counts) == accountant.num_releases > 500 and abs(counts[0] - counts[1]) <= 1
    assert 1.99 < composition.epsilon(dict(accountant.ledger), DELTA, ADD, "pld") <= 2.0


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


@pytest.mark.parametrize("engine", ["advanced", "basic"])
def test_a_ledger_of_a_retired_engine_loads(engine, tmp_path):
    """Another engine vouches for the same releases."""
    with pytest.raises(ConfigurationError, match="engine must be one of 'pld', 'rdp'"):
        PrivacyAccountant(1.0, engine=engine)
    accountant, old = PrivacyAccountant(1.0), PrivacyAccountant(1.0)
    old.record(SubsampledGaussian(37.0), 6)
    accountant.load_state_dict(old.state_dict() | {"engine": engine})
    assert accountant.ledger == old.ledger and accountant.engine == "pld"
    assert accountant.get_epsilon() == old.get_epsilon()
    header = {"epsilon": 1.0, "delta": 1e-5, "neighboring": ADD, "engine": engine}
    Journal(tmp_path / "journal", header, Ledger()).close()
    with PrivacyAccountant(1.0).journal(tmp_path / "journal"):
        pass
    with pytest.raises(ConfigurationError, match="engine='gdp' .*differs"):
        accountant.load_state_dict(old.state_dict() | {"engine": "gdp"})


def test_a_forked_process_records_nothing():
    """Its ledger would be a copy, hidden from the first process."""
    accountant = PrivacyAccountant(epsilon=8.0)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            accountant.record(SubsampledGaussian(1.0))
        except PrivacyError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    text = os.read(reading, 1000).decode()
    os.close(reading)
    assert "forked" in text
    accountant.record(SubsampledGaussian(1.0))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_there_are_no_copies(copied):
    with pytest.raises(PrivacyError, match="Share it"):
        copied(PrivacyAccountant())


@pytest.mark.long
def test_absurd_counts_are_refused():
    """From 1e15 on the rounding of a step's cost, times the count, would be noticed."""
    accountant, event = PrivacyAccountant(), SubsampledGaussian(1e4, 1e-3)
    accountant.record(event, 10**12)
    assert 0.37 < accountant.get_epsilon() < 0.38
    for count in (1, 10**20):
        with pytest.raises(ConfigurationError, match="count"):
            accountant.record(event, count)
    state = accountant.state_dict()
    state["ledger"][0]["count"] = 10**13
    with pytest.raises(ConfigurationError, match="count"):
        PrivacyAccountant().load_state_dict(state)


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
        line(mechanism=["subsampled_gaussian"]),
        line(mechanism="approximate_dp"),
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


EVERY_KIND = (
    SubsampledGaussian(4.0, 0.01),
    ApproximateDP(0.5, 1e-6, "selection of a prior"),
    NonPrivateLook("loss", "2026-01-02T03:04:05+00:00"),
)


def test_events_of_all_kinds_are_kept_and_shown(tmp_path):
    accountant = spend([(event, 2) for event in EVERY_KIND])
    accountant.save(tmp_path / "state.json")
    loaded = PrivacyAccountant()
    loaded.load(tmp_path / "state.json")
    assert loaded.ledger == tuple((event, 2) for event in EVERY_KIND)
    assert loaded.num_releases == 6
    for text in (str(loaded), loaded._repr_html_()):
        for part in ("selection of a prior", "0.5", "1e-06", "loss", "2026-01-02T03:04:05", "inf"):
            assert part in text


def test_bad_events_of_other_kinds():
    for bad in (-0.1, math.nan, math.inf, True, "1", None):
        with pytest.raises(ConfigurationError, match="epsilon"):
            ApproximateDP(bad, 0.0, "x")
    for bad in (-0.1, 1.0, math.nan, True, "1", None):
        with pytest.raises(ConfigurationError, match="delta"):
            ApproximateDP(1.0, bad, "x")
    for bad in ("", None, 3, "two\nlines", "x" * 201):
        with pytest.raises(ConfigurationError, match="name"):
            ApproximateDP(1.0, 0.0, bad)
        with pytest.raises(ConfigurationError, match="what"):
            PrivacyAccountant().record_nonprivate(bad)
    with pytest.raises(ConfigurationError, match="time"):
        NonPrivateLook("loss", None)


def test_a_look_is_never_refused_and_ends_the_budget():
    event = SubsampledGaussian(10.0, 0.01)
    accountant = PrivacyAccountant(1.0)
    sigma = accountant.noise_multiplier(num_steps=100)
    accountant.record(event)
    accountant.record_nonprivate("loss of the training data")
    look = accountant.ledger[-1].event
    assert look.what == "loss of the training data"
    assert datetime.fromisoformat(look.time).utcoffset() == timedelta(0)
    assert accountant.get_epsilon() == math.inf and accountant.get_delta(math.inf) == 1.0
    before = accountant.ledger
    for refused in (event, SubsampledGaussian(sigma), ApproximateDP(0.0, 0.0, "nothing")):
        with pytest.raises(PrivacyBudgetExceeded, match="non-private look"):
            accountant.record(refused)
    with pytest.raises(PrivacyBudgetExceeded):
        accountant.noise_multiplier(num_steps=1)
    assert accountant.ledger == before
    accountant.record_nonprivate("gradient norms")
    assert accountant.num_releases == 3
    loaded = PrivacyAccountant(1.0)
    loaded.load_state_dict(accountant.state_dict())
    with pytest.raises(PrivacyBudgetExceeded, match="non-private look"):
        loaded.record(event)


def test_calibration_beside_a_selection():
    accountant = PrivacyAccountant(1.0)
    accountant.record(ApproximateDP(0.4, 4e-6, "selection"))
    sigma = accountant.noise_multiplier(num_steps=100, sample_rate=0.05)
    rest = PrivacyAccountant(0.6, 6e-6)  # what epsilons that are added would leave
    added = rest.noise_multiplier(num_steps=100, sample_rate=0.05)
    assert 0.95 * added < sigma < 0.98 * added
    accountant.record(SubsampledGaussian(sigma, 0.05), 100)
    assert 0.998 < accountant.get_epsilon() <= 1.0
    before = accountant.ledger
    for event in (ApproximateDP(0.01, 0.0, "a"), ApproximateDP(0.0, 1e-6, "b")):
        with pytest.raises(PrivacyBudgetExceeded):
            accountant.record(event)
    assert accountant.ledger == before


@pytest.mark.parametrize("eps, delta", [(0.015, 0.0), (1e-3, 1e-8), (1e-6, 1e-8)])
def test_many_selections_need_few_evaluations(evaluations, eps, delta):
    accountant = PrivacyAccountant(2.0)
    accountant.record(SubsampledGaussian(2.0, 0.01), 100)
    with pytest.raises(PrivacyBudgetExceeded):
        for _ in range(5000):
            accountant.record(ApproximateDP(eps, delta, "selection"))
    assert len(evaluations) < 60
    assert 900 <= accountant.num_releases - 100 <= 2000
    assert composition.epsilon(dict(accountant.ledger), DELTA, ADD, "pld") <= 2.0


def test_display_has_the_numbers():
    accountant = PrivacyAccountant(3.0)
    accountant.record(SubsampledGaussian(1.25, 0.0125), 777)
    accountant.note("<seeded>")
    spent = accountant.get_epsilon()
    for text in (str(accountant), accountant._repr_html_()):
        for part in (
            "1.25",
            "0.0125",
            "Poisson sampling",
            "777",
            up(spent),
            spent_and_left(spent, 3.0)[1],
        ):
            assert part in text
        assert "1e-05" in text and ADD in text and "pld" in text
    assert "note: <seeded>" in str(accountant)
    assert "&lt;seeded&gt;" in accountant._repr_html_()


def told(accountant):
    """Each run's releases, in words that compare."""
    return [(origin and origin.saved(), part) for origin, part in accountant.runs()]


def with_runs():
    """Two runs that are alike, and a release of none."""
    accountant = PrivacyAccountant()
    for number, bound in enumerate((0.5, None, 2.0)):
        origin = Origin.now("DPSVI", seeded=False, secure=number == 2)
        with accountant.next_position(origin, bound):
            accountant.record(SubsampledGaussian(2.0, 0.1), number + 1)
            accountant.record(ApproximateDP(0.5, 1e-6, "x"))
        if number == 0:
            accountant.note_result(origin, (0.25, 0.01))
    accountant.record(SubsampledGaussian(2.0, 0.1), 4)
    accountant.describe(title="T", unit="a person", units=10)
    return accountant


def test_runs_and_descriptions_are_saved(tmp_path):
    accountant = with_runs()
    accountant.save(tmp_path / "ledger.json")
    loaded = PrivacyAccountant()
    loaded.describe(title="mine stays", controller="C")
    loaded.load(tmp_path / "ledger.json")
    assert loaded.ledger == accountant.ledger and told(loaded) == told(accountant)
    assert [part.counts.total() for _, part in told(loaded)] == [4, 2, 3, 4]
    said = Description(title="mine stays", controller="C", unit="a person", units=10)
    assert loaded.description == said
    assert json.dumps(accountant.state_dict()["runs"]) == json.dumps(loaded.state_dict()["runs"])
    old = accountant.state_dict()
    for name in ("runs", "description"):  # as an older version saved it
        old.pop(name)
    before = PrivacyAccountant()
    before.load_state_dict(old)
    ((origin, part),) = before.runs()
    assert origin is None and part.counts == dict(before.ledger)
    assert before.description == Description()


def _run(**changed):
    run = {"method": "x", "generator": "secure", "time": "t", "releases": [[0, 1]]}
    return [run | changed]


STEP = SubsampledGaussian(5.0, 0.1)


def _reserved(**changed):
    return [{"run": 0, "releases": [to_line(STEP, 1)]} | changed]


@pytest.mark.parametrize(
    "changed",
    [
        {"runs": 3},
        {"runs": [3]},
        {"runs": [{}]},
        {"runs": _run(method="two\nlines")},
        {"runs": _run(generator="fast")},
        {"runs": _run(releases=[[0, 11]])},  # more than the ledger has
        {"runs": _run(releases=[[2, 1]])},
        {"runs": _run(releases=[[-1, 1]])},
        {"runs": _run(releases=[[0, 1, 0.0, 1.0]])},
        {"runs": _run(releases=[[0, 1.5]])},
        {"runs": _run(clipped=[2.0, 0.1])},
        {"runs": _run(clipped=0.1)},
        {"runs": _run(reservation=3)},
        {"reserved": 3},
        {"reserved": [3]},
        {"reserved": [{"run": 0}]},
        {"reserved": _reserved(run=3)},  # there are three
        {"reserved": _reserved(run=-1)},
        {"reserved": _reserved(releases=3)},
        {"reserved": _reserved(releases=[{"mechanism": "approximate_dp", "count": 1}])},
        {"reserved": _reserved(releases=[to_line(STEP, 1) | {"count": -1}])},
        {"reserved": _reserved(releases=[to_line(SubsampledGaussian(1.0, 0.5, "fixed"), 1)])},
        {"description": "T"},
        {"description": {"units": 0}},
        {"description": {"title": 3}},
    ],
)
def test_damaged_runs_and_descriptions_are_refused(changed):
    state = with_runs().state_dict() | changed
    with pytest.raises(ConfigurationError, match="damaged"):
        PrivacyAccountant().load_state_dict(state)


def test_runs_of_a_later_version_load():
    accountant = with_runs()
    state = accountant.state_dict()
    state["runs"][0]["place"] = state["description"]["language"] = "x"
    loaded = PrivacyAccountant()
    loaded.load_state_dict(state)
    assert told(loaded) == told(accountant)


@pytest.mark.parametrize(
    "wrong",
    [
        {"title": "two\nlines"},
        {"dataset": 3},
        {"purpose": "x" * 1001},
        {"units": 0},
        {"units": 1.5},
    ],
)
def test_descriptions_are_lines(wrong):
    accountant = with_runs()
    before = accountant.description
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        accountant.describe(**{"controller": "new"} | wrong)
    assert accountant.description == before


def begun(accountant, count=10, made=1):
    """A run that has made some of the releases that it has planned."""
    origin = Origin.now("DPSVI", seeded=False, secure=False)
    with accountant.next_position(origin, reserves={STEP: count}):
        accountant.record(STEP)
    for _ in range(made - 1):
        with accountant.next_position(origin):
            accountant.record(STEP)
    return origin


def cost(count, event=STEP):
    accountant = PrivacyAccountant()
    accountant.record(event, count)
    return accountant.get_epsilon()


def test_a_run_counts_its_plan_from_the_first_release_on():
    accountant = PrivacyAccountant(3.0)
    origin = begun(accountant, 10, made=3)
    assert accountant.ledger == ((STEP, 3),) and accountant.num_releases == accountant.position == 3
    assert accountant.counted == ((STEP, 10),)
    assert accountant.reserved == [(origin, {STEP: 7})]
    assert accountant.get_epsilon() == cost(10)
    assert accountant.remaining == 3.0 - cost(10)
    assert accountant.get_delta(cost(10)) == pytest.approx(1e-5, rel=1e-3)
    assert "planned, not taken: 7 of DPSVI" in str(accountant)
    with accountant.next_position(origin):
        accountant.record(STEP, 9)  # two more than planned
    assert accountant.ledger == accountant.counted == ((STEP, 12),) and accountant.reserved == []


def test_what_others_release_uses_up_no_reservation():
    accountant = PrivacyAccountant()
    origin = begun(accountant)
    accountant.record(STEP)
    other = begun(accountant, count=1)
    with accountant.next_position(other):
        accountant.record(STEP)
    assert accountant.reserved == [(origin, {STEP: 9})]
    assert accountant.counted == ((STEP, 1 + 9 + 3),)


def test_a_plan_beyond_the_budget_is_refused_as_a_whole():
    accountant = PrivacyAccountant(cost(10))
    with pytest.raises(PrivacyBudgetExceeded, match="recording 11 more of"):
        begun(accountant, 11)
    assert accountant.counted == () and accountant.reserved == accountant.runs() == []
    begun(accountant, 10)
    with pytest.raises(PrivacyBudgetExceeded):
        accountant.record(STEP)
    with pytest.raises(PrivacyBudgetExceeded, match="remains"):
        accountant.noise_multiplier(num_steps=1)
    with pytest.raises(PrivacyBudgetExceeded), accountant.up_to(0.9):
        pass


def test_a_new_plan_replaces_the_old_one_of_its_run():
    """The run's new calibration may cost the rest of its plan."""
    accountant = PrivacyAccountant(1.0)
    first = accountant.noise_multiplier(num_steps=10)
    origin = Origin.now("DPSVI", seeded=False, secure=False)
    with accountant.next_position(origin, reserves={SubsampledGaussian(first): 10}):
        accountant.record(SubsampledGaussian(first))

    def releases(sigma):
        return {SubsampledGaussian(sigma): 20}

    second = accountant.least_noise(releases, origin.reservation)
    assert second > first
    with accountant.next_position(origin, reserves=releases(second)):
        accountant.record(SubsampledGaussian(second))
    assert accountant.reserved == [(origin, {SubsampledGaussian(second): 19})]
    assert 0.995 < accountant.get_epsilon() <= 1.0
    with pytest.raises(PrivacyBudgetExceeded):
        accountant.record(SubsampledGaussian(first))


def test_a_run_that_goes_on_takes_over_what_was_reserved():
    accountant = PrivacyAccountant()
    origin = begun(accountant, 10, made=3)
    loaded = PrivacyAccountant()
    loaded.load_state_dict(json.loads(json.dumps(accountant.state_dict())))
    assert loaded.counted == ((STEP, 10),) and loaded.get_epsilon() == accountant.get_epsilon()
    ((found, left),) = loaded.reserved
    assert (found.saved(), left) == (origin.saved(), {STEP: 7})
    later = Origin.now("DPSVI", seeded=False, secure=False, reservation=origin.reservation)
    with loaded.next_position(later, reserves={STEP: 7}):
        loaded.record(STEP)
    assert loaded.reserved == [(later, {STEP: 6})] and loaded.counted == ((STEP, 10),)
    assert [part.counts for _, part in loaded.runs()] == [{STEP: 3}, {STEP: 1}]


def test_a_state_that_knows_no_reservation_returns_none():
    """A state of an older version, or one of before the plan."""
    accountant = PrivacyAccountant()
    begun(accountant, 10)
    state = accountant.state_dict()
    old = state | {"runs": []}
    old.pop("reserved")
    accountant.load_state_dict(old)
    assert accountant.ledger == ((STEP, 1),) and accountant.counted == ((STEP, 10),)
    fresh = PrivacyAccountant()
    fresh.load_state_dict(old)
    assert fresh.counted == ((STEP, 1),)


def test_no_more_than_can_be_counted_is_reserved():
    accountant = PrivacyAccountant()
    with pytest.raises(ConfigurationError, match="more than 1e\\+12"):
        begun(accountant, 10**12 + 1)
    assert accountant.counted == ()


def test_a_refused_release_is_of_no_run():
    accountant, origin = PrivacyAccountant(1.0), Origin.now("x", seeded=False, secure=False)
    with accountant.next_position(origin, 1.0), pytest.raises(PrivacyBudgetExceeded):
        accountant.record(SubsampledGaussian(0.1))
    assert accountant.runs() == []
    accountant.note_result(origin, (0.5, 0.1))
    assert accountant.runs() == []


@pytest.fixture
def hasty_threads():
    """Threads that take turns all the time, so that races show."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(*works):
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.long
@pytest.mark.parametrize("budget", [None, 50.0])
def test_threads_lose_nothing(hasty_threads, budget):
    accountant = PrivacyAccountant(budget)
    events = [SubsampledGaussian(20.0, 0.001 * (1 + i % 3)) for i in range(8)]
    selection = ApproximateDP(1e-6, 0.0, "selection")

    def work(event):
        for i in range(2000):
            accountant.record(selection if i % 100 == 0 else event)

    in_threads(*(functools.partial(work, event) for event in events))
    assert accountant.num_releases == 16_000
    assert dict(accountant.ledger) == {
        selection: 160,
        events[0]: 5940,
        events[1]: 5940,
        events[2]: 3960,
    }


@pytest.mark.long
def test_threads_cannot_pass_the_budget(hasty_threads):
    event = SubsampledGaussian(3.0, 0.1)
    alone, together = PrivacyAccountant(2.0), PrivacyAccountant(2.0)
    with pytest.raises(PrivacyBudgetExceeded):
        while True:
            alone.record(event)
    refused = []

    def work():
        for _ in range(10_000):
            try:
                together.record(event)
            except PrivacyBudgetExceeded:
                refused.append(event)
                return

    in_threads(*[work] * 8)
    assert len(refused) == 8
    assert together.ledger == alone.ledger and 8 < alone.num_releases < 80_000
    assert 1.99 < together.get_epsilon() <= 2.0


@pytest.mark.long
def test_many_kinds_of_events_between_few():
    """Each kind is rounded to one that costs a little less, and to one that costs more."""
    rng = np.random.default_rng(0)
    ledger, less, more = {}, Counter(), Counter()
    for _ in range(60):
        noise, rate, count = rng.uniform(1.0, 2.0), rng.uniform(0.01, 0.02), int(rng.integers(1, 9))
        ledger[SubsampledGaussian(noise, rate)] = count
        cell, row = math.floor(noise / 0.25) * 0.25, math.floor(rate / 0.0025) * 0.0025
        more[SubsampledGaussian(cell, row + 0.0025)] += count
        less[SubsampledGaussian(cell + 0.25, row)] += count
    low, exact, high = (
        composition.epsilon(each, DELTA, ADD, "pld") for each in (less, ledger, more)
    )
    assert len(more) == 16 and low < exact < high < 2 * low


def test_what_a_calibrated_run_leaves_over_is_not_calibrated_again():
    """Otherwise a second inference would run, and return nothing but noise."""
    accountant = PrivacyAccountant(epsilon=1.0)
    sigma = accountant.noise_multiplier(num_steps=100, sample_rate=0.1)
    accountant.record(SubsampledGaussian(sigma, 0.1), 100)
    assert accountant.remaining > 0
    with pytest.raises(PrivacyBudgetExceeded, match="remains"):
        accountant.noise_multiplier(num_steps=100, sample_rate=0.1)
