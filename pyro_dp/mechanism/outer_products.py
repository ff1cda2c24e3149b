"""Per-record products of matrices, and gradients of looked-up rows: norms and sums from factors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dp.mechanism.contributions import Rows, few_rows, whole_total
from pyro_dp.utils.linalg import gram, in_memory


@dataclass
class LookedUpRows:
    """A block of the records' contributions: zero, except for the rows that a record reads.

    A record that reads a row several times adds up the gradients there.

    :param gradients: the gradients in the rows that each record reads, (B, T, q).
    :param indices: which rows it reads, (B, T), from 0 to size - 1.
    :param num_rows: number of the table's rows.
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
        if self.left.shape[2] == 1:
            tiny = torch.finfo(torch.float64).tiny  # squares that underflow do not count as zero
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
        return (squares + terms * torch.finfo(torch.float64).eps * size).unsqueeze(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """(p q,) in float64; where a weight (B, 1) is zero, the record does not matter."""
        left, right = (_of_weight(each, weights).double() for each in (self.left, self.right))
        if left.shape[1] < right.shape[2]:
            left = left * weights.unsqueeze(2)
        else:
            right = right * weights.unsqueeze(2)
        # (p, B k) (B k, q)
        total = left.permute(1, 0, 2).flatten(1) @ right.flatten(0, 1)
        return (total.T if self.transposed else total).flatten()

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
        squares = [part.squared_norms() for part in self.parts]
        return sum(squares[1:], squares[0]).sqrt()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        sums = [part.weighted_sum(weights) for part in self.parts]
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.parts], dim=1)

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def whole_sum(self, weights: Tensor, fused: bool) -> Tensor:
        return torch.cat([part.whole_sum(weights, fused) for part in self.parts])


def _of_weight(values: Tensor, weights: Tensor) -> Tensor:
    """Set records of weight (B, 1) zero, which may be NaN, to zero; values are (B, p, q)."""
    return torch.where(weights.unsqueeze(2) > 0, values, 0.0)


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
