"""The looks of DPSEP so far, with the opening, and the norms of the records' parts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pyro_dp.infer.ep.look_plan import Frame, LookPlan
from pyro_dp.infer.ep.norm_counts import (
    NEAR,
    ExtremeCounts,
    Histograms,
    MeanHistogram,
    extreme_excess,
)
from pyro_dp.infer.ep.problem import EPProblem
from pyro_dp.infer.posterior.looks import Look, PooledLooks, squared_distances, with_last
from pyro_dp.mechanism.norm_histogram import Norms
from pyro_dp.utils.linalg import Gaussian, unstacked


@dataclass(frozen=True, eq=False)
class SeenLooks:
    """
    :param looks: all looks without the opening, which releases norms alone.
    :param histograms: histograms of norms, one for each look, if there is noise.
    :param extremes: numbers of extreme records, one for each of the last looks.
    :param pooled: all looks together; None: there is no look yet.
    :param scale: trace of a record's mean curvature.
    :param weight: mean weight of the records in the last look.
    """

    plan: LookPlan
    looks: tuple[Look, ...] = ()
    histograms: Histograms = ()
    extremes: tuple[ExtremeCounts, ...] = ()
    pooled: PooledLooks | None = None
    scale: float = 1.0
    weight: float = 1.0

    def with_look(
        self, point: Tensor, frame: Frame, released: Sequence[Tensor], noises: Sequence[float]
    ) -> "SeenLooks":
        """These and one more look, in the latents' coordinates.

        All histograms together determine the clipping bias of each look. An early look with a small
        bound has little noise. Without its bias, its weight would be too large.

        :param released: one tensor a block.
        :param noises: standard deviations of the blocks' noise.
        """
        dim, noise, back = self.plan.dim, noises[0], torch.linalg.inv(frame.root)
        entries = dim * (dim + 1) // 2
        sums, counted = released[0].tensor_split([dim + entries + 1])
        gradient, curvature, total = sums.split([dim, entries, 1])
        look = Look(
            point=point,
            score=back @ gradient,
            curvature=back @ unstacked(curvature / frame.weight, dim) @ back,
            geometry=back @ back,
            score_sd=noise,
            curvature_sd=noise / frame.weight,
            bound=frame.bound,
        )
        histograms = (*self.histograms, *zip(released[1:], noises[1:], strict=True))
        seen = replace(self, looks=(*self.looks, look), histograms=histograms)
        if frame.bound < math.inf:
            seen = seen._weighted(frame, total, counted, noise)
        pooled = with_last(seen.looks, self.pooled, self.plan.size, self.plan.bend)
        return replace(seen, pooled=pooled)

    def _weighted(self, frame: Frame, total: Tensor, counted: Tensor, noise: float) -> "SeenLooks":
        """The last look, divided by its records' mean weight, and the bias of all looks.

        :param total: the released sum of the weights, times tau.
        :param counted: released numbers of extreme records.
        """
        *before, look = self.looks
        plan, unit, norms = self.plan, frame.counted * self.plan.size, self.norms(look.point)
        predicted = norms.weight(np.array([frame.bound]))[0]
        weight = plan.mean_weight(total.item() / unit, noise / unit, predicted)
        sd, extremes = noise / weight, self.extremes
        if plan.num_extremes:
            extremes = (*extremes, ExtremeCounts.read(counted, noise, frame.bound))
        look = replace(
            look,
            score=look.score / weight,
            curvature=look.curvature / weight,
            score_sd=sd,
            curvature_sd=sd / frame.weight,
        )
        seen = replace(self, looks=(*before, look), extremes=extremes, weight=weight)
        bounds = np.array([each.bound for each in seen.looks])
        surely = plan.sure_excess(seen.extremes_near(look.point), norms, bounds)
        excess = (plan.excess(norms, bounds) + surely) / norms.weight(bounds)
        looks = tuple(
            replace(look, squared_bias=plan.squared_bias(each.item()))
            for look, each in zip(seen.looks, excess, strict=True)
        )
        return replace(seen, looks=looks)

    def norms(self, point: Tensor) -> Norms:
        """Norms of the records' parts at a point, from all histograms."""
        return self.histogram(point).norms(self.scale, self.plan.residuals)

    def histogram(self, point: Tensor) -> MeanHistogram:
        """The mean histogram, with higher weights for looks near a point."""
        return MeanHistogram.of(self.histograms, self._distances(point), self.plan.size)

    def extremes_near(self, point: Tensor) -> list[ExtremeCounts]:
        """The counts of looks near a point. Elsewhere, other records are extreme."""
        distances = self._distances(point).tolist()
        last = zip(reversed(self.extremes), reversed(distances), strict=False)
        return [each for each, distance in last if distance < NEAR]

    def squared_bias(self, bound: float, dispersion: float = 0.0) -> float:
        """Squared bias of the score in a direction by clipping, in coordinates M^1/2 z.

        :param bound: C.
        :param dispersion: a lower limit of the scores' variance, relative to the model's.
        """
        if bound == math.inf:
            return 0.0
        point, bounds = self.looks[-1].point, np.array([bound])
        norms, near = self.norms(point), self.extremes_near(point)
        found = self.plan.excess(norms, bounds), extreme_excess(near, norms, bounds)
        own, extreme = (each.item() / self.weight for each in found)
        return self.plan.squared_bias(own, extreme, dispersion)

    @property
    def required_pooled(self) -> PooledLooks:
        assert self.pooled is not None
        return self.pooled

    def _distances(self, point: Tensor) -> Tensor:
        """Squared distances of all looks from a point, in nats per record."""
        points = [look.point for look in self.looks]
        if self.pooled is None:
            return point.new_zeros(len(points))
        return squared_distances(points, point, self.pooled.curvature, self.plan.size)


