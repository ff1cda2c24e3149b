"""The sites of :class:`LinearMoments` for a batch by one product of its rows, which is faster.

Let T be the axes of a pass (:class:`~pyro_dp.infer.ep.linear_design.Axes`), and u_n = T' J_n'. Take
a record of one number a(z) = J_n z + c_n. In the release's coordinates, its residual has the norm
|r_n| |u_n|, and its precision has the Frobenius norm Lambda_n |u_n|^2. Both r_n and Lambda_n depend
on J_n m + c_n, on the variance sum D u_n^2 and on the outcome.

The batch's sum is (U' (w r), U' diag(w Lambda) U). The public Q turns it at the end. So there are
two products, and nothing of size N d^2. The norms and the sum use the same u_n, in float64. Only
rounding of a norm of d terms and of the turn by Q can take a record over the bound. That is about d
units of 2^-52. The squared norms are raised by 1e-12, and the clipping has a further margin.

The model's code computes J_n z + c_n at two points. If u_n does not predict the difference, the
record's predictors are not linear as on public rows. Then the model's derivatives compute the site
of this record alone. If the model's code is affine in z, J and the row are the same in every step.
Then a confirmed record is not checked again.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_dp.infer.ep.element_sites import element_sites
from pyro_dp.infer.ep.linear_design import Axes, Numbers, rounding, where_possible
from pyro_dp.infer.ep.observation_family import Residuals
from pyro_dp.infer.ep.site_factors import LowRank
from pyro_dp.infer.ep.tilted_sites import LinearMoments, joined
from pyro_dp.utils.linalg import times

_OUTCOMES = 4  # simulated for a record
_SIMULATED = Residuals.CENTRED, Residuals.SCALED  # residuals that these outcomes centre
_ROOM = 1 + 1e-12  # for rounding of a row's norm when Q turns it


class LinearSites:
    """
    :param moments: moments with a design.
    :param mean: the cavity's mean, (d,).
    :param covariance: the cavity's covariance, (d, d).
    :param root: W of the frame of the release, (d, d). None: the latents' coordinates, without
        simulated outcomes, which centre residuals.
    """

    def __init__(
        self, moments: LinearMoments, mean: Tensor, covariance: Tensor, root: Tensor | None
    ):
        assert moments.design is not None
        self._moments, self._design = moments, moments.design
        skewed = not all(family.is_symmetric for family in moments.families)
        centres = skewed and root is not None and moments.residuals in _SIMULATED
        self._outcomes = _OUTCOMES if centres else 0
        self._mean, self._covariance = mean, covariance
        self._axes = Axes.of(covariance, root)
        self._product = self._design.along(self._axes.basis)
        ones = torch.ones_like(self._axes.variances)
        self._weights = torch.stack([ones, self._axes.variances])
        self._probe = self._axes.probe
        self._elsewhere = mean + self._axes.basis @ self._probe
        self._tolerance = rounding(moments.dtype)
        self.size = self._design.size  # at most so many records at a time

    def each(self, indices: Tensor, rows: list[Tensor]) -> Iterator[LowRank]:
        """:meth:`factors`, or sites by the model's derivatives for records on which it fails."""

        def others(indices: Tensor, rows: list[Tensor]) -> LowRank:
            along, precision, residual, largest = self._derived(indices, rows)
            return LowRank(along, precision, residual, largest, turn=self._axes.turn)

        return where_possible(self.factors, others, indices, rows)

    def _derived(self, indices: Tensor, rows: list[Tensor]) -> list[Tensor]:
        """J T, precisions, residuals and largest residuals, by the model's derivatives."""
        sites = self._moments.factors(self._mean, self._covariance, indices, rows)
        return sites.within(self._axes.basis)

    def factors(self, indices: Tensor, rows: list[Tensor]) -> LowRank:
        """The sites of B records, in the frame's coordinates.

        :param rows: rows of the records. This method only reads them.
        """
        here = self._design.numbers(self._mean, indices, rows)
        along = self._product(rows)  # (B, R, d)
        squares = times(self._weights, along.square().flatten(0, 1).mT)
        lengths, variances = squares.unflatten(1, along.shape[:2])  # (B, R) each
        sites, simulated, start = [], [], 0
        for family, (numbers, rest) in zip(self._moments.families, here, strict=True):
            shape, stop = numbers.shape, start + numbers.shape[1:].numel()
            if family.rank == 1:
                variance = variances[:, start:stop].reshape(*shape, 1)
            else:
                part = along[:, start:stop].reshape(*shape, -1)
                variance = (part * self._axes.variances) @ part.mT
            sites.append(element_sites(family, numbers, variance, rest))
            if self._outcomes:
                gradients = family.simulated_gradients(numbers, rest, self._outcomes)
                simulated.append(gradients.flatten(2))
            start = stop
        parts = [along, *joined(sites)]
        straight = self._design.straight[indices]
        if not straight.all():
            straight |= self._are_straight(here, along, lengths, indices, rows)
            if self._design.affine:
                self._design.straight[indices] = straight
            if not straight.all():
                bent = ~straight
                found = self._derived(indices[bent], [row[bent] for row in rows])
                # Replace only these: the numbers of other records must not change by rounding.
                parts = [x.index_put((bent,), new) for x, new in zip(parts, found, strict=True)]
                lengths = lengths.index_put((bent,), found[0].square().sum(dim=2))
        along, precision, residual, largest = parts
        lengths = lengths * _ROOM
        drawn = torch.cat(simulated, dim=2) if simulated else residual.new_zeros(0)
        return LowRank(along, precision, residual, largest, lengths, self._axes.turn, drawn)

    def _are_straight(
        self, here: Numbers, along: Tensor, lengths: Tensor, indices: Tensor, rows: list[Tensor]
    ) -> Tensor:
        """Whether each record's numbers differ between two points as J T predicts, (B,)."""
        there = self._design.numbers(self._elsewhere, indices, rows)
        before, after = (
            torch.cat([a.flatten(1) for a, _ in each], dim=1) for each in (here, there)
        )
        gap = after - before - along @ self._probe
        size = after.abs() + before.abs() + lengths.sqrt()
        return (gap.abs() <= self._tolerance * size).all(dim=1)
