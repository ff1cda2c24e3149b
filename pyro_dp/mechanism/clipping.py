"""Clip and sum: one record's contribution is bounded, and the sum is private until released.

Both relations follow from the bound C alone: zeroing one record out moves the sum by at most C,
replacing it by at most 2C.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from pyro_dp.mechanism.contributions import Block, Contributions, Rows
from pyro_dp.mechanism.streams import normals
from pyro_dp.mechanism.system_random import Stream, SystemGenerator
from pyro_dp.utils.errors import PrivacyError
from pyro_dp.utils.linalg import require_same
from pyro_dp.utils.torch_state import one_thread

S = TypeVar("S")


def clipped_sums(
    values: Sequence[Contributions], bounds: Sequence[Tensor | float], weights: Tensor | None = None
) -> list[Tensor]:
    """Clip each record's blocks and sum them: (size,) in float64 per block, private.

    A record with a NaN or infinite coordinate adds zero to *every* block.

    :param values: one per block.
    :param bounds: norms to which they are clipped.
    :param weights: (B, 1), one for a record and zero for a padded row; all ones by default.
    """
    norms = [each.norms() for each in values]  # (B, 1)
    measured = [norm for norm in norms if norm is not None]
    counted = sum(measured[1:], measured[0]) < math.inf  # (B, 1); NaN is not
    if weights is not None:
        counted = counted & (weights > 0)
    sums = []
    for each, bound, norm in zip(values, bounds, norms, strict=True):
        if norm is None:
            sums.append(each.weighted_sum(counted))
            continue
        # In float64: rounding stays within the bound.
        target = torch.as_tensor(bound, dtype=torch.float64, device=norm.device) * (1 - 1e-12)
        scale = torch.where(norm > target, target / norm, 1.0)
        sums.append(each.weighted_sum(torch.where(counted, scale, 0.0)))
    return sums


class ClippedSum:
    """Sum over records of their clipped blocks; microbatches are added one after the other.

    Sums are kept in float64, so that rounding in a long sum stays far below one record's bound.
    (:class:`~pyro_dp.mechanism.fixed_point.FixedPointSum` keeps them in integers, against attacks
    on rounding.)
    """

    clipped_sums = staticmethod(clipped_sums)
    compiled_sums = clipped_sums  # the same, for a graph that will be compiled
    dtype = torch.float64

    @staticmethod
    def most_records(size: int, limit: int | None) -> int | None:
        """How many records of so many coordinates to work on at a time; None: all of them."""
        return limit

    def __init__(self, blocks: Sequence[Block], device: torch.device | str = "cpu"):
        self.blocks = tuple(blocks)
        self.device = device
        self._added: tuple[Tensor, ...] = ()  # until there is something

    @torch.no_grad()  # a network that is no parameter of the model may ask for gradients
    def add(self, *values: Tensor | Contributions) -> None:
        """Clip each record's blocks and add them.

        :param values: one tensor of shape (B, size), or its equivalent, per block; private.
        """
        rows = [Rows(value) if isinstance(value, Tensor) else value for value in values]
        self.add_sums(self.clipped_sums(rows, [block.bound for block in self.blocks]))

    def add_each(
        self, contribute: Callable[[S], Sequence[Tensor | Contributions]], batches: Iterable[S]
    ) -> None:
        """As :meth:`add`, of the contribution of each of these small batches."""
        with one_thread():
            for batch in batches:
                self.add(*contribute(batch))

    def add_sums(self, sums: Sequence[Tensor]) -> None:
        """Add the result of :attr:`clipped_sums` for these bounds."""
        if self._added:
            sums = [total + new for total, new in zip(self._added, sums, strict=True)]
        self._added = tuple(sums)

    def over_ranks(self, reduce: Callable[[Tensor], Tensor | None]) -> None:
        """Become the sum over all processes of a cluster, where it is released; empty elsewhere.

        :param reduce: from this process's part of all blocks, one after the other, to the total;
            None where that does not belong.
        """
        total = reduce(torch.cat(self._totals))
        sizes = [block.size for block in self.blocks]
        self._added = () if total is None else torch.split(total.to(self.device), sizes)

    def require_same_as(self, other: "ClippedSum", *, count: int, exact: bool) -> None:
        """Compare the first blocks of two computations. No sum leaves this class for it.

        :param count: number of the records, which are the same.
        :param exact: whether the model computes in float64.
        :raises ModelError: they differ by more than rounding explains.
        """
        bound = self.blocks[0].bound
        require_same(
            self._exact_sums[0],
            other._exact_sums[0],
            exact=exact,
            scale=bound if bound < math.inf else 0.0,
            rounding=self.rounding(count),
        )

    def rounding(self, count: int) -> float:
        """The largest difference of sums of so many equal records, in units of the bound."""
        return 0.0

    def require_noise(self, sigmas: Sequence[float]) -> None:
        """:raises ConfigurationError: noise of such a size, one per block, cannot be added."""

    @property
    def _totals(self) -> tuple[Tensor, ...]:
        """In units of the grid, if there is one."""
        return self._added or tuple(
            torch.zeros(b.size, dtype=self.dtype, device=self.device) for b in self.blocks
        )

    @property
    def _exact_sums(self) -> tuple[Tensor, ...]:
        """Private until released."""
        return self._totals

    def _noisy(self, sigmas: Sequence[float], noise: Stream) -> list[Tensor]:
        """The sums with noise, for :func:`release` only.

        :param sigmas: standard deviation of each block's noise in units of the block's bound.
        """
        if isinstance(noise, SystemGenerator):
            raise PrivacyError("A SystemGenerator draws integers: its noise needs a FixedPointSum.")
        released = []
        for block, total, sigma in zip(self.blocks, self._exact_sums, sigmas, strict=True):
            if sigma > 0:
                draw = normals(noise, block.size, sigma * block.bound, total.device)
                released.append(draw.add_(total))
            else:
                released.append(total.clone())
        return released
