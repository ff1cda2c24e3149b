"""Released counts of records by the norm of their part: histograms, and extreme records.

A few records far above the bound can decide the exact posterior. But clipping removes most of their
part, and the noise of a histogram hides them. So an extreme record gives up a fraction of its
clipped part, and is counted in another coordinate. Its row keeps the norm C, so the count costs
nothing. At epsilon 1, 21 such records are about 4 standard deviations of the count's noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pyro_dp.infer.ep.observation_family import Residuals
from pyro_dp.mechanism.clipped_fraction import ClippedFraction
from pyro_dp.mechanism.contributions import Measured
from pyro_dp.mechanism.norm_histogram import EDGES, MIDDLES, Floats, Norms

FROM = (4.0, 16.0)  # the least norms of two classes of extreme records, in units of the bound
KEPT = 0.6  # fraction of its clipped part that an extreme record keeps
_COUNTED = math.sqrt(1 - KEPT**2)
_ALIKE = 0.2  # largest difference of the logarithms of two looks' bounds
SIGNIFICANT = 2.75  # standard deviations
NEAR = 0.1  # squared distance beyond which norms differ
_SPREAD = 2.0  # sd of the first guess of norms, in nats
_SPREAD_LATER = 0.25
_SURE = 3.0  # standard deviations
_TYPICAL = 0.8  # norm of a record's gradient, over the root of its curvature
Histograms = Sequence[tuple[Tensor, float]]  # released, with the sd of their noise


class WithExtremes:
    """The clipped parts of B records, and coordinates that count the extreme ones.

    Looks with bounded residuals do without. Their weights do not depend on the outcome, so clipping
    causes no bias if the model holds. A record of a rare group is worth more than its count.

    :param parts: the parts, each of norm at most C.
    :param ratios: norms before clipping, in units of C, (B, 1).
    :param bound: C.
    """

    def __init__(self, parts: Measured, ratios: Tensor, bound: Tensor):
        least = ratios.new_tensor(FROM)
        reached = (ratios >= least).to(torch.float64)  # (B, classes)
        one_hot = reached - torch.cat([reached[:, 1:], torch.zeros_like(ratios)], dim=1)
        self._parts, self._counts = parts, one_hot * (_COUNTED * bound)
        self._kept = 1.0 - (1.0 - KEPT) * reached[:, :1]

    def norms(self) -> Tensor:
        squared = (self._parts.norms() * self._kept).square()
        return (squared + self._counts.square().sum(dim=1, keepdim=True)).sqrt()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        parts = self._parts.weighted_sum(weights * self._kept)
        return torch.cat([parts, (self._counts * weights).sum(dim=0)])

    def dense(self) -> Tensor:
        return torch.cat([self._parts.dense() * self._kept, self._counts], dim=1)


@dataclass(frozen=True, eq=False)
class ExtremeCounts:
    """Noisy numbers of extreme records.

    :param counts: number of records in each class, (classes,).
    :param sd: standard deviation of the noise.
    :param bound: C.
    """

    counts: Tensor
    sd: float
    bound: float

    @staticmethod
    def read(released: Tensor, noise: float, bound: float) -> "ExtremeCounts":
        """
        :param released: the coordinates of a look that count extreme records, (classes,).
        :param noise: standard deviation of the noise in a coordinate.
        """
        unit = _COUNTED * bound
        return ExtremeCounts(released / unit, noise / unit, bound)

    def joined(self, other: "ExtremeCounts") -> "ExtremeCounts":
        """The mean with the counts of another look of about the same bound."""
        share = other.sd**2 / (other.sd**2 + self.sd**2)
        counts = share * self.counts + (1 - share) * other.counts
        return ExtremeCounts(counts, math.sqrt(share) * self.sd, self.bound)

    def excess(self, norms: Norms, bounds: Floats, sds: float = SIGNIFICANT) -> Floats:
        """Sums of the extreme records' norms beyond each bound that a fit lacks.

        Norms in a class have a Pareto distribution of index 3. A class enters if it has
        significantly more records than the fit. All classes enter if their sum is significant.

        :param norms: the fit to a histogram.
        :param sds: how many standard deviations are significant.
        """
        edges = [each * self.bound for each in (*FROM, math.inf)]
        more = self.counts.cpu().numpy() - np.histogram(norms.norms, edges, weights=norms.counts)[0]
        significant = more > sds * self.sd
        if more.sum() > sds * math.sqrt(len(FROM)) * self.sd:
            significant |= more > 0
        least = self.bound * np.array(FROM)
        ratios = np.maximum(bounds[:, None] / least, 1.0)
        each = least / (2 * ratios**2) + np.maximum(least - bounds[:, None], 0.0)
        sums: Floats = each @ (more * significant)
        return sums


def extreme_excess(
    seen: Sequence[ExtremeCounts], norms: Norms, bounds: Floats, sds: float = SIGNIFICANT
) -> Floats:
    """The largest :meth:`ExtremeCounts.excess` over bounds of the looks.

    A look with a small bound counts records that are not extreme for a larger one.
    """
    found: list[ExtremeCounts] = []
    for each in seen:
        alike = [other for other in found if abs(math.log(other.bound / each.bound)) < _ALIKE]
        found = [other for other in found if other not in alike[:1]]
        found.append(each.joined(alike[0]) if alike else each)
    return np.max(
        [np.zeros(len(bounds)), *(each.excess(norms, bounds, sds) for each in found)], axis=0
    )


@dataclass(frozen=True, eq=False)
class MeanHistogram:
    """The mean of released histograms of norms.

    :param counts: noisy numbers of records, (SIZE,).
    :param sd: standard deviation of the noise in a bin.
    :param size: N.
    """

    counts: Tensor
    sd: float
    size: int

    @staticmethod
    def of(histograms: Histograms, distances: Tensor, size: int) -> "MeanHistogram":
        """The mean, with higher weights for histograms near the posterior.

        :param distances: squared distances of the histograms' points.
        """
        sds = torch.tensor([sd for _, sd in histograms]).to(distances).clamp(min=1e-6)
        weights = 1 / ((1 + (distances / NEAR) ** 2) * sds**2)
        weights = weights / weights.sum()
        counts = torch.tensordot(weights, torch.stack([each for each, _ in histograms]), dims=1)
        return MeanHistogram(counts, (weights * sds).norm().item(), size)

    def opening_norms(self, dim: int) -> Norms:
        """Norms of scores in the opening, of ``dim`` coordinates."""
        return self._read(math.sqrt(dim), _SPREAD)

    def norms(self, scale: float, residuals: str) -> Norms:
        """:param scale: trace of a record's mean curvature."""
        tail = residuals != Residuals.BOUNDED
        one_sided = tail and residuals not in (Residuals.NORMAL, Residuals.SCALED)
        typical = _TYPICAL * math.sqrt(scale)
        return self._read(typical, _SPREAD_LATER, tail=tail, one_sided=one_sided)

    def above(self, bound: float) -> ClippedFraction:
        """The fraction of norms above a bound, with the standard error of its noise."""
        above = self.counts[Norms.places_above(bound)]
        fraction = above.sum().item() / self.size
        error = self.sd * math.sqrt(len(above)) / self.size
        return ClippedFraction(min(max(fraction, 0.0), 1.0), error)

    def least_mean_square(self, below: float) -> float:
        """A lower confidence limit of the mean squared norm.

        Norms beyond a cut count as 0. The cut maximises the limit.

        :param below: the largest cut. Beyond it, the noise of the bins would dominate.
        """
        norms = np.exp(MIDDLES[EDGES[1:] <= math.log(below)])
        sums = (self.counts.cpu().numpy()[: len(norms)] * norms**2).cumsum()
        sds = self.sd * np.sqrt((norms**4).cumsum())
        return float((sums - _SURE * sds).max()) / self.size

    def _read(self, typical: float, spread: float, **shape: bool) -> Norms:
        counts = self.counts.cpu().numpy()
        return Norms.read(counts, self.sd, self.size, typical=typical, spread=spread, **shape)