_MEDIAN = 0.455  # median of a squared standard normal number
_FAR_TOO_SMALL = 3.0  # median of the squared residuals, in units of the scale


def opened(
    released: Sequence[Tensor],
    noises: Sequence[float],
    problem: EPProblem,
    posterior: Gaussian,
    root: Tensor,
    size: int,
) -> tuple[Gaussian, float, Frame]:
    """The first q, the trace of a record's curvature there, and the frame of the first look.

    :param released: a histogram of the scores' norms for each group of coordinates.
    :param noises: standard deviations of the noise.
    :param root: W of the opening, (d, d).
    """
    groups = problem.groups
    medians = [
        MeanHistogram(counts, sd, size).opening_norms(len(group)).median
        for counts, sd, group in zip(released, noises, groups, strict=True)
    ]
    posterior, medians = _rescaled(problem, posterior, root, medians)
    median = medians[0]
    if len(groups) > 1:  # scale the scores of each group to norm 1
        root = root.clone()
        for group, each in zip(groups, medians, strict=True):
            root[group] /= each
        median = math.sqrt(len(groups))
    return posterior, median**2, Frame.of(root, median**2, 2 * median)


def _rescaled(
    problem: EPProblem, posterior: Gaussian, root: Tensor, medians: list[float]
) -> tuple[Gaussian, list[float]]:
    """q with a scale of the residuals that fits the opening, and medians of the norms there.

    If the first scale is far too small, all scores are large, and looks would be clipped until the
    scale has risen. The score of the scale's logarithm is Z^2 - 1, with Z the residual in units of
    the scale. Its Fisher information is 2. So the median norm determines the median of Z^2.

    :param medians: medians of the norms, one for each group of coordinates.
    """
    slope, groups = problem.moments.log_scale, problem.groups
    if slope is None or [g.tolist() for g in groups[1:]] != [slope.nonzero().flatten().tolist()]:
        return posterior, medians
    along = root @ slope
    length = along.norm().item()
    squared = 1 + math.sqrt(max((medians[1] / length) ** 2 - 2, 0.0))
    if squared < _FAR_TOO_SMALL:
        return posterior, medians
    factor = squared / _MEDIAN  # by which the variance rises
    mean = posterior.mean.clone()
    mean[problem.places] += root @ along * (0.5 * math.log(factor) / length**2)
    smaller = math.sqrt((_MEDIAN + 1) / (factor * (squared + 1)))
    usual = length * math.sqrt(2 + (1 - _MEDIAN) ** 2)
    moved = Gaussian(posterior.precision @ mean, posterior.precision)
    return moved, [smaller * medians[0], usual]
