"""How large the records' parts are: a histogram of their norms that joins a release.

Each record adds a one to the bin of its norm before clipping, a quarter of an octave wide. As a
block of its own with bound 1 it costs a share of the release. Reading from it is post-processing.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy
import torch
from torch import Tensor

from pyro_dp.mechanism.contributions import Contributions, Kept, Measured

Floats = npt.NDArray[np.float64]

SIZE = 160  # bins
SHARE = 0.05  # its share of the cost of a release with other blocks too
_PER_OCTAVE = 4
EDGES = (np.arange(SIZE + 1) - SIZE / 2) * math.log(2) / _PER_OCTAVE  # log norms
MIDDLES = (EDGES[:-1] + EDGES[1:]) / 2
# Bells that are tried: widths in nats, and one over the index of power tails. Half of their prior
# has no tail. If clipped parts point to one side, the tail decides the bias, and more are tried.
_FEW = (0.25, 0.45, 0.8, 1.2), (0.2, 0.4)
_MANY = (0.25, 0.35, 0.45, 0.6, 0.8, 1.0, 1.2), (0.1, 0.2, 0.3, 0.4)
_UNLIKELY = 1e-8  # odds of a bell, relative to the likeliest
_REFUTED = 5.0  # standard deviations of the residual of a bell
_SIGNIFICANT = 2.0  # standard deviations of four bins
_NEIGHBOURS = np.ones(4)
_APART = 5.5  # standard deviations of a group's bins together: some 200 positions, tens of readings
_GROUPS = (4, 8, 16)  # bins
_LONGEST_TAIL = 40  # bins
_TAIL = 0.55  # the slowest fall of a tail, from bin to bin: to a tenth in an octave


class Bins:
    """A one in the bin of each record's norm: a block that keeps its bound of 1 by itself.

    :param norms: (B, 1).
    """

    def __init__(self, norms: Tensor):
        place = torch.floor(_PER_OCTAVE * norms.log2() + SIZE / 2).nan_to_num(0.0)
        self._bins = place.clamp(0, SIZE - 1).long()

    def norms(self) -> None:
        return None

    def weighted_sum(self, weights: Tensor) -> Tensor:
        own = torch.where(weights > 0, weights, 0.0).to(torch.float64)
        return own.new_zeros(SIZE).index_add(0, self._bins.squeeze(1), own.squeeze(1))

    def dense(self) -> Tensor:
        # Not functional.one_hot, which looks at values: no graph can.
        return (self._bins == torch.arange(SIZE, device=self._bins.device)).to(torch.float64)


class MeasuredBins(Bins):
    """The same, from the norms themselves: a broken record's part is broken."""

    def __init__(self, norms: Tensor):
        super().__init__(norms)
        self._own = torch.where(norms.isfinite(), 1.0, torch.nan).to(torch.float64)

    def norms(self) -> Tensor:  # type: ignore[override]
        return self._own

    def dense(self) -> Tensor:
        return super().dense() * self._own


def with_bins(block: Measured, bound: Tensor | float) -> list[Contributions]:
    """The block, and the bins of its rows' norms, whatever it is clipped to."""
    norms = block.norms()
    return [Kept(block, norms), Bins(norms)]


def bins_alone(block: Measured, bound: Tensor | float) -> list[Contributions]:
    return [MeasuredBins(block.norms())]


