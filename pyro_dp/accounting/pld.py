r"""Privacy loss distributions: of one step on a grid of losses, and of many steps by FFT.

A pair (P, Q) of output distributions has delta(epsilon) = sup_A P(A) - e^epsilon Q(A). It dominates
a mechanism if that is at least the mechanism's for every epsilon. Pairs of steps compose as
products. A step may depend on earlier outputs as long as its pair does not (Zhu, Dong & Wang 2022,
Theorem 10).
With the loss L = log(P/Q) under P, delta(epsilon) is the mean of max(0, 1 - e^(epsilon - L)).

Connect-the-Dots (Doroshenko et al. 2022, Algorithm 1) splits the mass between two grid points so
that P and Q both keep theirs. That only spreads P/Q, so delta(epsilon) rises everywhere. Interval
masses come from normal distribution functions. (Second differences of delta, as in
``dp_accounting``, have an error of 1e-16 / grid each, a false mass over many fine steps.)

The distribution is tilted by e^(rate * loss) before the FFT, ``rate`` + 1 being the Rényi order
that is best for the delta asked for. The losses that decide epsilon then hold the bulk: a window
of few standard deviations is enough, and rounding errors are relative to delta.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from pyro_dp.utils.errors import PrivacyError

Floats = NDArray[np.float64]
LARGEST_SAMPLED = 1e6  # noise beyond which the losses of a sampled step are not accurate


class Distribution(NamedTuple):
    """Losses (ascending), their probabilities under P, and P's mass at infinity."""

    losses: Floats
    probs: Floats
    infinity: float


class DominatingPair(NamedTuple):
    """A dominating pair (P, Q), in units where the bound of one record's effect is 1.

    ``remove``: P = (1-q) N(0, s^2) + q N(1, s^2), Q = N(0, s^2); ``add`` is (Q, P).

    ``replace``: the same P against (1-q) N(0, s^2) + q N(-1, s^2), for Poisson sampling. It
    dominates any two replacements a, b in the unit ball. Let alpha >= 1; for alpha < 1, exchange P
    and Q. Then P - alpha Q = q N(a) - (alpha-1)(1-q) N(0) - alpha q N(b). Among the sets with the
    same N(a), a half-space has the least N(0) and N(b). Both fall with the distances of 0 and b
    from a, which are largest for a = -b of length 1.

    ``fixed``: ``remove`` for losses > 0, ``add`` for losses < 0, the remaining mass at loss 0. This
    is the profile of sampling without replacement (Zhu, Dong & Wang 2022, Theorem 11).
    """

    kind: str
    noise: float  # s
    rate: float  # q

    @property
    def most(self) -> float:
        """The largest loss."""
        return math.inf

    @property
    def on_grids(self) -> bool:
        """Whether it has a distribution, and not moments alone."""
        return True

    @classmethod
    def together(
        cls, counts: Mapping["DominatingPair", int], neighboring: str
    ) -> list[tuple["DominatingPair", int]]:
        """The pairs to be composed for these, in a canonical order.

        n_k Gaussians of noise s_k are one Gaussian with s^-2 = sum n_k s_k^-2 (Dong, Roth & Su
        2022).

        :raises PrivacyError: full batches are of a kind that may not be Gaussian.
        """
        merged = sorted((pair, n) for pair, n in counts.items() if pair.rate < 1.0)
        full = sorted((pair.noise, n) for pair, n in counts.items() if pair.rate == 1.0)
        if full:
            kind = "remove" if neighboring == "add_or_remove_one" else "fixed"
            if others := {pair.kind for pair in counts if pair.rate == 1.0} - {kind}:
                raise PrivacyError(f"pairs {sorted(others)} of rate 1 are not Gaussians.")
            noise = 1.0 / math.hypot(*(math.sqrt(n) / s for s, n in full), 1e-300)
            if merged:  # rounded down, as in each pair
                noise = min(noise, LARGEST_SAMPLED)
            merged.append((cls(kind, noise, 1.0), 1))
        return merged

    def reverse(self) -> "DominatingPair":
        """The pair of the other direction of the relation."""
        return self._replace(kind="add")

    def span(self, tail: float) -> Floats:
        """The losses between which all but ``exp(tail)`` of P and Q lies."""
        return losses_at(self, _range(self, tail))

    def moments(self) -> tuple[Floats, float]:
        """Upper bounds of log E_P exp(rate * loss) at :data:`RATES`, and the mass left out."""
        return _moments(self)

    def on_grid(self, least: float, most: float, gap: float) -> Distribution:
        """The distribution on multiples of ``gap``, with a delta that is nowhere below."""
        first = 0 if self.kind == "fixed" else math.floor(least / gap)
        losses = np.arange(first, math.ceil(most / gap) + 1, dtype=np.float64) * gap
        return connect_dots(self, losses, np.maximum.accumulate(outcomes_at(self, losses)))


Side = tuple[tuple[Any, int], ...]  # pairs, also of ``bounded_pairs``, with their counts


