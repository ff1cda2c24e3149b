"""The arguments of a call, turned into tensors or refused by name, and which records are here.

User code sees one record at a time, so it needs no rows of other processes. The tensors that a
model sees are as long as all records together, on every rank, also on one without records.
"""

import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp.mechanism.messages import Shape, Shapes
from pyro_dp.records.column import Column, has_rows, like
from pyro_dp.records.columns import opened, with_columns
from pyro_dp.records.stand_ins import placeholder_row
from pyro_dp.records.tables import as_tensor, is_rows, lengths, refuse_packed, require_same_rows
from pyro_dp.utils.errors import ModelError

_FEW_NUMBERS = (
    "Argument {name!r} has {count} numbers, as many as argument {other!r} has rows, so it is read "
    "as data. If they are public, pass each as an argument of its own, as in {name}_1=..., "
    "{name}_2=.... If they are data: "
)
Arguments = tuple[tuple, dict]
T = TypeVar("T")

_UNTYPED = (
    "Argument {name!r} has one element per record, and is a {kind}, whose records cannot be read. "
    "Pass a tensor, an array or a list of numbers, as in torch.tensor(list({elements})). (Settings "
    "that have this number by chance are bound to the model, as in functools.partial.)"
)
Exchange = Callable[[Shapes], list[Shapes]]  # by rank
_OTHER_ARGUMENTS = (
    "The arguments differ between the processes of the cluster in number or kind: all must pass "
    "the same ones, each with its own rows. One that has none passes tensors of shape (0, ...)."
)
_OTHER_ROWS = (
    "The rows of {name} differ in shape or dtype between the processes of the cluster. Convert the "
    "data to tensors of one dtype, with rows of one shape."
)
NO_SHARD = (
    "The size of the private plate is the number of rows of no argument, over all processes of "
    "the cluster. Let it be len(x), which counts all rows, or the sum of the shards."
)
_NESTED = (
    "Argument {name!r} is a {kind} that holds numbers or texts. Each process or owner must pass "
    "its records as tensors with a row per record, even for one or none, as in "
    "torch.tensor([[1.0, 2.0]]). Nothing else counts as data. Settings of a model are "
    "bound to it, as in functools.partial(model, sizes=(8, 2))."
)
_NO_RECORDS = "No process of the cluster has a record: pass each its rows, as in run(x, y)."


def as_tensors(model: Callable, args: tuple, kwargs: dict) -> Arguments:
    """Arguments with rows become tensors, by one rule for all; columns stay columns.

    Floats get torch's default dtype, also those of tensors; integers int64; booleans stay. Arrays
    and frames are tables; arrays that are mapped from a file may become columns. Lists, tuples and
    ranges are tables, if they have as many elements as the longest argument has rows. Datasets
    stand for the arguments that their items have (:func:`~pyro_dp.records.columns.with_columns`).
    Everything else stays unchanged.

    :raises ModelError: an argument cannot be read record by record; names it.
    """
    names = [name for name, _ in named_arguments(model, args, {})]
    args, kwargs = with_columns(args, kwargs, names)
    longest = _longest(args, kwargs)
    named, rows = named_arguments(model, args, kwargs), partial(is_rows, size=longest)
    for name, value in named:
        refuse_packed(name, value)
    require_same_rows([(n, leaf) for n, x in named for leaf in pytree.tree_leaves(x, is_leaf=rows)])
    found = [
        pytree.tree_map(partial(as_tensor, name, size=longest), value, is_leaf=rows)
        for name, value in named
    ]
    # An argument with fewer rows is a public constant, and no data.
    found = in_memory(found, below=longest)
    tensors = tuple(found[: len(args)]), dict(zip(kwargs, found[len(args) :], strict=True))
    if longest > 1:
        # The search for the plate would take it for a public constant.
        for name, value in named_arguments(model, *tensors):
            refuse_untyped(name, value, longest)
    return tensors


