"""Columns of Arrow tables and Parquet files, which are decoded in parts."""

import abc
import importlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_dp.records.column import (
    Column,
    Name,
    Places,
    block_size,
    dtype_of,
    indices_of,
    joint_dtype,
    own_tensor,
    parts,
    require_names,
)
from pyro_dp.records.tables import OTHERS, no_numbers
from pyro_dp.utils.errors import CURATOR, ModelError

_BUFFER = 2**18  # bytes of each column of a file that are read at a time
_EXTRA = "columns(): Parquet files need pyarrow. Run pip install 'pyro-dp[data]'."
_NO_FILES = "columns(): the directory has no files that end in .parquet."
_UNREADABLE = "columns(): file {file!r} is no Parquet file that pyarrow can read."
_SCHEMAS = "columns(): all files of a directory must have the same columns; {file!r} differs."
_MISSING = (
    "Column {name!r} of integers, booleans or lists has missing values: impute them, or drop the "
    "records. " + CURATOR
)
_RAGGED = (
    "Column {name!r} holds lists without a fixed length: pad them to one length, and write them "
    "as pyarrow.list_(value_type, length)."
)
_KINDS = (("is_floating", "f"), ("is_integer", "i"), ("is_boolean", "b"))
_ROWS = "columns(): {name!r} joins several columns. Each must have one number per record."


def is_arrow(source: Any) -> bool:
    """Whether a source is an Arrow table."""
    return type(source).__module__.split(".")[0] == "pyarrow" and hasattr(source, "to_batches")


def of_arrow(source: Any, names: Sequence[Name]) -> list[Column]:
    """A column for each name.

    :param source: a table, or the path of a Parquet file or of a directory of them.
    :raises ModelError: pyarrow is missing; a file or column does not exist; a column does not hold
        numbers.
    """
    files = _Files(source) if isinstance(source, Path) else None
    schema = files.schema if files else source.schema
    require_names([part for name in names for part in parts(name)], schema.names)
    if files:
        return [_ParquetColumn(name, schema, files) for name in names]
    return [_TableColumn(name, schema, source) for name in names]


class _ArrowColumn(Column):
    """One column of the source, or several whose numbers make one row."""

    def __init__(self, name: Name, schema: Any, size: int):
        self._parts = parts(name)
        kinds = [_kind(part, schema.field(part).type) for part in self._parts]
        stacked = not isinstance(name, str)
        if stacked and any(shape for shape, _ in kinds):
            raise ModelError(_ROWS.format(name=name))
        self._stacked = stacked
        dtype = joint_dtype([dtype_of(kind) for _, kind in kinds])
        super().__init__((size, *((len(kinds),) if stacked else kinds[0][0])), dtype)

    def _at(self, places: Places) -> Tensor:
        indices, done = indices_of(places).numpy(), 0
        found = torch.empty((len(indices), *self.row_shape), dtype=self.dtype)
        while done < len(indices):
            batch, start = self._batch_of(int(indices[done]))
            upto = int(np.searchsorted(indices, start + batch.num_rows))
            found[done:upto] = self._rows_of(_taken(batch, indices[done:upto] - start))
            done = upto
        return found

    @abc.abstractmethod
    def _batch_of(self, index: int) -> tuple[Any, int]:
        """The batch that contains a row, and the index of the batch's first row."""

    def _rows_of(self, batch: Any) -> Tensor:
        """All rows of a batch, (B, ...)."""
        dtype, values = self.dtype, [_numbers(x, batch.column(x)) for x in self._parts]
        if self._stacked:
            return torch.stack([own_tensor(each, dtype) for each in values], dim=1)
        return own_tensor(values[0].reshape(-1, *self.row_shape), dtype)


class _TableColumn(_ArrowColumn):
    """Columns of a table, which may be mapped from a file."""

    def __init__(self, name: Name, schema: Any, table: Any):
        super().__init__(name, schema, table.num_rows)
        self._table = table.select(self._parts).to_batches()
        self._ends = np.cumsum([batch.num_rows for batch in self._table])

    def _batch_of(self, index: int) -> tuple[Any, int]:
        position = int(np.searchsorted(self._ends, index, side="right"))
        batch = self._table[position]
        return batch, int(self._ends[position]) - batch.num_rows


