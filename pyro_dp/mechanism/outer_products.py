"""Per-record parts that are matrix products: their norms and sums, without the matrices."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dp.mechanism.contributions import Rows


@dataclass
class OuterProducts:
    """A block of the records' contributions: left @ right, flattened, of each record.

    :param left: (B, p, k).
    :param right: (B, k, q).
    :param transposed: of each record; before it is flattened.
    """

    left: Tensor
    right: Tensor
    transposed: bool = False

    def squared_norms(self) -> Tensor:
        """(B, 1) in float64; never below the true ones."""
        if self.left.shape[2] == 1:
            return Rows(self.left).squared_norms() * Rows(self.right).squared_norms()
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
        left, right = finite(self.left).double(), finite(self.right).double()
        if left.shape[1] < right.shape[2]:
            left = left * weights.unsqueeze(2)
        else:
            right = right * weights.unsqueeze(2)
        # (p, B k) (B k, q)
        total = left.permute(1, 0, 2).flatten(1) @ right.flatten(0, 1)
        return (total.T if self.transposed else total).flatten()

    def dense(self) -> Tensor:
        """(B, p q) in float64."""
        left, right = self.left.double(), self.right.double()
        # A batched product of vectors takes twenty times as long as their multiplication.
        products = left * right if left.shape[2] == 1 else left @ right
        return (products.mT if self.transposed else products).flatten(1)


@dataclass
class Joined:
    """Blocks that are clipped jointly.

    One of :class:`~pyro_dp.mechanism.contributions.Contributions`.
    """

    parts: Sequence[OuterProducts | Rows]

    @staticmethod
    def of(outputs: Sequence[Tensor], products: Sequence[bool | None]) -> "Joined":
        """From the outputs of a graph that hands out factors, but for the last output.

        :param products: of each block whether it is a product's transpose; None: no product.
        """
        rest = iter(outputs)
        parts = [
            Rows(next(rest))
            if transposed is None
            else OuterProducts(next(rest), next(rest), transposed)
            for transposed in products
        ]
        return Joined(parts)

    def norms(self) -> Tensor:
        squares = [part.squared_norms() for part in self.parts]
        return sum(squares[1:], squares[0]).sqrt()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        sums = [part.weighted_sum(weights) for part in self.parts]
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.parts], dim=1)


def finite(values: Tensor) -> Tensor:
    """Zero in place of NaN and infinity: a record of weight zero must not matter."""
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