def in_memory(arguments: T, *, below: int | None = None) -> T:
    """The arguments with columns as tensors of all of their rows.

    :param below: only those with fewer rows.
    """

    def read(column: Column) -> Tensor | Column:
        few = below is None or len(column) < below
        return column.rows(torch.arange(len(column))) if few else column

    found: T = pytree.tree_map_only(Column, read, arguments)
    return found


def flattened(args: tuple, kwargs: dict) -> tuple[list, Any]:
    """The original arguments: leaves, among them lists of rows, and their structure."""
    given = opened(args)
    leaves: list[Any] = [*given, *kwargs.values()]
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        return leaves, (tuple(kwargs), [len(given)])
    leaves, places, longest = [], [], _longest(args, kwargs)
    for value in (*given, *kwargs.values()):
        found, spec = pytree.tree_flatten(value, is_leaf=partial(is_rows, size=longest))
        leaves += found
        places.append(spec)
    return leaves, (tuple(kwargs), places)


def _longest(args: tuple, kwargs: dict) -> int:
    """Most rows of an argument: of none, 0. A list of one element is no data."""
    found = (n for value in (*opened(args), *kwargs.values()) for n in lengths(value))
    longest = max(found, default=0)
    return longest if longest > 1 else 0


def refuse_untyped(name: str, value: Any, size: int) -> None:
    """:raises ModelError: an argument has one element per record, and is no tensor."""
    if _is_untyped_data(value, size):
        elements = f"{name}.values()" if isinstance(value, dict) else name
        kind = type(value).__name__
        raise ModelError(_UNTYPED.format(name=name, kind=kind, elements=elements))


def is_few(shape: Sequence[int]) -> bool:
    """Whether these may be settings, such as the widths of layers: 2 to 4 numbers."""
    return len(shape) == 1 and 2 <= shape[0] <= 4


def read_as_data(model: Callable, args: tuple, kwargs: dict) -> str:
    """The beginning of an error, if a short list is as long as another argument; else empty."""
    longest = _longest(args, kwargs)
    named = [(n, x) for n, x in named_arguments(model, args, kwargs) if longest in lengths(x)]
    few = [
        name
        for name, value in named
        if isinstance(value, (list, tuple))
        and isinstance(value[0], numbers.Number)
        and is_few((len(value),))
    ]
    others = [n for n, _ in named if n not in few]
    if few and others:
        return _FEW_NUMBERS.format(name=few[0], count=longest, other=others[0])
    return ""


def signature_of(model: Callable) -> Mapping[str, inspect.Parameter]:
    """The parameters of the model's signature, where it has one."""
    function = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def required_arguments(model: Callable) -> list[str]:
    """Names of the arguments that the model cannot be called without."""
    any_number = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    found = signature_of(model).values()
    return [p.name for p in found if p.default is p.empty and p.kind not in any_number]


def named_arguments(model: Callable, args: tuple, kwargs: dict) -> list[tuple[str, Any]]:
    """Arguments by the names of the model's signature."""
    parameters = list(signature_of(model))
    parameters += [f"argument {i}" for i in range(len(parameters), len(args))]
    return [*zip(parameters, args, strict=False), *kwargs.items()]


def described(model: Callable, args: tuple, kwargs: dict) -> str:
    """Kinds and shapes of the arguments, which are public, for a message."""
    found = []
    for name, value in named_arguments(model, args, kwargs):
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            dtype = str(value.dtype).removeprefix("torch.")
            found.append(f"{name!r} {tuple(value.shape)} {dtype}")
        else:
            found.append(f"{name!r} {type(value).__name__}")
    return f"The arguments were {', '.join(found)}." if found else ""


def argument_names(model: Callable, args: tuple, kwargs: dict) -> list[str]:
    """The name of the argument that each leaf belongs to."""
    return [
        name
        for name, value in named_arguments(model, args, kwargs)
        for _ in pytree.tree_leaves(value)
    ]


