"""Convert the arguments of a call to tensors, or refuse them by name, and find a process's records.

User code sees one record at a time, so it needs no rows of other processes. On every rank, also on
one without records, the tensors that a model sees have as many rows as all ranks together.
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

Arguments = tuple[tuple, dict]
Exchange = Callable[[Shapes], list[Shapes]]  # results by rank
T = TypeVar("T")

_FEW_NUMBERS = (
    "Argument {name!r} has {count} numbers, as many as argument {other!r} has rows, so it is read "
    "as data. If they are public, pass each as an argument of its own, as in {name}_1=..., "
    "{name}_2=.... If they are data: "
)
_UNTYPED = (
    "Argument {name!r} has one element per record, and is a {kind}, whose records cannot be read. "
    "Pass a tensor, an array or a list of numbers, as in torch.tensor(list({elements})). (If it is "
    "a setting that has this length by chance, bind it to the model with functools.partial.)"
)
_OTHER_ARGUMENTS = (
    "The arguments differ between the processes of the cluster in number or kind. All must pass "
    "the same arguments, each with its own rows, or tensors of shape (0, ...) without rows."
)
_OTHER_ROWS = (
    "The rows of {name} differ in shape or dtype between the processes of the cluster. Convert the "
    "data to tensors of one dtype, with rows of one shape."
)
NO_SHARD = (
    "No argument has as many rows over all processes of the cluster as the private plate has "
    "elements. Let the plate's size be len(x), which counts all rows, or the sum of the shards."
)
_NESTED = (
    "Argument {name!r} is a {kind} that holds numbers or texts. Each process or owner must pass "
    "its records as tensors with a row per record, even for one or none, as in "
    "torch.tensor([[1.0, 2.0]]). Nothing else counts as data. Bind settings to the model, as in "
    "functools.partial(model, sizes=(8, 2))."
)
_NO_RECORDS = "No process of the cluster has a record: pass each process its rows, as in run(x, y)."


def as_tensors(model: Callable, args: tuple, kwargs: dict) -> Arguments:
    """Convert arguments with rows to tensors, by one rule for all; columns stay columns.

    Floats get torch's default dtype, also those of tensors. Integers become int64, and booleans
    stay. Arrays and frames are tables; arrays that are mapped from a file may become columns.
    Lists, tuples and ranges are tables if they are as long as the longest argument. A dataset
    becomes the arguments in its items (:func:`~pyro_dp.records.columns.with_columns`). Everything
    else stays unchanged.

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
    # An argument with fewer rows is a public constant.
    found = in_memory(found, below=longest)
    tensors = tuple(found[: len(args)]), dict(zip(kwargs, found[len(args) :], strict=True))
    if longest > 1:
        # The search for the plate would take such a value for a public constant.
        for name, value in named_arguments(model, *tensors):
            refuse_untyped(name, value, longest)
    return tensors


def in_memory(arguments: T, *, below: int | None = None) -> T:
    """The arguments, with columns read into tensors.

    :param below: read only columns with fewer rows.
    """

    def read(column: Column) -> Tensor | Column:
        few = below is None or len(column) < below
        return column.rows(torch.arange(len(column))) if few else column

    found: T = pytree.tree_map_only(Column, read, arguments)
    return found


def flattened(args: tuple, kwargs: dict) -> tuple[list, Any]:
    """The leaves of the user's arguments, and their structure. A list of rows is one leaf."""
    positional = opened(args)
    values: list[Any] = [*positional, *kwargs.values()]
    if all(isinstance(value, Tensor) for value in values):
        return values, (tuple(kwargs), [len(positional)])
    leaves, specs, longest = [], [], _longest(args, kwargs)
    for value in values:
        found, spec = pytree.tree_flatten(value, is_leaf=partial(is_rows, size=longest))
        leaves += found
        specs.append(spec)
    return leaves, (tuple(kwargs), specs)


def _longest(args: tuple, kwargs: dict) -> int:
    """The largest number of rows of an argument. It is 0 without rows, and for a single one."""
    found = (n for value in (*opened(args), *kwargs.values()) for n in lengths(value))
    longest = max(found, default=0)
    return longest if longest > 1 else 0


