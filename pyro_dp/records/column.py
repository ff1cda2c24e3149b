"""A column: one argument with a row per record, read a part at a time, or held for some records."""

import abc
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from pyro_dp.mechanism.sampling import DrawnAhead, RecordSampler
from pyro_dp.records.stand_ins import is_table
from pyro_dp.utils.errors import ModelError

Name = str | Sequence[str]  # one column's; or several, whose numbers make one row
Places = slice | Tensor  # from start to stop; or ascending indices

_NO_NAME = "columns(): a name is a text, or a list of texts for one column with all of them."
_NAMES = (
    "columns(): say which columns, as in x, y = pyro_dp.columns(source, 'x', 'y'); source has "
    "{known}."
)
_UNKNOWN = "columns(): source has no column {name!r}; it has {known}."
_BLOCK = 2**20  # numbers that are read at a time: 8 MB
_MOST = 2**28  # bytes that are held
_INDICES = 16  # bytes of a record beside its rows: its index and its position


def parts(name: Name) -> list[str]:
    """The columns of the source that one column is made of.

    :raises ModelError: it is no name.
    """
    if isinstance(name, str):
        return [name]
    if not (isinstance(name, (list, tuple)) and name and all(isinstance(x, str) for x in name)):
        raise ModelError(_NO_NAME)
    return list(name)


def require_names(names: Sequence[str], known: Sequence[Any]) -> None:
    """:raises ModelError: none are asked for, or one that is not there."""
    listed = ", ".join(map(repr, known))
    if not names:
        raise ModelError(_NAMES.format(known=listed))
    for name in names:
        if name not in known:
            raise ModelError(_UNKNOWN.format(name=name, known=listed))


class Column(abc.ABC):
    """One row for each record, in memory or not: the result of :func:`pyro_dp.columns`.

    Only requested rows are in memory. A model sees one at a time, as with a tensor.

    Floats are read in torch's default dtype, integers as int64, booleans as they are.

    :ivar shape: (N, ...).
    """

    sequential = False  # whether some rows at random take as long to read as all between them

    def __init__(self, shape: Sequence[int], dtype: torch.dtype):
        self.shape, self._dtype = torch.Size(shape), dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that is read."""
        return torch.get_default_dtype() if self._dtype.is_floating_point else self._dtype

    @property
    def row_shape(self) -> torch.Size:
        """One row's shape; empty for a number."""
        return self.shape[1:]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def like(self) -> Tensor:
        """A tensor of the same shape and dtype: zeros that take no memory."""
        zero = torch.zeros(self.row_shape, dtype=self.dtype, device=self.device)
        return zero.expand(self.shape)

    def take(self, indices: Tensor) -> Tensor:
        """Rows of these records, (B, ...), with memory of their own.

        :param indices: (B,), ascending.
        :raises ModelError: they are not, or lie outside of the column.
        """
        indices = torch.as_tensor(indices)
        ordered = indices.dim() == 1 and not indices.is_floating_point()
        if not ordered or (indices[1:] <= indices[:-1]).any():
            raise ModelError("take() needs the indices of records, each once, in ascending order.")
        if len(indices) and not (indices[0] >= 0 and indices[-1] < len(self)):
            raise ModelError(f"take() was asked for rows beyond the {len(self)} of this column.")
        return self.rows(indices)

    def rows(self, indices: Tensor) -> Tensor:
        """As :meth:`take`, of indices that are in order."""
        if not len(indices):
            return self.like[:0].clone()
        first, last = int(indices[0]), int(indices[-1])
        if last - first + 1 == len(indices):  # those that stand together
            return self._at(slice(first, last + 1))
        return self._at(indices)

    def repeated_rows(self, indices: Tensor) -> Tensor:
        """The rows at any indices, which may repeat."""
        found, places = indices.unique(return_inverse=True)
        return self.rows(found)[places]

    def blocks(self) -> Iterator[Tensor]:
        """All rows in their order, some megabytes at a time."""
        count = block_size(self.row_shape.numel())
        for start in range(0, len(self), count):
            yield self._at(slice(start, min(start + count, len(self))))

    def only_read(self, start: int, stop: int) -> Tensor:
        """Rows start, ..., stop - 1, where they are if that is memory: nobody writes into them."""
        return self._at(slice(start, stop))

    @abc.abstractmethod
    def _at(self, places: Places) -> Tensor:
        """Rows of a slice or at ascending indices, with memory of their own."""


