"""The accountant: ledger, budget, calibration, state and display."""

import copy
import json
import math
import os
import pickle
import sys
from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta

import numpy as np
import pytest
import torch
from ledgers import a_run, in_threads, ledger, loaded, record, told

from pyro_dp.accounting import composition
from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import ApproximateDP, NonPrivateLook, RenyiDP, SubsampledGaussian
from pyro_dp.accounting.journal import Journal
from pyro_dp.accounting.ledger import Description, Ledger, to_line
from pyro_dp.utils.display import spent_and_left
from pyro_dp.utils.errors import ConfigurationError, PrivacyBudgetExceeded, PrivacyError

pytestmark = pytest.mark.filterwarnings("error")

ADD, REPLACE = "add_or_remove_one", "replace_one"
DELTA = 1e-5


@pytest.mark.long
@pytest.mark.every_commit
def test_more_costs_more():
    def cost(sigma=1.0, rate=0.02, steps=100, relation=ADD):
        return ledger((SubsampledGaussian(sigma, rate), steps), neighboring=relation).get_epsilon()

    assert cost(0.9) > cost() > cost(1.1)
    assert cost(rate=0.03) > cost() > cost(rate=0.01)
    assert cost(steps=120) > cost() > cost(steps=80)
    assert ledger((SubsampledGaussian(1.0, 0.02), 100), delta=1e-7).get_epsilon() > cost()


@pytest.mark.long
@pytest.mark.every_commit
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
    fresh = ledger(*accountant.ledger, neighboring=relation)
    assert 0.995 <= fresh.get_epsilon() <= 1.0
    assert accountant.get_epsilon() <= 1.0 and accountant.remaining < 0.005


@pytest.mark.long
def test_calibration_reference():
    sigma = PrivacyAccountant(1.0).noise_multiplier(num_steps=1000, sample_rate=0.01)
    assert sigma == pytest.approx(1.4146, rel=2e-3)


@pytest.mark.parametrize(
    "rate, sampling, words",
    [
        (0.1, "poisson", "Gaussian noise, Poisson sampling"),
        (0.1, "fixed", "Gaussian noise, subsets of fixed size"),
        (1.0, "full", "Gaussian noise, all records"),
        (1.0, "poisson", "Gaussian noise, all records"),
    ],
)
def test_a_ledger_says_what_is_gaussian_and_what_poisson(rate, sampling, words):
    accountant = ledger((SubsampledGaussian(2.0, rate, sampling), 1), neighboring=REPLACE)
    assert words in repr(accountant) and words in accountant._repr_html_()


def test_calibration_refuses():
    with pytest.raises(ConfigurationError, match="epsilon"):
        PrivacyAccountant().noise_multiplier(num_steps=10)
    accountant = PrivacyAccountant(1.0)
    accountant.record(SubsampledGaussian(accountant.noise_multiplier(num_steps=1)))
    assert accountant.remaining > 0  # which would be all noise
    with pytest.raises(PrivacyBudgetExceeded, match="remains"):
        accountant.noise_multiplier(num_steps=100, sample_rate=0.1)
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
    budget = ledger((event, n), engine=engine).get_epsilon() * (1 + 1e-9)
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
    composed, exact = [], composition.compose
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


@pytest.mark.long
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


NO_NUMBERS = (math.nan, -1.0, True, "1", None, torch.tensor(1.0))
NO_CURVES = ([0.1] * 86, [math.nan] * 87, [0.2] + [0.1] * 86, "x" * 87, None)
REFUSED = [
    (SubsampledGaussian, "noise_multiplier", (*NO_NUMBERS, math.inf)),
    (lambda rate: SubsampledGaussian(1.0, rate), "sample_rate", (*NO_NUMBERS, 0.0, 1.1)),
    (lambda sampling: SubsampledGaussian(1.0, 0.5, sampling), "sampling", ("shuffle", None)),
    (lambda sampling: SubsampledGaussian(1.0, 0.5, sampling), "sample_rate", ("full",)),
    (lambda epsilon: ApproximateDP(epsilon, 0.0, "x"), "epsilon", (*NO_NUMBERS, math.inf)),
    (lambda delta: ApproximateDP(1.0, delta, "x"), "delta", (*NO_NUMBERS, 1.0)),
    (lambda name: ApproximateDP(1.0, 0.0, name), "name", ("", None, 3, "two\nlines", "x" * 201)),
    (lambda what: OURS.record_nonprivate(what), "what", ("", None, 3, "two\nlines", "x" * 201)),
    (lambda time: NonPrivateLook("loss", time), "time", (None,)),
    (lambda curve: RenyiDP(curve, None, "x"), "divergences", NO_CURVES),
    (lambda epsilon: PrivacyAccountant(epsilon or 0.0), "epsilon", (*NO_NUMBERS, math.inf)),
    (lambda delta: PrivacyAccountant(1.0, delta), "delta", (*NO_NUMBERS, 0.0, 1.0)),
    (lambda relation: PrivacyAccountant(neighboring=relation), "neighboring", ("swap",)),
    (lambda engine: PrivacyAccountant(engine=engine), "engine", ("gdp",)),
    (lambda count: OURS.record(SubsampledGaussian(1.0), count), "count", (*NO_NUMBERS, 1.5)),
    (lambda event: OURS.record(event), "unknown", (object(), "event", None, 1.0, [])),
    (lambda event: OURS.record(event), "fixed", (SubsampledGaussian(1.0, 0.5, "fixed"),)),
    (lambda epsilon: OURS.get_delta(epsilon), "epsilon", NO_NUMBERS),
    (lambda delta: OURS.get_epsilon(delta), "delta", (2.0,)),
    (lambda text: OURS.note(text), "text", (3,)),
]
OURS = PrivacyAccountant(5.0)


