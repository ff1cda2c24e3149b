"""How the budget is laid out over the steps of DPSEP, and the bound of a record's part."""

import math
from dataclasses import dataclass

import numpy as np

from pyro_dp.mechanism.norm_histogram import Norms

# Chosen on Adult, RAND HIE, abalone, wine, cancer, power, kin8nm, protein and simulated data; see
# benchmarks/RESULTS.md for others.
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
        return 1 + min(max(round(_STEPS * self.ratio**-0.35), FEWEST_STEPS), _MOST)

    @property
    def curvature_share(self) -> float:
        """c: the curvature in a typical record's norm, over its gradient."""
        return min(max(0.35 * (self.ratio / 0.02) ** 0.4, _SMALLEST_SHARE), _LARGEST_SHARE)

    def bound(self, norms: Norms, scale: float, used: float, *, label_free: bool) -> float:
        """C, at which noise, bias and lost information together cost least, in nats.

        With v the records' mean curvature, the noise costs (d C sigma / w)^2 / (2 N v), w being the
        mean weight min(1, C / norm); parts B that are cut off, in all, d B^2 a / (2 N v), where a
        says how far they point to one side; unequal weights cost information.

        :param norms: before weights.
        :param scale: mean curvature of a record, weighted as with the bound that was used.
        :param label_free: weights do not depend on the outcome, and bias only a wrong model.
        """
        least, most = norms.norms[norms.counts.cumsum() > 0.02 * self.size][0], norms.norms[-1]
        bounds = np.exp(np.arange(math.log(least) - 0.7, math.log(most) + 0.3, 0.05))
        weight = norms.weight(bounds)
        scale = scale / norms.weight(np.array([used]))[0]
        cost = (self.dim * bounds * self.multiplier / weight) ** 2
        cost += _ALIGNED[label_free] * self.dim * norms.excess(bounds) ** 2
        cost /= 2 * self.size * scale
        if label_free:
            cost += 0.5 * self.dim * (norms.weight(bounds, 2) / weight**2 - 1)
        return float(bounds[cost.argmin()])
