"""What the events of a ledger cost: epsilon(delta) and delta(epsilon) under a relation.

Two engines, each a valid upper bound on the cost of ``{event: count}``:

* ``pld``, privacy loss distributions: tight, see :mod:`pyro_dp.accounting.pld`. Full batches merge
  into one Gaussian, whose closed form is Balle & Wang 2018, Theorem 8. The answer never exceeds
  the Rényi bound of the same distributions.
* ``rdp``: Rényi divergences from ``autodp``, converted as in Canonne, Kamath & Steinke 2020.

A release that is private by itself has a dominating pair of its own
(:mod:`pyro_dp.accounting.bounded_pairs`), which the engines compose with all others. Some have
only Rényi divergences (:mod:`pyro_dp.accounting.renyi_curve`): then ``pld`` takes the Rényi bound
of the whole ledger. A non-private look leaves no guarantee: epsilon is inf, delta is 1.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pyro_dp.accounting.bounded_pairs import MOST_LOSS
from pyro_dp.accounting.events import NonPrivateLook, Stated, SubsampledGaussian
from pyro_dp.accounting.pld import RATES, Curve, DominatingPair, Floats, Side, compose, log_moments
from pyro_dp.accounting.privacy_profile import step_delta, step_epsilon
from pyro_dp.accounting.rdp import ORDERS, autodp_moments, renyi_delta, renyi_epsilon
from pyro_dp.accounting.renyi_curve import RenyiPair
from pyro_dp.utils.errors import ConfigurationError, PrivacyError
from pyro_dp.utils.validation import LARGEST

ENGINES = {  # by name, and what they compose costs by, in words
    "pld": "privacy loss distributions",
    "rdp": "Rényi differential privacy",
}
NEIGHBORING = ("add_or_remove_one", "replace_one")

_TOLERANCE = 1e-3  # relative move of the answer that ends the refinement of grids
_LEAST = 1e-30  # delta below which only Rényi bounds are used: masses come close to underflow


def require_known(event: Any, neighboring: str) -> None:
    """:raises ConfigurationError: if the event is unknown or does not fit the relation."""
    if not isinstance(event, Stated | NonPrivateLook):
        interpret(event, neighboring)


def interpret(event: Any, neighboring: str) -> DominatingPair:
    """
    :param event: a :class:`SubsampledGaussian`.
    :param neighboring: the relation, see :data:`NEIGHBORING`.
    :returns: the dominating pair of one release. Under ``add_or_remove_one`` that of a removal; its
        reverse is the one of an addition.
    :raises ConfigurationError: if the event is unknown or does not fit the relation.
    """
    if type(event) is not SubsampledGaussian:
        raise ConfigurationError(
            f"an event of type {type(event).__name__} is unknown: record a SubsampledGaussian, an "
            "ApproximateDP, or a Mechanism of autodp."
        )
    sigma, rate = event.noise_multiplier, event.sample_rate
    # Rates this close to 0 or 1 are rounded up and noise beyond a million is rounded down, which
    # costs more privacy, to keep log(1 - q) and the losses of a step accurate. Where all records
    # take part noise is rounded down to what has a square.
    rate = 1.0 if rate > 1.0 - 1e-9 else max(rate, 1e-12)
    sigma = min(sigma, LARGEST if rate == 1.0 else 1e6)
    if neighboring == "add_or_remove_one":
        if event.sampling == "fixed":
            raise ConfigurationError(
                "sampling='fixed' has a fixed batch size, which add_or_remove_one cannot have: "
                "use neighboring='replace_one', or sampling='poisson'."
            )
        return DominatingPair("remove", sigma, rate)
    if event.sampling == "fixed" or rate == 1.0:
        return DominatingPair("fixed", sigma / 2.0, rate)  # the bound of one record's effect is 2C
    return DominatingPair("replace", sigma, rate)


def epsilon(ledger: Mapping[Any, int], delta: float, neighboring: str, engine: str) -> float:
    """
    :param ledger: count of each event.
    :param delta: in (0, 1).
    :param neighboring: the relation, see :data:`NEIGHBORING`.
    :param engine: see :data:`ENGINES`.
    :returns: an epsilon (nats) such that the ledger is (epsilon, delta)-DP; inf without noise.
    :raises ConfigurationError: if an event is unknown or does not fit the relation.
    """
    return _of_parts(_EPSILON[engine], ledger, delta, neighboring)


def _of_parts(
    composed: Callable[[Side, float], float],
    ledger: Mapping[Any, int],
    delta: float,
    neighboring: str,
) -> float:
    """Epsilon of a ledger, by a function for that of its pairs at what is left of delta."""
    steps, added, lost = _parts(ledger, neighboring)
    if steps is None or lost > delta:
        return math.inf
    # A mixture: all of delta is lost + (1 - lost) left.
    steps, left = _without_rare(steps, (delta - lost) / (1.0 - lost))
    if not steps:
        return added
    return added + min(_most(steps), composed(steps, left) if left > 0.0 else math.inf)


def delta(ledger: Mapping[Any, int], epsilon: float, neighboring: str, engine: str) -> float:
    """The other way round, otherwise as :func:`epsilon`.

    :param epsilon: in nats, >= 0.
    :returns: a delta such that the ledger is (epsilon, delta)-DP.
    """
    steps, added, lost = _parts(ledger, neighboring)
    if steps is None or epsilon < added:
        return 1.0
    if epsilon == math.inf or epsilon - added >= _most(steps):
        return min(1.0, lost)
    if engine == "pld":
        own = _pld_delta(steps, epsilon - added)
    else:
        own = renyi_delta(*autodp_moments(steps), epsilon - added)
    rare, rest = _taking_part(steps), _bounded(steps)
    if rare < own and epsilon - added >= _most(rest):
        own = rare
    return min(1.0, lost + own * (1.0 - lost))


def epsilon_bound(ledger: Mapping[Any, int], delta: float, neighboring: str, engine: str) -> float:
    """A bound that costs microseconds for events seen before; inf where the engine has none.

    Arguments as for :func:`epsilon`, whose result it bounds from above.
    """
    composed = _bound if engine == "pld" else _no_bound
    return _of_parts(composed, ledger, delta, neighboring)


def moments(ledger: Mapping[Any, int], neighboring: str) -> tuple[Floats, float]:
    """Rényi divergences of a ledger of sums, as log moments of the privacy loss.

    :param ledger: counts of :class:`SubsampledGaussian`.
    :param neighboring: the relation, see :data:`NEIGHBORING`.
    :returns: bounds of log E exp(rate * loss) at :data:`~pyro_dp.accounting.pld.RATES`, for both
        directions of the relation (inf without noise), and the mass of outcomes left out of them.
    :raises ConfigurationError: if an event is no sum, or does not fit the relation.
    """
    steps = _steps(ledger, neighboring)
    if steps is None:
        return np.full_like(RATES, math.inf), 0.0
    sides = [log_moments(side) for side in _sides(steps)]
    return np.max([each for each, _ in sides], axis=0), max(lost for _, lost in sides)


def renyi(ledger: Mapping[Any, int], neighboring: str) -> RenyiPair:
    """Rényi divergences of a ledger at :data:`~pyro_dp.accounting.rdp.ORDERS`, through autodp.

    They are infinite where a delta of its own is left, or no noise. Arguments as for :func:`delta`.
    """
    steps, added, lost = _parts(ledger, neighboring)
    if steps is None or lost > 0.0:
        return RenyiPair(math.inf, (math.inf,) * len(ORDERS))
    rates, found = autodp_moments(steps)
    return RenyiPair(_most(steps) + added, tuple(found + rates * added))


def _taking_part(steps: Side) -> float:
    """A bound of the probability that a record takes part in a sum: else none depends on it."""
    return math.fsum(count * step.rate for step, count in steps if step.most == math.inf)


def _bounded(steps: Side) -> Side:
    return tuple(each for each in steps if each[0].most < math.inf)


def _most(steps: Side) -> float:
    """The largest loss of all together: basic composition."""
    return math.fsum(count * step.most for step, count in steps)


def _without_rare(steps: Side, left: float) -> tuple[Side, float]:
    """Without sums in which a record hardly ever takes part, where ``left`` of delta covers it."""
    rare = _taking_part(steps)
    return (_bounded(steps), left - rare) if rare <= left else (steps, left)


def _parts(ledger: Mapping[Any, int], neighboring: str) -> tuple[Side | None, float, float]:
    """Pairs that compose (None: no privacy), epsilons that are added, and the probability lost.

    The last is the probability of an infinite loss, 1 - prod_i (1 - delta_i).
    """
    for event, count in ledger.items():
        if count and type(event) is NonPrivateLook:
            return None, 0.0, 0.0
    own = [(event, n) for event, n in ledger.items() if n and isinstance(event, Stated)]
    sums = {e: n for e, n in ledger.items() if not isinstance(e, Stated | NonPrivateLook)}
    lost = -math.expm1(math.fsum(n * math.log1p(-event.delta) for event, n in own))
    kinds: dict[Any, Counter[Any]] = {}  # by the class of their pairs
    for event, n in own:
        kinds.setdefault(type(event.pair), Counter())[event.pair] += n
    by_name = sorted(kinds.items(), key=lambda kind: kind[0].__name__)
    pairs = tuple(pair for kind, some in by_name for pair in kind.together(some))
    large = ((pair.most, n) for _, some in by_name for pair, n in some.items())
    added = math.fsum(n * most for most, n in large if MOST_LOSS < most < math.inf)
    steps = _steps(sums, neighboring)
    return None if steps is None else steps + pairs, added, lost


def _steps(ledger: Mapping[Any, int], neighboring: str) -> Side | None:
    """Pairs and counts in a canonical order; None if one is noiseless.

    n_k Gaussians of noise s_k are one Gaussian with s^-2 = sum n_k s_k^-2 (Dong, Roth & Su 2022).

    :raises PrivacyError: a full batch is of a kind that is not known to be a Gaussian.
    """
    counts: dict[DominatingPair, int] = {}
    for event, count in ledger.items():
        step = interpret(event, neighboring)
        if count:
            counts[step] = counts.get(step, 0) + count
    if any(step.noise < 1e-9 for step in counts):  # no privacy to speak of, and no overflow
        return None
    full = sorted((s.noise, n) for s, n in counts.items() if s.rate == 1.0)
    merged = sorted((s, n) for s, n in counts.items() if s.rate < 1.0)
    if full:
        kind = "remove" if neighboring == "add_or_remove_one" else "fixed"
        if others := {s.kind for s in counts if s.rate == 1.0} - {kind}:
            raise PrivacyError(f"pairs {sorted(others)} of rate 1 are not known to be Gaussian.")
        noise = 1.0 / math.hypot(*(math.sqrt(n) / s for s, n in full), 1e-300)
        if merged:  # rounded down, as in ``interpret``
            noise = min(noise, 1e6)
        merged.append((DominatingPair(kind, noise, 1.0), 1))
    return tuple(merged)


def _sides(steps: Side) -> list[Side]:
    """The pairs to be composed, one list per direction of the relation."""
    if any(step.kind == "remove" and step.rate < 1.0 for step, _ in steps):
        return [steps, tuple((step.reverse(), n) for step, n in steps)]
    return [steps]  # symmetric


@functools.lru_cache(maxsize=256)
def _pld_epsilon(steps: Side, delta: float) -> float:
    if len(steps) == 1 and steps[0][1] == 1:
        return step_epsilon(steps[0][0], delta)
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
        return step_delta(steps[0][0], eps)
    worst = 0.0
    for side in _sides(steps):
        moments, lost = log_moments(side)
        bound = min(1.0, renyi_delta(RATES, moments, eps) + lost)
        rate = float(RATES[np.argmin(moments - RATES * eps)])
        target = math.inf
        while bound < 1e-3 * target and bound > max(worst, _LEAST):
            target = bound  # up to 1e-7 of it is cut off: the answer must not be much smaller
            tight = _refine(side, rate, math.log(target), lambda curve: curve.delta(eps))
            bound = min(bound, tight)
        worst = max(worst, bound)
    return worst


def _refine(
    side: Side, rate: float, log_delta: float, read: Callable[[Curve], float | None]
) -> float:
    """What ``read`` finds, on ever finer grids, until it moves by less than the tolerance.

    Every grid gives an upper bound, and the least is returned. The error falls at least in
    proportion to the grid (with its square, unless losses bunch up between two points), so that
    what is left is about a third of the last move, and mostly a fifteenth.
    """
    best, refined = math.inf, 1.0
    while all(step.on_grids for step, _ in side):
        curve = compose(side, rate, log_delta, 0.75 * _TOLERANCE / refined)
        value = read(curve)
        if value is None:  # below the window: tilt less
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


def _bound(steps: Side, delta: float) -> float:
    return max(_moments_epsilon(side, delta) for side in _sides(steps))


def _no_bound(steps: Side, delta: float) -> float:
    return math.inf


def _rdp_epsilon(steps: Side, delta: float) -> float:
    return renyi_epsilon(*autodp_moments(steps), delta)


_EPSILON: dict[str, Callable[[Side, float], float]] = {
    "pld": _pld_epsilon,
    "rdp": _rdp_epsilon,
}
