"""A second opinion on epsilon, by the independent implementation ``dp_accounting``.

It reads the ledger, not the output of :mod:`pyro_dp.accounting.composition`. So it also detects a
release that is misread there. Its PLD accountant composes Gaussian sums (of all records or Poisson
samples), Laplace noise, and releases that are (epsilon, delta)-DP by themselves. Its bound is
tight. Only its RDP accountant supports random subsets of fixed size, with a loose bound. Autodp's
Rényi divergences give a third opinion, which is also loose.

Under ``replace_one`` the sums of neighbours are 2C apart. The PLD accountant takes their noise in
units of C, as the ledger does, and the RDP accountant in units of 2C.

If a computation would take too long, there is no opinion. This depends on sizes, not on measured
times, so the same ledger always gets the same opinion.
"""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pyro_dp.accounting import composition
from pyro_dp.accounting.events import Event, NonPrivateLook, SubsampledGaussian, together

TOLERANCE = 0.005  # relative difference, four times the effect of grids and rounding

_FINENESS = 1e-3  # approximate relative rise of epsilon that the grid may cause
_LARGEST = 700.0  # epsilon, for which exp(-epsilon) does not underflow
_MOST_KINDS = 30  # kinds of releases
_MOST_STEPS = 500_000
_MOST_POINTS = 250_000  # approximate number of grid points in all
# For larger delta, the rounding errors of dp_accounting are below a hundredth of delta.
_LEAST_DELTA = 1e-10
_LEAST_DELTA_PER_STEP = 2e-14

# dp_accounting calls the empty record, which may replace a record, "special".
_RELATIONS = {"add_or_remove_one": "REPLACE_SPECIAL", "replace_one": "REPLACE_ONE"}


class SecondOpinion(NamedTuple):
    """An upper bound of the ledger's epsilon in nats; None: there is no opinion."""

    epsilon: float | None
    source: str  # the accountant that computed it, or the reason why there is no opinion


def second_opinion(ledger: Mapping[Event, int], delta: float, neighboring: str) -> SecondOpinion:
    """The bound of ``dp_accounting``. It raises no error if that fails or is not installed."""
    try:
        with np.errstate(all="ignore"):
            return _opinion(ledger, delta, neighboring)
    except ImportError:
        return SecondOpinion(None, "it is not installed")
    except Exception as error:  # a report must be written after any error
        return SecondOpinion(None, f"it failed ({type(error).__name__})")


def third_opinion(ledger: Mapping[Event, int], delta: float, neighboring: str) -> float | None:
    """The bound from autodp's Rényi divergences; None: there is none, or it would take long."""
    sums = [event for event in ledger if isinstance(event, SubsampledGaussian)]
    on_samples = any(e.sample_rate < 1.0 and e.sampling == "poisson" for e in sums)
    if len(ledger) > _MOST_KINDS or (neighboring == "replace_one" and on_samples):
        return None
    try:
        found = composition.epsilon(ledger, delta, neighboring, "rdp")
    except Exception:  # a report must be written after any error
        return None
    return found if found < math.inf else None


def _opinion(ledger: Mapping[Event, int], delta: float, neighboring: str) -> SecondOpinion:
    sums = {event: n for event, n in ledger.items() if isinstance(event, SubsampledGaussian)}
    looks = [event for event in ledger if isinstance(event, NonPrivateLook)]
    others = {event: n for event, n in ledger.items() if event not in sums and event not in looks}
    if any(event.dots is None for event in others):
        return SecondOpinion(None, "it is not asked about releases of such a kind")
    if looks or not all(event.noise_multiplier for event in sums):
        return SecondOpinion(math.inf, "PLD")
    if len(ledger) > _MOST_KINDS:
        return SecondOpinion(None, f"there are more than {_MOST_KINDS} kinds of releases")
    sampled = {event.sampling for event in sums if event.sample_rate < 1.0}
    if "fixed" in sampled:
        if others or len(sampled) > 1:
            reason = "it cannot add subsets of fixed size to releases of the other kinds here"
            return SecondOpinion(None, reason)
        return SecondOpinion(_rdp_loose(sums, delta), "RDP")
    stated = math.fsum(n * event.pair(neighboring).most for event, n in others.items())
    left = delta - math.fsum(n * event.delta for event, n in others.items())
    if left < max(_LEAST_DELTA, _LEAST_DELTA_PER_STEP * _steps(sums)):
        reason = "its rounding errors are not small against what is left of delta"
        return SecondOpinion(None, reason)
    composed = composition.epsilon(sums, left, neighboring, "pld")
    if stated + composed > _LARGEST:
        return SecondOpinion(None, f"its exponentials overflow where epsilon is above {_LARGEST:g}")
    whole = composition.epsilon(ledger, delta, neighboring, "pld")
    gap = _gap(sums, composed, others, whole, left)
    if gap == 0.0:
        return SecondOpinion(None, "no grid is fine enough for an epsilon of 0")
    steps = _steps(sums) + sum(others.values())
    spans = math.fsum(_span(event, n, neighboring) for event, n in ledger.items())
    points = spans / gap + 50.0 * len(ledger) * math.sqrt(steps)
    if points > _MOST_POINTS or steps > _MOST_STEPS:
        return SecondOpinion(None, "its grids would be too large for these releases")
    return SecondOpinion(_pld_pessimistic(ledger, delta, neighboring, gap), "PLD")