@dataclass(frozen=True, eq=False)
class Norms:
    """The norms of all N records, as far as the noise lets see.

    :param norms: (n,), ascending.
    :param readings: records of each norm in m readings that the noise allows, (m, n). They are not
        negative, and N in all on average.
    :param odds: probabilities of the readings, (m,).
    """

    norms: Floats
    readings: Floats
    odds: Floats

    @staticmethod
    def of(norms: Floats, counts: Floats) -> "Norms":
        """One reading alone.

        :param counts: records of each norm, (n,).
        """
        return Norms(norms, counts[None], np.ones(1))

    @functools.cached_property
    def counts(self) -> Floats:
        """Records of each norm, (n,): the mean over the readings."""
        return self.odds @ self.readings

    @staticmethod
    def read(
        counts: Floats,
        sd: float,
        size: int,
        *,
        typical: float,
        spread: float,
        tail: bool = False,
        one_sided: bool = False,
    ) -> "Norms":
        """Fit noisy counts: a bell in the logarithm if they fit one, or else a single peak.

        A bell has few numbers to learn, and the prior of its centre decides if noise hides all. If
        its residual exceeds the noise, the closest counts with one peak are taken, as far out as
        they stand out of the noise.

        :param counts: (SIZE,), released.
        :param sd: standard deviation of the noise in a bin.
        :param typical: a public guess of the norms.
        :param spread: standard deviation of its logarithm.
        :param tail: whether to extend the peak's tail where the noise hides it: for a bound whose
            bias grows with the norms beyond it.
        :param one_sided: whether the parts beyond a bound point to one side, as those of counts.
        """
        shares, squares, medians, log_prior = _bells(*(_MANY if one_sided else _FEW))
        residual = counts @ counts - 2 * size * (shares @ counts) + size**2 * squares
        residual = residual.clip(0.0) / max(sd, 1e-9 * size) ** 2
        log_prior = log_prior - (((medians - math.log(typical)) / spread) ** 2) / 2
        score = log_prior - residual / 2
        odds = np.exp(score - score.max())
        likely = odds > _UNLIKELY
        readings, odds = shares[likely], odds[likely] / odds[likely].sum()
        if residual[score.argmax()] > SIZE + _REFUTED * math.sqrt(2 * SIZE):
            peaked = within_noise(single_peak(counts), counts, sd, tail)
            if peaked.any():
                readings, odds = peaked[None] / size, np.ones(1)
        fitted = odds @ readings
        kept = fitted > 1e-9
        readings = readings[:, kept] * (size / fitted[kept].sum())
        return Norms(np.exp(MIDDLES[kept]), readings, odds)

    @staticmethod
    def places_above(bound: float) -> slice:
        """The bins above the bound, about."""
        return slice(int(np.searchsorted(MIDDLES, math.log(bound))), SIZE)

    @property
    def median(self) -> float:
        half = self.counts.sum() / 2
        return float(self.norms[np.searchsorted(self.counts.cumsum(), half)])

    def share_above(self, bound: float) -> float:
        return float(self.counts[self.norms > bound].sum() / self.counts.sum())

    def excess(self, bounds: Floats) -> Floats:
        """The clipped excess, in units of norm: sum of (norm - bound)+, one for each bound."""
        return np.maximum(self.norms - bounds[:, None], 0.0) @ self.counts

    def rms_excess(self, bounds: Floats) -> Floats:
        """Root mean square of the excess over all readings: a bias may be as large as this.

        Noise can hide a tail. The mean over readings with and without it is too small if it exists.
        """
        excess = np.maximum(self.norms - bounds[:, None], 0.0) @ self.readings.T
        rms: Floats = np.sqrt(excess**2 @ self.odds)
        return rms

    def weight(self, bounds: Floats, power: int = 1) -> Floats:
        """Mean of min(1, bound / norm) to this power, one for each bound."""
        weights = np.minimum(1.0, bounds[:, None] / self.norms) ** power
        mean: Floats = weights @ self.counts / self.counts.sum()
        return mean


@functools.cache
def _bells(
    widths: tuple[float, ...], heavy: tuple[float, ...]
) -> tuple[Floats, Floats, Floats, Floats]:
    """Each bell's share of each bin, (n, SIZE), with and without a power tail. Then the sum of its
    squares, the median of the log norms, and the log prior of the tail, (n,) each.
    """
    places, sds = (each.ravel() for each in np.meshgrid(EDGES[1:-1], widths))
    cumulative = scipy.special.ndtr((EDGES - places[:, None]) / sds[:, None])
    cumulative[:, 0], cumulative[:, -1] = 0.0, 1.0
    plain = np.diff(cumulative, axis=1)
    bells = np.concatenate([plain, *(_with_tail(plain, each) for each in heavy)])
    medians = EDGES[np.minimum((bells.cumsum(axis=1) < 0.5).sum(axis=1), SIZE)]
    tails = np.repeat([0.5, *(0.5 / len(heavy) for _ in heavy)], len(plain))
    return bells, (bells**2).sum(axis=1), medians, np.log(tails)