class _ParquetColumn(_ArrowColumn):
    """Columns of Parquet files. Rows are decoded once if they are read in order."""

    sequential = True

    def __init__(self, name: Name, schema: Any, files: "_Files"):
        super().__init__(name, schema, files.size)
        self._files = files
        self._coming: Iterator[Any] = iter(())
        self._batch: Any = None  # the last one that was decoded
        self._start = self._end = self._group_end = 0  # rows of that batch and of its row group

    def _batch_of(self, index: int) -> tuple[Any, int]:
        try:
            if not self._start <= index < self._group_end:
                self._begin_group(int(np.searchsorted(self._files.ends, index, side="right")))
            while index >= self._end:
                self._batch = next(self._coming)
                self._start, self._end = self._end, self._end + self._batch.num_rows
        except BaseException:  # these numbers may not fit the batch any more
            self._start = self._end = self._group_end = 0
            raise
        return self._batch, self._start

    def _begin_group(self, group: int) -> None:
        size = block_size(max(len(self._parts), math.prod(self.row_shape)))
        self._group_end = int(self._files.ends[group])
        self._start = self._end = self._group_end - self._files.counts[group]
        self._coming, self._batch = self._files.batches(group, self._parts, size), None


class _Files:
    """The row groups of a Parquet file, or of a directory's files in the order of their names."""

    def __init__(self, path: Path):
        self._parquet = _module("pyarrow.parquet")
        inside = path.iterdir() if path.is_dir() else [path]
        paths = sorted(x for x in inside if x.suffix == ".parquet" or x == path)
        if not paths:
            raise ModelError(_NO_FILES)
        self.counts: list[int] = []  # rows in each group
        self._groups: list[tuple[Path, int]] = []
        self._open: tuple[Path, Any] | None = None
        for each in paths:
            file = self._file(each)
            if each == paths[0]:
                self.schema = file.schema_arrow
            elif not file.schema_arrow.equals(self.schema):
                raise ModelError(_SCHEMAS.format(file=each.name))
            groups = range(file.metadata.num_row_groups)
            self._groups += [(each, group) for group in groups]
            self.counts += [file.metadata.row_group(group).num_rows for group in groups]
        self.ends = np.cumsum(self.counts)
        self.size = sum(self.counts)

    def batches(self, group: int, names: list[str], size: int) -> Iterator[Any]:
        """Some columns of a row group, ``size`` rows at a time."""
        path, number = self._groups[group]
        batches: Iterator[Any] = self._file(path).iter_batches(
            size, row_groups=[number], columns=names, use_threads=False
        )
        return batches

    def _file(self, path: Path) -> Any:
        if self._open is None or self._open[0] != path:
            try:
                file = self._parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)
            except (OSError, ValueError):  # pyarrow's errors are of these types
                raise ModelError(_UNREADABLE.format(file=path.name)) from None
            self._open = path, file
        return self._open[1]


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ModelError(_EXTRA) from None


def _kind(name: str, kind: Any) -> tuple[tuple[int, ...], str]:
    """The shape of a row, and the NumPy kind of its numbers."""
    types = _module("pyarrow").types
    if types.is_fixed_size_list(kind):
        shape, inner = _kind(name, kind.value_type)
        return (kind.list_size, *shape), inner
    if types.is_list(kind) or types.is_large_list(kind):
        raise ModelError(_RAGGED.format(name=name))
    if hasattr(kind, "storage_type") and hasattr(kind, "shape"):  # a tensor
        _, inner = _kind(name, kind.storage_type)
        return tuple(kind.shape), inner
    for test, found in _KINDS:
        if getattr(types, test)(kind):
            return (), found
    raise no_numbers(name, "text" if types.is_string(kind) else OTHERS)


def _numbers(name: str, array: Any) -> np.ndarray:
    """All numbers of some rows, flat; a missing float is NaN."""
    array = getattr(array, "storage", array)  # an array of tensors has one
    while hasattr(array, "flatten") and hasattr(array.type, "list_size"):
        _require_no_missing(name, array)
        array = array.flatten()
    if not _module("pyarrow").types.is_floating(array.type):
        _require_no_missing(name, array)
    found: np.ndarray = array.to_numpy(zero_copy_only=False)
    return found


def _require_no_missing(name: str, array: Any) -> None:
    if array.null_count:
        raise ModelError(_MISSING.format(name=name))


def _taken(batch: Any, indices: np.ndarray) -> Any:
    """The rows of a batch at ascending indices."""
    if len(indices) == indices[-1] - indices[0] + 1:
        return batch.slice(int(indices[0]), len(indices))
    return batch.take(_module("pyarrow").array(indices))
