"""Columns: arguments with a row per record that are read in parts, or kept for some records."""

import abc
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from pyro_dp.mechanism.sampling import DrawnAhead, RecordSampler
from pyro_dp.records.stand_ins import is_table
from pyro_dp.utils.errors import ModelError

Name = str | Sequence[str]  # a list names columns that make one row
Places = slice | Tensor  # a slice from start to stop, or ascending indices

_NO_NAME = "columns(): a name is a text, or a list of texts for one column with all of them."
_NAMES = (
    "columns(): say which columns, as in x, y = pyro_dp.columns(source, 'x', 'y'); source has "
    "{known}."
)
_UNKNOWN = "columns(): source has no column {name!r}; it has {known}."
_BLOCK = 2**20  # numbers that are read at a time: 8 MB
_MOST_HELD = 2**28  # bytes of rows that are kept in memory
_INDICES = 16  # bytes of a record's index and position, which are kept with its rows


def parts(name: Name) -> list[str]:
    """The source's columns that a name stands for.

    :raises ModelError: the name is neither a text nor a list of texts.
    """
    if isinstance(name, str):
        return [name]
    if not (isinstance(name, (list, tuple)) and name and all(isinstance(x, str) for x in name)):
        raise ModelError(_NO_NAME)
    return list(name)


def require_names(names: Sequence[str], known: Sequence[Any]) -> None:
    """:raises ModelError: there are no names, or one is unknown."""
    listed = ", ".join(map(repr, known))
    if not names:
        raise ModelError(_NAMES.format(known=listed))
    for name in names:
        if name not in known:
            raise ModelError(_UNKNOWN.format(name=name, known=listed))


class Column(abc.ABC):
    """One row for each record, in memory or not: the result of :func:`pyro_dp.columns`.

    Only requested rows are in memory. A model sees one at a time, as with a tensor. Floats are read
    in torch's default dtype, integers as int64, and booleans as booleans.

    :ivar shape: (N, ...).
    """

    sequential = False  # whether reading random rows takes as long as reading all between them

    def __init__(self, shape: Sequence[int], dtype: torch.dtype):
        self.shape, self._dtype = torch.Size(shape), dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows that are read."""
        return torch.get_default_dtype() if self._dtype.is_floating_point else self._dtype

    @property
    def row_shape(self) -> torch.Size:
        """The shape of one row; empty for a number."""
        return self.shape[1:]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def like(self) -> Tensor:
        """Zeros of the same shape and dtype, which take no memory."""
        zero = torch.zeros(self.row_shape, dtype=self.dtype, device=self.device)
        return zero.expand(self.shape)

    def take(self, indices: Tensor) -> Tensor:
        """A copy of the rows of these records, (B, ...).

        :param indices: (B,), ascending.
        :raises ModelError: the indices are not ascending, or lie outside of the column.
        """
        indices = torch.as_tensor(indices)
        ordered = indices.dim() == 1 and not indices.is_floating_point()
        if not ordered or (indices[1:] <= indices[:-1]).any():
            raise ModelError("take() needs the indices of records, each once, in ascending order.")
        if len(indices) and not (indices[0] >= 0 and indices[-1] < len(self)):
            raise ModelError(f"take() was asked for rows beyond the {len(self)} of this column.")
        return self.rows(indices)

    def rows(self, indices: Tensor) -> Tensor:
        """The same as :meth:`take`, without checking the indices."""
        if not len(indices):
            return self.like[:0].clone()
        first, last = int(indices[0]), int(indices[-1])
        if last - first + 1 == len(indices):  # consecutive rows
            return self._at(slice(first, last + 1))
        return self._at(indices)

    def repeated_rows(self, indices: Tensor) -> Tensor:
        """A copy of the rows at indices in any order, which may repeat."""
        found, positions = indices.unique(return_inverse=True)
        return self.rows(found)[positions]

    def blocks(self) -> Iterator[Tensor]:
        """All rows in order, some megabytes at a time."""
        count = block_size(self.row_shape.numel())
        for start in range(0, len(self), count):
            yield self._at(slice(start, min(start + count, len(self))))

    def only_read(self, start: int, stop: int) -> Tensor:
        """Rows start, ..., stop - 1, for reading only: a view, if they are in memory."""
        return self._at(slice(start, stop))

    @abc.abstractmethod
    def _at(self, places: Places) -> Tensor:
        """A copy of the rows in a slice or at ascending indices."""


class TensorColumn(Column):
    """Rows of a tensor, which may be mapped from a file (``torch.from_file``).

    :param dtype: dtype of the rows that are read; by default torch's for floats, else the tensor's.
    """

    def __init__(self, tensor: Tensor, dtype: torch.dtype | None = None):
        super().__init__(tensor.shape, tensor.dtype)
        self.tensor, self._read_as = tensor, dtype

    @property
    def dtype(self) -> torch.dtype:
        return self._read_as or super().dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def rows(self, indices: Tensor) -> Tensor:
        if indices.device.type != "cpu":  # reading an index would wait for the device
            return self._at(indices)
        return super().rows(indices)

    def repeated_rows(self, indices: Tensor) -> Tensor:
        return self._at(indices)

    def only_read(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop].to(self.dtype).contiguous()

    def _at(self, places: Places) -> Tensor:
        if isinstance(places, slice):
            return self.tensor[places].to(self.dtype, copy=True)
        return self.tensor.index_select(0, places.to(self.device)).to(self.dtype)


class ArrayColumn(Column):
    """Rows of an array that is read by slices and by ascending indices, like NumPy's.

    :param array: with shape, dtype and ``__getitem__``.
    """

    def __init__(self, array: Any):
        super().__init__(array.shape, dtype_of(array.dtype.kind))
        self.array = array

    def _at(self, places: Places) -> Tensor:
        rows = self.array[places if isinstance(places, slice) else places.cpu().numpy()]
        return own_tensor(np.asarray(rows), self.dtype)


class StackedColumn(Column):
    """Columns of numbers side by side, such as the features of a row.

    :param columns: (N,) each.
    """

    def __init__(self, columns: Sequence[Column]):
        dtype = joint_dtype([column.dtype for column in columns])
        super().__init__((len(columns[0]), len(columns)), dtype)
        self._columns = columns
        self.sequential = any(column.sequential for column in columns)

    def _at(self, places: Places) -> Tensor:
        return torch.stack([column._at(places).to(self.dtype) for column in self._columns], dim=1)


def indices_of(places: Places) -> Tensor:
    """The indices of these rows, on the CPU."""
    return torch.arange(places.start, places.stop) if isinstance(places, slice) else places.cpu()


def block_size(numbers: int) -> int:
    """How many records are read at a time.

    :param numbers: how many numbers the rows of one record have.
    """
    return max(1, _BLOCK // max(1, numbers))


def as_column(table: Tensor | Column) -> Column:
    return TensorColumn(table, table.dtype) if isinstance(table, Tensor) else table


def equal(one: Column, other: Column) -> bool:
    """Whether two columns have equal rows; reads some megabytes at a time."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    blocks = zip(one.blocks(), other.blocks(), strict=True)
    return all(torch.equal(these, those.to(these.device)) for these, those in blocks)


