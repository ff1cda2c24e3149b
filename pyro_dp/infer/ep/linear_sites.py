"""Sites of a batch by one product of its rows: what :class:`LinearMoments` gives, and faster.

With u_n = T' J_n' for the axes T of a pass (:class:`~pyro_dp.infer.ep.linear_design.Axes`) a record
of one number a(z) = J_n z + c_n has, in the release's coordinates, a residual of norm |r_n| |u_n|
and a precision of Frobenius norm Lambda_n |u_n|^2, where r_n and Lambda_n depend on J_n m + c_n, on
the variance sum D u_n^2 and on the outcome. The batch's sum is (U' (w r), U' diag(w Lambda) U),
turned by the public Q at the end: two products, and nothing of size N d^2. As the sum is made of
the very u_n that norms were taken of, in float64, rounding can take a record over the bound no
further than the rounding of a norm of d terms and of the turn by Q, of about d units of 2^-52: the
squared norms are raised by 1e-12, and the clipping has room of its own.

The model's own code still gives J_n z + c_n, at two points z: where they differ by anything else
than u_n says, the record's predictors are not what they are on public rows, and the record, and no
other, is taken by the model's own derivatives. (Where the operations of the model's code are affine
in z, neither J nor the row changes from step to step: a record that was found straight is not asked
again.)
"""

import torch
from torch import Tensor

from pyro_dp.infer.ep.element_sites import element_sites
from pyro_dp.infer.ep.linear_design import Axes, Numbers
from pyro_dp.infer.ep.site_factors import LowRank
from pyro_dp.infer.ep.tilted_sites import LinearMoments, joined
from pyro_dp.utils.linalg import times

_TOLERANCE = {torch.float64: 1e-9}
_COARSE_TOLERANCE = 1e-5
_ROOM = 1 + 1e-12  # for what turning a row by Q may add to its norm by rounding


class LinearSites:
    """
    :param moments: with a design.
    :param mean: of the cavity, (d,).
    :param covariance: of the cavity, (d, d).
    :param root: W of the frame in which the sites are released, (d, d); None: the latents' own.
    """

    def __init__(
        self, moments: LinearMoments, mean: Tensor, covariance: Tensor, root: Tensor | None
    ):
        assert moments.design is not None
        self._moments, self._design = moments, moments.design
        self._mean, self._covariance = mean, covariance
        self._axes = Axes.of(covariance, root)
        self._product = self._design.along(self._axes.basis)
        ones = torch.ones_like(self._axes.variances)
        self._weights = torch.stack([ones, self._axes.variances])
        probe = torch.cos(torch.arange(1.0, len(mean) + 1).to(mean))  # an irregular direction
        self._probe = probe / probe.norm()
        self._elsewhere = mean + self._axes.basis @ self._probe
        self._tolerance = _TOLERANCE.get(moments.dtype, _COARSE_TOLERANCE)
        self.size = self._design.size  # at most so many records at a time

    def factors(self, indices: Tensor, rows: list[Tensor]) -> LowRank:
        """Of B records, in the frame's coordinates.

        :param rows: are only read.
        """
        along = self._product(rows)  # (B, R, d)
        squares = times(self._weights, along.square().flatten(0, 1).mT)
        lengths, variances = squares.unflatten(1, along.shape[:2])  # (B, R) each
        here = self._design.numbers(self._mean, indices, rows)
        sites, start = [], 0
        for family, (numbers, rest) in zip(self._moments.families, here, strict=True):
            shape, stop = numbers.shape, start + numbers.shape[1:].numel()
            if family.rank == 1:
                variance = variances[:, start:stop].reshape(*shape, 1)
            else:
                own = along[:, start:stop].reshape(*shape, -1)
                variance = (own * self._axes.variances) @ own.mT
            sites.append(element_sites(family, numbers, variance, rest))
            start = stop
        parts = [along, *joined(sites)]
        straight = self._design.straight[indices]
        if not straight.all():
            straight |= self._are_straight(here, along, lengths, indices, rows)
            if self._design.affine:
                self._design.straight[indices] = straight
            if not straight.all():
                parts = self._with_others(~straight, parts, indices, rows)
                # Of these alone: no other record's numbers change in the last digit.
                lengths = lengths.index_put((~straight,), parts[0][~straight].square().sum(dim=2))
        along, precision, residual, largest = parts
        lengths = lengths * _ROOM
        return LowRank(along, precision, residual, largest, lengths, self._axes.turn)

    def _are_straight(
        self,
        here: Numbers,
        along: Tensor,
        lengths: Tensor,
        indices: Tensor,
        rows: list[Tensor],
    ) -> Tensor:
        """Which records' numbers move as J T says, (B,)."""
        there = self._design.numbers(self._elsewhere, indices, rows)
        before, after = (
            torch.cat([a.flatten(1) for a, _ in each], dim=1) for each in (here, there)
        )
        gap = after - before - along @ self._probe
        size = after.abs() + before.abs() + lengths.sqrt()
        return (gap.abs() <= self._tolerance * size).all(dim=1)

    def _with_others(
        self, others: Tensor, parts: list[Tensor], indices: Tensor, rows: list[Tensor]
    ) -> list[Tensor]:
        """Some records, (B,), by the model's own derivatives."""
        own = [row[others] for row in rows]
        sites = self._moments.factors(self._mean, self._covariance, indices[others], own)
        found = sites.within(self._axes.basis)
        return [x.index_put((others,), new) for x, new in zip(parts, found, strict=True)]
