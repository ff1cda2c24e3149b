"""Contributions of a batch of records to the blocks of a release, in the form that is cheapest."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pyro_dp.utils.errors import ConfigurationError

LEAST_BOUND = 1e-6
_CACHED = 2**16  # numbers


@dataclass(frozen=True)
class Block:
    """One block of a joint release.

    A release of several blocks is *one* Gaussian event. With noise multipliers sigma_k in units of
    each block's own bound it costs sigma = (sum_k sigma_k^-2)^(-1/2). A block with share s_k of the
    cost has sigma_k = sigma / sqrt(s_k).

    :param size: number of coordinates.
    :param bound: Euclidean norm to which the block of one record is clipped; at least 1e-6, far
        above where squares underflow.
    :param share: the part of sigma^-2 that this block takes; the shares of a release sum to 1.
    """

    size: int
    bound: float
    share: float = 1.0

    def __post_init__(self) -> None:
        if not self.bound >= LEAST_BOUND:
            raise ConfigurationError(
                f"The bound of a record's part is {self.bound:g}, and norms that small are not "
                f"computed safely. Use bounds of at least {LEAST_BOUND:g}, in larger units."
            )

    def noise(self, multiplier: float) -> float:
        """Standard deviation of the noise in a coordinate; 0 without noise, whatever the bound.

        :param multiplier: sigma of the release.
        """
        return multiplier * self.bound / math.sqrt(self.share) if multiplier > 0 else 0.0


class Contributions(Protocol):
    """One block of a batch of records, where a tensor of shape (B, size) would be too large."""

    def norms(self) -> Tensor | None:
        """Euclidean norms of the block's rows, (B, 1) in float64; never below the true ones.

        A record with a NaN or infinite coordinate has a norm that is not finite. None: all rows
        are finite and keep the bound by themselves.
        """

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Sum of the rows times their weights, (size,) in float64.

        :param weights: (B, 1); where a weight is zero, the row must not matter, NaN or not.
        """

    def dense(self) -> Tensor:
        """The tensor itself, in float64, for sums that must see every coordinate."""


class Measured(Contributions, Protocol):
    """A block with stored norms."""

    def norms(self) -> Tensor: ...


class Divisible(Measured, Protocol):
    """A block whose coordinates can be rounded without holding all of them at once."""

    @property
    def size(self) -> int:
        """Number of coordinates."""

    def whole_sum(self, weights: Tensor, fused: bool) -> Tensor:
        """Sum of the rows times their weights, each coordinate rounded towards zero first: (size,)
        in int64.

        :param weights: (B, 1) in float64; no row times its weight is longer than 2^30. If a weight
            is zero, the row does not matter.
        :param fused: it will be compiled, and holds nothing between.
        """


def divisible(block: Contributions) -> Divisible:
    """The block itself, or its rows, with the norms of exactly the numbers that are rounded."""
    inner = block
    while isinstance(inner, Kept):
        inner = inner.block
    # A protocol that is asked at run time would call properties.
    return block if hasattr(inner, "whole_sum") else Rows(block.dense())  # type: ignore[return-value]


class Rows:
    """A block that is held as it is.

    All in float64. The norm of a float32 vector overflows at 1e19. The scale of a long
    half-precision one is too coarse for the bound to hold.

    :param values: (B, ...), which are flattened.
    """

    def __init__(self, values: Tensor):
        self.values = values.to(torch.float64).reshape(len(values), values.shape[1:].numel())

    def norms(self) -> Tensor:
        # torch's vector_norm loses 1e-10 of a row of 10^8 numbers.
        return self.squared_norms().sqrt()

    def squared_norms(self) -> Tensor:
        """(B, 1)"""
        return self.values.square().sum(dim=1, keepdim=True)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return torch.where(weights > 0, self.values * weights, 0.0).sum(dim=0)

    def dense(self) -> Tensor:
        return self.values

    @property
    def size(self) -> int:
        return self.values.shape[1]

    def whole_sum(self, weights: Tensor, fused: bool) -> Tensor:
        rows = few_rows(len(weights), self.size, fused)
        parts = zip(torch.split(self.values, rows), torch.split(weights, rows), strict=True)
        return whole_total(torch.where(own > 0, values * own, 0.0) for values, own in parts)


def few_rows(count: int, size: int, fused: bool) -> int:
    """How many rows to round at a time: they stay in a processor's cache, in at most 32 parts."""
    return max(1, count if fused else max(_CACHED // max(1, size), math.ceil(count / 32)))


def whole_total(parts: Iterable[Tensor]) -> Tensor:
    """The sum of numbers of at most 2^30, each rounded towards zero: (...) in int64.

    :param parts: (rows, ...) each.
    """
    # A conversion to int32, where they fit, takes a tenth of the time of torch.trunc.
    sums = [part.to(torch.int32).sum(dim=0, dtype=torch.int64) for part in parts]
    return sum(sums[1:], sums[0])


class Kept:
    """A block whose norms are kept, and whose rows may be made shorter, whatever the bound.

    :param norms: (B, 1).
    :param factors: (B, 1) in [0, 1], which make rows shorter; private. None: all are 1.
    """

    def __init__(self, block: Contributions, norms: Tensor, factors: Tensor | None = None):
        self.block, self._factors = block, factors
        self._norms = self._scaled(norms)

    def norms(self) -> Tensor:
        return self._norms

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.block.weighted_sum(self._of_rows(weights))

    def dense(self) -> Tensor:
        return self._scaled(self.block.dense())

    @property
    def size(self) -> int:
        return divisible(self.block).size

    def whole_sum(self, weights: Tensor, fused: bool) -> Tensor:
        return divisible(self.block).whole_sum(self._of_rows(weights), fused)

    def _scaled(self, values: Tensor) -> Tensor:
        return values if self._factors is None else values * self._factors

    def _of_rows(self, weights: Tensor) -> Tensor:
        # A broken record's factor is NaN, and its weight zero.
        return torch.where(weights > 0, self._scaled(weights), 0.0)


class _Bits:
    """Numbers +-1/2, (B, 1): a block that keeps its bound of 1/2 by itself."""

    def __init__(self, values: Tensor):
        self._values = values

    def norms(self) -> None:
        return None

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return torch.where(weights > 0, self._values, 0.0).sum(dim=0, dtype=torch.float64)

    def dense(self) -> Tensor:
        return self._values.to(torch.float64)


def with_bit(block: Measured, bound: Tensor | float) -> list[Contributions]:
    """The block, and one of bound 1/2: +1/2 for each record within the bound, -1/2 beyond it."""
    norms = block.norms()
    return [Kept(block, norms), _Bits(torch.where(norms <= bound, 0.5, -0.5))]
