"""The contract of a ledger's event, over the registry of its kinds."""

import json
import math
import pickle
from dataclasses import FrozenInstanceError, fields

import pytest

from pyro_dp import ConfigurationError, PrivacyAccountant
from pyro_dp.accounting import composition, ledger
from pyro_dp.accounting.events import (
    KINDS,
    ApproximateDP,
    Event,
    Laplace,
    NonPrivateLook,
    RenyiDP,
    SubsampledGaussian,
)
from pyro_dp.accounting.pld import ORDERS
from pyro_dp.accounting.second_opinion import TOLERANCE, second_opinion

pytestmark = pytest.mark.every_case
EXAMPLES = {
    "subsampled_gaussian": SubsampledGaussian(3.0, 0.1),
    "approximate_dp": ApproximateDP(0.2, 1e-7, "a selection"),
    "nonprivate_look": NonPrivateLook("a mean", "2026-01-31T12:00:00"),
    "laplace": Laplace(8.0, "a count"),
    "renyi_dp": RenyiDP(tuple(0.01 * ORDERS), None, "a tree"),
}
EACH = pytest.mark.parametrize("event", EXAMPLES.values(), ids=EXAMPLES)
RELATIONS = pytest.mark.parametrize("neighboring", composition.NEIGHBORING)


def test_each_kind_has_an_example():
    assert {name: type(event) for name, event in EXAMPLES.items()} == KINDS
    ours = {each for each in Event.__subclasses__() if each.__module__.startswith("pyro_dp.")}
    assert set(KINDS.values()) == ours


@EACH
def test_it_is_inert(event):
    assert hash(event) == hash(pickle.loads(pickle.dumps(event)))
    with pytest.raises(FrozenInstanceError):
        setattr(event, fields(event)[0].name, 1.0)


@EACH
def test_it_is_saved_and_read(event):
    line = json.loads(json.dumps(ledger.to_line(event, 3)))
    assert ledger.from_line(line, "replace_one") == (event, 3)
    for name in [each.name for each in fields(event)] + ["count", "mechanism"]:
        with pytest.raises((KeyError, ConfigurationError)):
            ledger.from_line(
                {key: value for key, value in line.items() if key != name}, "replace_one"
            )
        with pytest.raises(ConfigurationError):
            ledger.from_line(line | {name: [math.nan]}, "replace_one")


@EACH
def test_its_words_are_one_line(event):
    assert event.brief.isprintable() and 0 < len(event.brief) < 300


@EACH
@RELATIONS
def test_its_cost(event, neighboring):
    """Epsilon grows with the count. A look without noise leaves no guarantee."""
    costs = [
        [composition.epsilon({event: n}, 1e-5, neighboring, engine) for n in (0, 1, 2)]
        for engine in composition.ENGINES
    ]
    for none, one, two in costs:
        assert none == 0.0
        assert one == two == math.inf if event.pair(neighboring) is None else 0.0 < one < two
    assert costs[0][2] <= costs[1][2]  # no engine is tighter than the first


@EACH
@RELATIONS
def test_with_another_kind_it_costs_more(event, neighboring):
    other = SubsampledGaussian(2.0)
    alone = composition.epsilon({event: 1}, 1e-5, neighboring, "pld")
    assert composition.epsilon({event: 1, other: 1}, 1e-5, neighboring, "pld") >= alone


@EACH
@RELATIONS
def test_the_second_opinion(event, neighboring):
    """It confirms the cost, or says why it is not asked."""
    own = composition.epsilon({event: 2}, 1e-5, neighboring, "pld")
    found, reason = second_opinion({event: 2}, 1e-5, neighboring)
    if event.dots is None and event.pair(neighboring) is not None:
        assert found is None and "not asked" in reason
    else:
        assert found == pytest.approx(own, rel=TOLERANCE)


@pytest.mark.slow
@EACH
def test_a_report_has_it(event):
    accountant = PrivacyAccountant()
    accountant.record(event, count=2)
    for text in (accountant.report(), accountant.report("html"), str(accountant)):
        assert "2" in text and len(text) > 100
    assert accountant.get_epsilon() == composition.epsilon(
        {event: 2}, 1e-5, accountant.neighboring, "pld"
    )


def test_what_is_in_no_registry_is_refused():
    class Unknown(Event):
        kind, delta, brief = "unknown", 0.0, "unknown"

        def pair(self, neighboring):
            return SubsampledGaussian(1.0).pair(neighboring)

    with pytest.raises(ConfigurationError, match="unknown"):
        composition.epsilon({Unknown(): 1}, 1e-5, "replace_one", "pld")
    with pytest.raises(ConfigurationError, match="unknown"):
        ledger.from_line({"mechanism": "unknown", "count": 1}, "replace_one")
