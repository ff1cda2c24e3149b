"""The contributions of a batch of records to a release, in the form that is cheapest to compute.

A release consists of blocks, each with a clipping bound of its own. A batch of B records
contributes a matrix (B, size) to each block, with a row for each record. The classes here compute
the rows' norms and weighted sums, and most of them never build the matrix.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.linalg import gram, in_memory

LEAST_BOUND = 1e-6
_CACHED = 2**16  # numbers that fit a processor's cache
# Columns of a copy in float64. It is fixed, so the rounding of a norm does not depend on the batch.
_HELD = 2**12


@dataclass(frozen=True)
class Block:
    """One block of a joint release.

    A release of several blocks is *one* Gaussian event. Let block k have the noise multiplier
    sigma_k, in units of its bound. Then the event's is sigma = (sum_k sigma_k^-2)^(-1/2). A block
    that takes the share s_k of the cost has sigma_k = sigma / sqrt(s_k).

    :param size: number of coordinates.
    :param bound: Euclidean norm to which the block of one record is clipped. It is at least 1e-6,
        because squares of much smaller numbers underflow.
    :param share: the part of sigma^-2 that this block takes; the shares of a release sum to 1.
    """

    size: int
    bound: float
    share: float = 1.0

    def __post_init__(self) -> None:
        if not self.bound >= LEAST_BOUND:
            raise ConfigurationError(
                f"The bound of a record's part is {self.bound:g}, and such small norms cannot be "
                f"computed safely. Choose larger units, with bounds of at least {LEAST_BOUND:g}."
            )

    def noise(self, multiplier: float) -> float:
        """Standard deviation of the noise in a coordinate, for the event's noise multiplier."""
        return multiplier * self.bound / math.sqrt(self.share) if multiplier > 0 else 0.0


class Contributions(Protocol):
    """A batch's rows (B, size) of one block."""

    def norms(self) -> Tensor | None:
        """Upper bounds of the rows' Euclidean norms, (B, 1) in float64, tight up to rounding.

        If a row has a NaN or infinite coordinate, its norm is not finite. None: all rows are finite
        and within the block's bound.
        """

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """The sum of the rows times their weights, (size,) in float64.

        :param weights: (B, 1); a row of weight zero is ignored, even if it holds NaN.
        """

    def dense(self) -> Tensor:
        """The rows themselves, (B, size) in float64."""


class Measured(Contributions, Protocol):
    """Rows that must be clipped, so they have norms."""

    def norms(self) -> Tensor: ...


class Divisible(Measured, Protocol):
    """Rows that can be rounded to integers in parts, without building all of them at once."""

    @property
    def size(self) -> int:
        """Number of coordinates."""

    def whole_sum(self, weights: Tensor, fused: bool) -> Tensor:
        """The sum of the weighted rows, each coordinate first rounded towards zero; (size,) int64.

        :param weights: (B, 1) in float64. The norm of a weighted row is at most 2^30. A row of
            weight zero is ignored.
        :param fused: the code will be compiled, so nothing is gained by small parts.
        """


def divisible(block: Contributions) -> Divisible:
    """The block, if it has ``whole_sum``, and otherwise its dense rows.

    Norms then belong to exactly the numbers that are rounded.
    """
    inner = block
    while isinstance(inner, Kept):
        inner = inner.block
    # A runtime-checkable protocol would evaluate the properties.
    return block if hasattr(inner, "whole_sum") else Rows(block.dense())  # type: ignore[return-value]


class Rows:
    """Rows that are stored as a matrix, and computed with in float64.

    In float32 norms overflow at 1e19. In half precision the scale of a long row is too coarse for
    the bound to hold.

    :param values: (B, ...), which is flattened to (B, size).
    """

    def __init__(self, values: Tensor):
        self.values = values.reshape(len(values), values.shape[1:].numel())

    def norms(self) -> Tensor:
        # torch's vector_norm has a relative error of 1e-10 for a row of 10^8 numbers.
        return self.squared_norms().sqrt()

    def squared_norms(self) -> Tensor:
        """(B, 1)"""
        return _sum_of([part.square().sum(dim=1, keepdim=True) for part in self._parts()])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        sums = [torch.where(weights > 0, x * weights, 0.0).sum(dim=0) for x in self._parts()]
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def _parts(self) -> Iterator[Tensor]:
        """Copies in float64 of a few columns at a time, to save memory."""
        return (part.to(torch.float64) for part in torch.split(self.values, _HELD, dim=1))

    def dense(self) -> Tensor:
        return self.values.to(torch.float64)

    @property
    def size(self) -> int:
        return self.values.shape[1]

    def whole_sum(self, weights: Tensor, fused: bool) -> Tensor:
        rows = few_rows(len(weights), self.size, fused)
        parts = zip(torch.split(self.dense(), rows), torch.split(weights, rows), strict=True)
        return whole_total(torch.where(own > 0, values * own, 0.0) for values, own in parts)


