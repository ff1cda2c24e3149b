"""Sums of the records' sites in whitened coordinates, weighted without a look at the outcome."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dp.infer.ep.site_sum import Public, SiteSum
from pyro_dp.infer.ep.whitened import Frame
from pyro_dp.infer.posterior.gaussian import Gaussian
from pyro_dp.mechanism.contributions import Contributions, Kept, Scaled
from pyro_dp.mechanism.norm_histogram import Bins, one_hot


@dataclass(eq=False, repr=False)
class WhitenedSum(SiteSum):
    """What DPSEP releases in the coordinates of a :class:`~pyro_dp.infer.ep.whitened.Frame`.

    **Sensitivity.** A record's part (W r, kappa W Lambda W) is made shorter by the factor
    min(1, C / b), where b is the largest norm that it could have for any outcome: a factor that
    does not depend on the outcome leaves the estimating equation unbiased where the model holds
    (Kuensch, Stefanski & Carroll 1989). Where b is not known, or too small, the sum clips: each
    part has norm at most C, whatever W, kappa, C and b are. The bin of its norm is a block of
    bound 1. Both blocks are one Gaussian release.
    """

    def _public(self, at: tuple[Gaussian, Frame | None]) -> Public:
        cavity, frame = at
        public = super()._public(cavity)
        if frame is None:
            return public
        weight = torch.tensor(frame.weight, dtype=torch.float64, device=frame.root.device)
        return [*public, frame.root, weight]

    def _contributions(
        self, public: Public, indices: Tensor, rows: list[Tensor], bound: Tensor
    ) -> list[Contributions]:
        """The blocks of the joint release: sites, histogram; before the first frame only this."""
        mean, spread, *frame = public
        sites = self._moments.factors(mean, spread, indices, rows)
        if not frame:
            return [one_hot(torch.linalg.vector_norm(sites.residual, dim=1, keepdim=True))]
        root, weight = frame
        sites = sites.whitened(root)
        part = self.structure.rows(sites.residual, sites, weight)
        norms = part.norms()
        largest = sites.largest_residual() + weight**2 * sites.squared_norm()
        largest = largest.sqrt().unsqueeze(1).maximum(norms)
        weighted = Scaled(Kept(part, norms), (bound / largest).clamp(max=1.0))
        return [weighted, Bins(norms)] if self.has_bit else [weighted]
