"""Convert data with a row per record, in the usual forms, to one tensor.

Floats get torch's default dtype, integers become int64, and booleans stay. Rows keep their order.
"""

import gc
import math
import numbers
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from pyro_dp.graphs.references import require_torchs
from pyro_dp.records.column import ArrayColumn, Column, dtype_of, own_tensor
from pyro_dp.utils.errors import CURATOR, ModelError, no_warnings

_LOADER = (
    "Argument {name!r} is a {kind}, which hands out batches: pass the dataset behind it, all "
    "records at once, as in svi.run({name}.dataset). Which records take part in a step is drawn "
    "privately."
)
_LOADER_ITERATORS = (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter)
_IN_A_LOOP = (
    "The first step has {count} of {total} records, a batch of a DataLoader. They would be taken "
    "for all data. Call svi.run(loader.dataset) instead, outside the loop over the loader. "
    "Batches are drawn privately, at the sample rate."
)
DISTRIBUTED = (
    "Argument {name!r} {has} a DistributedSampler, which repeats records so that all processes "
    "have equally many. The guarantee would not cover a repeated record. Pass "
    "the dataset itself; which records take part in a step is drawn privately."
)
_SAMPLER = (
    "Argument {name!r} is a {kind}: which records take part in a step is drawn privately, at "
    "sampling's rate. Pass the dataset, or the tensors, themselves."
)
_DATASET = (
    "Argument {name!r} is a {kind}: a dataset stands for the arguments that its items have, and is "
    "passed by position, as in svi.run(dataset)."
)
_ONCE = (
    "Argument {name!r} is a {kind}, which can be read only once. Pass all records, as a tensor or "
    "a list, as in svi.run(list({name}))."
)
_SPARSE = (
    "Argument {name!r} is a sparse {kind}. Pass it dense, as in svi.run({name}.toarray()), or the "
    "indices and values of its nonzero entries, as arrays with a row per record."
)
_KIND = (
    "Argument {name!r} holds {kind}{where}. Encode them as numbers first (a category as integers "
    "0, 1, ..., by a rule that was fixed before the data, as in {column}.map({{'no': 0, 'yes': "
    "1}}))."
)
_RAGGED = (
    "Argument {name!r} has rows of different lengths: pad them to one, and pass their lengths as "
    "another argument, as in torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)."
)
_MIXED = (
    "Argument {name!r} has integers, floats or booleans for some records, and other numbers for "
    "others. So one record would decide the dtype of all. Convert all of them alike, as in "
    "np.asarray({name}, dtype=float). " + CURATOR
)
_MASKED = (
    "Argument {name!r} is a masked array, and a tensor has no mask: pass {name}.filled(0) and "
    "~{name}.mask, as two arguments."
)
_PACKED = (
    "Argument {name!r} is a PackedSequence, whose rows are the time steps of all records. Pass the "
    "padded tensor and its lengths: write x, lengths = pad_packed_sequence({name}, "
    "batch_first=True), and svi.run(x, lengths). In the model, mask the steps after the last."
)
_KINDS = {"U": "text", "S": "text", "T": "text", "M": "dates", "m": "time spans", "c": "complex"}
OTHERS = "text or other objects"
_IN_PARTS = ("numpy", "h5py", "zarr")


def is_rows(value: Any, size: int) -> bool:
    """Whether this is a list, tuple or range of ``size`` numbers, lists, arrays or tensors."""
    if _is_listed(value):
        return len(value) == size
    if not isinstance(value, (list, tuple)) or not len(value) == size > 0:
        return False
    first = value[0]
    # If the tensors themselves have ``size`` rows, each of them holds the records.
    return isinstance(first, (Tensor, np.ndarray)) and first.shape[:1] != (size,)


def lengths(value: Any) -> Iterator[int]:
    """The lengths of possible tables in an argument, also within containers."""
    if _is_listed(value) or isinstance(value, Column):
        yield len(value)
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from lengths(each)
    elif _is_array(value) and value.shape:
        yield int(value.shape[0])