@pytest.mark.parametrize("use, named, values", REFUSED)
def test_refuses(use, named, values):
    for bad in values:
        with pytest.raises(ConfigurationError, match=named):
            use(bad)
    assert OURS.ledger == ()


def test_state_round_trip(tmp_path):
    entries = (SubsampledGaussian(4.0, 0.01, "fixed"), 100), (SubsampledGaussian(50.0), 1)
    accountant = ledger(*entries, epsilon=3.0, neighboring=REPLACE)
    for _ in range(2):
        accountant.note("seeded")
    torch.save(accountant.state_dict(), tmp_path / "state.pt")
    again = PrivacyAccountant(3.0, neighboring=REPLACE)
    again.note("mine")
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert again.ledger == accountant.ledger and again.notes == ("mine", "seeded")
    assert again.get_epsilon() == accountant.get_epsilon()
    accountant.save(tmp_path / "state.json")
    accountant.record(SubsampledGaussian(4.0, 0.01, "fixed"), 5)
    accountant.save(str(tmp_path / "state.json"))
    again.load(tmp_path / "state.json")
    assert again.ledger == accountant.ledger
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state.json", "state.pt"]


def test_loading_never_lowers():
    event = SubsampledGaussian(4.0, 0.01)
    early, late = ledger((event, 10)), ledger((event, 11))
    before = late.state_dict()
    for state in (early.state_dict(), PrivacyAccountant().state_dict()):
        with pytest.raises(PrivacyError):
            late.load_state_dict(state)
    assert late.state_dict() == before
    early.load_state_dict(before)
    assert early.ledger == late.ledger
    budgeted = loaded(PrivacyAccountant(1.0).state_dict(), epsilon=1.0)
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
    accountant = PrivacyAccountant(1.0)
    old = ledger((SubsampledGaussian(37.0), 6), epsilon=1.0)
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
    """Its ledger would be a copy that the first process does not see."""
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


@pytest.mark.slow
def test_absurd_counts_are_refused():
    """Beyond 1e15 releases the rounding error of each step's cost would add up."""
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
    first, second = (ledger((event, n), epsilon=1.0) for n in (7, 1))
    second.load_state_dict(first.state_dict())
    assert second.get_epsilon() == first.get_epsilon()
    with pytest.raises(PrivacyBudgetExceeded):
        second.record(event)


