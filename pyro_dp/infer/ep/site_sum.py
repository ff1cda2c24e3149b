"""Clipped sums of the records' sites, in the latents' own coordinates or in whitened ones."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_dp.graphs.tracing import Compiler
from pyro_dp.infer.ep.linear_sites import LinearSites
from pyro_dp.infer.ep.norm_counts import WithExtremes
from pyro_dp.infer.ep.observation_family import Residuals
from pyro_dp.infer.ep.problem import EPProblem
from pyro_dp.infer.ep.site_factors import Full, FullRows, LowRank, Structure
from pyro_dp.infer.ep.stein_sites import SteinSites
from pyro_dp.infer.ep.tilted_sites import LinearMoments
from pyro_dp.infer.padded_sum import CHECKED_STEPS, PaddedSum, pass_size
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.contributions import Contributions, Kept, Measured, with_bit
from pyro_dp.mechanism.norm_histogram import Bins, MeasuredBins
from pyro_dp.mechanism.sampling import Indices
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.linalg import dense, restricted
from pyro_dp.utils.torch_state import forked_rng, private_rng

Public = Sequence[Tensor]  # mean and spread of the cavity, and everything else for the parts


@dataclass(eq=False, repr=False, kw_only=True)
class SiteSum:
    """The sums over a batch of records that DPSEP releases, before the noise.

    :param structure: structure of the released precisions.
    :param centred: whether eta_n - Lambda_n m is released, with m the cavity mean, or eta_n.
    :param weight: kappa.
    :param num_blocks: blocks of a release; a second one is the bit of being within the bound.
    :param microbatch_size: largest number of records at a time; None: it is chosen.
    """

    problem: EPProblem
    structure: Structure
    centred: bool = True
    weight: float = 1.0
    num_blocks: int
    microbatch_size: int | None

    def __post_init__(self) -> None:
        self._moments, self._term = self.problem.moments, self.problem.likelihood.term
        limit = self.microbatch_size or self._moments.microbatch_size
        self._pass = len(self.problem.places) + self.structure.size, limit
        full = isinstance(self.structure, Full)
        self._by_one_product = full and self._moments.design is not None
        self._passes: PaddedSum | None = None
        self._unchecked = 0

    def trace(
        self, at: Any, sum_type: type[ClippedSum], usual_size: int, compiler: Compiler
    ) -> None:
        """Use a graph from now on, and compare it with Pyro's code in the first steps.

        Sites by one product do not need a graph.

        :param usual_size: batch size that is seldom exceeded.
        :raises NotTraceable: the sites come from more than a fixed sequence of tensor operations.
        """
        if self._by_one_product:
            return

        def contribute(bounds, public, indices, rows, _) -> tuple[list[Contributions], list]:
            return self._blocks(self._factors(public, indices, rows), public, bounds[0]), []

        with forked_rng():
            self._passes = PaddedSum(
                contribute,
                self._term,
                self._public(at),
                blocks=self.num_blocks,
                size=pass_size(usual_size, sum_type.most_records(*self._pass)),
                sum_type=sum_type,
                compiler=compiler,
            )
        self._unchecked = CHECKED_STEPS

    def add(
        self, clipped: ClippedSum, at: Any, indices: Indices, stream: np.random.Generator
    ) -> None:
        """Clip and sum the sites of these records, one microbatch after the other.

        :param at: the cavity, and further values for a subclass.
        :param stream: private source of the model's draws.
        """
        public = self._public(at)
        with private_rng(stream):
            size, usual = self._pass
            if linear := self._linear(public):
                most = min(self.microbatch_size or linear.size, linear.size)
                most = clipped.most_records(size, most) or most
                passes = self._term.records.passes(indices, most)
                bound = torch.as_tensor(clipped.blocks[0].bound, dtype=torch.float64)
                clipped.add_each(
                    lambda sites: self._blocks(sites, public, bound),
                    (sites for batch in passes for sites in linear.each(*batch)),
                )
                return
            limit = clipped.most_records(size, usual)
            for chosen in indices.split(self._passes.size if self._passes else limit):
                if len(chosen):  # an empty batch is split into one empty part
                    self._add_microbatch(clipped, public, chosen)
        if len(indices):
            self._unchecked = max(0, self._unchecked - 1)

    def _linear(self, public: Public) -> LinearSites | SteinSites | None:
        """The sites by one product; None: the model does not have them."""
        mean, spread, *rest = public
        if not self._by_one_product or self._term.state.changed:  # the graph is outdated
            return None
        root = rest[0] if rest else None
        if isinstance(self._moments, LinearMoments):
            return LinearSites(self._moments, mean, dense(spread), root)
        return SteinSites(self._moments, mean, spread, root)

    def norms(self, at: Any, indices: Tensor) -> Tensor:
        """Norms of the sites before clipping, (B,): private, for non-private readings only."""
        public, rows = self._public(at), self._term.records.rows(indices)
        return self._part(self._factors(public, indices, rows), public).norms()[:, 0]

    def _add_microbatch(self, clipped: ClippedSum, public: Public, chosen: Tensor) -> None:
        if self._passes is None:
            self._add_by_pyro(clipped, public, chosen)
            return
        checked = [self._like(clipped)] if self._unchecked else []
        try:
            self._passes.add(clipped, public, self._passes.batch(public, chosen), *checked)
        except Exception:  # Pyro's code finds the record
            self._add_by_pyro(clipped, public, chosen)
            return
        for found in checked:
            expected = self._like(clipped)
            self._add_by_pyro(expected, public, chosen)
            exact = self.problem.likelihood.dtype == torch.float64
            found.require_same_as(expected, count=len(chosen), exact=exact)

    def _add_by_pyro(self, clipped: ClippedSum, public: Public, chosen: Tensor) -> None:
        sites = self._factors(public, chosen, self._term.records.rows(chosen))
        bound = torch.as_tensor(clipped.blocks[0].bound, dtype=torch.float64)
        clipped.add(*self._blocks(sites, public, bound))

    def _blocks(self, sites: LowRank, public: Public, bound: Tensor) -> list[Contributions]:
        """The blocks of the release: sites, bit."""
        part = self._part(sites, public)
        return with_bit(part, bound) if self.num_blocks > 1 else [part]

    def _like(self, clipped: ClippedSum) -> ClippedSum:
        return type(clipped)(clipped.blocks, self._term.records.device)

    def _public(self, at: Any) -> Public:
        places = self.problem.places
        try:
            return at.mean[places], self._moments.spread(restricted(at.covariance, places))
        except torch.linalg.LinAlgError:
            raise ConfigurationError(
                "The posterior has become too narrow or too wide to compute with; this step spent "
                "nothing. Use a smaller noise_multiplier, or other units."
            ) from None

    def _factors(self, public: Public, indices: Tensor, rows: list[Tensor]) -> LowRank:
        """Sites of these records, in the coordinates of the release."""
        mean, spread = public
        return self._moments.factors(mean, spread, indices, rows)

    def _part(self, sites: LowRank, public: Public) -> Measured:
        """Each record's part of the release before clipping."""
        eta: Any = sites.residual
        if not self.centred:
            eta = eta + sites.times(public[0])
        elif isinstance(self.structure, Full):
            eta = sites.gradients()
        return self.structure.rows(eta, sites, self.weight)