def _pld_pessimistic(
    ledger: Mapping[Event, int], delta: float, neighboring: str, gap: float
) -> float:
    from dp_accounting import NeighboringRelation

    relation = NeighboringRelation[_RELATIONS[neighboring]]
    parts = []
    for event, count in ledger.items():
        one, times = _merged(event, count)
        parts.append(one.dots(gap, relation).self_compose(times))
    whole = functools.reduce(lambda one, other: one.compose(other), parts)
    return float(whole.get_epsilon_for_delta(delta))


def _rdp_loose(sums: Mapping[SubsampledGaussian, int], delta: float) -> float:
    """The RDP accountant's bound under ``replace_one``, which subsets of fixed size need."""
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = RdpAccountant(neighboring_relation=relation)
    for event, count in sums.items():
        step = dp_accounting.GaussianDpEvent(event.noise_multiplier / 2.0)
        if event.sample_rate < 1.0:
            size, records = event.sample_rate.as_integer_ratio()
            step = dp_accounting.SampledWithoutReplacementDpEvent(records, size, step)
        accountant.compose(step, count)
    return float(accountant.get_epsilon(delta))


def _merged(event: Event, count: int) -> tuple[Event, int]:
    """The releases to compose, and their number. Full batches merge into one Gaussian."""
    if not isinstance(event, SubsampledGaussian) or event.sample_rate < 1.0:
        return event, count
    return together({event: count}), 1


def _steps(sums: Mapping[SubsampledGaussian, int]) -> int:
    return sum(_merged(event, count)[1] for event, count in sums.items())


def _gap(
    sums: Mapping[SubsampledGaussian, int],
    composed: float,
    others: Mapping[Event, int],
    whole: float,
    left: float,
) -> float:
    """The spacing of a grid of losses that raises epsilon by about a thousandth; 0 if none does.

    Connect-the-Dots adds a variance of gap^2/6 to each of n losses. For a Gaussian mechanism,
    epsilon = mu^2/2 + mu sqrt(2 log 1/delta), and the variance of the total loss is mu^2. With
    heavier tails, epsilon rises less. The losses of other releases are rounded up to the grid.

    :param composed: epsilon of the sums at delta ``left``.
    :param whole: epsilon of all releases.
    """
    root = math.sqrt(-2.0 * math.log(left))

    def variance(epsilon: float) -> float:
        return (2.0 * epsilon / (root + math.sqrt(root**2 + 2.0 * epsilon))) ** 2

    rise = _FINENESS * whole
    gaps = [rise / n for n in others.values()]
    if sums:
        room = variance(composed + rise) - variance(composed)
        gaps.append(math.sqrt(6.0 * room / _steps(sums)))
    return min(gaps)


def _span(event: Event, count: int, neighboring: str) -> float:
    """The width of a release's range of losses, to about ten standard deviations."""
    event, _ = _merged(event, count)
    if not isinstance(event, SubsampledGaussian):
        return 2.0 * float(event.pair(neighboring).most)
    noise, rate = event.noise_multiplier, event.sample_rate
    most = 10.0 / noise + 0.5 / noise**2
    absent = -math.log1p(-rate) if rate < 1.0 else math.inf
    span = float(np.logaddexp(-absent, math.log(rate) + most)) + min(most, absent)
    return span if neighboring == "add_or_remove_one" else 2.0 * span
