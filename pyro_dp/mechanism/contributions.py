"""What the records of a batch add to one block of a release, in the form that is cheapest."""

from typing import Protocol

import torch
from torch import Tensor


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
    """A block whose norms are known."""

    def norms(self) -> Tensor: ...


class Rows:
    """A block that is held as it is.

    All in float64: the norm of a float32 vector overflows at 1e19, and the scale of a long
    half-precision one is too coarse for the bound to hold.

    :param values: (B, ...), which are flattened.
    """

    def __init__(self, values: Tensor):
        self.values = values.to(torch.float64).reshape(len(values), values.shape[1:].numel())

    def norms(self) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(self.values, dim=1, keepdim=True)
        return norms

    def squared_norms(self) -> Tensor:
        """(B, 1), for a block that is a part of another."""
        return self.values.square().sum(dim=1, keepdim=True)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return torch.where(weights > 0, self.values * weights, 0.0).sum(dim=0)

    def dense(self) -> Tensor:
        return self.values


class Kept:
    """A block whose norms are kept."""

    def __init__(self, block: Contributions, norms: Tensor):
        self.weighted_sum, self.dense = block.weighted_sum, block.dense
        self._norms = norms

    def norms(self) -> Tensor:
        return self._norms


class Scaled:
    """A block whose rows are made shorter, whatever the bound.

    :param factors: in [0, 1], (B, 1); private.
    """

    def __init__(self, block: Measured, factors: Tensor):
        self._block, self._factors = block, factors

    def norms(self) -> Tensor:
        return self._block.norms() * self._factors

    def weighted_sum(self, weights: Tensor) -> Tensor:
        # A broken record's factor is NaN, and its weight zero.
        return self._block.weighted_sum(torch.where(weights > 0, weights * self._factors, 0.0))

    def dense(self) -> Tensor:
        return self._block.dense() * self._factors


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