def test_damaged_state(tmp_path):
    accountant = ledger((SubsampledGaussian(4.0, 0.01), 10))
    good = accountant.state_dict()

    def line(**changes):
        return good | {"ledger": [good["ledger"][0] | changes]}

    wrong = {"version": [2], "ledger": [3, [[]], [{}]], "notes": [[1], "text"]}
    damaged = [good | {name: value} for name, values in wrong.items() for value in values]
    wrong = {"count": [10.5, -1], "sampling": ["fixed"], "sample_rate": ["all"]}
    wrong["noise_multiplier"] = [math.nan]
    wrong["mechanism"] = ["laplace", "approximate_dp", ["subsampled_gaussian"]]
    damaged += [line(**{name: value}) for name, values in wrong.items() for value in values]
    for state in [[], {}, *damaged]:
        with pytest.raises(ConfigurationError):
            accountant.load_state_dict(state)
    text = json.dumps(good)
    for content in (text[: len(text) // 2], "", "[1]", "\x00"):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(ConfigurationError):
            accountant.load(tmp_path / "bad.json")
    assert accountant.state_dict() == good


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
    again = loaded(accountant.state_dict(), epsilon=1.0)
    with pytest.raises(PrivacyBudgetExceeded, match="non-private look"):
        again.record(event)


@pytest.mark.long
def test_calibration_beside_a_selection():
    accountant = ledger((ApproximateDP(0.4, 4e-6, "selection"), 1), epsilon=1.0)
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
    accountant = ledger((SubsampledGaussian(2.0, 0.01), 100), epsilon=2.0)
    with pytest.raises(PrivacyBudgetExceeded):
        for _ in range(5000):
            accountant.record(ApproximateDP(eps, delta, "selection"))
    assert len(evaluations) < 60
    assert 900 <= accountant.num_releases - 100 <= 2000
    assert composition.epsilon(dict(accountant.ledger), DELTA, ADD, "pld") <= 2.0


def test_display_has_the_numbers():
    accountant = ledger((SubsampledGaussian(1.25, 0.0125), 777), epsilon=3.0)
    accountant.note("<seeded>")
    shown = spent_and_left(accountant.get_epsilon(), 3.0)
    for text in (str(accountant), accountant._repr_html_()):
        for part in ("1.25", "0.0125", "Poisson sampling", "777", *shown, "1e-05", ADD, "pld"):
            assert part in text
    assert "note: <seeded>" in str(accountant)
    assert "&lt;seeded&gt;" in accountant._repr_html_()


def with_runs():
    """Two runs that are alike, and a release of none."""
    accountant = PrivacyAccountant()
    for number, bound in enumerate((0.5, None, 2.0)):
        origin = a_run(secure=number == 2)
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
    again = PrivacyAccountant()
    again.describe(title="mine stays", controller="C")
    again.load(tmp_path / "ledger.json")
    assert again.ledger == accountant.ledger and told(again) == told(accountant)
    assert [part.counts.total() for _, part in told(again)] == [4, 2, 3, 4]
    said = Description(title="mine stays", controller="C", unit="a person", units=10)
    assert again.description == said
    assert json.dumps(accountant.state_dict()["runs"]) == json.dumps(again.state_dict()["runs"])
    old = accountant.state_dict()
    for name in ("runs", "description"):  # as an older version saved it
        old.pop(name)
    before = loaded(old)
    ((origin, part),) = before.runs()
    assert origin is None and part.counts == dict(before.ledger)
    assert before.description == Description()


STEP = SubsampledGaussian(5.0, 0.1)
RUN = {"method": "x", "generator": "secure", "time": "t", "releases": [[0, 1]]}
RESERVED = {"run": 0, "releases": [to_line(STEP, 1)]}
BAD_RUNS = [  # the ledger has two kinds of event, and ten of the first
    *({"method": "two\nlines"}, {"generator": "fast"}, {"reservation": 3}),
    *({"clipped": clipped} for clipped in (0.1, [2.0, 0.1])),
    *({"releases": [each]} for each in ([0, 11], [2, 1], [-1, 1], [0, 1.5], [0, 1, 0.0, 1.0])),
]
BAD_RESERVATIONS = [
    *({"run": run} for run in (3, -1)),  # there are three
    *({"releases": 3}, {"releases": [{"mechanism": "approximate_dp", "count": 1}]}),
    {"releases": [to_line(STEP, 1) | {"count": -1}]},
    {"releases": [to_line(SubsampledGaussian(1.0, 0.5, "fixed"), 1)]},
]
DAMAGED = {
    "runs": [3, [3], [{}], *([RUN | each] for each in BAD_RUNS)],
    "reserved": [3, [3], [{"run": 0}], *([RESERVED | each] for each in BAD_RESERVATIONS)],
    "description": ["T", {"units": 0}, {"title": 3}],
}


@pytest.mark.parametrize("part", DAMAGED)
def test_damaged_runs_and_descriptions_are_refused(part):
    good = with_runs().state_dict()
    for bad in DAMAGED[part]:
        with pytest.raises(ConfigurationError, match="damaged"):
            PrivacyAccountant().load_state_dict(good | {part: bad})


def test_runs_of_a_later_version_load():
    accountant = with_runs()
    state = accountant.state_dict()
    state["runs"][0]["place"] = state["description"]["language"] = "x"
    again = loaded(state)
    assert told(again) == told(accountant)


def test_descriptions_are_lines():
    accountant = with_runs()
    before = accountant.description
    wrong = {"title": ("two\nlines",), "dataset": (3,), "purpose": ("x" * 1001,), "units": (0, 1.5)}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ConfigurationError, match=name):
                accountant.describe(**{"controller": "new", name: value})
    assert accountant.description == before


def begun(accountant, count=10, made=1):
    """A run that has made some of the releases that it has planned."""
    origin = a_run()
    record(accountant, origin, STEP, reserves={STEP: count})
    for _ in range(made - 1):
        record(accountant, origin, STEP)
    return origin


def cost(count):
    return ledger((STEP, count)).get_epsilon()


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
    record(accountant, origin, STEP, 9)  # two more than planned
    assert accountant.ledger == accountant.counted == ((STEP, 12),) and accountant.reserved == []


def test_what_others_release_uses_up_no_reservation():
    accountant = PrivacyAccountant()
    origin = begun(accountant)
    accountant.record(STEP)
    other = begun(accountant, count=1)
    record(accountant, other, STEP)
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
    """A new calibration may spend what the old plan had left."""
    accountant = PrivacyAccountant(1.0)
    first = accountant.noise_multiplier(num_steps=10)
    origin = a_run()
    record(accountant, origin, SubsampledGaussian(first), reserves={SubsampledGaussian(first): 10})

    def releases(sigma):
        return {SubsampledGaussian(sigma): 20}

    second = accountant.least_noise(releases, origin.reservation)
    assert second > first
    record(accountant, origin, SubsampledGaussian(second), reserves=releases(second))
    assert accountant.reserved == [(origin, {SubsampledGaussian(second): 19})]
    assert 0.995 < accountant.get_epsilon() <= 1.0
    with pytest.raises(PrivacyBudgetExceeded):
        accountant.record(SubsampledGaussian(first))


def test_a_plan_that_becomes_shorter_returns_nothing():
    """A run cannot use its releases to decide to pay less. A longer plan costs more."""
    accountant = PrivacyAccountant()
    origin = begun(accountant, 10, made=3)
    record(accountant, origin, STEP, reserves={STEP: 1})
    assert accountant.counted == ((STEP, 10),) and accountant.reserved == [(origin, {STEP: 6})]
    record(accountant, origin, STEP, reserves={STEP: 8})
    assert accountant.counted == ((STEP, 12),)
    smaller = replace(STEP, sample_rate=0.001)
    record(accountant, origin, smaller, reserves={smaller: 7})
    assert accountant.counted == ((STEP, 12), (smaller, 7))


def test_a_run_that_goes_on_takes_over_what_was_reserved():
    accountant = PrivacyAccountant()
    origin = begun(accountant, 10, made=3)
    again = loaded(json.loads(json.dumps(accountant.state_dict())))
    assert again.counted == ((STEP, 10),) and again.get_epsilon() == accountant.get_epsilon()
    ((found, left),) = again.reserved
    assert (found.saved(), left) == (origin.saved(), {STEP: 7})
    later = a_run(reservation=origin.reservation)
    record(again, later, STEP, reserves={STEP: 7})
    assert again.reserved == [(later, {STEP: 6})] and again.counted == ((STEP, 10),)
    assert [part.counts for _, part in again.runs()] == [{STEP: 3}, {STEP: 1}]


def test_a_state_that_knows_no_reservation_returns_none():
    """A state of an older version, or one that was saved before the plan."""
    accountant = PrivacyAccountant()
    begun(accountant, 10)
    state = accountant.state_dict()
    old = state | {"runs": []}
    old.pop("reserved")
    accountant.load_state_dict(old)
    assert accountant.ledger == ((STEP, 1),) and accountant.counted == ((STEP, 10),)
    fresh = loaded(old)
    assert fresh.counted == ((STEP, 1),)


def test_no_more_than_can_be_counted_is_reserved():
    accountant = PrivacyAccountant()
    with pytest.raises(ConfigurationError, match="more than 1e\\+12"):
        begun(accountant, 10**12 + 1)
    assert accountant.counted == ()


def test_a_refused_release_is_of_no_run():
    accountant, origin = PrivacyAccountant(1.0), a_run("x")
    with pytest.raises(PrivacyBudgetExceeded):
        record(accountant, origin, SubsampledGaussian(0.1), bound=1.0)
    assert accountant.runs() == []
    accountant.note_result(origin, (0.5, 0.1))
    assert accountant.runs() == []


@pytest.mark.every_commit
@pytest.mark.long
def test_threads_lose_nothing_and_cannot_pass_the_budget():
    """Threads switch all the time, so that a race would show."""
    event, interval = SubsampledGaussian(3.0, 0.1), sys.getswitchinterval()
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

    sys.setswitchinterval(1e-6)
    try:
        in_threads(*[work] * 8)
    finally:
        sys.setswitchinterval(interval)
    assert len(refused) == 8
    assert together.ledger == alone.ledger and 8 < alone.num_releases < 80_000
    assert 1.99 < together.get_epsilon() <= 2.0


@pytest.mark.slow
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