def refuse_untyped(name: str, value: Any, size: int) -> None:
    """:raises ModelError: an argument has one element per record, but is no tensor."""
    if _is_untyped_data(value, size):
        elements = f"{name}.values()" if isinstance(value, dict) else name
        kind = type(value).__name__
        raise ModelError(_UNTYPED.format(name=name, kind=kind, elements=elements))


def is_few(shape: Sequence[int]) -> bool:
    """Whether a shape may be that of settings, such as the widths of layers: 2 to 4 numbers."""
    return len(shape) == 1 and 2 <= shape[0] <= 4


def read_as_data(model: Callable, args: tuple, kwargs: dict) -> str:
    """The beginning of an error if a short list is as long as another argument; else empty."""
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
    """The parameters of the model's signature; empty if it has none."""
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
    """Arguments with their names in the model's signature."""
    parameters = list(signature_of(model))
    parameters += [f"argument {i}" for i in range(len(parameters), len(args))]
    return [*zip(parameters, args, strict=False), *kwargs.items()]


def described(model: Callable, args: tuple, kwargs: dict) -> str:
    """A sentence with the types and shapes of the arguments, which are public."""
    found = []
    for name, value in named_arguments(model, args, kwargs):
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            dtype = str(value.dtype).removeprefix("torch.")
            found.append(f"{name!r} {tuple(value.shape)} {dtype}")
        else:
            found.append(f"{name!r} {type(value).__name__}")
    return f"The arguments were {', '.join(found)}." if found else ""


def argument_names(model: Callable, args: tuple, kwargs: dict) -> list[str]:
    """The name of each leaf's argument."""
    return [
        name
        for name, value in named_arguments(model, args, kwargs)
        for _ in pytree.tree_leaves(value)
    ]


def _is_untyped_data(value: Any, size: int) -> bool:
    """Whether a collection has one element per record, but is no tensor or dictionary of tables."""
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

    :param count: how many records this process has; it may be 0.
    :param size: N, the number of records of all processes.
    :param places: positions of the data among the arguments' leaves.
    """

    count: int
    size: int
    places: frozenset[int]


def find_shards(names: Sequence[str], arguments: Arguments, exchange: Exchange) -> list[Shard]:
    """Candidates for the records, from the shapes on all processes; most rows first.

    Tensors with the same number of rows on each process belong together. Only the model shows
    whether such a group is data or constants. Values of numbers are not exchanged, because a number
    in a list may be a record.

    :raises ModelError: arguments differ between processes, or none has rows. All processes raise
        the same error.
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
    """The arguments with placeholder rows instead of data, one for each record of all processes."""
    leaves, spec = pytree.tree_flatten(arguments)
    return pytree.tree_unflatten(_with_public_rows(leaves, shard, shard.size), spec)


def with_a_row(leaves: Sequence[Any], shard: Shard) -> list[Any]:
    """The leaves. An empty shard gets one placeholder row for tracing, which no step uses."""
    return list(leaves) if shard.count else _with_public_rows(leaves, shard, 1)


def _with_public_rows(leaves: Sequence[Any], shard: Shard, length: int) -> list[Any]:
    rows = {i: placeholder_row(like(leaves[i])) for i in shard.places}
    rows = {i: row.expand(length, *row.shape) for i, row in rows.items()}
    return [rows.get(i, leaf) for i, leaf in enumerate(leaves)]


def _refuse_nested(names: Sequence[str], arguments: Arguments) -> None:
    """:raises ModelError: an argument is a collection of numbers or texts."""
    args, kwargs = arguments
    position = 0  # the index of the argument's first leaf
    for value in (*args, *kwargs.values()):
        leaves, spec = pytree.tree_flatten(value)
        if not spec.is_leaf() and any(isinstance(x, (int, float, str)) for x in leaves):
            raise ModelError(_NESTED.format(name=names[position], kind=type(value).__name__))
        position += len(leaves)


def _shape(leaf: Any) -> Shape:
    """The number of rows, the shape of one, and the dtype or type; all are public."""
    if has_rows(leaf):
        return len(leaf), tuple(leaf.shape[1:]), str(leaf.dtype)
    return 0, (), str(leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__
