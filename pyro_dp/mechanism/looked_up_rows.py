"""Per-record gradients of a table, if each record reads a few of its rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dp.mechanism.contributions import Rows


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
        """(B, size) in float64."""
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
