"""``columns()`` for data that need not fit into memory, and torch datasets as arguments."""

import contextlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from pyro_dp.graphs.captured_state import alike
from pyro_dp.graphs.references import References, require_torchs
from pyro_dp.records.arrow import is_arrow, of_arrow
from pyro_dp.records.column import (
    ArrayColumn,
    Column,
    Name,
    Places,
    StackedColumn,
    TensorColumn,
    indices_of,
    parts,
    require_names,
)
from pyro_dp.records.sandbox import guarded
from pyro_dp.records.tables import as_tensor, is_numeric, kinds_of, refuse_samplers, require_alike
from pyro_dp.utils.errors import CURATOR, ModelError
from pyro_dp.utils.torch_state import forked_rng, put_back, reseed, seed_torch

_ITERABLE = (
    "Argument {name!r} is a {kind}, which has no length or no items by number. Pass a dataset with "
    "__len__ and __getitem__, or all its records, as in svi.run(*torch.utils.data.default_collate("
    "list({name})))."
)
_STACK = (
    "The items of argument {name!r} (a {kind}) cannot be stacked. All must be numbers, arrays or "
    "tensors of one shape, or tuples of these, or dictionaries of these with the same keys. Images "
    "need a transform such as ToTensor(). list({name}) shows an error of the dataset itself."
)
_CHANGES = (
    "The first item of argument {name!r} (a {kind}) changes when others are read. An item may "
    "depend only on its record and index. So a dataset must keep no running mean, and its "
    "transforms must draw from generators of torch, NumPy or Python. " + CURATOR
)
_OTHER_ITEM = (
    "columns(): the items of source differ in shape, or in the kind of their numbers (integers, "
    "floats, booleans). Convert them alike, as in float(item). " + CURATOR
)
_EMPTY = "columns(): source is a dataset without records."
_PARTS = (
    "columns(): an item of source has {count} parts, but the call names {given}. Name all "
    "parts, in their order, as in x, y = pyro_dp.columns(dataset, 'x', 'y')."
)
_UNNAMED = (
    "columns(): an array or tensor has no named columns. Call x = pyro_dp.columns(array). "
    "A dictionary gives names to several arrays: columns({{'x': x, 'y': y}}, 'x', 'y')."
)
_LENGTHS = "columns(): {listed}; all columns must have a row per record, the same N."
_NO_ROWS = "columns(): column {name!r} is a single number, and has no rows."
_STACKED = (
    "columns(): {name!r} names several columns that make one row, and {part!r} of them has rows "
    "of shape {shape}. Each must be one number per record."
)
_SOURCE = (
    "columns(): source is a {kind}. Pass an array, a tensor, a dictionary of such, a structured "
    "array, an Arrow table or a Dataset with a length. Or pass the path of a Parquet file, of a "
    "directory of them, or of a .npy file."
)
_FILE = (
    "columns(): source is no file or directory that can be read here. Pass the path of a Parquet "
    "file, of a directory of them, or of a .npy file."
)


def opened(args: tuple) -> list:
    """The positional arguments, with each :class:`TensorDataset` replaced by its tensors."""
    found: list[Any] = []
    for arg in args:
        found += arg.tensors if isinstance(arg, TensorDataset) else [arg]
    return found


def with_columns(args: tuple, kwargs: dict, names: Sequence[str]) -> tuple[tuple, dict]:
    """Replace each dataset among the positional arguments by its stacked items.

    A ``TensorDataset`` becomes its tensors. Items of other datasets are read once. Tuples become
    arguments by position, dictionaries become arguments by name, and other items one argument.

    :param names: names of the positional arguments, for messages.
    :raises ModelError: a dataset has no length, or its items cannot be stacked.
    """
    found: list[Any] = []
    for name, arg in zip(names, args, strict=True):
        if not isinstance(arg, Dataset) or isinstance(arg, TensorDataset):
            found += opened((arg,))
            continue
        positional, named = _columns(name, arg)
        found += positional
        kwargs = kwargs | named
    return tuple(found), kwargs