def as_tensor(name: str, value: Any, *, size: int = 0) -> Any:
    """A tensor or a column if the value has rows; else the value itself.

    A NumPy array that is mapped from a file is not copied. It becomes a tensor if it is read-only
    and has the right dtype. Otherwise it becomes a column, which converts the rows that are read.
    Everything else is copied, so later changes have no effect.

    :param size: lists of this length are rows.
    :raises ModelError: it has rows, but cannot be read as numbers; names the argument.
    """
    if isinstance(value, Tensor):
        require_torchs(name, value)
        return value.to(torch.get_default_dtype()) if value.is_floating_point() else value
    if is_rows(value, size):
        return _listed(name, value)
    _refuse_others(name, value)
    if hasattr(value, "iloc"):  # pandas
        return _tensor(_frame(name, value) if value.ndim == 2 else _column(name, value))
    if hasattr(value, "to_numpy"):
        value = value.to_numpy()
    if not _is_array(value):
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise ModelError(_MASKED.format(name=name))
    if isinstance(value, np.memmap) and value.ndim and is_numeric(value):
        return _as_it_lies(value)
    return _tensor(_numbers(name, np.asanyarray(value)))


def require_same_rows(named: list[tuple[str, Any]]) -> None:
    """:raises ModelError: frames or series of equal length have different indices."""
    frames = [(name, value) for name, value in named if hasattr(value, "iloc")]
    for name, value in frames[1:]:
        first, reference = frames[0]
        if len(value) == len(reference) and not value.index.equals(reference.index):
            raise ModelError(
                f"Arguments {first!r} and {name!r} have different indices, and rows are matched by "
                f"position: pass {name}.loc[{first}.index], or, if their order is the same, "
                f"{name}.to_numpy()."
            )


def refuse_packed(name: str, value: Any) -> None:
    """:raises ModelError: it is a packed sequence, whose rows are time steps of all records."""
    if isinstance(value, PackedSequence):
        raise ModelError(_PACKED.format(name=name))


def _is_listed(value: Any) -> bool:
    """Whether this is a range, or a list or tuple of numbers or texts, perhaps nested."""
    if isinstance(value, range):
        return True
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return isinstance(value[0], (numbers.Number, np.bool_, str)) or _is_listed(value[0])


def _is_array(value: Any) -> bool:
    """Whether this is an array of NumPy or pandas, or of a file format that reads as one."""
    return isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "__array__")


def is_numeric(value: Any) -> bool:
    """Whether this is an array of numbers that can be read in parts.

    An array of a user's class cannot, because its indexing would see several records together.
    """
    own = type(value)
    known = any(getattr(sys.modules.get(n), own.__name__, None) is own for n in _IN_PARTS)
    plain = known and _is_array(value) and not isinstance(value, np.ma.MaskedArray)
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    return plain and not hasattr(value, "iloc") and kind in tuple("fiub")


def no_numbers(name: str, found: str) -> ModelError:
    return ModelError(_KIND.format(name=name, kind=found, where="", column=name))


def _refuse_others(name: str, value: Any) -> None:
    kind = type(value).__name__
    refuse_samplers(name, value)
    if isinstance(value, Dataset):
        raise ModelError(_DATASET.format(name=name, kind=kind))
    if isinstance(value, Iterator):
        raise ModelError(_ONCE.format(name=name, kind=kind))
    if scipy.sparse.issparse(value):
        raise ModelError(_SPARSE.format(name=name, kind="array"))


def refuse_samplers(name: str, value: Any) -> None:
    """:raises ModelError: it chooses records, which must be sampled privately."""
    kind = type(value).__name__
    own = value if isinstance(value, Sampler) else getattr(value, "sampler", None)
    if isinstance(own, DistributedSampler):
        raise ModelError(DISTRIBUTED.format(name=name, has="is" if own is value else "has"))
    if isinstance(value, DataLoader):
        raise ModelError(_LOADER.format(name=name, kind=kind))
    if isinstance(value, Sampler):
        raise ModelError(_SAMPLER.format(name=name, kind=kind))


def refuse_batches(count: int) -> None:
    """Refuse a loop over a DataLoader before its first batch is taken for all data.

    Only the loader's sizes decide, which are public.

    :raises ModelError: a DataLoader with batches of so many records is being read.
    """
    # The loop's iterator has no name. The garbage collector finds the objects of its class.
    for each in gc.get_referrers(*_LOADER_ITERATORS):
        if type(each) in _LOADER_ITERATORS:
            try:
                size, total = each._index_sampler.batch_size, len(each._dataset)
            except (AttributeError, TypeError):  # no batches, or no length
                continue
            if size == count < total:
                raise ModelError(_IN_A_LOOP.format(count=count, total=total))


