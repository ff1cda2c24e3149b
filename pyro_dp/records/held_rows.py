"""A column with the rows of some records in memory, where to find a few means to decode all."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_dp.mechanism.drawn_ahead import DrawnAhead
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.records.column import Column

_MOST = 2**28  # bytes that are held
_INDICES = 16  # bytes of a record beside its rows: its index, and its place


class HeldRows(Column):
    """Another column, of which the rows of chosen records stay until others are chosen.

    They are in memory for longer than the step that takes them, until the run ends.

    :param column: the other one.
    """

    def __init__(self, column: Column):
        super().__init__(column.shape)
        self._column = column
        self._held = self.like[:0]
        self._chosen = self._places = torch.empty(0, dtype=torch.long)

    def hold(self, indices: Tensor) -> None:
        self._chosen = self._places = indices[:0]
        self._held = self._column.rows(indices)

    def choose(self, indices: Tensor, places: Tensor) -> None:
        self._chosen, self._places = indices, places

    @property
    def dtype(self) -> torch.dtype:
        return self._column.dtype

    def rows(self, indices: Tensor) -> Tensor:
        if len(self._chosen) and self._held.dtype == self.dtype:
            found = torch.searchsorted(self._chosen, indices).clamp_(max=len(self._chosen) - 1)
            if torch.equal(self._chosen[found], indices):
                return self._held[self._places[found]]
        return self._column.rows(indices)

    def _between(self, start: int, stop: int) -> Tensor:
        return self._column._between(start, stop)

    def _at(self, indices: Tensor) -> Tensor:
        return self._column._at(indices)


def drawn_ahead(columns: Sequence[Column], sampler: RecordSampler) -> DrawnAhead:
    """The samples of as many steps at once as have rows of some bytes, by public numbers."""
    held = [x for x in columns if isinstance(x, HeldRows)]
    batch = sampler.usual_size
    if not held or batch == len(held[0]):  # all are read in each step
        return DrawnAhead(1, [])
    row = sum(x.row_shape.numel() * x.dtype.itemsize for x in held)
    return DrawnAhead(_MOST // (batch * (row + _INDICES)), held)
