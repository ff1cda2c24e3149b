r"""Privacy loss distributions on a grid, and their composition by FFT.

A pair (P, Q) of output distributions has delta(epsilon) = sup_A P(A) - e^epsilon Q(A). It dominates
a mechanism if delta(epsilon) is at least the mechanism's for every epsilon. Pairs of steps compose
as products. A step may depend on earlier outputs if its pair does not (Zhu, Dong & Wang 2022,
Theorem 10). With the loss L = log(P/Q) under P, delta(epsilon) = E max(0, 1 - e^(epsilon - L)).

Connect-the-Dots (Doroshenko et al. 2022, Algorithm 1) moves the probability between two grid points
onto them. The total masses of P and Q stay the same. This only spreads P/Q, so delta(epsilon) never
falls.

Before the FFT, the distribution is tilted by e^(rate * loss), where ``rate`` + 1 is the Rényi order
that is best for the wanted delta. Most of the tilted mass is at the losses that determine epsilon.
So a window of few standard deviations suffices, and rounding errors are small relative to delta.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Distribution(NamedTuple):
    """Losses (ascending), their probabilities under P, and P's mass at infinity."""

    losses: Floats
    probs: Floats
    infinity: float


Side = tuple[tuple[Any, int], ...]  # pairs for one direction of the relation, with their counts


def onto_dots(losses: Floats, p: Floats, q: Floats) -> Floats:
    """P's probabilities of the grid's losses, by Connect-the-Dots.

    :param p: P's probabilities between neighbouring losses; likewise q.
    """
    gap = np.diff(losses)
    with np.errstate(over="ignore", invalid="ignore"):
        lower = (q * np.exp(losses[:-1]) - p * np.exp(-gap)) / -np.expm1(-gap)
    # If exp overflows, moving all probability up is safe.
    lower = np.clip(np.nan_to_num(lower, nan=0.0, posinf=0.0), 0.0, p)
    probs = np.zeros_like(losses)
    probs[:-1] += lower
    probs[1:] += p - lower
    return probs


RATES = np.geomspace(1e-2, 1e7, 91)  # Rényi order - 1


def cumulant(grid: Distribution, rates: Floats) -> Floats:
    """log E_P exp(rate * loss) of the finite losses."""
    # logsumexp without copies: a ledger of many kinds spends most of its time here.
    some = grid.probs > 0.0
    terms: Floats = np.multiply.outer(rates, grid.losses[some])
    terms += np.log(grid.probs[some])
    largest = terms.max(axis=-1)
    terms -= largest[..., None]
    cumulant: Floats = largest + np.log(np.exp(terms, out=terms).sum(axis=-1))
    return cumulant


def log_moments(side: Side) -> tuple[Floats, float]:
    """Bounds of log E_P exp(rate * loss) of a composition at :data:`RATES`.

    The second result bounds the probability of losses that these moments leave out.
    """
    parts = [(step.moments(), count) for step, count in side]
    moments = sum((n * k for (k, _), n in parts), np.zeros_like(RATES))
    return moments, sum((n * lost for (_, lost), n in parts), 0.0)


ORDERS = np.array([*range(2, 65), *(round(64 * 1.15**k) for k in range(1, 25))], float)


def renyi_epsilon(rates: Floats, moments: Floats, delta: float) -> float:
    """The smallest epsilon at this delta that these log moments imply.

    It is Canonne, Kamath & Steinke 2020, Proposition 12, with order = 1 + rate.

    :param rates: (k,), > 0.
    :param moments: (k,) upper bounds of log E exp(rate * loss).
    """
    if delta <= 0.0:
        return math.inf
    order = 1.0 + rates
    bounds = (moments - math.log(delta) - np.log(order)) / rates - np.log1p(1.0 / rates)
    return max(0.0, float(np.min(bounds)))


def renyi_delta(rates: Floats, moments: Floats, eps: float) -> float:
    """The smallest delta at this epsilon; otherwise as :func:`renyi_epsilon`."""
    order = 1.0 + rates
    logs = moments - rates * eps - np.log(order) - rates * np.log1p(1.0 / rates)
    return float(np.exp(min(0.0, np.min(logs))))


_LARGEST = 1 << 21  # grid points: about 0.5 GiB at the peak
_NEGLIGIBLE = math.log(1e-7)  # log share of delta that is cut off and counted at infinity
_BLOCK = 30.0  # nats, over which powers of e lose no digits


class Curve(NamedTuple):
    """delta of a composition at the losses ``gap * (low + i)``. It is undefined below them.

    All probability is on the grid, so delta is linear in exp(epsilon) between its points.
    """

    gap: float
    low: int
    above: Floats  # P's probability of at least this loss, without infinity, over exp(log_unit)
    hockey: Floats  # delta, without infinity, over exp(log_unit)
    log_unit: float
    infinity: float
    finest: bool  # no finer grid is affordable

    def epsilon(self, delta: float) -> float | None:
        """An upper bound that is exact on the grid; None if it is below the curve."""
        if delta <= self.infinity:
            return math.inf
        wanted = math.exp(min(700.0, math.log(delta - self.infinity) - self.log_unit))
        i = int(np.searchsorted(-self.hockey, -wanted))  # the first with hockey <= wanted
        if i == 0:
            return None if self.low > 0 else 0.0
        i = min(i, len(self.hockey) - 1)
        dual, spare = self.above[i] - self.hockey[i], wanted - self.hockey[i]
        down = math.log1p(-spare / dual) if 0.0 < spare < dual else 0.0
        return max(0.0, self.gap * (self.low + i) + down)

    def delta(self, eps: float) -> float | None:
        """An upper bound that is exact on the grid; None if it is below the curve."""
        i = math.ceil(eps / self.gap - 1e-9) - self.low
        if i < 0:
            return None
        if i >= len(self.hockey):
            return self.infinity
        up = -math.expm1(min(0.0, eps - self.gap * (self.low + i)))
        value = self.hockey[i] + up * (self.above[i] - self.hockey[i])
        log = math.log(value) + self.log_unit if value > 0.0 else -math.inf
        return min(1.0, self.infinity + math.exp(min(0.0, log)))


