"""The arguments of a model as records: which arguments are data, and one record's part of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.utils import _pytree as pytree

from pyro_dp.graphs.references import sentence
from pyro_dp.mechanism.releases import Releases
from pyro_dp.mechanism.sampling import AllRecords, DrawnAhead, Indices, RecordSampler
from pyro_dp.records.arguments import (
    Arguments,
    Shard,
    argument_names,
    flattened,
    is_few,
    named_arguments,
    refuse_untyped,
    with_a_row,
)
from pyro_dp.records.column import (
    Column,
    HeldRows,
    as_column,
    block_size,
    drawn_ahead,
    equal,
    has_rows,
)
from pyro_dp.records.data_numbers import DataNumbers, Scale
from pyro_dp.records.plate import OneRecord, PrivatePlate
from pyro_dp.records.sandbox import guarded
from pyro_dp.records.stand_ins import placeholder_row, rows_shown, spacing, varied
from pyro_dp.utils.errors import CURATOR, ModelError
from pyro_dp.utils.torch_state import sent, version

_NO_ROWS = (
    "No argument has a row for each of the {plate.size} elements of the private plate "
    "{plate.name!r}, and data that a model captures cannot be protected. Make the data arguments "
    "of the model, as in def model(x, y), and write svi.run(x, y). A list of tensors is passed as "
    "torch.stack(x)."
)
_OTHER_DIMENSION = (
    "The {plate.size} elements of the private plate {plate.name!r} lie in dimension {dim} of "
    "argument {name!r}, which has shape {shape}. They must lie in dimension 0: write "
    "svi.run({name}.transpose(0, {dim})), and {name} = {name}.transpose(0, {dim}) as the first "
    "line of model and guide."
)
_COLUMNS = (
    "{label} has {size} columns, as many as there are records, and would be a public constant. "
    "Transpose it, here and in the first line of model and guide, so that each record has a row. "
    "(A public constant that has this shape by chance: pass c[None], and read c[0].)"
)
_BATCH = (
    "Argument {name!r} is a batch: it has {rows} rows, and the private plate {plate.name!r} has "
    "{plate.size} elements. Write pyro.plate({plate.name!r}, len({name})), and pass all records to "
    "every step, as in svi.run({names}). Batches are drawn privately, at the sample rate."
)
_PART = (
    "The model reads a part of argument {name!r}: it has {rows} rows, and the private plate "
    "{plate.name!r} has {plate.size} elements. Write pyro.plate({plate.name!r}, len({name})) for "
    "all records. Or pass those of the plate alone, all arguments like {name}[:{plate.size}]."
)
_BESIDE = (
    "The model takes {label} for a public constant, because another owner has another number of "
    "its rows. It has as many rows as there are records here, or in all. Pass all data at all "
    "owners, with a row per record. A public constant is bound to the model, as in "
    "functools.partial(model, c=c[None])."
)
_OTHER_DATA = (
    "The data are not those of the first step ({what}). Each step samples its records privately, "
    "at the sample rate. Pass the whole data to every step, as in run(x, y), and no batches of a "
    "DataLoader. For other data make a new inference, with the same accountant "
    "if somebody can be in both."
)


class Reading(Enum):
    """How a model reads its arguments."""

    BY_INDEX = auto()  # at the plate's indices
    WHOLE = auto()
    COUNTED = auto()  # whole, and an integer N says how long they are


class Records:
    """The arguments of one step.

    Every tensor whose first dimension is N is data: row i belongs to record i. Everything else is a
    public constant.

    A model or guide never sees the data as a whole. If it reads its arguments whole, it sees row
    i alone for record i. Otherwise it sees that row repeated N times, as a view. Then "other
    records" are the same record. By construction a record's term depends on that record only. Code
    outside the plate and initial values use placeholders, and depend on no record.

    :param args: the step's arguments after :func:`~pyro_dp.records.arguments.as_tensors`; so are
        ``kwargs``.
    :param given: args and kwargs before their conversion; by default the same.
    :param shard: the records of this process; ``None``: all N.
    :ivar columns: the data, (N, ...) each, for the curator's checks; user code never sees them.
    :ivar original: the user's arguments before their conversion.
    :raises ModelError: no argument is data.
    """

    def __init__(
        self,
        model: Callable,
        plate: PrivatePlate,
        args: tuple,
        kwargs: dict,
        reading: Reading,
        given: Arguments | None = None,
        shard: Shard | None = None,
    ):
        self.plate = plate
        self.reading = reading
        self.count = plate.size if shard is None else shard.count
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self.original = _Original(*(given or (args, kwargs)))
        self._versions = [version(x) for x in self._leaves]
        if shard is None:
            tables = {i for i, leaf in enumerate(self._leaves) if has_rows(leaf)}
            self._data = [i for i in sorted(tables) if len(self._leaves[i]) == plate.size]
        else:
            self._data = sorted(shard.places) if shard.size == plate.size else []
            self._leaves = with_a_row(self._leaves, shard)
        self._names = argument_names(model, args, kwargs)
        if not self._data:
            raise ModelError(_no_data(plate, zip(self._names, self._leaves, strict=True)))
        _refuse_turned({plate.size, self.count}, self.constants)
        columns = [as_column(self._leaves[i]) for i in self._data]
        self.columns: list[Column] = [HeldRows(x) if x.sequential else x for x in columns]
        self.numbers = DataNumbers(self.columns)
        for name, value in named_arguments(model, args, kwargs):
            refuse_untyped(name, value, plate.size)

    @property
    def slice_data(self) -> bool:
        """Whether the model reads its arguments whole, and sees one row of them."""
        return self.reading is not Reading.BY_INDEX

    @property
    def likes(self) -> list[Tensor]:
        """Zeros of the shapes and dtypes of the data, (N, ...) each."""
        return [column.like for column in self.columns]

    @property
    def names(self) -> list[str]:
        """The name of each column's argument."""
        return [self._names[i] for i in self._data]

    @property
    def shown(self) -> int:
        """The number of placeholder rows that replace all N records."""
        return rows_shown(self.plate.size, self.row_size)

    @property
    def places(self) -> Arguments:
        """The arguments, with each leaf replaced by a flag: whether it is data."""
        leaves = [i in self._data for i in range(len(self._leaves))]
        return pytree.tree_unflatten(leaves, self._spec)

    @property
    def constants(self) -> list[tuple[str, Any]]:
        """Labels and values of the arguments that are no data."""
        return [
            (f"argument {name!r}", leaf)
            for i, (name, leaf) in enumerate(zip(self._names, self._leaves, strict=True))
            if i not in self._data
        ]

    @property
    def device(self) -> torch.device:
        return self.columns[0].device

    @property
    def row_size(self) -> int:
        """The number of numbers in the rows of one record."""
        return sum(column.row_shape.numel() for column in self.columns)

    @property
    def block(self) -> int:
        """How many records are read at a time."""
        return block_size(self.row_size)

    def blocks(self, count: int) -> Iterator[Tensor]:
        """Indices of all records of this process, in chunks of this size."""
        return AllRecords(self.count, self.device).split(count)

    def require_no_rows_beside(self) -> None:
        """Refuse constants with a row per record, because digests of constants leave this process.

        So another owner cannot turn data here into a constant.

        :raises ModelError: an argument that is no data has a row per record; names it.
        """
        for label, leaf in self.constants:
            if has_rows(leaf) and len(leaf) in (self.count, self.plate.size):
                raise ModelError(_BESIDE.format(label=label))

    def checked(self, count: int) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Indices and rows of all records of this process, ``count`` at a time.

        :raises ModelError: a number is not finite; names the argument only.
        """
        scales = [Scale(f"Argument {name!r}") for name in self.names]
        for chosen in self.blocks(count):
            rows = self.rows(chosen)
            self.require_finite(rows)
            for scale, values in zip(scales, rows, strict=True):
                if values.is_floating_point():
                    scale.add(values.detach())
            yield chosen, rows
        for scale in scales:
            scale.warn()

    def require_finite(self, rows: Sequence[Tensor]) -> None:
        """
        :param rows: rows of every data tensor, (B, ...) each.
        :raises ModelError: one holds NaN or infinity; names the argument only.
        """
        for name, values in zip(self.names, rows, strict=True):
            if not torch.isfinite(values).all():
                raise ModelError(
                    f"Argument {name!r} holds NaN or infinite values: impute them, or drop or mask "
                    f"the records. {CURATOR}"
                )

    def rows(self, indices: Tensor, *, distinct: bool = True) -> list[Tensor]:
        """A copy of the rows of every data tensor, each (B, ...).

        :param indices: (B,), ascending if ``distinct``.
        """
        if distinct:
            return [column.rows(indices) for column in self.columns]
        return [column.repeated_rows(indices) for column in self.columns]

    def passes(self, indices: Indices, size: int) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """At most ``size`` of these indices at a time, and their rows, for reading only.

        If these are all records, the rows are the data themselves, not copies.

        :param indices: distinct, ascending.
        """
        whole, start = len(indices) == self.count, 0
        for chosen in indices.split(size):
            if not len(chosen):  # an empty batch is split into one empty part
                return
            if whole:
                rows = [x.only_read(start, start + len(chosen)) for x in self.columns]
                start += len(chosen)
            else:
                rows = self.rows(chosen)
            yield chosen, rows

    def row(self, index: int) -> list[Tensor]:
        """One row of every data tensor, without the batch dimension."""
        return [rows[0] for rows in self.rows(torch.tensor([index]))]

    def examples(self, count: int = 3) -> list[int]:
        """At most ``count`` indices, evenly spread: the records on which checks run."""
        last = max(self.count, 1) - 1
        return sorted({i * last // (count - 1) for i in range(count)})

    def placeholder(self) -> list[Tensor]:
        """A public row without batch dimension: ones; zeros for integers."""
        return [placeholder_row(like) for like in self.likes]

    def varied(self, length: int, seed: int, *, integers: bool = True) -> Arguments:
        """The arguments with public rows that differ (``stand_ins.varied``)."""
        return self.with_tables([varied(x, length, seed, integers=integers) for x in self.likes])

    def apart(self, count: int, length: int) -> Tensor:
        """Indices of ``count`` varied rows that have no number in common, (count,)."""
        step = max(spacing(like, length) for like in self.likes)
        return step * torch.arange(count, device=self.device)

    def arguments(self, row: Sequence[Tensor], *, length: int | None = None) -> Arguments:
        """The arguments as the model sees them for one record.

        :param row: one row per data tensor, without the batch dimension.
        :param length: how often the row is repeated; by default N times, and once if the model
            reads its arguments whole.
        """
        length = length or (1 if self.slice_data else self.plate.size)
        # A copy, because the model may write into it.
        own = [value if is_batchedtensor(value) else value.clone() for value in row]
        return self.with_tables([value.expand(length, *value.shape) for value in own])

    def with_tables(self, tables: Sequence[Tensor]) -> Arguments:
        """The arguments with these rows instead of the data, (length, ...) each."""
        leaves = list(self._leaves)
        if self.reading is Reading.COUNTED:
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, int) and leaf == self.plate.size and leaf is not True:
                    leaves[i] = len(tables[0])
        for i, table in zip(self._data, tables, strict=True):
            leaves[i] = table
        return pytree.tree_unflatten(leaves, self._spec)

    def same_as(self, args: tuple, kwargs: dict) -> bool:
        """Whether these are the same arguments, unchanged."""
        return self.original.is_still(*flattened(args, kwargs))

    def require_same_data(self, later: "Records") -> None:
        """:raises ModelError: a later step has other data."""
        for size, first in ((later.count, self.count), (later.plate.size, self.plate.size)):
            if size != first:
                raise ModelError(_OTHER_DATA.format(what=f"{size} records, and {first} at first"))
        for i, j in zip(self._data, later._data, strict=False):
            name = later._names[j]
            one, other = self._leaves[i], later._leaves[j]
            if _same(other, one, self._versions[i]):
                continue
            if version(one) != self._versions[i]:
                raise ModelError(_OTHER_DATA.format(what=f"{name!r} was overwritten"))
            if not equal(as_column(one), as_column(other)):
                raise ModelError(_OTHER_DATA.format(what=f"{name!r} has other values"))
        if self._data != later._data:
            raise ModelError(_OTHER_DATA.format(what="other arguments have a row per record"))


@contextmanager
def on_placeholders(records: Records, runs: str, count: int = 1) -> Iterator[Arguments]:
    """Arguments of ``count`` placeholder records, in a context where the plate has their indices.

    :param runs: the name of the code that runs inside, such as "the model".
    :raises ModelError: the code inside raised an exception.
    """
    length = count if records.slice_data else None
    own = OneRecord(records.plate, torch.arange(count, device=records.device))
    with own, guarded(f"Running {runs} on placeholder data", public=True):
        yield records.arguments(records.placeholder(), length=length)


@dataclass(frozen=True, eq=False)
class Prepared:
    """Everything that an inference prepares for the data of its steps; other data start anew."""

    records: Records
    sampler: RecordSampler

    def is_current(self) -> bool:
        """Whether the parameters are still those that this was built for."""
        return True

    @cached_property
    def ahead(self) -> DrawnAhead:
        """Samples of several steps at once, if that saves passes over the data."""
        return drawn_ahead(self.records.columns, self.sampler)

    def draw(self, releases: Releases, position: int) -> Indices:
        """The records of a step: indices, ascending, on their device."""
        indices, device = releases.sample(self.sampler, position, self.ahead), self.records.device
        # The host draws them, because it must know their number for shapes.
        return sent(indices, device) if isinstance(indices, Tensor) else indices.to(device)

    def public(self, releases: Releases) -> list[Tensor]:
        """Constants of the model, as tensors: the public inputs of a release."""
        constants = [value for _, value in self.records.constants]
        tensors = [each for each in constants if isinstance(each, Tensor)]
        if releases.peers.own_ledgers:
            return tensors  # a digest of a single number would reveal it to other owners
        numbers = [each for each in constants if isinstance(each, (int, float, str))]
        return [*tensors, torch.frombuffer(bytearray(repr(numbers).encode()), dtype=torch.uint8)]


class _Original:
    """The user's arguments before their conversion, leaf by leaf."""

    def __init__(self, args: tuple, kwargs: dict):
        self.leaves, self._spec = flattened(args, kwargs)
        self._versions = [version(x) for x in self.leaves]

    def is_still(self, leaves: list[Any], spec: Any) -> bool:
        """Whether a later step has the same arguments, unchanged."""
        return spec == self._spec and all(map(_same, leaves, self.leaves, self._versions))


