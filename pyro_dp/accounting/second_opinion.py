"""A second opinion on epsilon, by ``dp_accounting``: another implementation, by other people.

It reads the ledger, not the output of :mod:`pyro_dp.accounting.composition`, and so it also notices
a release that is misread there. Its PLD accountant composes Gaussian sums (of all records or
Poisson samples), Laplace noise, and releases that are (epsilon, delta)-DP by themselves. It is
pessimistic, and tight. Only its RDP accountant handles random subsets of fixed size, with a loose
bound. A third opinion is that of autodp's Rényi divergences, which are loose as well.

Under ``replace_one`` the sums are 2C apart. The PLD accountant takes their noise in units of C, as
the ledger does. The RDP accountant takes it in units of 2C.

How long it takes is decided by sizes alone: the same ledger always gets the same opinion.
"""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pyro_dp.accounting import composition
from pyro_dp.accounting.events import Event, NonPrivateLook, SubsampledGaussian, together

TOLERANCE = 0.005  # relative: four times the effect of grids and rounding

_FINENESS = 1e-3  # relative rise of epsilon that the grid may cause, about
_LARGEST = 700.0  # epsilon: exp(-epsilon) must be a number
_MOST_KINDS = 30  # kinds of releases
_MOST_STEPS = 500_000
_MOST_POINTS = 250_000  # on the grids of single releases, and on part of those of their sums
_LEAST_DELTA = 1e-10  # its rounding errors in delta are below a hundredth of these two
_LEAST_DELTA_PER_STEP = 2e-14

# An empty record that replaces a record is "special" in the words of ``dp_accounting``.
_RELATIONS = {"add_or_remove_one": "REPLACE_SPECIAL", "replace_one": "REPLACE_ONE"}


class SecondOpinion(NamedTuple):
    """An upper bound of the ledger's epsilon in nats; None: there is none."""

    epsilon: float | None
    source: str  # the accountant that found it, or the reason why there is none


def second_opinion(ledger: Mapping[Event, int], delta: float, neighboring: str) -> SecondOpinion:
    """The result of ``dp_accounting``. Nothing is raised if it fails or is missing."""
    try:
        with np.errstate(all="ignore"):
            return _opinion(ledger, delta, neighboring)
    except ImportError:
        return SecondOpinion(None, "it is not installed")
    except Exception as error:  # whatever goes wrong there, a report is written
        return SecondOpinion(None, f"it failed ({type(error).__name__})")


def third_opinion(ledger: Mapping[Event, int], delta: float, neighboring: str) -> float | None:
    """A bound by autodp's Rényi divergences; None: it has none, or not in a short time."""
    sums = [event for event in ledger if isinstance(event, SubsampledGaussian)]
    on_samples = any(e.sample_rate < 1.0 and e.sampling == "poisson" for e in sums)
    if len(ledger) > _MOST_KINDS or (neighboring == "replace_one" and on_samples):
        return None
    try:
        found = composition.epsilon(ledger, delta, neighboring, "rdp")
    except Exception:  # whatever goes wrong there, a report is written
        return None
    return found if found < math.inf else None


def _opinion(ledger: Mapping[Event, int], delta: float, neighboring: str) -> SecondOpinion:
    sums = {event: n for event, n in ledger.items() if isinstance(event, SubsampledGaussian)}
    looks = [event for event in ledger if isinstance(event, NonPrivateLook)]
    own = {event: n for event, n in ledger.items() if event not in sums and event not in looks}
    if any(event.dots is None for event in own):
        return SecondOpinion(None, "it is not asked about releases of such a kind")
    if looks or not all(event.noise_multiplier for event in sums):
        return SecondOpinion(math.inf, "PLD")
    if len(ledger) > _MOST_KINDS:
        return SecondOpinion(None, f"there are more than {_MOST_KINDS} kinds of releases")
    sampled = {event.sampling for event in sums if event.sample_rate < 1.0}
    if "fixed" in sampled:
        if own or len(sampled) > 1:
            reason = "it cannot add subsets of fixed size to releases of the other kinds here"
            return SecondOpinion(None, reason)
        return SecondOpinion(_rdp_loose(sums, delta), "RDP")
    stated = math.fsum(n * event.pair(neighboring).most for event, n in own.items())
    left = delta - math.fsum(n * event.delta for event, n in own.items())
    if left < max(_LEAST_DELTA, _LEAST_DELTA_PER_STEP * _steps(sums)):
        reason = "its rounding errors are not small against what is left of delta"
        return SecondOpinion(None, reason)
    composed = composition.epsilon(sums, left, neighboring, "pld")
    if stated + composed > _LARGEST:
        return SecondOpinion(None, f"its exponentials overflow where epsilon is above {_LARGEST:g}")
    whole = composition.epsilon(ledger, delta, neighboring, "pld")
    gap = _gap(sums, composed, own, whole, left)
    if gap == 0.0:
        return SecondOpinion(None, "no grid is fine enough for an epsilon of 0")
    steps = _steps(sums) + sum(own.values())
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
    """Under ``replace_one``, the only relation that has subsets of fixed size."""
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
    """Releases to be composed, and their number: full batches are one Gaussian together."""
    if not isinstance(event, SubsampledGaussian) or event.sample_rate < 1.0:
        return event, count
    return together({event: count}), 1


def _steps(sums: Mapping[SubsampledGaussian, int]) -> int:
    return sum(_merged(event, count)[1] for event, count in sums.items())


def _gap(
    sums: Mapping[SubsampledGaussian, int],
    composed: float,
    own: Mapping[Event, int],
    whole: float,
    left: float,
) -> float:
    """The grid of losses on which epsilon rises by a thousandth, about; 0 if there is none.

    Connect-the-Dots adds a variance of gap^2/6 to each of n losses. With epsilon = mu^2/2 + mu
    sqrt(2 log 1/delta), the variance of their sum is about mu^2, as for a Gaussian mechanism.
    Heavier tails make the rise less. It is rounded up to the grid.

    :param composed: epsilon of the sums at delta ``left``; ``whole`` is that of all releases.
    """
    root = math.sqrt(-2.0 * math.log(left))

    def variance(epsilon: float) -> float:
        return (2.0 * epsilon / (root + math.sqrt(root**2 + 2.0 * epsilon))) ** 2

    rise = _FINENESS * whole
    gaps = [rise / n for n in own.values()]
    if sums:
        room = variance(composed + rise) - variance(composed)
        gaps.append(math.sqrt(6.0 * room / _steps(sums)))
    return min(gaps)


def _span(event: Event, count: int, neighboring: str) -> float:
    """The span of a release's losses, about ten standard deviations out."""
    event, _ = _merged(event, count)
    if not isinstance(event, SubsampledGaussian):
        return 2.0 * float(event.pair(neighboring).most)
    noise, rate = event.noise_multiplier, event.sample_rate
    most = 10.0 / noise + 0.5 / noise**2
    absent = -math.log1p(-rate) if rate < 1.0 else math.inf
    span = float(np.logaddexp(-absent, math.log(rate) + most)) + min(most, absent)
    return span if neighboring == "add_or_remove_one" else 2.0 * span
