"""A private histogram of the norms of the records' contributions, before clipping.

Each record adds 1 to the bin of its norm. Bins are a quarter of an octave wide. The histogram is a
block of a release, with bound 1 and a share of the cost. Fitting it is post-processing.
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
SHARE = 0.05  # its share of the cost, in a release that has other blocks too
_PER_OCTAVE = 4
EDGES = (np.arange(SIZE + 1) - SIZE / 2) * math.log(2) / _PER_OCTAVE  # log norms
MIDDLES = (EDGES[:-1] + EDGES[1:]) / 2
# Candidate bells: standard deviations in nats, and inverse indices of power tails. Without a tail
# they have half of the prior probability. If clipped contributions point to one side, the tail
# determines the bias, so there are more candidates.
_FEW = (0.25, 0.45, 0.8, 1.2), (0.2, 0.4)
_MANY = (0.25, 0.35, 0.45, 0.6, 0.8, 1.0, 1.2), (0.1, 0.2, 0.3, 0.4)
_UNLIKELY = 1e-8  # relative to the most probable bell; less probable ones are dropped
_REFUTED = 5.0  # standard deviations of the residual beyond which no bell fits
_SIGNIFICANT = 2.0  # standard deviations of the sum of four bins
_NEIGHBOURS = np.ones(4)
# Standard deviations of a group's sum. Noise exceeds that rarely at any of some 200 positions, in
# tens of histograms.
_APART = 5.5
_GROUPS = (4, 8, 16)  # widths in bins
_LONGEST_TAIL = 40  # bins
_TAIL = 0.55  # the slowest decay of a tail, from bin to bin: to a tenth in an octave


class Bins:
    """Rows (B, SIZE) with a 1 in the bin of each record's norm. They are within their bound of 1.

    :param norms: (B, 1).
    """

    def __init__(self, norms: Tensor):
        bins = torch.floor(_PER_OCTAVE * norms.log2() + SIZE / 2).nan_to_num(0.0)
        self._bins = bins.clamp(0, SIZE - 1).long()

    def norms(self) -> None:
        return None

    def weighted_sum(self, weights: Tensor) -> Tensor:
        own = torch.where(weights > 0, weights, 0.0).to(torch.float64)
        return own.new_zeros(SIZE).index_add(0, self._bins.squeeze(1), own.squeeze(1))

    def dense(self) -> Tensor:
        # functional.one_hot reads values, which a graph cannot.
        return (self._bins == torch.arange(SIZE, device=self._bins.device)).to(torch.float64)


class MeasuredBins(Bins):
    """The same for a histogram without another block. Records with infinite or NaN norms have NaN.

    So clipping leaves them out.
    """

    def __init__(self, norms: Tensor):
        super().__init__(norms)
        self._norms = torch.where(norms.isfinite(), 1.0, torch.nan).to(torch.float64)

    def norms(self) -> Tensor:  # type: ignore[override]
        return self._norms

    def dense(self) -> Tensor:
        return super().dense() * self._norms


def with_bins(block: Measured, bound: Tensor | float) -> list[Contributions]:
    """The block, and the histogram of its rows' norms before clipping."""
    norms = block.norms()
    return [Kept(block, norms), Bins(norms)]


def bins_alone(block: Measured, bound: Tensor | float) -> list[Contributions]:
    """Only the histogram of the block's norms."""
    return [MeasuredBins(block.norms())]