def compose(side: Side, rate: float, log_delta: float, spread: float) -> Curve:
    """Compose pairs: tilt their distributions, convolve them, and tilt back.

    :param rate: the tilt's, a Rényi order - 1.
    :param log_delta: log of the wanted delta, roughly. It limits the probability that is cut off.
    :param spread: approximate relative rise of delta that the grid may cause.
    :returns: an upper bound of delta, at the losses that determine epsilon.
    """
    counts = [count for _, count in side]
    log_cut = log_delta + _NEGLIGIBLE
    tail = log_cut - math.log(sum(counts))
    ranges = [step.span(tail) for step, _ in side]
    # Connect-the-Dots spreads a loss over a grid cell, a variance of gap^2/6 on average. That
    # raises the log moment, and so log(delta), by rate (rate + 1) / 2 times as much per step.
    wanted = math.sqrt(12.0 * spread / (sum(counts) * rate * (rate + 1.0)))
    widest = float(max(map(np.ptp, ranges)))
    # Otherwise two grids without a point among the losses of a step could agree on a wrong result.
    wanted = min(wanted, widest / 1024.0)
    gap = max(wanted, 2.0 * widest / _LARGEST)
    while True:
        grids = [
            step.on_grid(least, most, gap)
            for (step, _), (least, most) in zip(side, ranges, strict=True)
        ]
        low, high = _window(grids, counts, rate, log_cut)
        if high - low < gap * _LARGEST:
            break
        gap = 1.01 * (high - low) / _LARGEST
    first = math.floor(low / gap)
    size = scipy.fft.next_fast_len(math.ceil(high / gap) - first + 1, real=True)
    spectrum, offset, log_scale, log_finite = 1.0, 0, 0.0, 0.0
    for grid, count in zip(grids, counts, strict=True):
        scale = float(cumulant(grid, np.array(rate)))
        with np.errstate(divide="ignore"):
            tilted = np.exp(np.log(grid.probs) + rate * grid.losses - scale)
        wrapped = np.bincount(np.arange(len(tilted)) % size, tilted, minlength=size)
        spectrum = spectrum * _power(scipy.fft.rfft(wrapped), count)
        offset += round(grid.losses[0] / gap) * count
        log_scale += scale * count
        log_finite += count * math.log1p(-grid.infinity)
    # The FFT is circular, so probability outside the window is added inside, which is pessimistic.
    # That above the window is also counted at infinity. That below does not change delta there.
    tilted = np.maximum(np.roll(scipy.fft.irfft(spectrum, size), offset - first), 0.0)
    probs = tilted * np.exp(-np.minimum(rate * gap * np.arange(size), 700.0))  # never underflows
    above = np.cumsum(probs[::-1])
    hockey = _hockey_sticks(above, gap)
    return Curve(
        gap=gap,
        low=first,
        above=above[::-1],
        hockey=hockey[::-1],
        log_unit=log_scale - rate * gap * first,
        infinity=math.exp(log_cut) - math.expm1(log_finite),
        finest=gap > wanted,
    )


def _power(base: Any, count: int) -> Any:
    """A power by squaring: several times as fast as ``base**count`` for complex arrays."""
    found = base.copy() if count % 2 else np.ones_like(base)
    while count := count // 2:
        base *= base
        if count % 2:
            found *= base
    return found


def _hockey_sticks(above: Floats, gap: float) -> Floats:
    """delta at each loss of the grid, from the highest to the lowest.

    hockey_i = e^-gap hockey_(i-1) + (1 - e^-gap) above_(i-1), with hockey_0 = 0. All terms are
    positive, so nothing cancels. In a block, hockey_i e^(i gap) is a cumulative sum.

    :param above: P's probability of at least each loss, in the same order.
    """
    hockey, last = np.zeros_like(above), 0.0
    size = max(1, min(len(above), int(_BLOCK / gap)))
    growth = np.exp(gap * np.arange(1, size + 1))
    for start in range(1, len(above), size):
        added = -math.expm1(-gap) * above[start - 1 : start - 1 + size][: len(above) - start]
        factor = growth[: len(added)]
        hockey[start : start + len(added)] = (last + np.cumsum(added * factor)) / factor
        last = hockey[start + len(added) - 1]
    return hockey


def _window(
    grids: list[Distribution], counts: list[int], rate: float, log_cut: float
) -> tuple[float, float]:
    """An interval of losses of the composition, by Chernoff bounds.

    P has at most exp(log_cut) above it, and the tilted distribution little outside of it.
    """
    below, above = rate * np.array([-1.0, 0.0, 0.5, 0.8]), rate * np.array([1.25, 1.6, 2.5, 4.0])
    rates = np.concatenate((below, above, [rate]))
    parts = (n * cumulant(grid, rates) for grid, n in zip(grids, counts, strict=True))
    moments = sum(parts, np.zeros_like(rates))
    excess = moments - moments[-1] - _NEGLIGIBLE
    low = np.max(excess[:4] / (below - rate))
    high = max(np.min(excess[4:8] / (above - rate)), np.min((moments[4:] - log_cut) / rates[4:]))
    least = sum(n * grid.losses[0] for grid, n in zip(grids, counts, strict=True))
    most = sum(n * grid.losses[-1] for grid, n in zip(grids, counts, strict=True))
    low, high = max(low, least), min(high, most)
    return float(low), float(max(high, low))
