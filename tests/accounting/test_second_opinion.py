"""``dp_accounting``'s answers, against closed forms and the package's own engines."""

import math
import sys

import pytest

from pyro_dp import ApproximateDP, SubsampledGaussian
from pyro_dp.accounting import NonPrivateLook, composition, second_opinion
from pyro_dp.accounting.second_opinion import TOLERANCE, SecondOpinion

RELATIONS = ("add_or_remove_one", "replace_one")


def opinion(ledger, delta=1e-5, neighboring="add_or_remove_one"):
    return second_opinion.second_opinion(ledger, delta, neighboring)


def sums(*entries):
    """A ledger of sums, each (noise multiplier, rate, count)."""
    return {SubsampledGaussian(noise, rate): count for noise, rate, count in entries}


def stated(epsilon, delta=0.0):
    return ApproximateDP(epsilon, delta, "x")


LEDGERS = [
    (sums((1.0, 0.01, 1000)), 1e-5),
    (sums((0.5, 1e-4, 20_000)), 1e-6),
    (sums((30.0, 0.3, 50)), 1e-9),
    (sums((0.6, 0.05, 1)), 1e-5),
    (sums((2.0, 0.02, 3000), (1.0, 0.001, 500), (8.0, 1.0, 4)), 1e-7),
    (sums((10.0, 1.0, 3), (20.0, 1.0, 9)), 1e-5),
    (sums((0.3, 1.0, 1)), 1e-5),
    (sums((900.0, 1.0, 3)), 1e-5),
]


@pytest.mark.parametrize("neighboring", RELATIONS)
@pytest.mark.parametrize("ledger, delta", LEDGERS)
def test_agrees_with_the_engine_on_sums(ledger, delta, neighboring):
    ours = composition.epsilon(ledger, delta, neighboring, "pld")
    found, source = opinion(ledger, delta, neighboring)
    assert source == "PLD"
    assert ours * (1 - TOLERANCE / 2) <= found <= ours * (1 + TOLERANCE / 2)


@pytest.mark.slow
@pytest.mark.parametrize("noise, rate, count", [(1.0, 0.01, 1000), (3.0, 0.2, 100)])
def test_subsets_are_known_to_the_loose_accountant(noise, rate, count):
    ledger = {
        SubsampledGaussian(noise, rate, "fixed"): count,
        SubsampledGaussian(10.0, 1.0, "full"): 2,
        SubsampledGaussian(30.0, 1.0, "fixed"): 2,
    }
    rdp, pld = (composition.epsilon(ledger, 1e-5, "replace_one", e) for e in ("rdp", "pld"))
    found, source = opinion(ledger, neighboring="replace_one")
    assert source == "RDP"
    assert found == pytest.approx(rdp, rel=1e-3)
    assert found > 1.05 * pld


@pytest.mark.long
def test_what_states_its_own_cost_is_composed():
    found, source = opinion({stated(0.1): 3})
    assert source == "PLD"
    assert 0.3 * (1 - TOLERANCE) < found < 0.3 * (1 + TOLERANCE / 2)
    some = sums((1.0, 0.01, 1000))
    alone, _ = opinion(some)
    bounds = []
    for delta in (0.0, 5e-6, 9e-6):
        ledger = some | {stated(1.0, delta): 1}
        bounds.append(opinion(ledger).epsilon)
        ours = composition.epsilon(ledger, 1e-5, "add_or_remove_one", "pld")
        assert bounds[-1] == pytest.approx(ours, rel=TOLERANCE / 2)
    assert max(alone, 1.0) < bounds[0] < 0.98 * bounds[1] < 0.98**2 * bounds[2]


def test_beside_a_large_cost_that_is_stated_a_small_sum_stays_small():
    ledger = sums((4.7, 9e-5, 856)) | {stated(1.6): 2}
    found, _ = opinion(ledger, 1e-9, "replace_one")
    ours = composition.epsilon(ledger, 1e-9, "replace_one", "pld")
    assert found == pytest.approx(ours, rel=TOLERANCE / 2)


@pytest.mark.parametrize("event", [SubsampledGaussian(0.0, 0.1), NonPrivateLook("the mean")])
def test_without_noise_there_is_no_bound(event):
    assert opinion({event: 1, SubsampledGaussian(1.0): 1}) == SecondOpinion(math.inf, "PLD")


FIXED = SubsampledGaussian(1.0, 0.1, "fixed")
POISSON = SubsampledGaussian(1.0, 0.1)


@pytest.mark.parametrize(
    "ledger, delta, reason",
    [
        ({FIXED: 1, POISSON: 1}, 1e-5, "subsets of fixed size"),
        ({FIXED: 1, stated(1.0): 1}, 1e-5, "subsets of fixed size"),
        (sums(*((k + 1.0, 0.1, 1) for k in range(31))), 1e-5, "more than 30 kinds"),
        ({POISSON: 1}, 1e-20, "rounding errors"),
        ({POISSON: 1, stated(1.0, 1e-5): 1}, 1e-5, "rounding errors"),
        ({stated(1.0, 1e-4): 1}, 1e-5, "rounding errors"),
        (sums((1e3, 1e-3, 10**12)), 1e-3, "rounding errors"),
        (sums((1e-3, 0.1, 1)), 1e-5, "overflow"),
        ({stated(800.0): 1}, 1e-5, "overflow"),
        (sums((1e9, 1.0, 1)), 1e-5, "epsilon of 0"),
        ({stated(0.0): 1}, 1e-5, "epsilon of 0"),
        (sums((1e3, 0.5, 10**6)), 1e-5, "too large"),
        ({stated(1e-6): 10**6}, 1e-5, "too large"),
        (sums((0.1, 1e-6, 1), (5e3, 0.1, 100_000)), 1e-5, "too large"),
    ],
)
def test_where_there_is_none_the_reason_is_told(ledger, delta, reason, monkeypatch):
    """No computation has begun that might never end."""

    def begun(*arguments):
        raise AssertionError

    monkeypatch.setattr(second_opinion, "_pld_pessimistic", begun)
    monkeypatch.setattr(second_opinion, "_rdp_loose", begun)
    found, said = opinion(ledger, delta, "replace_one")
    assert found is None
    assert reason in said


def test_it_may_fail_or_be_missing(monkeypatch):
    def fails(*arguments):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(second_opinion, "_pld_pessimistic", fails)
        assert opinion({POISSON: 1}) == SecondOpinion(None, "it failed (MemoryError)")
    for event, neighboring in ((POISSON, "add_or_remove_one"), (FIXED, "replace_one")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "dp_accounting", None)
            found = opinion({event: 1}, neighboring=neighboring)
        assert found == SecondOpinion(None, "it is not installed")