@dataclass(frozen=True, eq=False)
class Norms:
    """A posterior distribution of the norms of all N records: m weighted histograms ("readings").

    :param norms: (n,), ascending.
    :param readings: (m, n): the number of records of each norm in each histogram, >= 0. On average
        over the histograms, the numbers sum to N.
    :param odds: (m,): the histograms' probabilities.
    """

    norms: Floats
    readings: Floats
    odds: Floats

    @staticmethod
    def of(norms: Floats, counts: Floats) -> "Norms":
        """A single histogram, of probability 1.

        :param counts: (n,): the number of records of each norm.
        """
        return Norms(norms, counts[None], np.ones(1))

    @functools.cached_property
    def counts(self) -> Floats:
        """The expected number of records of each norm, (n,)."""
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
        """Fit a noisy histogram.

        Candidates are bells (normal distributions of the log norm, perhaps with a power tail). They
        have few parameters. If the noise hides everything, the prior of a bell's centre decides. If
        no bell fits within the noise, the result is the closest histogram with a single peak. It is
        cut off where it no longer exceeds the noise.

        :param counts: (SIZE,), released.
        :param sd: standard deviation of the noise in a bin.
        :param size: N.
        :param typical: a public guess of the norms, the median of the prior of a bell's centre.
        :param spread: the prior's standard deviation, of the logarithm.
        :param tail: extend the peak's tail where the noise hides it. This is for a bound whose bias
            grows with the norms beyond it.
        :param one_sided: whether contributions beyond a bound point to one side, as those of counts
            do.
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
        """The bins whose middles are above the bound."""
        return slice(int(np.searchsorted(MIDDLES, math.log(bound))), SIZE)

    @property
    def median(self) -> float:
        half = self.counts.sum() / 2
        return float(self.norms[np.searchsorted(self.counts.cumsum(), half)])

    def share_above(self, bound: float) -> float:
        return float(self.counts[self.norms > bound].sum() / self.counts.sum())

    def excess(self, bounds: Floats) -> Floats:
        """The expected sum of (norm - bound)+ over all records, for each bound."""
        return np.maximum(self.norms - bounds[:, None], 0.0) @ self.counts

    def rms_excess(self, bounds: Floats) -> Floats:
        """The root mean square of the sum of (norm - bound)+, for each bound.

        Noise can hide a tail. If there is one, the mean over histograms with and without a tail is
        too small. This allows for a bias that large.
        """
        excess = np.maximum(self.norms - bounds[:, None], 0.0) @ self.readings.T
        rms: Floats = np.sqrt(excess**2 @ self.odds)
        return rms

    def weight(self, bounds: Floats, power: int = 1) -> Floats:
        """The mean of min(1, bound / norm)^power over all records, for each bound."""
        weights = np.minimum(1.0, bounds[:, None] / self.norms) ** power
        mean: Floats = weights @ self.counts / self.counts.sum()
        return mean


@functools.cache
def _bells(
    widths: tuple[float, ...], heavy: tuple[float, ...]
) -> tuple[Floats, Floats, Floats, Floats]:
    """All candidate bells, without and with power tails.

    :param heavy: inverse indices of the tails.
    :returns: the probability of each bin, (n, SIZE). Then its sum of squares, the median of the log
        norm, and the log prior of the tail, (n,) each.
    """
    means, sds = (each.ravel() for each in np.meshgrid(EDGES[1:-1], widths))
    cumulative = scipy.special.ndtr((EDGES - means[:, None]) / sds[:, None])
    cumulative[:, 0], cumulative[:, -1] = 0.0, 1.0
    plain = np.diff(cumulative, axis=1)
    bells = np.concatenate([plain, *(_with_tail(plain, each) for each in heavy)])
    medians = EDGES[np.minimum((bells.cumsum(axis=1) < 0.5).sum(axis=1), SIZE)]
    tails = np.repeat([0.5, *(0.5 / len(heavy) for _ in heavy)], len(plain))
    return bells, (bells**2).sum(axis=1), medians, np.log(tails)


def _with_tail(bells: Floats, heavy: float) -> Floats:
    """Bells for a norm times an independent Pareto variable of index 1 / heavy."""
    fall = np.exp(-np.arange(_LONGEST_TAIL) * math.log(2) / _PER_OCTAVE / heavy)
    found = np.stack([np.convolve(bell, fall / fall.sum())[:SIZE] for bell in bells])
    mean: Floats = found / found.sum(axis=1, keepdims=True)
    return mean


def single_peak(counts: Floats) -> Floats:
    """The closest histogram, by least squares, that rises to a peak and then falls."""
    tops = np.argsort(np.convolve(counts, np.ones(3), "same"))[-6:]
    found = []
    for top in tops:
        rising = scipy.optimize.isotonic_regression(counts[: top + 1]).x
        falling = scipy.optimize.isotonic_regression(counts[top:], increasing=False).x
        joined = np.concatenate([rising[:-1], [max(rising[-1], falling[0])], falling[1:]])
        found.append(np.maximum(joined, 0.0))
    return min(found, key=lambda each: float(((each - counts) ** 2).sum()))


def within_noise(fitted: Floats, counts: Floats, sd: float, tail: bool = False) -> Floats:
    """The fitted histogram, with zeros beyond the first four bins that may be noise.

    It is cut on both sides of the peak. A group of bins above the cut stays if it clearly exceeds
    the noise, as of records with a rare value and large leverage.

    :param tail: above the peak, extrapolate the decay of the last two octaves instead of zeros.
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
    """The end of the most significant group of bins from ``start`` on; 0 if all may be noise."""
    best, end = _APART * sd, 0
    for width in _GROUPS:
        heights = np.convolve(counts[start:], np.full(width, width**-0.5), "valid")
        if len(heights) and heights.max() > best:
            best, end = heights.max(), start + int(heights.argmax()) + width
    return end


def _tail(seen: Floats, hidden: Floats, sd: float) -> Floats:
    """Extrapolate the decay of the last two octaves.

    The tail is at most as high as the noisy counts allow, by one standard error.

    :param seen: fitted counts up to the cut.
    :param hidden: noisy counts of the bins beyond the cut.
    """
    before, last = seen[-2 * _PER_OCTAVE : -_PER_OCTAVE].sum(), seen[-_PER_OCTAVE:].sum()
    fall = min((last / max(before, 1e-9)) ** (1 / _PER_OCTAVE), _TAIL)
    steps = np.arange(len(hidden)) + (_PER_OCTAVE + 1) / 2
    found: Floats = last / _PER_OCTAVE * fall**steps
    length = max(float(np.linalg.norm(found)), 1e-9)
    most = float(found @ hidden / length + sd) / length
    return found * min(max(most, 0.0), 1.0)