class TensorColumn(Column):
    """Rows of a tensor, which may be mapped from a file (``torch.from_file``).

    :param dtype: in which they are read; by default torch's for floats, else the tensor's own.
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
        if indices.device.type != "cpu":  # to look at an index would wait for the device
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
    """Rows of an array that is read by slices and by ascending indices, as NumPy's are.

    :param array: with shape, dtype and ``__getitem__``.
    """

    def __init__(self, array: Any):
        super().__init__(array.shape, dtype_of(array.dtype.kind))
        self.array = array

    def _at(self, places: Places) -> Tensor:
        rows = self.array[places if isinstance(places, slice) else places.cpu().numpy()]
        return own_tensor(np.asarray(rows), self.dtype)


class StackedColumn(Column):
    """Columns of numbers side by side, as the features of a row.

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
    """Them as indices, on the CPU."""
    return torch.arange(places.start, places.stop) if isinstance(places, slice) else places.cpu()


def block_size(numbers: int) -> int:
    """How many records are read at a time.

    :param numbers: in the rows of a record.
    """
    return max(1, _BLOCK // max(1, numbers))


def as_column(table: Tensor | Column) -> Column:
    return TensorColumn(table, table.dtype) if isinstance(table, Tensor) else table


def equal(one: Column, other: Column) -> bool:
    """Whether all rows are, some megabytes at a time."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    blocks = zip(one.blocks(), other.blocks(), strict=True)
    return all(torch.equal(these, those.to(these.device)) for these, those in blocks)


def has_rows(leaf: Any) -> TypeGuard[Tensor | Column]:
    """Whether an argument can have a row per record."""
    return isinstance(leaf, Column) or is_table(leaf)


def like(leaf: Any) -> Any:
    """A tensor of a column's shape without its numbers; all else as it is."""
    return leaf.like if isinstance(leaf, Column) else leaf


def dtype_of(kind: str) -> torch.dtype:
    """The dtype read from an array of this kind."""
    return {"f": torch.get_default_dtype(), "b": torch.bool}.get(kind, torch.int64)


def joint_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Booleans or integers only where all are."""
    return dtypes[0] if len(set(dtypes)) == 1 else torch.get_default_dtype()


def own_tensor(array: Any, dtype: torch.dtype) -> Tensor:
    """A copy."""
    floats = np.float64 if dtype == torch.float64 else np.float32
    plain = {torch.int64: np.int64, torch.bool: np.bool_}.get(dtype, floats)
    return torch.from_numpy(np.array(array, dtype=plain, order="C", subok=False)).to(dtype)


class HeldRows(Column):
    """Another column, whose chosen rows stay in memory until others are chosen.

    They are in memory for longer than the step that takes them, until the run ends.
    """

    def __init__(self, column: Column):
        super().__init__(column.shape, column.dtype)
        self._column = column
        self._held = self.like[:0]
        self._chosen = self._places = torch.empty(0, dtype=torch.long)

    def hold(self, indices: Tensor) -> None:
        self._chosen = self._places = indices[:0]
        self._held = self._column.rows(indices)

    def choose(self, indices: Tensor, places: Tensor) -> None:
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
    """The samples of as many steps at once as have rows of some bytes, by public numbers."""
    held = [x for x in columns if isinstance(x, HeldRows)]
    batch = sampler.usual_size
    if not held or batch == len(held[0]):  # all are read in each step
        return DrawnAhead(1, [])
    row = sum(x.row_shape.numel() * x.dtype.itemsize for x in held)
    return DrawnAhead(_MOST // (batch * (row + _INDICES)), held)
