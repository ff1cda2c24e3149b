"""All looks of DPSEP so far, and the norms of the records' parts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pyro_dp.infer.ep.look_plan import Frame, LookPlan
from pyro_dp.infer.ep.norm_counts import ExtremeCounts, MeanHistogram, NormHistograms
from pyro_dp.infer.posterior.looks import Look, PooledLooks, squared_distances, with_last
from pyro_dp.mechanism.norm_histogram import Norms
from pyro_dp.utils.linalg import unstacked


@dataclass(frozen=True, eq=False)
class SeenLooks:
    """
    :param plan: settings of looks, which are public.
    :param looks: all looks without the opening, which reads norms alone.
    :param histograms: histograms of norms, one for each look, if there is noise.
    :param extremes: number of extreme records; None: no look has counted them.
    :param pooled: all looks together; None: there is no look yet.
    :param scale: mean curvature of a record, all directions together.
    :param weight: mean weight of the records in the last look.
    """

    plan: LookPlan
    looks: tuple[Look, ...] = ()
    histograms: NormHistograms = NormHistograms()
    extremes: ExtremeCounts | None = None
    pooled: PooledLooks | None = None
    scale: float = 1.0
    weight: float = 1.0

    def with_look(
        self, point: Tensor, frame: Frame, released: Sequence[Tensor], noises: Sequence[float]
    ) -> "SeenLooks":
        """These and one more look, in the latents' coordinates.

        All looks get the bias that clipping to their bounds causes, by all histograms. An early
        look has little noise for its share if its bound is small. Without its bias, it would count
        too much.

        :param point: the look's, (d,).
        :param released: block by block.
        :param noises: standard deviation of the noise in each block.
        """
        dim, size, noise = self.plan.dim, self.plan.size, noises[0]
        entries = dim * (dim + 1) // 2
        sums, counted = released[0].tensor_split([dim + entries + 1])
        gradient, curvature, total = sums.split([dim, entries, 1])
        histograms, norms, weight, extremes = self.histograms, None, 1.0, None
        for counts, sd in zip(released[1:], noises[1:], strict=True):
            histograms = histograms.with_one(counts, sd)
        if frame.bound < math.inf:
            points = [*(look.point for look in self.looks), point]
            norms = self._norms(self._mean(histograms, points, point))
            predicted = norms.weight(np.array([frame.bound]))[0]
            unit = frame.counted * size
            weight = self.plan.mean_weight(total.item() / unit, noise / unit, predicted)
            if self.plan.num_extremes:
                extremes = ExtremeCounts.read(counted, noise, frame.bound).after(self.extremes)
        back = torch.linalg.inv(frame.root)
        curvature = back @ unstacked(curvature / frame.weight, dim) @ back
        sd = noise / weight
        look = Look(
            point=point,
            score=back @ gradient / weight,
            curvature=curvature / weight,
            geometry=back @ back,
            score_sd=sd,
            curvature_sd=sd / frame.weight,
            bound=frame.bound,
        )
        looks = (*self.looks, look)
        if norms is not None:
            bounds = np.array([each.bound for each in looks])
            excess = norms.excess(bounds) / norms.weight(bounds)
            looks = tuple(
                replace(look, squared_bias=self.plan.squared_bias(each.item()))
                for look, each in zip(looks, excess, strict=True)
            )
        pooled = with_last(looks, self.pooled, size, self.plan.bend)
        return SeenLooks(self.plan, looks, histograms, extremes, pooled, self.scale, weight)

    def norms(self, point: Tensor) -> Norms:
        """Norms of the records' parts at a point, from all histograms."""
        return self._norms(self.histogram(point))

    def histogram(self, point: Tensor) -> MeanHistogram:
        """The mean of all, above all of those near a point."""
        return self._mean(self.histograms, [look.point for look in self.looks], point)

    def squared_bias(self, bound: float) -> float:
        """Squared bias of the score in a direction by clipping, in coordinates M^1/2 z.

        :param bound: C.
        """
        if bound == math.inf:
            return 0.0
        norms = self.norms(self.looks[-1].point)
        excess = norms.excess(np.array([bound]))[0].item()
        if self.extremes is not None:
            excess += self.extremes.excess(norms)
        return self.plan.squared_bias(excess / self.weight)

    @property
    def required_pooled(self) -> PooledLooks:
        assert self.pooled is not None
        return self.pooled

    def _norms(self, histogram: MeanHistogram) -> Norms:
        return histogram.norms(self.scale, self.plan.residuals)

    def _mean(
        self, histograms: NormHistograms, points: Sequence[Tensor], point: Tensor
    ) -> MeanHistogram:
        distances = point.new_zeros(len(points))
        if self.pooled is not None:
            own = self.pooled.curvature, self.plan.size
            distances = squared_distances(points, point, *own)
        return histograms.mean(distances, self.plan.size)
