"""How the next look is made: its share of the budget, its coordinates, and its bound.

All of it follows from public settings and from what was released before.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pyro_dp.infer.ep.observation_family import Residuals
from pyro_dp.mechanism.blocks import LEAST_BOUND
from pyro_dp.mechanism.norm_histogram import SHARE, Floats, Norms

OPENING = 0.01  # of the budget, for norms alone
FIRST = 0.01  # of the budget, for the first look
MOST_LOOKS = 16
MOST_WITHOUT_NOISE = 50
_GROWTH = 2.0  # of the share, from look to look
_FINAL = 0.45  # of what is left: a look that would take so much takes all of it
_FAR = 4.0  # looks stay small while a step gains so many times the nats that its noise costs
_WASTED = 1.4  # times the noise that other coordinates would have had
_MOST_ALIKE = 3  # looks of one share: more of them would resolve nothing new
_CURVATURE, _RESOLVED = 0.5, 0.3  # its part of a record's norm, at this relative noise
_LEAST_CURVATURE, _MOST_CURVATURE = 0.35, 1.0
_COUNTED = 0.25  # of a typical norm: the coordinate that sums the weights
_WEIGHT_SD = 0.15  # of the mean weight, as norms predict it
_LEAST_WEIGHT = 0.1
# Square of how far parts that are cut off point to one side. Weights that do not depend on the
# outcome bias only a model that does not hold, and symmetric residuals cancel if it holds.
_ALIGNED = {Residuals.BOUNDED: 1 / 20_000, Residuals.NORMAL: 1 / 8, Residuals.OTHER: 1.0}
_NEGLIGIBLE = 0.005  # noise in a direction, beside the posterior's variance there
_LEAST_NOISE = 1e-9
# Times the curvature's noise is added to it before coordinates follow it. A quadratic likelihood
# has one curvature everywhere, and every look makes it clearer.
_DOUBTED = {Residuals.BOUNDED: 4.0, Residuals.NORMAL: 0.3, Residuals.OTHER: 4.0}
_UNRESOLVED = 1.0  # relative noise of the curvature
# Change of the curvature over a distance of one root of a nat per record. Where residuals are
# bounded, it is about one over the root of a record's curvature.
_BEND = {Residuals.BOUNDED: 4.0, Residuals.NORMAL: 0.0, Residuals.OTHER: 2.5}
_LOWEST = 0.02  # of the records have a norm below the least bound that is tried


@dataclass(frozen=True, eq=False)
class Frame:
    """Public coordinates, weights and bound of a look.

    :param root: W = M^-1/2, (d, d). A record's part is (W s, kappa W H W, tau).
    :param weight: kappa.
    :param bound: C.
    :param counted: tau. Its sum is tau times the sum of the records' weights.
    """

    root: Tensor
    weight: float
    bound: float
    counted: float

    @staticmethod
    def of(root: Tensor, scale: float, bound: float, noise: float = _RESOLVED) -> "Frame":
        """
        :param scale: mean curvature of a record in these coordinates, all directions together.
        :param noise: relative, of the curvature so far.
        """
        part = _CURVATURE * math.sqrt(noise / _RESOLVED)
        part = min(max(part, _LEAST_CURVATURE), _MOST_CURVATURE)
        typical = math.sqrt(scale)
        counted = _COUNTED * min(bound, 1.5 * typical)
        return Frame(root, part / typical, bound, counted)


@dataclass(frozen=True)
class LookPlan:
    """Public before the first look.

    :param dim: d, of the latents that records see.
    :param size: N.
    :param multiplier: noise of one release of the whole budget, in units of its bound.
    :param residuals: of the observations.
    """

    dim: int
    size: int
    multiplier: float
    residuals: str

    @property
    def bend(self) -> float:
        """Of the likelihood, see :func:`~pyro_dp.infer.posterior.looks.with_last`."""
        return _BEND[self.residuals]

    def mean_weight(self, total: float, noise: float, predicted: float) -> float:
        """Of the records, from the released sum and from the histogram of norms.

        :param total: of the weights over N, released.
        :param noise: of that number.
        :param predicted: from the norms.
        """
        own, other = 1 / max(noise, 1e-12) ** 2, 1 / _WEIGHT_SD**2
        mean = (total * own + predicted * other) / (own + other)
        return float(min(max(mean, _LEAST_WEIGHT), 1.0))  # not of numpy: states are plain

    def root(
        self, precision: Tensor, doubt: Tensor, norms: Norms, scale: float, bound: float
    ) -> Tensor:
        """W, (d, d): the noise has the posterior's shape as far as noise matters.

        Directions of small precision are those of few records, whose leverage W makes large. So W
        follows the precision only as far as the noise would matter otherwise, and does not follow
        what may be noise itself.

        :param precision: of the posterior, (d, d).
        :param doubt: the noise in it, (d, d).
        """
        values, vectors = torch.linalg.eigh(precision + _DOUBTED[self.residuals] * doubt)
        weight = norms.weight(np.array([bound]))[0]
        noise = self.dim * (bound * self.multiplier / weight) ** 2 / (self.size * scale)
        raised = (_NEGLIGIBLE / max(noise, _LEAST_NOISE)) * values
        values = values.maximum(raised.clamp(max=values.mean()))
        values = (values / values.mean()).clamp(min=1e-12)
        return (vectors / values.sqrt()) @ vectors.mT

    def bound(self, norms: Norms, scale: float) -> float:
        """C, at which noise, bias and lost information together cost least.

        With v the records' mean curvature and w their mean weight the noise costs
        (d C sigma / w)^2 / (2 N v) nats. Parts of B in all that are cut off cost d B^2 / (2 N v) if
        they point to one side. Unequal weights lose information.

        :param norms: before weights.
        """
        least = norms.norms[norms.counts.cumsum() > _LOWEST * self.size][0]
        bounds = np.exp(np.arange(math.log(least) - 0.7, math.log(norms.norms[-1]) + 0.3, 0.05))
        weight, unit = norms.weight(bounds), 2 * self.size * scale
        cost: Floats = (self.dim * bounds * self.multiplier / weight) ** 2 / unit
        cost = cost + _ALIGNED[self.residuals] * self.dim * norms.excess(bounds) ** 2 / unit
        if self.residuals == Residuals.BOUNDED:
            cost = cost + 0.5 * self.dim * (norms.weight(bounds, 2) / weight**2 - 1)
        return max(float(bounds[cost.argmin()]), LEAST_BOUND)

    def squared_bias(self, norms: Norms, bound: float, weight: float) -> float:
        """Of the score in a direction, by what is cut off, in squared units of the bound.

        :param weight: mean, of the last look.
        """
        excess = norms.excess(np.array([bound]))[0] / weight
        return float(_ALIGNED[self.residuals] * excess**2 / self.dim)

    def share(self, frame: Frame, before: "Arrival", left: float, looks: int) -> float:
        """Of the budget, for the next look.

        :param frame: of that look.
        :param left: of the budget.
        :param looks: so far.
        """
        share = before.share
        inverse = torch.linalg.inv(before.precision)
        back = torch.linalg.inv(frame.root)
        noise = 0.5 * (inverse @ back @ back).trace().item()
        noise *= (self.multiplier * frame.bound) ** 2 / share
        one, other = inverse @ before.geometry, torch.linalg.inv(before.geometry) @ before.precision
        wasted = (one.trace() * other.trace()).item() / self.dim**2
        stays = before.shortened or before.gain > _FAR * noise or wasted > _WASTED
        # A look that resolves nothing must not be repeated. (Where residuals are not bounded, norms
        # fall on the way, and early looks stay small.)
        unresolved = self.residuals == Residuals.BOUNDED and before.relative_noise >= _UNRESOLVED
        if unresolved or before.alike >= _MOST_ALIKE or not stays:
            share *= _GROWTH
        return left if looks + 1 >= MOST_LOOKS or share >= _FINAL * left else share


@dataclass(frozen=True, eq=False)
class Arrival:
    """How close a look has come.

    :param share: of the budget that the look took.
    :param geometry: M of the look, (d, d).
    :param precision: of the posterior, (d, d).
    :param gain: of the step that follows from it, in nats.
    :param shortened: whether that step was longer than is trusted.
    :param relative_noise: of the curvature of all looks.
    :param alike: number of looks of this share, one after the other.
    """

    share: float
    geometry: Tensor
    precision: Tensor
    gain: float
    shortened: bool
    relative_noise: float
    alike: int


def histogram_share(bound: float) -> float:
    """Of a look's cost; what is not clipped needs no histogram."""
    return SHARE if bound < math.inf else 0.0