def _is_untyped_data(value: Any, size: int) -> bool:
    """Whether a collection has one element per record, and is no dictionary of tables."""
    if isinstance(value, (Tensor, Column, str)) or not hasattr(value, "__len__"):
        return False
    elements = list(value.values()) if isinstance(value, dict) else value
    if len(value) == size:
        tables = isinstance(value, dict) and all(has_rows(x) and len(x) == size for x in elements)
        return not tables
    nested = isinstance(value, (dict, list, tuple))
    return nested and any(_is_untyped_data(each, size) for each in elements)


@dataclass(frozen=True)
class Shard:
    """The records of one process.

    :param count: how many are here, also 0.
    :param size: N, of all processes.
    :param places: the data's indices among the arguments' leaves.
    """

    count: int
    size: int
    places: frozenset[int]


def find_shards(names: Sequence[str], arguments: Arguments, exchange: Exchange) -> list[Shard]:
    """The candidates for the records, by the shapes of all processes; most rows first.

    Tensors that have equally many rows on each process belong together. A constant has the same
    ones everywhere, which only the model can tell from data. Values of numbers stay private,
    because a number in a list may be a record.

    :raises ModelError: they differ between processes, or there are no rows; on all of them alike.
    """
    _refuse_nested(names, arguments)
    leaves = pytree.tree_leaves(arguments)
    by_rank = exchange(Shapes(list(names), [_shape(leaf) for leaf in leaves]))
    if any(each.names != by_rank[0].names for each in by_rank):
        raise ModelError(_OTHER_ARGUMENTS)
    by_leaf = list(zip(*(each.shapes for each in by_rank), strict=True))
    for name, found in zip(names, by_leaf, strict=True):
        if len({each[1:] for each in found}) > 1:
            raise ModelError(_OTHER_ROWS.format(name=repr(name)))
    groups: dict[tuple[int, ...], set[int]] = {}
    for i, found in enumerate(by_leaf):
        groups.setdefault(tuple(each[0] for each in found), set()).add(i)
    shards = [
        Shard(len(leaves[min(places)]), sum(counts), frozenset(places))
        for counts, places in groups.items()
        if sum(counts)
    ]
    if not shards:
        raise ModelError(_NO_RECORDS)
    return sorted(shards, key=lambda shard: -shard.size)


def as_of_all(arguments: Arguments, shard: Shard) -> Arguments:
    """The arguments with public rows instead of data, as many as all processes have."""
    leaves, spec = pytree.tree_flatten(arguments)
    return pytree.tree_unflatten(_with_public_rows(leaves, shard, shard.size), spec)


def with_a_row(leaves: Sequence[Any], shard: Shard) -> list[Any]:
    """An empty shard has one public row, to trace the model; no step takes it."""
    return list(leaves) if shard.count else _with_public_rows(leaves, shard, 1)


def _with_public_rows(leaves: Sequence[Any], shard: Shard, length: int) -> list[Any]:
    rows = {i: placeholder_row(like(leaves[i])) for i in shard.places}
    rows = {i: row.expand(length, *row.shape) for i, row in rows.items()}
    return [rows.get(i, leaf) for i, leaf in enumerate(leaves)]


def _refuse_nested(names: Sequence[str], arguments: Arguments) -> None:
    args, kwargs = arguments
    remaining = iter(names)  # as many of each argument as it has leaves
    for value in (*args, *kwargs.values()):
        leaves, spec = pytree.tree_flatten(value)
        own = [next(remaining) for _ in leaves]
        if not spec.is_leaf() and any(isinstance(x, (int, float, str)) for x in leaves):
            raise ModelError(_NESTED.format(name=own[0], kind=type(value).__name__))


def _shape(leaf: Any) -> Shape:
    """Rows, the shape of one, and its type; all of it is public."""
    if has_rows(leaf):
        return len(leaf), tuple(leaf.shape[1:]), str(leaf.dtype)
    return 0, (), str(leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__