def _no_data(plate: PrivatePlate, arguments: Iterable[tuple[str, Any]]) -> str:
    """An error with the likely cause, from shapes alone, which are public."""
    shapes = {
        name: tuple(leaf.shape)
        for name, leaf in arguments
        if has_rows(leaf) and not is_few(leaf.shape)
    }
    for name, shape in shapes.items():
        if plate.size in shape:
            dim = shape.index(plate.size)
            return _OTHER_DIMENSION.format(plate=plate, name=name, dim=dim, shape=shape)
    if not shapes:
        return _NO_ROWS.format(plate=plate)
    name = max(shapes, key=lambda name: shapes[name][0])
    rows = shapes[name][0]
    text = _BATCH if rows < plate.size else _PART
    names = ", ".join(name for name, shape in shapes.items() if shape[0] == rows)
    return text.format(plate=plate, name=name, names=names, rows=rows)


def _refuse_turned(sizes: set[int], constants: Sequence[tuple[str, Any]]) -> None:
    """
    :param sizes: the numbers of all records and of those here.
    :raises ModelError: an argument has a column per record.
    """
    for label, leaf in constants:
        if has_rows(leaf) and len(leaf.shape) == 2 and len(leaf) > 1:
            count = leaf.shape[1]
            if count > 1 and count in sizes:
                raise ModelError(_COLUMNS.format(label=sentence(label), size=count))


def _same(new: Any, old: Any, known: int) -> bool:
    if isinstance(old, Tensor):
        if new is old:
            return version(new) == known
        return isinstance(new, Tensor) and _memory(new) == (*_memory(old)[:-1], known)
    if new is old:
        return True
    return isinstance(new, (bool, int, float, str)) and type(new) is type(old) and new == old


def _memory(tensor: Tensor) -> tuple:
    """Identifies a tensor's memory and version. The old tensor keeps its memory allocated."""
    place = (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride())
    return (*place, version(tensor))
