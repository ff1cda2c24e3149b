"""Sums of the records' sites in whitened coordinates, with weights and a histogram of norms."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dp.infer.ep.extreme_records import WithExtremes, are_counted
from pyro_dp.infer.ep.observation_family import Residuals
from pyro_dp.infer.ep.site_factors import Factors, Full, FullRows
from pyro_dp.infer.ep.site_sum import Public, SiteSum
from pyro_dp.mechanism.contributions import Contributions, Kept, Measured, Scaled
from pyro_dp.mechanism.norm_histogram import Bins, MeasuredBins


class CountedRows:
    """(W s, kappa W H W, tau) of B records.

    :param rows: (W s, kappa W H W).
    :param counted: tau.
    """

    def __init__(self, rows: FullRows, counted: Tensor):
        self._rows, self._counted = rows, counted

    def norms(self) -> Tensor:
        return (self._rows.norms().square() + self._counted.square()).sqrt()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self._counted * weights.sum()
        return torch.cat([self._rows.weighted_sum(weights), total.reshape(1)])

    def dense(self) -> Tensor:
        rows = self._rows.dense()
        return torch.cat([rows, self._counted.expand(len(rows), 1)], dim=1)


@dataclass(eq=False, repr=False)
class WhitenedSum(SiteSum):
    """What a look of DPSEP releases in the coordinates of a
    :class:`~pyro_dp.infer.ep.look_plan.Frame`.

    **Sensitivity.** A record's part (W s, kappa W H W, tau) is shortened by the factor
    min(1, C / b). If the family bounds the norm, b is its maximum over all outcomes. Such a factor
    does not depend on the outcome. So it leaves the estimating equation unbiased if the model holds
    (Kuensch, Stefanski & Carroll 1989). The sum clips the shortened part, so each part has norm at
    most C, whatever W, kappa, tau, C and b are. If outcomes decide the norms, extreme records are
    counted. The row r of such a record becomes (a r, sqrt(1 - a^2) C e), with e the unit vector of
    its class. The norm of that row is at most C, too. The bin of the norm is a block of bound 1.
    Both blocks are one Gaussian release.
    """

    structure: Full

    def _public(self, at: Any) -> Public:
        cavity, frame = at
        numbers = torch.tensor([frame.weight, frame.counted], dtype=torch.float64)
        return [*super()._public(cavity), frame.root, *numbers.to(frame.root.device).unbind()]

    def _blocks(self, sites: Factors, public: Public, bound: Tensor) -> list[Contributions]:
        """The blocks of a look: sites, histogram."""
        *_, weight, counted = public
        part = self._part(sites, public)
        norms = part.norms()
        size = self._size_before_weights(sites, norms, weight)
        longest = size.maximum(norms)
        weighted: Measured = Scaled(Kept(part, norms), (bound / longest).clamp(max=1.0))
        if self.num_blocks == 1:
            return [weighted]
        if are_counted(self._moments.residuals):
            weighted = WithExtremes(weighted, longest / bound, bound)
        return [weighted, Bins(size)]

    def _size_before_weights(self, sites: Factors, norms: Tensor, weight: Tensor) -> Tensor:
        """b, (B, 1)."""
        if self._moments.residuals != Residuals.BOUNDED:
            return norms
        size = sites.largest_residual() + weight**2 * sites.squared_norm()
        return size.sqrt().unsqueeze(1)

    def _part(self, sites: Factors, public: Public) -> Measured:
        *_, weight, counted = public
        return CountedRows(FullRows(sites.gradients(), sites, weight), counted)

    def _factors(self, public: Public, indices: Tensor, rows: list[Tensor]) -> Factors:
        """The sites in the frame's coordinates."""
        mean, spread, root, *_ = public
        return super()._factors([mean, spread], indices, rows).whitened(root)


@dataclass(eq=False, repr=False)
class OpeningSum(WhitenedSum):
    """The opening: a histogram of the norms of the records' scores for each group of coordinates.

    The score of a count that equals its mean is zero. So if the outcome decides the score's size,
    the expected squared score is added to the squared norm.
    """

    def _blocks(self, sites: Factors, public: Public, bound: Tensor) -> list[Contributions]:
        groups = self.problem.groups
        if self._moments.residuals == Residuals.BOUNDED:
            found = [sites.largest_residual()]
        elif len(groups) == 1:
            found = [sites.gradients().squared_norms()[:, 0] + _size(sites.diagonal())]
        else:
            scores, diagonal = sites.gradients().dense(), sites.diagonal()
            found = [scores[:, g].square().sum(dim=1) + _size(diagonal[:, g]) for g in groups]
        return [MeasuredBins(squared.sqrt().unsqueeze(1)) for squared in found]


def _size(diagonal: Tensor) -> Tensor:
    return diagonal.sum(dim=1).clamp(min=0.0)