def has_rows(leaf: Any) -> TypeGuard[Tensor | Column]:
    """Whether an argument can have a row per record."""
    return isinstance(leaf, Column) or is_table(leaf)


def like(leaf: Any) -> Any:
    """For a column, zeros of its shape; anything else unchanged."""
    return leaf.like if isinstance(leaf, Column) else leaf


def dtype_of(kind: str) -> torch.dtype:
    """The dtype in which an array of this NumPy kind is read."""
    return {"f": torch.get_default_dtype(), "b": torch.bool}.get(kind, torch.int64)


def joint_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The common dtype; torch's default if they differ."""
    return dtypes[0] if len(set(dtypes)) == 1 else torch.get_default_dtype()


def own_tensor(array: Any, dtype: torch.dtype) -> Tensor:
    """A copy of an array as a tensor."""
    floats = np.float64 if dtype == torch.float64 else np.float32
    plain = {torch.int64: np.int64, torch.bool: np.bool_}.get(dtype, floats)
    return torch.from_numpy(np.array(array, dtype=plain, order="C", subok=False)).to(dtype)


class HeldRows(Column):
    """A column that keeps chosen rows in memory, until others replace them or the run ends."""

    def __init__(self, column: Column):
        super().__init__(column.shape, column.dtype)
        self._column = column
        self._held = self.like[:0]
        self._chosen = self._places = torch.empty(0, dtype=torch.long)

    def hold(self, indices: Tensor) -> None:
        """Read these rows into memory."""
        self._chosen = self._places = indices[:0]
        self._held = self._column.rows(indices)

    def choose(self, indices: Tensor, places: Tensor) -> None:
        """Serve these records from the kept rows at these positions."""
        self._chosen, self._places = indices, places

    def rows(self, indices: Tensor) -> Tensor:
        if len(self._chosen) and self._held.dtype == self.dtype:
            found = torch.searchsorted(self._chosen, indices).clamp_(max=len(self._chosen) - 1)
            if torch.equal(self._chosen[found], indices):
                return self._held[self._places[found]]
        return self._column.rows(indices)

    def _at(self, places: Places) -> Tensor:
        return self._column._at(places)


def drawn_ahead(columns: Sequence[Column], sampler: RecordSampler) -> DrawnAhead:
    """The samples of several steps: as many as have rows within the memory limit.

    Their number follows from public numbers.
    """
    held = [x for x in columns if isinstance(x, HeldRows)]
    batch = sampler.usual_size
    if not held or batch == len(held[0]):  # each step reads all rows
        return DrawnAhead(1, [])
    row = sum(x.row_shape.numel() * x.dtype.itemsize for x in held)
    return DrawnAhead(_MOST_HELD // (batch * (row + _INDICES)), held)
