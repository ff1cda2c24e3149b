"""The distribution of a unit's codes under a mixture of independent columns."""

from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions import Categorical, TorchDistribution
from torch import Tensor
from torch.distributions import constraints


class RowMixture(TorchDistribution):
    """Rows of codes, each from a component of its own, over which their density sums.

    :param weights: the components', (K,).
    :param tables: one for each column, (K, size).
    :param rows: None: a value is a row, (columns,); else (rows, columns), and rows of -1 count
        nothing.
    :param batch_shape: each of the batch is from the same mixture.
    """

    arg_constraints: dict[str, Any] = {}
    support = constraints.independent(constraints.integer_interval(-1, 2**53), 1)

    def __init__(
        self,
        weights: Tensor,
        tables: Sequence[Tensor],
        rows: int | None = None,
        batch_shape: Sequence[int] = (),
    ):
        self.weights, self.tables, self.rows = weights, list(tables), rows
        event = [len(self.tables)] if rows is None else [rows, len(self.tables)]
        super().__init__(torch.Size(batch_shape), torch.Size(event), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "RowMixture":
        return type(self)(self.weights, self.tables, self.rows, batch_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        used = value[..., 0] >= 0
        value = value.long().clamp(min=0)
        total = self.weights.log().expand(*value.shape[:-1], -1)
        tiny = torch.finfo(self.weights.dtype).tiny
        for j, table in enumerate(self.tables):
            total = total + table.clamp(min=tiny).log().T[value[..., j]]
        each = torch.where(used, total.logsumexp(dim=-1), 0.0)
        return each if self.rows is None else each.sum(dim=-1)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        rows = () if self.rows is None else (self.rows,)
        shape = torch.Size(sample_shape) + self.batch_shape + rows
        component = Categorical(self.weights).sample(shape)
        drawn = [Categorical(table[component]).sample() for table in self.tables]
        return torch.stack(drawn, dim=-1)
