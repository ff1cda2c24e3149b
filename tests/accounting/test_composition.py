"""Laws of composition, on random ledgers: none of them depends on how the costs are computed."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledgers import ledger

from pyro_dp.accounting import composition
from pyro_dp.accounting.events import ApproximateDP, SubsampledGaussian
from pyro_dp.accounting.gaussian_pairs import DominatingPair
from pyro_dp.utils.errors import PrivacyError

ADD, REPLACE = "add_or_remove_one", "replace_one"
TOLERANCE = 1e-3  # relative: the answers are upper bounds, refined to about this


def law(examples):
    """The same random ledgers in every run, as many as the suite has time for."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


@st.composite
def ledgers(draw, kinds=3, approximate=True):
    """A relation, a delta, and a list of events and counts that cost neither nothing nor all."""
    relation = draw(st.sampled_from([ADD, REPLACE]))
    samplings = ["poisson", "full"] + (["fixed"] if relation == REPLACE else [])
    entries = []
    for _ in range(draw(st.integers(1, kinds))):
        sampling = draw(st.sampled_from(samplings))
        noise = math.exp(draw(st.floats(math.log(0.7), math.log(20.0))))
        rate = 1.0 if sampling == "full" else math.exp(draw(st.floats(math.log(1e-4), 0.0)))
        most = max(1.0, min(1000.0, (noise / rate) ** 2))  # or epsilon is far above all use
        count = int(math.exp(draw(st.floats(0.0, math.log(most)))))
        entries.append((SubsampledGaussian(noise, rate, sampling), count))
    if approximate and draw(st.booleans()):
        own = ApproximateDP(draw(st.floats(0.0, 2.0)), draw(st.sampled_from([0.0, 1e-9])), "own")
        entries.append((own, draw(st.integers(1, 20))))
    return relation, draw(st.sampled_from([1e-5, 1e-8, 1e-3])), entries


def cost(entries, relation, delta, engine="pld"):
    return ledger(*entries, delta=delta, neighboring=relation, engine=engine).get_epsilon()


def at_most(small, large):
    return small <= large * (1.0 + TOLERANCE) + 1e-9


def equal(one, other):
    return at_most(one, other) and at_most(other, one)


ENGINES = pytest.mark.parametrize("engine", composition.ENGINES)


@pytest.mark.slow
@law(60)
@given(ledgers(kinds=2, approximate=False), st.data())
def test_events_that_hardly_differ_cost_what_equal_ones_cost(ledger, data):
    """Different events are composed one by one, and equal ones as a power."""
    relation, delta, entries = ledger
    apart = []
    for event, count in entries:
        first = data.draw(st.integers(0, count))
        near = SubsampledGaussian(
            event.noise_multiplier * (1.0 + 1e-9), event.sample_rate, event.sampling
        )
        apart += [(event, first), (near, count - first)]
    assert equal(cost(apart, relation, delta), cost(entries, relation, delta))


@pytest.mark.slow
@ENGINES
@law(25)
@given(ledgers(kinds=2), st.data())
def test_costs_are_monotone(engine, ledger, data):
    """In count, delta, noise, rate, and number of events."""
    relation, delta, entries = ledger
    now = cost(entries, relation, delta, engine)
    place = data.draw(st.integers(0, len(entries) - 1))
    event, count = entries[place]
    factor = data.draw(st.sampled_from([1.001, 1.02, 1.5]))

    def instead(*new):
        return cost([*entries[:place], new, *entries[place + 1 :]], relation, delta, engine)

    assert at_most(now, instead(event, count + data.draw(st.sampled_from([1, 30]))))
    assert at_most(cost(entries, relation, delta * factor, engine), now)
    assert at_most(cost(entries[1:], relation, delta, engine), now)
    if isinstance(event, ApproximateDP):
        assert at_most(now, instead(ApproximateDP(event.epsilon + 0.1, event.delta, "a"), count))
        return
    noise, rate, sampling = event.noise_multiplier, event.sample_rate, event.sampling
    assert at_most(instead(SubsampledGaussian(noise * factor, rate, sampling), count), now)
    sampling = "poisson" if sampling == "full" else sampling
    assert at_most(instead(SubsampledGaussian(noise, rate / factor, sampling), count), now)


@pytest.mark.slow
@law(30)
@given(ledgers())
def test_loss_distributions_are_never_above_renyi(ledger):
    relation, delta, entries = ledger
    assert at_most(cost(entries, relation, delta), cost(entries, relation, delta, "rdp"))


@pytest.mark.long
@law(60)
@given(ledgers())
def test_epsilon_and_delta_are_inverse(ledger):
    relation, delta, entries = ledger
    epsilon = composition.epsilon(dict(entries), delta, relation, "pld")
    if epsilon == math.inf:  # the deltas of the events alone are more than delta
        return
    again = composition.delta(dict(entries), epsilon, relation, "pld")
    assert again <= delta * (1.0 + 5.0 * TOLERANCE)


@pytest.mark.parametrize("kind", ["laplace", "fixed"])
def test_pairs_that_are_not_known_to_be_gaussian_are_not_merged_as_such(monkeypatch, kind):
    pair = DominatingPair(kind, 1.0, 1.0)
    monkeypatch.setattr(composition, "interpret", lambda event, neighboring: pair)
    with pytest.raises(PrivacyError, match=f"'{kind}'"):
        composition.epsilon({SubsampledGaussian(1.0): 2}, 1e-5, "add_or_remove_one", "pld")


def test_both_directions_of_the_relation_are_composed():
    """No theorem says that a removal costs at least as much as an addition for all ledgers."""
    one, ten = (SubsampledGaussian(sigma, 0.1).pair(ADD) for sigma in (1.0, 10.0))
    sides = composition._sides(((one, 3), (ten, 5)))
    assert [[step.kind for step, _ in side] for side in sides] == [["remove"] * 2, ["add"] * 2]
    assert all([n for _, n in side] == [3, 5] for side in sides)