def few_rows(count: int, size: int, fused: bool) -> int:
    """How many rows to round at a time: as many as fit a cache, but at most 32 parts in all."""
    return max(1, count if fused else max(_CACHED // max(1, size), math.ceil(count / 32)))


def whole_total(parts: Iterable[Tensor]) -> Tensor:
    """The sum over all rows of numbers that are rounded towards zero first: (...) in int64.

    :param parts: (rows, ...) each, of absolute values up to 2^30.
    """
    # Conversion to int32 rounds like torch.trunc, in a tenth of the time.
    return _sum_of([part.to(torch.int32).sum(dim=0, dtype=torch.int64) for part in parts])


def _sum_of(terms: Sequence[Tensor]) -> Tensor:
    return sum(terms[1:], terms[0])


class Kept:
    """A block with precomputed norms, whose rows may also be scaled down.

    :param norms: (B, 1), before scaling.
    :param factors: (B, 1) in [0, 1], private: a row's scale. None: all are 1.
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
        # If a record has NaN, so has its factor, and its weight is zero.
        return torch.where(weights > 0, self._scaled(weights), 0.0)


class _Bits:
    """Numbers +-1/2, (B, 1). They are within the block's bound of 1/2, so they have no norms."""

    def __init__(self, values: Tensor):
        self._values = values

    def norms(self) -> None:
        return None

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return torch.where(weights > 0, self._values, 0.0).sum(dim=0, dtype=torch.float64)

    def dense(self) -> Tensor:
        return self._values.to(torch.float64)


def with_bit(block: Measured, bound: Tensor | float) -> list[Contributions]:
    """The block, and a block of bound 1/2 that counts: +1/2 for each record within, -1/2 beyond.

    :param bound: C, the first block's.
    """
    norms = block.norms()
    return [Kept(block, norms), _Bits(torch.where(norms <= bound, 0.5, -0.5))]


@dataclass
class LookedUpRows:
    """Gradients with respect to a table (num_rows, q). Each record reads T rows of the table.

    If a record reads a row several times, the gradients there add up.

    :param gradients: with respect to the rows that a record reads, (B, T, q).
    :param indices: the rows that a record reads, (B, T), from 0 to num_rows - 1.
    """

    gradients: Tensor
    indices: Tensor
    num_rows: int

    def squared_norms(self) -> Tensor:
        """Upper bounds, (B, 1) in float64, tight up to rounding."""
        own = self.gradients.double()
        same = self.indices.unsqueeze(2) == self.indices.unsqueeze(1)  # (B, T, T)
        gram = own @ own.mT
        squares = torch.where(same, gram, 0.0).sum(dim=(1, 2)).clamp(min=0.0)
        # Terms of both signs cancel, so a bound of the rounding error is added.
        lengths = gram.diagonal(dim1=1, dim2=2).sqrt()
        size = torch.where(same, lengths.unsqueeze(2) * lengths.unsqueeze(1), 0.0).sum(dim=(1, 2))
        terms = own.shape[2] + own.shape[1] ** 2 + 8
        return (squares + terms * torch.finfo(torch.float64).eps * size).unsqueeze(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        weights = weights.unsqueeze(2)
        own = torch.where(weights > 0, self.gradients * weights, 0.0).double()
        total = own.new_zeros(self.num_rows, own.shape[2])
        return total.index_add(0, self.indices.flatten(), own.flatten(0, 1)).flatten()

    def dense(self) -> Tensor:
        count, own = len(self.gradients), self.gradients.double()
        first = self.num_rows * torch.arange(count, device=own.device).unsqueeze(1)
        total = own.new_zeros(count * self.num_rows, own.shape[2])
        places = (self.indices + first).flatten()
        return total.index_add(0, places, own.flatten(0, 1)).reshape(count, self.size)

    @property
    def size(self) -> int:
        return self.num_rows * self.gradients.shape[2]

    def whole_sum(self, weights: Tensor, fused: bool) -> Tensor:
        return Rows(self.dense()).whole_sum(weights, fused)


@dataclass
class OuterProducts:
    """Rows that are flattened matrix products left @ right, as gradients of a linear layer are.

    :param left: (B, p, k).
    :param right: (B, k, q).
    :param transposed: transpose each record's matrix before it is flattened.
    """

    left: Tensor
    right: Tensor
    transposed: bool = False

    def squared_norms(self) -> Tensor:
        """Upper bounds, (B, 1) in float64, tight up to rounding."""
        tiny = torch.finfo(torch.float64).tiny  # added, because squares may underflow to zero
        if self.left.shape[2] == 1:
            ours, theirs = Rows(self.left).squared_norms(), Rows(self.right).squared_norms()
            return (ours + tiny) * (theirs + tiny)
        left, right = self.left.double(), self.right.double()
        ours, theirs = left.mT @ left, right @ right.mT  # (B, k, k)
        squares = (ours * theirs).sum(dim=(1, 2)).clamp(min=0.0)
        # Terms of both signs cancel, so a bound of the rounding error is added. An entry of a Gram
        # matrix has an error in proportion to the norms of the two vectors.
        own, other = (each.diagonal(dim1=1, dim2=2) for each in (ours, theirs))
        size = (own * other).sqrt().sum(dim=1).square()
        terms = left.shape[1] + right.shape[2] + left.shape[2] ** 2 + 8
        # An entry that underflows may be multiplied by one that nearly overflows.
        lost = tiny * (1 + own.sum(dim=1) + other.sum(dim=1))
        return (squares + terms * (torch.finfo(torch.float64).eps * size + lost)).unsqueeze(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.sum_into(weights.new_empty(self.size, dtype=torch.float64), weights)

    def sum_into(self, total: Tensor, weights: Tensor) -> Tensor:
        """Write :meth:`weighted_sum` into ``total``, and return it."""
        left, right = (counted(each, weights).double() for each in (self.left, self.right))
        if left.shape[1] < right.shape[2]:
            left = left * weights.unsqueeze(2)
        else:
            right = right * weights.unsqueeze(2)
        # (p, B k) (B k, q)
        factors = left.permute(1, 0, 2).flatten(1), right.flatten(0, 1)
        if self.transposed:
            factors = factors[1].T, factors[0].T
        torch.mm(*factors, out=total.view(len(factors[0]), -1))
        return total

    def dense(self) -> Tensor:
        left, right = self.left.double(), self.right.double()
        # For vectors, batched matmul takes twenty times as long as multiplication.
        products = left * right if left.shape[2] == 1 else left @ right
        return (products.mT if self.transposed else products).flatten(1)

    @property
    def size(self) -> int:
        return self.left.shape[1] * self.right.shape[2]

    def whole_sum(self, weights: Tensor, fused: bool) -> Tensor:
        if self.left.shape[2] > 1:
            return Rows(self.dense()).whole_sum(weights, fused)
        left, right = self.left.flatten(1).double(), self.right.flatten(1).double()
        kept = weights > 0
        left = torch.where(kept, left * weights, 0.0)
        right = torch.where(kept, right, 0.0)
        rows = few_rows(len(weights), self.size, fused)
        total = whole_total(
            x.unsqueeze(2) * y.unsqueeze(1)
            for x, y in zip(torch.split(left, rows), torch.split(right, rows), strict=True)
        )
        return (total.T if self.transposed else total).flatten()


@dataclass
class Joined:
    """One block that consists of several parts, clipped by their joint norm."""

    parts: Sequence[OuterProducts | LookedUpRows | Rows]

    def norms(self) -> Tensor:
        return _sum_of([part.squared_norms() for part in self.parts]).sqrt()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        # Products are written into the result: a copy would take as long as the product.
        total = weights.new_empty(self.size, dtype=torch.float64)
        sizes = [part.size for part in self.parts]
        for part, own in zip(self.parts, torch.split(total, sizes), strict=True):
            if isinstance(part, OuterProducts):
                part.sum_into(own, weights)
            else:
                own.copy_(part.weighted_sum(weights))
        return total

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.parts], dim=1)

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def whole_sum(self, weights: Tensor, fused: bool) -> Tensor:
        return torch.cat([part.whole_sum(weights, fused) for part in self.parts])


def counted(values: Tensor, weights: Tensor) -> Tensor:
    """The values, with zeros instead of rows whose weight (B, 1) is zero, even if these hold NaN.

    If no weight is zero, it may be the same tensor.
    """
    counts = weights[:, 0] > 0
    if in_memory(values) and counts.all():
        return values
    return torch.where(counts.reshape(-1, *(1,) * (values.dim() - 1)), values, 0.0)


def weighted_gram(rows: Tensor, weights: Tensor) -> Tensor:
    """The sum of weight * outer(row, row), (d, d), for weights (B, 1) of any sign."""
    if not in_memory(rows):
        return (rows * weights).mT @ rows
    total = gram(rows * weights.clamp(min=0.0).sqrt())  # half the work of a product
    if (weights < 0).any():
        total -= gram(rows * (-weights).clamp(min=0.0).sqrt())
    return total
