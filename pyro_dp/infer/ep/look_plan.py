"""The coordinates and the bound of the next look, from public settings and earlier releases."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_dp.infer.ep.norm_counts import FROM, ExtremeCounts, extreme_excess
from pyro_dp.infer.ep.observation_family import Residuals
from pyro_dp.mechanism.contributions import LEAST_BOUND
from pyro_dp.mechanism.norm_histogram import Floats, Norms

OPENING = 0.01  # share of the budget for the opening, which reads norms alone
LEAST_SHARE = 1e-9  # a smaller share of the budget is rounding
FIRST = 0.01  # share of the budget for the first look
MOST_LOOKS = 16
MOST_WITHOUT_NOISE = 50
_CURVATURE, _RESOLVED = 0.5, 0.3  # curvature's part of a record's norm, at this noise
_LEAST_CURVATURE, _MOST_CURVATURE = 0.35, 1.0
_COUNTED = 0.25  # size of the coordinate that sums the weights, in typical norms
_WEIGHT_SD = 0.15  # standard deviation of the mean weight that norms predict
_LEAST_WEIGHT = 0.1
_NEGLIGIBLE = 0.005  # noise in a direction, relative to the posterior's variance there
_LEAST_NOISE = 1e-9
_FARTHEST = 50.0  # the largest bound that is tried, in units of one that cuts off extreme records
_SURE = 4.0  # standard deviations, because a far larger bound makes far more noise
_LOWEST = 0.02  # fraction of the records with norms below the least bound that is tried


class _Kind(NamedTuple):
    """Numbers that depend on the kind of the residuals.

    :param aligned: squared alignment of the clipped excesses; 1 if all of them have one direction.
        Weights that do not depend on the outcome cause bias only if the model is wrong. Symmetric
        and centred residuals cancel if the model is right. An unknown spread depends on far
        records, and noise may hide two thirds of their excess.
    :param extremes: the same for extreme records, which the model does not explain.
    :param directions: above this d, the alignment falls as 1 / d, because excesses lie in all d
        directions. Infinite if they may agree, as in a wrong model or in a mixture's component.
    :param doubted: coordinates follow the curvature plus this multiple of its noise. A quadratic
        likelihood has the same curvature everywhere, so each look makes it more precise.
    :param bend: relative change of the curvature over a distance of one root of a nat per record.
        For bounded residuals, it is about one over the root of a record's curvature.
    :param longest: longest step between two looks, in roots of nats per record. A step past a
        Normal's scale makes all norms large.
    """

    aligned: float
    extremes: float
    doubted: float = 4.0
    bend: float = 2.5
    longest: float = 1.0
    directions: float = 8.0


_KINDS = {
    Residuals.BOUNDED: _Kind(1 / 8_000, 0.0, bend=4.0, directions=math.inf),
    Residuals.NORMAL: _Kind(1 / 8, 1 / 8, doubted=0.3),
    Residuals.SCALED: _Kind(1 / 8, 1 / 8, longest=0.5),
    Residuals.CENTRED: _Kind(1 / 4, 1.0),
    Residuals.LABELS: _Kind(1 / 8, 1 / 8),
    Residuals.INTEGRATED: _Kind(9.0, 9.0),
    Residuals.SUMMED: _Kind(1.0, 1.0, directions=math.inf),
    Residuals.OTHER: _Kind(1.0, 1.0),
}


@dataclass(frozen=True, eq=False)
class Frame:
    """The public coordinates, weights and bound of a look.

    :param root: W = M^-1/2, (d, d). A record's part is (W s, kappa W H W, tau).
    :param weight: kappa.
    :param bound: C.
    :param counted: tau. The sum of this coordinate is tau times the sum of the records' weights.
    """

    root: Tensor
    weight: float
    bound: float
    counted: float

    @staticmethod
    def of(root: Tensor, scale: float, bound: float, noise: float = _RESOLVED) -> "Frame":
        """
        :param scale: trace of a record's mean curvature in these coordinates.
        :param noise: relative noise of the curvature so far.
        """
        part = _CURVATURE * math.sqrt(noise / _RESOLVED)
        part = min(max(part, _LEAST_CURVATURE), _MOST_CURVATURE)
        typical = math.sqrt(scale)
        return Frame(root, part / typical, bound, _COUNTED * min(bound, 1.5 * typical))


@dataclass(frozen=True)
class LookPlan:
    """The public settings of all looks.

    :param dim: d, the number of coordinates of the likelihood's latents.
    :param size: N, the number of records.
    :param multiplier: noise multiplier of one release of the whole budget.
    :param residuals: kind of the observations' residuals.
    """

    dim: int
    size: int
    multiplier: float
    residuals: str

    @property
    def kind(self) -> _Kind:
        return _KINDS[self.residuals]

    def _aligned(self, dispersion: float) -> float:
        """The squared alignment. A dispersion above 1 is a tail that the model does not explain."""
        most = max(self.kind.aligned, self.kind.extremes)
        return self._spread * min(most, self.kind.aligned * max(1.0, dispersion) ** 2)

    @property
    def _spread(self) -> float:
        return min(1.0, self.kind.directions / self.dim)

    @property
    def bend(self) -> float:
        """Rate at which curvature changes, see :func:`~pyro_dp.infer.posterior.looks.with_last`."""
        if self.residuals == Residuals.NORMAL and self.multiplier == 0:
            return 0.0  # without clipping, the curvature is the same everywhere
        return self.kind.bend

    @property
    def num_extremes(self) -> int:
        """The number of classes of extreme records that a look counts."""
        return 0 if self.residuals == Residuals.BOUNDED else len(FROM)

    def mean_weight(self, total: float, noise: float, predicted: float) -> float:
        """The records' mean weight, from the released sum and from the histogram of norms.

        :param total: the released sum of the weights, divided by N.
        :param noise: sd of its noise.
        :param predicted: the mean weight that the norms predict.
        """
        precision, prior = 1 / max(noise, 1e-12) ** 2, 1 / _WEIGHT_SD**2
        mean = (total * precision + predicted * prior) / (precision + prior)
        return float(min(max(mean, _LEAST_WEIGHT), 1.0))  # states hold no NumPy numbers

    def root(
        self, precision: Tensor, doubt: Tensor, norms: Norms, scale: float, bound: float
    ) -> Tensor:
        """W, (d, d), which gives noise the shape of the posterior where noise matters.

        Few records inform a direction of small precision, and W makes their leverage large. So W
        follows the precision only in directions where noise would matter otherwise. It does not
        follow a precision that may be noise itself.

        :param doubt: the noise in the posterior's precision, (d, d).
        """
        values, vectors = torch.linalg.eigh(precision + self.kind.doubted * doubt)
        weight = norms.weight(np.array([bound]))[0]
        noise = self.dim * (bound * self.multiplier / weight) ** 2 / (self.size * scale)
        raised = (_NEGLIGIBLE / max(noise, _LEAST_NOISE)) * values
        values = values.maximum(raised.clamp(max=values.mean()))
        values = (values / values.mean()).clamp(min=1e-12)
        return (vectors / values.sqrt()) @ vectors.mT

    def bound(
        self,
        norms: Norms,
        scale: float,
        extremes: Sequence[ExtremeCounts] = (),
        dispersion: float = 0.0,
    ) -> float:
        """C that minimises the total cost of noise, bias and lost information.

        Let v be the records' mean curvature and w their mean weight. The noise costs
        (d C sigma / w)^2 / (2 N v) nats. If clipping removes B in total, in one direction, that
        costs d B^2 / (2 N v). Unequal weights lose information.

        :param norms: the parts' norms before weights.
        :param extremes: numbers of extreme records, which the noise of a histogram hides.
        :param dispersion: a lower limit of the scores' variance, relative to the model's.
        """
        least = norms.norms[norms.counts.cumsum() > _LOWEST * self.size][0]
        most = max([norms.norms[-1], *(_FARTHEST * each.bound for each in extremes)])
        bounds = np.exp(np.arange(math.log(least) - 0.7, math.log(most) + 0.3, 0.05))
        weight, unit = norms.weight(bounds), 2 * self.size * scale
        cost: Floats = (self.dim * bounds * self.multiplier / weight) ** 2 / unit
        excess = norms.excess(bounds) + self.sure_excess(extremes, norms, bounds)
        cost = cost + self._aligned(dispersion) * self.dim * excess**2 / unit
        if self.residuals == Residuals.BOUNDED:
            cost = cost + 0.5 * self.dim * (norms.weight(bounds, 2) / weight**2 - 1)
        return max(float(bounds[cost.argmin()]), LEAST_BOUND)

    @property
    def _one_sided(self) -> bool:
        return self.kind.extremes >= 1

    def excess(self, norms: Norms, bounds: Floats) -> Floats:
        """Sums of the norms beyond each bound, for the bias.

        Noise can hide a tail. If extremes may agree in direction, the bias covers all readings.
        """
        return norms.rms_excess(bounds) if self._one_sided else norms.excess(bounds)

    def sure_excess(
        self, extremes: Sequence[ExtremeCounts], norms: Norms, bounds: Floats
    ) -> Floats:
        """Sums of the norms beyond each bound, of records that are surely extreme.

        It is zero if their parts may agree in direction. A larger bound would then make intervals
        narrower, without the bias that remains.
        """
        if self._one_sided:
            return np.zeros(len(bounds))
        return extreme_excess(extremes, norms, bounds, _SURE)

    def squared_bias(
        self, excess: float, of_extremes: float = 0.0, dispersion: float = 0.0
    ) -> float:
        """Squared bias of the score in a direction by clipping.

        :param excess: sum of the norms beyond the bound, divided by the mean weight.
        :param of_extremes: the same for extreme records, which the noise of a histogram hides.
        :param dispersion: as for :meth:`bound`.
        """
        bias = math.sqrt(self._aligned(dispersion)) * excess
        bias += math.sqrt(self._spread * self.kind.extremes) * of_extremes
        return bias**2 / self.dim