def _with_tail(bells: Floats, heavy: float) -> Floats:
    """Norms of a bell times a number of a Pareto distribution of index 1 / heavy."""
    fall = np.exp(-np.arange(_LONGEST_TAIL) * math.log(2) / _PER_OCTAVE / heavy)
    found = np.stack([np.convolve(bell, fall / fall.sum())[:SIZE] for bell in bells])
    mean: Floats = found / found.sum(axis=1, keepdims=True)
    return mean


def single_peak(counts: Floats) -> Floats:
    """The closest counts, in squared distance, that rise to a peak and fall after it."""
    tops = np.argsort(np.convolve(counts, np.ones(3), "same"))[-6:]
    found = []
    for top in tops:
        rising = scipy.optimize.isotonic_regression(counts[: top + 1]).x
        falling = scipy.optimize.isotonic_regression(counts[top:], increasing=False).x
        joined = np.concatenate([rising[:-1], [max(rising[-1], falling[0])], falling[1:]])
        found.append(np.maximum(joined, 0.0))
    return min(found, key=lambda each: float(((each - counts) ** 2).sum()))


def within_noise(fitted: Floats, counts: Floats, sd: float, tail: bool = False) -> Floats:
    """The histogram, zero from the first four noise-like bins on, on each side of the peak.

    A group above them may stay: records with a rare value, of large leverage.

    :param tail: above the peak, continue the fall of the two octaves before instead of zeros.
    """
    top, least = int(fitted.argmax()), _SIGNIFICANT * 2.0 * sd
    ahead = np.convolve(counts, _NEIGHBOURS)[3:]  # sums over each bin and the three after it
    behind = np.convolve(counts, _NEIGHBOURS)[: len(counts)]
    fitted = fitted.copy()
    quiet = np.nonzero(ahead[top:] < least)[0]
    if len(quiet):
        end = top + int(quiet[0])
        end = max(end, _group(counts, sd, end))
        fitted[end:] = _tail(fitted[:end], counts[end:], sd) if tail else 0.0
    quiet = np.nonzero(behind[: top + 1] < least)[0]
    if len(quiet):
        fitted[: quiet[-1] + 1] = 0.0
    return fitted


def _group(counts: Floats, sd: float, start: int) -> int:
    """The end of the bins that stand out most from this one on, or 0 if that may be noise."""
    best, end = _APART * sd, 0
    for width in _GROUPS:
        heights = np.convolve(counts[start:], np.full(width, width**-0.5), "valid")
        if len(heights) and heights.max() > best:
            best, end = heights.max(), start + int(heights.argmax()) + width
    return end


def _tail(seen: Floats, hidden: Floats, sd: float) -> Floats:
    """How counts may go on that fell so in the last two octaves.

    They go on no higher than the hidden counts allow, by one standard error.

    :param hidden: noisy counts of the bins from there on.
    """
    before, last = seen[-2 * _PER_OCTAVE : -_PER_OCTAVE].sum(), seen[-_PER_OCTAVE:].sum()
    fall = min((last / max(before, 1e-9)) ** (1 / _PER_OCTAVE), _TAIL)
    steps = np.arange(len(hidden)) + (_PER_OCTAVE + 1) / 2
    found: Floats = last / _PER_OCTAVE * fall**steps
    length = max(float(np.linalg.norm(found)), 1e-9)
    most = float(found @ hidden / length + sd) / length
    return found * min(max(most, 0.0), 1.0)