class _Reader:
    """Reads items of a dataset, each as a function of its record and index.

    So no record changes another's item, and all steps see the same items. The index seeds the
    generators from which transforms draw, also those of the dataset itself.

    :param name: the argument's name, for errors.
    :raises ModelError: the dataset has no length, or no items by number.
    """

    def __init__(self, name: str, dataset: Any):
        self._name, self._dataset = name, dataset
        readable = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if isinstance(dataset, IterableDataset) or not readable:
            raise ModelError(self._text(_ITERABLE))
        self._generators = [each for _, each in References((name, dataset)).generators]

    def read(self, indices: Iterable[int]) -> list[Any]:
        """The items at these indices.

        :raises ModelError: reading fails, or changes the dataset's first item.
        """
        with self.guarded(), forked_rng(), put_back(self._generators):
            first = self._item(0)
            found = [self._item(i) for i in indices]
            unchanged = alike(first, self._item(0))
        if not unchanged:
            raise ModelError(self._text(_CHANGES))
        return found

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Inside, any error of reading or stacking items becomes a :class:`ModelError`."""
        try:
            with guarded("Reading the dataset"):
                yield
        except ModelError:
            raise ModelError(self._text(_STACK)) from None

    def _item(self, index: int) -> Any:
        seed_torch(index)
        np.random.seed(index % 2**32)
        random.seed(index)
        for each in self._generators:
            reseed(each, index)
        return self._dataset[index]

    def _text(self, text: str) -> str:
        return text.format(name=self._name, kind=type(self._dataset).__name__)


class _Items:
    """The stacked items of a dataset. It keeps the items that were read last.

    :param names: keys of an item, or names for all parts of a tuple in order.
    """

    def __init__(self, dataset: Any, names: Sequence[str]):
        self._reader = _Reader("source", dataset)
        self.size = len(dataset)
        if not self.size:
            raise ModelError(_EMPTY)
        self._names = list(names)
        self._last: tuple[Tensor, list[Tensor]] | None = None  # indices, and their parts
        self._kinds: set[Any] = set()
        first = self._read(torch.zeros(1, dtype=torch.long))
        if isinstance(first, dict):
            require_names(names, list(first))
        elif len(self._listed(first)) != len(names) or not names:
            raise ModelError(_PARTS.format(count=len(self._listed(first)), given=len(names)))

    def rows(self, indices: Tensor) -> list[Tensor]:
        """The rows of each name's part, (B, ...)."""
        if self._last is None or not torch.equal(self._last[0], indices):
            found = self._read(indices)
            listed = [found[n] for n in self._names] if isinstance(found, dict) else None
            parts = zip(self._names, listed or self._listed(found), strict=True)
            self._last = indices.clone(), [_tensor(name, part) for name, part in parts]
        return self._last[1]

    @staticmethod
    def _listed(found: Any) -> list:
        return list(found) if isinstance(found, (list, tuple)) else [found]

    def _read(self, indices: Tensor) -> Any:
        items = self._reader.read(indices.tolist())
        self._kinds |= kinds_of(items)
        if len(self._kinds) > 1:
            raise ModelError(_OTHER_ITEM)
        with self._reader.guarded():
            return default_collate(items)


class _DatasetColumn(Column):
    """One part of each item of a dataset.

    :param position: the part's position in an item.
    """

    def __init__(self, items: _Items, position: int):
        self._items, self._position = items, position
        row = items.rows(torch.zeros(1, dtype=torch.long))[position]
        super().__init__((items.size, *row.shape[1:]), row.dtype)

    def _at(self, places: Places) -> Tensor:
        rows = self._items.rows(indices_of(places))[self._position]
        # The first item's dtype must not change the others' numbers.
        kept = torch.promote_types(rows.dtype, self._dtype) == self._dtype
        if not kept or rows.shape[1:] != self.row_shape:
            raise ModelError(_OTHER_ITEM)
        return rows.to(self.dtype, copy=True)


def _tensor(name: str, part: Any) -> Tensor:
    found = as_tensor(name, part, size=len(part) if isinstance(part, list) else 0)
    if not isinstance(found, Tensor):
        raise ModelError(_STACK.format(name="source", kind="dataset"))
    return found


def _columns(name: str, dataset: Any) -> tuple[list, dict]:
    """The arguments in a dataset's items, by position and by name."""
    reader = _Reader(name, dataset)
    items = reader.read(range(len(dataset)))
    with reader.guarded():
        stacked = default_collate(items)
        several = isinstance(items[0], (list, tuple))
        if isinstance(stacked, dict) and any(x.keys() != stacked.keys() for x in items):
            raise KeyError  # else the first item alone would decide which arguments exist
    require_alike(name, items)
    if isinstance(stacked, dict):
        return [], stacked
    return (list(stacked) if several else [stacked]), {}


