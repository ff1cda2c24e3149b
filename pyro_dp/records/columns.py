"""``columns()``: data that need not fit into memory, as arguments with a row per record."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from pyro_dp.records.arrow import is_arrow, of_arrow
from pyro_dp.records.column import ArrayColumn, Column, StackedColumn, TensorColumn
from pyro_dp.records.column_names import Name, parts, require_names
from pyro_dp.records.datasets import of_dataset
from pyro_dp.records.tables import as_tensor, is_numeric, refuse_samplers
from pyro_dp.utils.errors import ModelError

_UNNAMED = (
    "columns(): an array or tensor has no columns by name: x = pyro_dp.columns(array) is a row per "
    "record; several arrays have names in a dictionary, columns({{'x': x, 'y': y}}, 'x', 'y')."
)
_LENGTHS = "columns(): {listed}; all columns must have a row per record, the same N."
_NO_ROWS = "columns(): column {name!r} is a single number, and has no rows."
_STACKED = (
    "columns(): {name!r} names several columns that make one row, and {part!r} of them has rows "
    "of its own, of shape {shape}: each must be one number per record."
)
_SOURCE = (
    "columns(): source is a {kind}; it can be a NumPy array or a tensor (also mapped from a file), "
    "a dictionary of such or a structured array, an Arrow table, the path of a Parquet file, of a "
    "directory of them or of a .npy file, or a Dataset with a length."
)
_FILE = (
    "columns(): source is no file or directory that can be read here: Parquet files, directories "
    "of them and .npy files can."
)


def columns(source: Any, *names: Name) -> Any:
    """Columns of data that need not fit into memory, to hand to ``run`` as tensors are.

    ``x, y = pyro_dp.columns(source, "x", "y")``, then ``svi.run(x, y)``. Of the data only the rows
    of a microbatch are in memory at a time. The guarantee, and what a model sees, are those of
    tensors: one record.

    The data must not change during a run: they are read in every step. Of Parquet, batches drawn
    at random are read for several steps at once, 256 MB at most, which stay in memory until the run
    ends or other rows take their place.

    :param source: a NumPy array or a tensor, such as ``np.load(path, mmap_mode="r")`` and
        ``torch.from_file``, which is one column, without a name; a dictionary of such, or a
        structured array; an Arrow table; the path of a Parquet file, of a directory of them (in
        the order of their names), or of a ``.npy`` file; a ``Dataset`` with a length, whose items
        are dictionaries, or tuples, to whose parts the names are given in their order. Arrow and
        Parquet need ``pip install "pyro-dp[data]"``.
    :param names: of the columns. A list of names is one column, whose rows are the numbers of all
        of these side by side: ``columns(path, ["age", "income"], "smokes")``.
    :returns: a :class:`~pyro_dp.records.column.Column` for each name, as a tuple; one column alone
        for one name, or for an array. It has ``len``, ``dtype``, ``row_shape``, ``take(indices)``
        and ``blocks()``.
    :raises ModelError: the source cannot be read record by record, has no such column, or holds
        other things than numbers.

    >>> import numpy as np
    >>> import pyro_dp
    >>> source = {"age": np.arange(20.0, 80.0), "smokes": np.arange(60) % 2}
    >>> age, smokes = pyro_dp.columns(source, "age", "smokes")  # then: svi.run(age, smokes)
    >>> len(age), age.dtype, smokes.dtype
    (60, torch.float32, torch.int64)
    """
    refuse_samplers("source", source)
    if isinstance(source, (str, Path)):
        source = _opened(Path(source))
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
    _require_lengths(names, chosen)
    return chosen[0] if len(chosen) == 1 else tuple(chosen)


def _opened(path: Path) -> Any:
    """An array, or a path of Parquet."""
    if path.suffix == ".npy" and path.is_file():
        return np.load(path, mmap_mode="r")
    if not path.exists():
        raise ModelError(_FILE)
    return path


def _is_structured(source: Any) -> bool:
    return isinstance(source, np.ndarray) and source.dtype.names is not None


def _by_name(source: Any, names: Sequence[str]) -> Mapping[str, Column]:
    if isinstance(source, Dataset):
        return of_dataset(source, names)
    if not (isinstance(source, Mapping) or _is_structured(source)):
        raise ModelError(_SOURCE.format(kind=type(source).__name__))
    require_names(names, list(source.dtype.names if _is_structured(source) else source))
    return {name: _of_array(name, source[name]) for name in names}


def _of_array(name: str, array: Any) -> Column:
    if isinstance(array, Column):
        return array
    if not isinstance(array, Tensor):
        if not is_numeric(array):  # of a list, or a frame's column; text is refused by name
            array = as_tensor(name, array, size=len(array) if isinstance(array, Sequence) else 0)
        if isinstance(array, Column):
            return array
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


def _require_lengths(names: Sequence[Name], chosen: Sequence[Column]) -> None:
    if len({len(column) for column in chosen}) > 1:
        named = zip(names, chosen, strict=True)
        listed = ", ".join(f"{name!r} has {len(column)} rows" for name, column in named)
        raise ModelError(_LENGTHS.format(listed=listed))