def losses_at(step: DominatingPair, x: Floats) -> Floats:
    """log(p/q) of the ``remove`` or ``replace`` pair, increasing in the outcome x."""
    q, s2 = step.rate, step.noise**2
    if q == 1.0:
        return (2.0 * x if step.kind == "replace" else x - 0.5) / s2
    up = np.logaddexp(math.log1p(-q), math.log(q) + (x - 0.5) / s2)
    if step.kind == "replace":
        up -= np.logaddexp(math.log1p(-q), math.log(q) - (x + 0.5) / s2)
    return up


def outcomes_at(step: DominatingPair, losses: Floats) -> Floats:
    """The inverse of :func:`losses_at`; -inf below the smallest loss, log(1-q) for ``remove``."""
    q, s2 = step.rate, step.noise**2
    if q == 1.0:
        return s2 * losses / 2.0 if step.kind == "replace" else s2 * losses + 0.5
    with np.errstate(divide="ignore"):  # log 0 at loss 0 and below the smallest loss
        if step.kind == "replace":
            # y = exp(x/s2) solves c y^2 + (1 - e^l) y - c e^l = 0: log y = l/2 + asinh(sinh(l/2)/c)
            half = np.abs(losses) / 2.0
            log_c = math.log(q) - math.log1p(-q) - 0.5 / s2
            ratio = half + np.log(-np.expm1(-2.0 * half)) - math.log(2.0) - log_c
            asinh = np.logaddexp(0.5 * np.logaddexp(0.0, 2.0 * ratio), ratio)
            return s2 * np.sign(losses) * (half + np.where(half == 0.0, 0.0, asinh))
        low, high = np.minimum(losses, 0.0), np.maximum(losses, 0.0)
        above = high + np.log(q * np.exp(-high) - np.expm1(-high))
        below = np.log(np.maximum(0.0, np.expm1(low) + q))
        return s2 * (np.where(losses > 0.0, above, below) - math.log(q)) + 0.5


def masses_between(step: DominatingPair, x: Floats) -> tuple[Floats, Floats]:
    """P and Q of the intervals (-inf, x_0], (x_0, x_1], ..., (x_n, inf), to relative accuracy."""
    edges = np.concatenate(([-np.inf], x, [np.inf]))

    def normal(mean: float) -> Floats:
        z = (edges - mean) / step.noise
        masses: Floats = np.where(
            z[:-1] > 0.0, -np.diff(scipy.special.ndtr(-z)), np.diff(scipy.special.ndtr(z))
        )
        return masses

    centre, q = normal(0.0), step.rate
    p = (1.0 - q) * centre + q * normal(1.0)
    return p, (1.0 - q) * centre + q * normal(-1.0) if step.kind == "replace" else centre


