"""The privacy cost of a ledger: epsilon(delta) and delta(epsilon), for a neighbouring relation.

There are two engines. Each returns an upper bound of the cost of ``{event: count}``:

* ``pld``, privacy loss distributions: tight, see :mod:`pyro_dp.accounting.pld`. Full batches merge
  into one Gaussian, which has a closed form (Balle & Wang 2018, Theorem 8). The result never
  exceeds the Rényi bound of the same distributions.
* ``rdp``: Rényi divergences from ``autodp``, converted as in Canonne, Kamath & Steinke 2020.

Each event has a dominating pair: of a Gaussian sum (:mod:`pyro_dp.accounting.gaussian_pairs`), or
with bounded losses (:mod:`pyro_dp.accounting.bounded_pairs`). The engines compose all pairs. Some
releases have only Rényi divergences (:class:`~pyro_dp.accounting.events.RenyiDP`). Then ``pld``
uses the Rényi bound of the whole ledger. A non-private look leaves no guarantee: epsilon is inf,
and delta is 1.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pyro_dp.accounting.bounded_pairs import MOST_LOSS, RenyiPair
from pyro_dp.accounting.events import KINDS
from pyro_dp.accounting.pld import (
    ORDERS,
    RATES,
    Curve,
    Floats,
    Side,
    compose,
    log_moments,
    renyi_delta,
    renyi_epsilon,
)
from pyro_dp.utils.errors import ConfigurationError

ENGINES = {  # by name, with the method of composition in words
    "pld": "privacy loss distributions",
    "rdp": "Rényi differential privacy",
}
NEIGHBORING = ("add_or_remove_one", "replace_one")

_TOLERANCE = 1e-3  # relative change of the result that ends the refinement of grids
_LEAST = 1e-30  # for smaller delta, only Rényi bounds are used: probabilities might underflow


def interpret(event: Any, neighboring: str) -> Any:
    """The event's dominating pair, see :meth:`Event.pair`.

    :raises ConfigurationError: the event is unknown, or does not fit the relation.
    """
    if type(event) not in KINDS.values():
        raise ConfigurationError(
            f"an event of type {type(event).__name__} is unknown: record a SubsampledGaussian, an "
            "ApproximateDP, or a Mechanism of autodp."
        )
    return event.pair(neighboring)


def epsilon(ledger: Mapping[Any, int], delta: float, neighboring: str, engine: str) -> float:
    """An epsilon (nats) for which the ledger is (epsilon, delta)-DP; inf without noise.

    :param ledger: count of each event.
    :param delta: in (0, 1).
    :param neighboring: one of :data:`NEIGHBORING`.
    :param engine: one of :data:`ENGINES`.
    :raises ConfigurationError: an event is unknown or does not fit the relation.
    """
    return _of_parts(_EPSILON[engine], ledger, delta, neighboring)


def _of_parts(
    composed: Callable[[Side, float], float],
    ledger: Mapping[Any, int],
    delta: float,
    neighboring: str,
) -> float:
    """Epsilon of a ledger.

    :param composed: epsilon of the composed pairs, for the part of delta that is left.
    """
    steps, added, lost = _parts(ledger, neighboring)
    if steps is None or lost > delta:
        return math.inf
    # The ledger is a mixture, so delta = lost + (1 - lost) * left.
    steps, left = _without_rare(steps, (delta - lost) / (1.0 - lost))
    if not steps:
        return added
    return added + min(_most(steps), composed(steps, left) if left > 0.0 else math.inf)


def delta(ledger: Mapping[Any, int], epsilon: float, neighboring: str, engine: str) -> float:
    """A delta for which the ledger is (epsilon, delta)-DP; otherwise as :func:`epsilon`."""
    steps, added, lost = _parts(ledger, neighboring)
    if steps is None or epsilon < added:
        return 1.0
    if epsilon == math.inf or epsilon - added >= _most(steps):
        return min(1.0, lost)
    if engine == "pld":
        own = _pld_delta(steps, epsilon - added)
    else:
        own = renyi_delta(*_autodp_moments(steps), epsilon - added)
    rest, rare = _without_sums(steps)
    if rare < own and epsilon - added >= _most(rest):
        own = rare
    return min(1.0, lost + own * (1.0 - lost))


def epsilon_bound(ledger: Mapping[Any, int], delta: float, neighboring: str, engine: str) -> float:
    """A quick upper bound of :func:`epsilon`, inf if there is none.

    For events that were composed before, it takes microseconds.
    """

    def composed(steps: Side, left: float) -> float:
        if engine != "pld":
            return math.inf
        return max(_moments_epsilon(side, left) for side in _sides(steps))

    return _of_parts(composed, ledger, delta, neighboring)


def moments(ledger: Mapping[Any, int], neighboring: str) -> tuple[Floats, float]:
    """Rényi divergences of a ledger of Gaussian sums, as log moments of the privacy loss.

    :param ledger: counts of :class:`SubsampledGaussian`.
    :returns: bounds of log E exp(rate * loss) at :data:`~pyro_dp.accounting.pld.RATES`, for both
        directions of the relation; inf without noise. Then the probability of outcomes that these
        moments leave out.
    :raises ConfigurationError: an event is not a sum, or does not fit the relation.
    """
    steps, added, lost = _parts(ledger, neighboring)
    if added or lost:
        raise ConfigurationError("moments are defined for a ledger of sums alone.")
    if steps is None:
        return np.full_like(RATES, math.inf), 0.0
    sides = [log_moments(side) for side in _sides(steps)]
    return np.max([each for each, _ in sides], axis=0), max(lost for _, lost in sides)


def renyi(ledger: Mapping[Any, int], neighboring: str) -> RenyiPair:
    """Autodp's Rényi divergences of a ledger at ``ORDERS``; inf if an event has a delta."""
    steps, added, lost = _parts(ledger, neighboring)
    if steps is None or lost > 0.0:
        return RenyiPair(math.inf, (math.inf,) * len(ORDERS))
    rates, found = _autodp_moments(steps)
    return RenyiPair(_most(steps) + added, tuple(found + rates * added))