def columns(source: Any, *names: Name) -> Any:
    """Columns of data that need not fit into memory. Pass them to ``run`` like tensors.

    ``x, y = pyro_dp.columns(source, "x", "y")``, then ``svi.run(x, y)``. Only the rows of a
    microbatch are in memory at a time. The guarantee is the same as for tensors: a model sees one
    record.

    The data must not change during a run, because every step reads them. Random batches of Parquet
    files are read for several steps at once, 256 MB at most. They stay in memory until the run ends
    or other rows replace them.

    :param source: a NumPy array or a tensor, as from ``np.load(path, mmap_mode="r")`` or
        ``torch.from_file``, is one column without a name. It may also be a dictionary of these, a
        structured array, an Arrow table, a path, or a ``Dataset`` with a length. A path leads to a
        Parquet file, a directory of them (read in the order of their names), or a ``.npy`` file.
        Items of a ``Dataset`` are dictionaries or tuples, whose parts ``names`` names in order.
        Arrow and Parquet need ``pip install "pyro-dp[data]"``.
    :param names: names of the columns. A list of names makes one column, whose rows have the
        numbers side by side: ``columns(path, ["age", "income"], "smokes")``.
    :returns: a tuple with a :class:`~pyro_dp.records.column.Column` for each name; for one name or
        an array, the column itself. It has ``len``, ``dtype``, ``row_shape``, ``take(indices)`` and
        ``blocks()``.
    :raises ModelError: the source cannot be read record by record, lacks a column, or does not hold
        numbers.

    >>> source = {"age": np.arange(20.0, 80.0), "smokes": np.arange(60) % 2}
    >>> age, smokes = columns(source, "age", "smokes")  # then: svi.run(age, smokes)
    >>> len(age), age.dtype, smokes.dtype
    (60, torch.float32, torch.int64)
    """
    refuse_samplers("source", source)
    if isinstance(source, (str, Path)):
        source = Path(source)
        if source.suffix == ".npy" and source.is_file():
            source = np.load(source, mmap_mode="r")
        elif not source.exists():
            raise ModelError(_FILE)
    if isinstance(source, (np.ndarray, Tensor)) and not _is_structured(source):
        if names:
            raise ModelError(_UNNAMED)
        return _of_array("source", source)
    chosen: Sequence[Column]
    if isinstance(source, Path) or is_arrow(source):
        chosen = of_arrow(source, names)
    else:
        found = _by_name(source, [part for name in names for part in parts(name)])
        chosen = [_chosen(found, name) for name in names]
    if len({len(column) for column in chosen}) > 1:
        named = zip(names, chosen, strict=True)
        listed = ", ".join(f"{name!r} has {len(column)} rows" for name, column in named)
        raise ModelError(_LENGTHS.format(listed=listed))
    return chosen[0] if len(chosen) == 1 else tuple(chosen)


def _is_structured(source: Any) -> bool:
    return isinstance(source, np.ndarray) and source.dtype.names is not None


def _by_name(source: Any, names: Sequence[str]) -> Mapping[str, Column]:
    if isinstance(source, Dataset):
        items = _Items(source, names)
        return {name: _DatasetColumn(items, i) for i, name in enumerate(names)}
    if not (isinstance(source, Mapping) or _is_structured(source)):
        raise ModelError(_SOURCE.format(kind=type(source).__name__))
    require_names(names, list(source.dtype.names if _is_structured(source) else source))
    return {name: _of_array(name, source[name]) for name in names}


def _of_array(name: str, array: Any) -> Column:
    if not (isinstance(array, (Tensor, Column)) or is_numeric(array)):
        # A list, or a column of a frame. Text is refused by name.
        array = as_tensor(name, array, size=len(array) if isinstance(array, Sequence) else 0)
    if isinstance(array, Column):
        return array
    if isinstance(array, Tensor):
        require_torchs(name, array)
    if not getattr(array, "shape", None):
        raise ModelError(_NO_ROWS.format(name=name))
    return TensorColumn(array) if isinstance(array, Tensor) else ArrayColumn(array)


def _chosen(found: Mapping[str, Column], name: Name) -> Column:
    if isinstance(name, str):
        return found[name]
    for part in name:
        if found[part].row_shape:
            shape = tuple(found[part].row_shape)
            raise ModelError(_STACKED.format(name=list(name), part=part, shape=shape))
    return StackedColumn([found[part] for part in name])
