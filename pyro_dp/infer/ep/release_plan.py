"""How the budget is laid out over the steps of DPSEP, and the bound of a record's part."""

import math
from dataclasses import dataclass

import numpy as np

from pyro_dp.mechanism.blocks import LEAST_BOUND
from pyro_dp.mechanism.norm_histogram import Floats, Norms

# Chosen on Adult, RAND HIE, abalone, wine, cancer, power, kin8nm, protein and simulated data. What
# judges them is in benchmarks/no_settings.py.
_STEPS, FEWEST_STEPS, _MOST = 30, 12, 50
_LARGEST_SHARE = 0.9  # of the curvature in a record's norm
_SMALLEST_SHARE = 0.4
_ALIGNED = {False: 1 / 8, True: 1 / 200}  # square of how far parts cut off point to one side


@dataclass(frozen=True)
class ReleasePlan:
    """Public before the first step: from the budget, N and d alone.

    :param dim: d, latents that records see.
    :param size: N.
    :param multiplier: sigma of a single release of the whole budget, in units of its bound.
    """

    dim: int
    size: int
    multiplier: float

    @property
    def ratio(self) -> float:
        """rho: about the noise in the released curvature, over the curvature."""
        return 5 * math.sqrt(2) * self.dim**1.5 * self.multiplier / self.size

    @property
    def num_steps(self) -> int:
        """Few where noise decides, as each starts from it; and one for the first histogram."""
        if self.ratio == 0:  # there is no noise
            return 1 + _MOST
        return 1 + min(max(round(_STEPS * self.ratio**-0.35), FEWEST_STEPS), _MOST)

    @property
    def curvature_share(self) -> float:
        """c: the curvature in a typical record's norm, over its gradient."""
        return min(max(0.35 * (self.ratio / 0.02) ** 0.4, _SMALLEST_SHARE), _LARGEST_SHARE)

    def bound(self, norms: Norms, scale: float, used: float, *, label_free: bool) -> float:
        """C, at which noise, bias and lost information together cost least.

        Unequal weights min(1, C / norm) cost information too.

        :param norms: before weights.
        :param scale: mean curvature of a record, weighted as with the bound that was used.
        :param used: that bound.
        :param label_free: weights do not depend on the outcome, and bias only a wrong model.
        """
        least, most = norms.norms[norms.counts.cumsum() > 0.02 * self.size][0], norms.norms[-1]
        bounds = np.exp(np.arange(math.log(least) - 0.7, math.log(most) + 0.3, 0.05))
        noise, bias = self._costs(norms, scale, used, bounds)
        cost = noise + _ALIGNED[label_free] * bias
        if label_free:
            weight = norms.weight(bounds)
            cost += 0.5 * self.dim * (norms.weight(bounds, 2) / weight**2 - 1)
        return max(float(bounds[cost.argmin()]), LEAST_BOUND)

    def noise_share(self, norms: Norms, scale: float, bound: float) -> float:
        """Variance that the noise of all releases adds in a direction, over the posterior's.

        :param scale: mean curvature of a record, weighted as with this bound.
        """
        noise, _ = self._costs(norms, scale, bound, np.array([bound]))
        return float(2 * noise[0] / self.dim)

    def bias(self, norms: Norms, scale: float, bound: float) -> float:
        """Of what is cut off, about: in nats, over those of noise and posterior together.

        :param scale: mean curvature of a record, weighted as with this bound.
        """
        noise, bias = self._costs(norms, scale, bound, np.array([bound]))
        return float(_ALIGNED[False] * bias[0] / (noise[0] + self.dim / 2))

    def _costs(
        self, norms: Norms, scale: float, used: float, bounds: Floats
    ) -> tuple[Floats, Floats]:
        """Of noise and of all that is cut off, if it points to one side, in nats.

        With v the records' mean curvature and w their mean weight the noise costs
        (d C sigma / w)^2 / (2 N v); parts that are B in all cost d B^2 / (2 N v).
        """
        weight = norms.weight(bounds)
        scale = scale / norms.weight(np.array([used]))[0]
        noise = (self.dim * bounds * self.multiplier / weight) ** 2
        bias = self.dim * norms.excess(bounds) ** 2
        return noise / (2 * self.size * scale), bias / (2 * self.size * scale)