def _without_sums(steps: Side) -> tuple[Side, float]:
    """The pairs with bounded losses, and a bound of the probability to take part in the others."""
    rare = math.fsum(count * step.rate for step, count in steps if step.most == math.inf)
    return tuple(each for each in steps if each[0].most < math.inf), rare


def _most(steps: Side) -> float:
    """The largest loss of the composition: epsilon by basic composition."""
    return math.fsum(count * step.most for step, count in steps)


def _without_rare(steps: Side, left: float) -> tuple[Side, float]:
    """Leave out the sums if delta covers the probability that a record takes part in any.

    :returns: the other pairs, and the rest of delta.
    """
    bounded, rare = _without_sums(steps)
    return (bounded, left - rare) if rare <= left else (steps, left)


def _parts(ledger: Mapping[Any, int], neighboring: str) -> tuple[Side | None, float, float]:
    """Split the cost of a ledger.

    :returns: the pairs to compose; None if there is no privacy. Then the sum of epsilons that are
        too large to compose, and the probability of an infinite loss, 1 - prod_i (1 - delta_i).
    """
    kinds: dict[Any, Counter[Any]] = {}  # counts of pairs, by their class
    for event, n in ledger.items():
        pair = interpret(event, neighboring)
        if n:
            kinds.setdefault(type(pair), Counter())[pair] += n
    if type(None) in kinds:
        return None, 0.0, 0.0
    lost = -math.expm1(math.fsum(n * math.log1p(-event.delta) for event, n in ledger.items()))
    by_name = sorted(kinds.items(), key=lambda kind: kind[0].__name__)
    pairs = tuple(pair for kind, some in by_name for pair in kind.together(some, neighboring))
    large = ((pair.most, n) for _, some in by_name for pair, n in some.items())
    added = math.fsum(n * most for most, n in large if MOST_LOSS < most < math.inf)
    return pairs, added, lost


def _sides(steps: Side) -> list[Side]:
    """The pairs to compose, for each direction of the relation."""
    if any(step.kind == "remove" and step.rate < 1.0 for step, _ in steps):
        return [steps, tuple((step.reverse(), n) for step, n in steps)]
    return [steps]  # all pairs are symmetric


@functools.lru_cache(maxsize=256)
def _pld_epsilon(steps: Side, delta: float) -> float:
    if len(steps) == 1 and steps[0][1] == 1:
        return float(steps[0][0].epsilon(delta))
    if delta < _LEAST:
        return _rdp_epsilon(steps, delta)
    worst = 0.0
    for side in _sides(steps):
        bound = _moments_epsilon(side, delta)
        if bound > worst:
            moments, log_delta = log_moments(side)[0], math.log(delta)
            rate = float(RATES[np.argmin((moments - log_delta) / RATES)])
            tight = _refine(side, rate, log_delta, lambda curve: curve.epsilon(delta))
            worst = max(worst, min(bound, tight))
    return worst


@functools.lru_cache(maxsize=256)
def _pld_delta(steps: Side, eps: float) -> float:
    if len(steps) == 1 and steps[0][1] == 1:
        return float(steps[0][0].delta(eps))
    worst = 0.0
    for side in _sides(steps):
        moments, lost = log_moments(side)
        bound = min(1.0, renyi_delta(RATES, moments, eps) + lost)
        rate = float(RATES[np.argmin(moments - RATES * eps)])
        target = math.inf
        while bound < 1e-3 * target and bound > max(worst, _LEAST):
            target = bound  # 1e-7 of it may be cut off, so the result must not be much smaller
            tight = _refine(side, rate, math.log(target), lambda curve: curve.delta(eps))
            bound = min(bound, tight)
        worst = max(worst, bound)
    return worst


def _refine(
    side: Side, rate: float, log_delta: float, read: Callable[[Curve], float | None]
) -> float:
    """The result of ``read`` on ever finer grids, until it changes by less than the tolerance.

    Every grid gives an upper bound, and the smallest is returned. The error falls at least in
    proportion to the grid. So it is at most about a third of the last change, and usually a
    fifteenth.

    :param rate: the tilt's, see :func:`~pyro_dp.accounting.pld.compose`.
    :param read: epsilon or delta from a curve; None if the curve does not reach so low.
    """
    best, refined = math.inf, 1.0
    while all(step.on_grids for step, _ in side):
        curve = compose(side, rate, log_delta, 0.75 * _TOLERANCE / refined)
        value = read(curve)
        if value is None:  # tilt less, so the window reaches lower losses
            rate /= 4.0
            if rate < 1e-4:
                return best
            continue
        done = curve.finest or best <= value * (1.0 + _TOLERANCE)
        best, refined = min(best, value), 16.0 * refined
        if done:
            break
    return best


def _moments_epsilon(side: Side, delta: float) -> float:
    moments, lost = log_moments(side)
    return renyi_epsilon(RATES, moments, delta - lost)


def _autodp_moments(steps: Side) -> tuple[Floats, Floats]:
    """The rates :data:`ORDERS` - 1, and the composition's log moments there."""
    moments = (n * step.renyi_moments() for step, n in steps)
    return ORDERS - 1.0, sum(moments, np.zeros_like(ORDERS))


def _rdp_epsilon(steps: Side, delta: float) -> float:
    return renyi_epsilon(*_autodp_moments(steps), delta)


_EPSILON: dict[str, Callable[[Side, float], float]] = {"pld": _pld_epsilon, "rdp": _rdp_epsilon}