def connect_dots(step: DominatingPair, losses: Floats, x: Floats) -> Distribution:
    """Move the mass between neighbouring losses onto them so that P and Q both keep theirs.

    Mass below the first loss is moved up to it, mass above the last one to infinity.

    :param losses: those of the ``remove`` or ``replace`` pair, ascending; from 0 for ``fixed``.
    :param x: the outcomes that have these losses, ascending.
    """
    p, q = masses_between(step, x)
    below, above = (p[0], q[0]), (p[-1], q[-1])
    p, q = p[1:-1], q[1:-1]
    atom = 0.0
    if step.kind == "add":
        losses, p, q = -losses[::-1], q[::-1], p[::-1]
        below, above = above[::-1], below[::-1]
    elif step.kind == "fixed":
        atom = max(0.0, below[0] - q.sum() - above[1])  # loss 0: 1 - P(loss > 0) - Q(loss > 0)
        losses = np.concatenate((-losses[:0:-1], losses))
        p, q = np.concatenate((q[::-1], p)), np.concatenate((p[::-1], q))
        below = above[::-1]
    probs = onto_dots(losses, p, q)
    probs[0] += below[0]
    probs[len(p) // 2] += atom
    return Distribution(losses, probs, float(above[0]))


def onto_dots(losses: Floats, p: Floats, q: Floats) -> Floats:
    """P's mass on the losses, if P and Q have the masses p and q between each two of them."""
    gap = np.diff(losses)
    with np.errstate(over="ignore", invalid="ignore"):
        lower = (q * np.exp(losses[:-1]) - p * np.exp(-gap)) / -np.expm1(-gap)
    # If exp overflows, moving all of the mass up is the safe side.
    lower = np.clip(np.nan_to_num(lower, nan=0.0, posinf=0.0), 0.0, p)
    probs = np.zeros_like(losses)
    probs[:-1] += lower
    probs[1:] += p - lower
    return probs


def _range(step: DominatingPair, tail: float) -> Floats:
    """The outcomes between which all but ``exp(tail)`` of P and Q lies, on either side."""
    reach = -float(scipy.special.ndtri_exp(tail)) * step.noise
    left = {"fixed": 0.5, "replace": -1.0 - reach}.get(step.kind, -reach)
    return np.array([left, 1.0 + reach])


_TAIL = math.log(1e-40)
RATES = np.geomspace(1e-2, 1e7, 91)  # Rényi order - 1


@functools.lru_cache(maxsize=4096)
def _moments(step: DominatingPair) -> tuple[Floats, float]:
    """Upper bounds on log E_P exp(rate * loss) at :data:`RATES`, and the mass left out.

    Connect-the-Dots on outcomes s/40 apart: any grid gives an upper bound, as exp(rate * loss) is
    convex in Q's density over P's.
    """
    ends = _range(step, _TAIL)
    near = np.arange(-13.5, 13.5, 1 / 40) * step.noise
    means = (-1.0, 0.0, 1.0) if step.kind == "replace" else (0.0, 0.5, 1.0)
    x = np.unique(np.concatenate([ends, *(near + mean for mean in means)]))
    x = x[(x >= ends[0]) & (x <= ends[1])]
    losses = np.maximum.accumulate(losses_at(step, x))
    if step.kind == "fixed":
        losses[0] = 0.0
    keep = np.concatenate(([True], np.diff(losses) > 0.0))
    grid = connect_dots(step, losses[keep], x[keep])
    return _cumulant(grid, RATES), grid.infinity


def _cumulant(grid: Distribution, rates: Floats) -> Floats:
    # By hand, without copies: a ledger of many kinds spends most of its time here.
    some = grid.probs > 0.0
    terms: Floats = np.multiply.outer(rates, grid.losses[some])
    terms += np.log(grid.probs[some])
    largest = terms.max(axis=-1)
    terms -= largest[..., None]
    cumulant: Floats = largest + np.log(np.exp(terms, out=terms).sum(axis=-1))
    return cumulant


def log_moments(side: Side) -> tuple[Floats, float]:
    parts = [(step.moments(), count) for step, count in side]
    moments = sum((n * k for (k, _), n in parts), np.zeros_like(RATES))
    return moments, sum((n * lost for (_, lost), n in parts), 0.0)


_LARGEST = 1 << 21  # grid points: about 0.5 GiB at the peak
_NEGLIGIBLE = math.log(1e-7)  # a share of delta, to cut off and put at infinity
_BLOCK = 30.0  # nats: powers of e that lose no digits


class Curve(NamedTuple):
    """delta of a composition at the losses ``gap * (low + i)``; it is undefined below them.

    All of the mass lies on the grid, so between its points delta is linear in exp(epsilon).
    """

    gap: float
    low: int
    above: Floats  # P's mass from this loss on
    hockey: Floats  # delta, both without ``infinity`` and in units of exp(log_unit)
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
    """Tilt, convolve, tilt back.

    :param side: pairs and counts.
    :param rate: the tilt's, Rényi order - 1.
    :param log_delta: to order of magnitude: what may be cut off is relative to it.
    :param spread: relative rise of delta that the grid may cause, about.
    :returns: an upper bound of delta at the losses that decide epsilon.
    """
    counts = [count for _, count in side]
    log_cut = log_delta + _NEGLIGIBLE
    tail = log_cut - math.log(sum(counts))
    ranges = [step.span(tail) for step, _ in side]
    # Connect-the-Dots spreads a loss over a grid cell, a variance of gap^2/6 on average. That
    # raises the log moment, hence log(delta), by rate (rate + 1) / 2 times as much per step.
    wanted = math.sqrt(12.0 * spread / (sum(counts) * rate * (rate + 1.0)))
    widest = float(max(map(np.ptp, ranges)))
    # Two grids without a point inside the losses of any step could agree, and both be wrong.
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
        scale = float(_cumulant(grid, np.array(rate)))
        with np.errstate(divide="ignore"):
            tilted = np.exp(np.log(grid.probs) + rate * grid.losses - scale)
        wrapped = np.bincount(np.arange(len(tilted)) % size, tilted, minlength=size)
        spectrum = spectrum * _power(scipy.fft.rfft(wrapped), count)
        offset += round(grid.losses[0] / gap) * count
        log_scale += scale * count
        log_finite += count * math.log1p(-grid.infinity)
    # The FFT is circular: what lay outside the window is added inside, which is pessimistic. Mass
    # above is also counted at infinity; mass below matters to no epsilon in the window.
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
    positive, so no like numbers are subtracted. In a block, hockey_i e^(i gap) is a cumulative sum.

    :param above: P's mass above each loss, in the same order.
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
    """Chernoff bounds: at most exp(log_cut) of P is above, little of the tilted mass outside."""
    below, above = rate * np.array([-1.0, 0.0, 0.5, 0.8]), rate * np.array([1.25, 1.6, 2.5, 4.0])
    rates = np.concatenate((below, above, [rate]))
    parts = (n * _cumulant(grid, rates) for grid, n in zip(grids, counts, strict=True))
    moments = sum(parts, np.zeros_like(rates))
    excess = moments - moments[-1] - _NEGLIGIBLE
    low = np.max(excess[:4] / (below - rate))
    high = max(np.min(excess[4:8] / (above - rate)), np.min((moments[4:] - log_cut) / rates[4:]))
    least = sum(n * grid.losses[0] for grid, n in zip(grids, counts, strict=True))
    most = sum(n * grid.losses[-1] for grid, n in zip(grids, counts, strict=True))
    low, high = max(low, least), min(high, most)
    return float(low), float(max(high, low))