def _listed(name: str, value: Any) -> Tensor:
    found: Any
    try:
        if isinstance(value[0], Tensor):
            for each in value:
                require_torchs(name, each)
            found = torch.stack(list(value))
        else:
            found = np.array(value)
    except (RuntimeError, TypeError, ValueError):  # whose text may show a value
        raise ModelError(_RAGGED.format(name=name)) from None
    if isinstance(found, np.ndarray):
        found = _tensor(_numbers(name, found))
    require_alike(name, value)
    tensor: Tensor = as_tensor(name, found)
    return tensor


def require_alike(name: str, records: Sequence[Any]) -> None:
    """:raises ModelError: records have different kinds of numbers, so one would decide the dtype.

    :param records: numbers, arrays, tensors, or lists and dictionaries of them.
    """
    if len(kinds_of(records)) > 1:
        raise ModelError(_MIXED.format(name=name))


def kinds_of(records: Sequence[Any]) -> set[Any]:
    """The kinds of numbers that records have: only one if all get the same dtype.

    ``None`` does not count. It becomes NaN, for which a later error has better words.
    """
    return {_kind(each) for each in records if each is not None}


def _kind(value: Any) -> Any:
    if isinstance(value, dict):
        return frozenset((key, _kind(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        found = tuple(map(_kind, value))
        return found[0] if len(set(found)) == 1 else found
    if isinstance(value, Tensor):
        return float if value.is_floating_point() else value.dtype
    if isinstance(value, (np.ndarray, np.generic)):
        return {"f": float, "i": int, "u": int, "b": bool}.get(value.dtype.kind, value.dtype)
    if type(value) is int and not -(2**63) <= value < 2**63:  # NumPy makes floats of it
        return object
    return float if value is None else type(value)


def _frame(name: str, frame: Any) -> np.ndarray:
    """The columns of a frame as one array, in their common dtype."""
    columns = [
        _column(name, frame.iloc[:, j], f"{name}[{name}.columns[{j}]]")
        for j in range(frame.shape[1])
    ]
    if not columns:
        return np.empty(frame.shape)
    return np.stack(columns, axis=1)


def _column(name: str, column: Any, label: str | None = None) -> np.ndarray:
    """A column of pandas, also of its nullable dtypes, with NaN for missing values."""
    label, kind = label or name, column.dtype.kind
    if kind in "fiub" and not isinstance(column.dtype, np.dtype):
        missing = kind == "f" or column.isna().any()
        dtype = float if missing else {"b": bool}.get(kind, np.int64)
        # A nullable column marks missing values separately.
        return column.to_numpy(dtype=dtype, na_value=math.nan if missing else None)
    return _numbers(name, column.to_numpy(), label)


def _numbers(name: str, array: np.ndarray, label: str | None = None) -> np.ndarray:
    where = f" in {label}" if label not in (None, name) else ""
    kind = array.dtype.kind
    if kind == "O":
        objects, array = array, _of_objects(array)
        kind = array.dtype.kind
        if kind != "O":
            require_alike(name, objects.tolist())
    if kind not in "fiub":
        found = _KINDS.get(kind, OTHERS)
        raise ModelError(_KIND.format(name=name, kind=found, where=where, column=label or name))
    return array


def _of_objects(array: np.ndarray) -> np.ndarray:
    """An array of Python numbers and ``None`` as an array of numbers; others unchanged."""
    elements = array.ravel().tolist()
    if not all(isinstance(each, (numbers.Number, np.bool_, type(None))) for each in elements):
        return array
    try:
        found = np.array(elements).reshape(array.shape)
        return array.astype(float) if found.dtype.kind == "O" else found
    except (TypeError, ValueError, OverflowError):  # whose text would show a value
        return array


def _as_it_lies(array: np.memmap) -> Tensor | Column:
    column = ArrayColumn(array)
    right = torch.from_numpy(np.empty(0, array.dtype.newbyteorder("="))).dtype == column.dtype
    fits = right and array.dtype.isnative and array.flags.c_contiguous
    if not fits or array.flags.writeable:
        return column
    with no_warnings():  # torch warns that it is read-only, but nobody writes to it
        return torch.from_numpy(array)


def _tensor(array: np.ndarray) -> Tensor:
    return own_tensor(array, dtype_of(array.dtype.kind))
