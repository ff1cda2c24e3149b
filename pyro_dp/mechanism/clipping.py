"""Clip each record's contribution, and add them up. The sum stays private until it is released.

The sensitivity follows from the bound C. Emptying one record moves the sum by at most C, and
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
    """The private sums of a batch's clipped contributions: (size,) in float64 for each block.

    If a record has a NaN or infinite coordinate, it adds zero to *every* block.

    :param values: the batch's contributions to each block.
    :param bounds: the norm to which a record is clipped in each block.
    :param weights: (B, 1): 1 for a record, 0 for a padded row. None: all are 1.
    """
    norms = [each.norms() for each in values]  # (B, 1)
    measured = [norm for norm in norms if norm is not None]
    counted = sum(measured[1:], measured[0]) < math.inf  # (B, 1); false for NaN
    if weights is not None:
        counted = counted & (weights > 0)
    sums = []
    for each, bound, norm in zip(values, bounds, norms, strict=True):
        if norm is None:
            sums.append(each.weighted_sum(counted))
            continue
        # With float64 and this margin, no rounding exceeds the bound.
        target = torch.as_tensor(bound, dtype=torch.float64, device=norm.device) * (1 - 1e-12)
        scale = torch.where(norm > target, target / norm, 1.0)
        sums.append(each.weighted_sum(torch.where(counted, scale, 0.0)))
    return sums


class ClippedSum:
    """The sum of clipped contributions over the records of a step, built up from microbatches.

    Sums are in float64, where the rounding of a long sum stays far below one record's bound.
    (:class:`~pyro_dp.mechanism.fixed_point.FixedPointSum` uses integers, against attacks on
    rounding.)
    """

    clipped_sums = staticmethod(clipped_sums)
    compiled_sums = clipped_sums  # for use in a compiled graph
    dtype = torch.float64

    @staticmethod
    def most_records(size: int, limit: int | None) -> int | None:
        """The largest microbatch, for records of ``size`` coordinates. None: all records at once.

        :param limit: the largest that the user allows; None: any.
        """
        return limit

    def __init__(self, blocks: Sequence[Block], device: torch.device | str = "cpu"):
        self.blocks = tuple(blocks)
        self.device = device
        self._added: tuple[Tensor, ...] = ()  # empty before the first batch

    @torch.no_grad()  # a network outside the model's parameters may require gradients
    def add(self, *values: Tensor | Contributions) -> None:
        """Clip the contributions of a batch, and add them.

        :param values: (B, size), or its equivalent, for each block; private.
        """
        rows = [Rows(value) if isinstance(value, Tensor) else value for value in values]
        self.add_sums(self.clipped_sums(rows, [block.bound for block in self.blocks]))

    def add_each(
        self, contribute: Callable[[S], Sequence[Tensor | Contributions]], batches: Iterable[S]
    ) -> None:
        """Call :meth:`add` with ``contribute(batch)`` for each of these small batches."""
        with one_thread():
            for batch in batches:
                self.add(*contribute(batch))

    def add_sums(self, sums: Sequence[Tensor]) -> None:
        """Add the result of :attr:`clipped_sums`, computed with the bounds of these blocks."""
        if self._added:
            sums = [total + new for total, new in zip(self._added, sums, strict=True)]
        self._added = tuple(sums)

    def over_ranks(self, reduce: Callable[[Tensor], Tensor | None]) -> None:
        """Replace this process's sum by the total of all processes in a cluster.

        :param reduce: takes this process's sums, concatenated. It returns the total on the rank
            that releases it. Elsewhere it returns None, and this sum becomes empty.
        """
        total = reduce(torch.cat(self._totals))
        sizes = [block.size for block in self.blocks]
        self._added = () if total is None else torch.split(total.to(self.device), sizes)

    def require_same_as(self, other: "ClippedSum", *, count: int, exact: bool) -> None:
        """Check that two computations agree in their first block, without revealing the sums.

        :param count: number of records that both have added, the same ones.
        :param exact: whether the model computes in float64.
        :raises ModelError: the sums differ by more than rounding explains.
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
        """The largest rounding error of a sum of ``count`` records, in units of the bound."""
        return 0.0

    def require_noise(self, sigmas: Sequence[float]) -> None:
        """:raises ConfigurationError: noise of one of these sizes cannot be added to its block."""

    @property
    def _totals(self) -> tuple[Tensor, ...]:
        """Private sums, in units of the grid for a :class:`FixedPointSum`."""
        return self._added or tuple(
            torch.zeros(b.size, dtype=self.dtype, device=self.device) for b in self.blocks
        )

    @property
    def _exact_sums(self) -> tuple[Tensor, ...]:
        """Private sums."""
        return self._totals

    def _noisy(self, sigmas: Sequence[float], noise: Stream) -> list[Tensor]:
        """The sums with noise. Only :func:`release` may call this.

        :param sigmas: standard deviation of each block's noise, in units of that block's bound.
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
