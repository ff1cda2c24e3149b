"""Sums of the records' sites in whitened coordinates, weighted without a look at the outcome."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dp.graphs.tracing import Compiler
from pyro_dp.infer.ep.site_factors import Factors, Full, FullRows
from pyro_dp.infer.ep.site_sum import Public, SiteSum
from pyro_dp.infer.ep.whitened import Frame
from pyro_dp.infer.padded_sum import PaddedSum
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.contributions import Contributions, Kept, Measured, Rows, Scaled
from pyro_dp.mechanism.norm_histogram import Bins, MeasuredBins

_WITHOUT_FRAME = 2  # public tensors: mean and spread of the cavity


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

    structure: Full

    def trace(
        self, at: Any, sum_type: type[ClippedSum], usual_size: int, compiler: Compiler
    ) -> None:
        """As :meth:`SiteSum.trace`; the first release, of norms alone, takes no graph."""
        cavity, frame = at
        frame = frame or Frame.start(cavity.eta, self.structure.dim, 1.0)
        super().trace((cavity, frame), sum_type, usual_size, compiler)

    def _passes_for(self, public: Public) -> PaddedSum | None:
        return self._passes if len(public) > _WITHOUT_FRAME else None

    def _public(self, at: Any) -> Public:
        cavity, frame = at
        public = super()._public(cavity)
        if frame is None:
            return public
        weight = torch.tensor(frame.weight, dtype=torch.float64, device=frame.root.device)
        return [*public, frame.root, weight]

    def _blocks(self, sites: Factors, public: Public, bound: Tensor) -> list[Contributions]:
        """The blocks of the joint release: sites, histogram; before the first frame only this."""
        part = self._part(sites, public)
        norms = part.norms()
        if len(public) == _WITHOUT_FRAME:
            return [MeasuredBins(norms)]
        largest = sites.largest_residual() + public[-1] ** 2 * sites.squared_norm()
        largest = largest.sqrt().unsqueeze(1).maximum(norms)
        weighted = Scaled(Kept(part, norms), (bound / largest).clamp(max=1.0))
        return [weighted, Bins(norms)] if self.num_blocks > 1 else [weighted]

    def _part(self, sites: Factors, public: Public) -> Measured:
        if len(public) == _WITHOUT_FRAME:
            return Rows(sites.residual)
        return FullRows(sites.gradients(), sites, public[-1])

    def _factors(self, public: Public, indices: Tensor, rows: list[Tensor]) -> Factors:
        """In the frame's coordinates; before the first frame in the latents'."""
        sites = super()._factors(public[:_WITHOUT_FRAME], indices, rows)
        return sites if len(public) == _WITHOUT_FRAME else sites.whitened(public[-2])