@dataclass(eq=False, repr=False)
class WhitenedSum(SiteSum):
    """The sum of a look of DPSEP, in the coordinates of a
    :class:`~pyro_dp.infer.ep.look_plan.Frame`.

    **Bias.** If norms depend on the outcome, residuals are centred before clipping
    (:meth:`~pyro_dp.infer.ep.site_factors.LowRank.centred`).

    **Sensitivity.** The factor min(1, C / b) shortens a record's part (W s, kappa W H W, tau). If
    the family bounds the norm, b is its maximum over all outcomes. Such a factor does not depend on
    the outcome. So the estimating equation stays unbiased if the model holds (Kuensch, Stefanski &
    Carroll 1989). The sum clips the shortened part. So each part has norm at most C for all W,
    kappa, C, b and tau. If norms depend on the outcome, extreme records are counted. The row r of
    such a record becomes (a r, sqrt(1 - a^2) C e), with e the unit vector of its class. The norm of
    this row is at most C, too. The bin of the norm is a block of bound 1. Both blocks are one
    Gaussian release.
    """

    structure: Structure = field(init=False)

    def __post_init__(self) -> None:
        self.structure = Full(self.problem.widths)
        super().__post_init__()

    def _public(self, at: Any) -> Public:
        cavity, frame = at
        numbers = torch.tensor([frame.weight, frame.counted], dtype=torch.float64)
        return [*super()._public(cavity), frame.root, *numbers.to(frame.root.device).unbind()]

    def _blocks(self, sites: LowRank, public: Public, bound: Tensor) -> list[Contributions]:
        """The blocks of a look: sites, histogram."""
        *_, weight, counted = public
        part = self._part(sites, public)
        norms = part.norms()
        size = norms
        if self._moments.residuals == Residuals.BOUNDED:  # for any outcome
            squared = sites.largest_residual() + weight**2 * sites.squared_norm() + counted**2
            size = squared.sqrt().unsqueeze(1)
        longest = size.maximum(norms)
        if len(sites.simulated):
            part = self._part(sites.centred(norms, bound), public)
            longest = norms = part.norms()
        weighted: Measured = Kept(part, norms, (bound / longest).clamp(max=1.0))
        if self.num_blocks == 1:
            return [weighted]
        if self._moments.residuals != Residuals.BOUNDED:
            weighted = WithExtremes(weighted, longest / bound, bound)
        return [weighted, Bins(size)]

    def _part(self, sites: LowRank, public: Public) -> Measured:
        *_, weight, counted = public
        return FullRows(sites.gradients(), sites, weight, counted.reshape(1))

    def _factors(self, public: Public, indices: Tensor, rows: list[Tensor]) -> LowRank:
        """The sites in the frame's coordinates."""
        mean, spread, root, *_ = public
        return super()._factors([mean, spread], indices, rows).whitened(root)


@dataclass(eq=False, repr=False)
class OpeningSum(WhitenedSum):
    """The opening: a histogram of the norms of the records' scores for each group of coordinates.

    The score of a count that equals its mean is zero. So if the size of a score depends on the
    outcome, the expected squared score is added to the squared norm.
    """

    def _blocks(self, sites: LowRank, public: Public, bound: Tensor) -> list[Contributions]:
        groups = self.problem.groups
        if self._moments.residuals == Residuals.BOUNDED:
            found = [sites.largest_residual()]
        elif len(groups) == 1:
            found = [sites.gradients().squared_norms()[:, 0] + _trace(sites.diagonal())]
        else:
            scores, diagonal = sites.gradients().dense(), sites.diagonal()
            found = [scores[:, g].square().sum(dim=1) + _trace(diagonal[:, g]) for g in groups]
        return [MeasuredBins(squared.sqrt().unsqueeze(1)) for squared in found]


def _trace(diagonal: Tensor) -> Tensor:
    return diagonal.sum(dim=1).clamp(min=0.0)
