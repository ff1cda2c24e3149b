"""Contributions of a batch of records to the blocks of a release, in the form that is cheapest."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.linalg import gram, in_memory

LEAST_BOUND = 1e-6
_CACHED = 2**16  # numbers
_HELD = 2**12  # columns of a copy in float64; the batch must not decide how norms are rounded


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
        """Standard deviation of the noise in a coordinate; 0 without noise, whatever the bound."""
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
        self.values = values.reshape(len(values), values.shape[1:].numel())

    def norms(self) -> Tensor:
        # torch's vector_norm loses 1e-10 of a row of 10^8 numbers.
        return self.squared_norms().sqrt()

    def squared_norms(self) -> Tensor:
        """(B, 1)"""
        return _sum_of([part.square().sum(dim=1, keepdim=True) for part in self._parts()])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        sums = [torch.where(weights > 0, x * weights, 0.0).sum(dim=0) for x in self._parts()]
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def _parts(self) -> Iterator[Tensor]:
        """A few columns after the other: copies of all would take a multiple of the memory."""
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
    """How many rows to round at a time: they stay in a processor's cache, in at most 32 parts."""
    return max(1, count if fused else max(_CACHED // max(1, size), math.ceil(count / 32)))


def whole_total(parts: Iterable[Tensor]) -> Tensor:
    """The sum of numbers of at most 2^30, each rounded towards zero: (...) in int64.

    :param parts: (rows, ...) each.
    """
    # A conversion to int32, where they fit, takes a tenth of the time of torch.trunc.
    sums = [part.to(torch.int32).sum(dim=0, dtype=torch.int64) for part in parts]
    return _sum_of(sums)


def _sum_of(terms: Sequence[Tensor]) -> Tensor:
    return sum(terms[1:], terms[0])


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


@dataclass
class LookedUpRows:
    """A block of the records' contributions: zero, except for the rows that a record reads.

    A record that reads a row several times adds up the gradients there.

    :param gradients: the gradients in the rows that each record reads, (B, T, q).
    :param indices: which rows it reads, (B, T), from 0 to size - 1.
    """

    gradients: Tensor
    indices: Tensor
    num_rows: int

    def squared_norms(self) -> Tensor:
        """(B, 1) in float64; never below the true ones."""
        own = self.gradients.double()
        same = self.indices.unsqueeze(2) == self.indices.unsqueeze(1)  # (B, T, T)
        gram = own @ own.mT
        squares = torch.where(same, gram, 0.0).sum(dim=(1, 2)).clamp(min=0.0)
        # That sum has terms of both signs: what rounding may take away is put back.
        lengths = gram.diagonal(dim1=1, dim2=2).sqrt()
        size = torch.where(same, lengths.unsqueeze(2) * lengths.unsqueeze(1), 0.0).sum(dim=(1, 2))
        terms = own.shape[2] + own.shape[1] ** 2 + 8
        return (squares + terms * torch.finfo(torch.float64).eps * size).unsqueeze(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """(size,) in float64; where a weight (B, 1) is zero, the record does not matter."""
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
    """A block of the records' contributions: left @ right, flattened, of each record.

    :param left: (B, p, k).
    :param right: (B, k, q).
    :param transposed: transpose each record's matrix before it is flattened.
    """

    left: Tensor
    right: Tensor
    transposed: bool = False

    def squared_norms(self) -> Tensor:
        """(B, 1) in float64; never below the true ones."""
        tiny = torch.finfo(torch.float64).tiny  # squares that underflow do not count as zero
        if self.left.shape[2] == 1:
            ours, theirs = Rows(self.left).squared_norms(), Rows(self.right).squared_norms()
            return (ours + tiny) * (theirs + tiny)
        left, right = self.left.double(), self.right.double()
        ours, theirs = left.mT @ left, right @ right.mT  # (B, k, k)
        squares = (ours * theirs).sum(dim=(1, 2)).clamp(min=0.0)
        # That sum has terms of both signs: what rounding may take away is put back. An entry of a
        # Gram matrix is rounded in proportion to the norms of the two vectors.
        own, other = (each.diagonal(dim1=1, dim2=2) for each in (ours, theirs))
        size = (own * other).sqrt().sum(dim=1).square()
        terms = left.shape[1] + right.shape[2] + left.shape[2] ** 2 + 8
        # An entry that underflows may meet one that nearly overflows.
        lost = tiny * (1 + own.sum(dim=1) + other.sum(dim=1))
        return (squares + terms * (torch.finfo(torch.float64).eps * size + lost)).unsqueeze(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """(p q,) in float64; where a weight (B, 1) is zero, the record does not matter."""
        return self.sum_into(weights.new_empty(self.size, dtype=torch.float64), weights)

    def sum_into(self, total: Tensor, weights: Tensor) -> Tensor:
        """The same, written into this memory."""
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
        # A batched product of vectors takes twenty times as long as their multiplication.
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
    """Blocks that are clipped jointly."""

    parts: Sequence[OuterProducts | LookedUpRows | Rows]

    def norms(self) -> Tensor:
        return _sum_of([part.squared_norms() for part in self.parts]).sqrt()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        # A copy of products would take as long as they do.
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
    """Rows of weight (B, 1) zero are zero, NaN or not; where there are none, the values."""
    counts = weights[:, 0] > 0
    if in_memory(values) and counts.all():
        return values
    return torch.where(counts.reshape(-1, *(1,) * (values.dim() - 1)), values, 0.0)


def weighted_gram(rows: Tensor, weights: Tensor) -> Tensor:
    """Sum of weights (B, 1), of any sign, times rows' rows, (d, d)."""
    if not in_memory(rows):
        return (rows * weights).mT @ rows
    total = gram(rows * weights.clamp(min=0.0).sqrt())  # half the work of a product
    if (weights < 0).any():
        total -= gram(rows * (-weights).clamp(min=0.0).sqrt())
    return total
