"""The arguments of a step, as users have them: turned into tensors, or refused by name."""

import inspect
import numbers
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp.records.column import Column
from pyro_dp.records.columns import opened, with_columns
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
    "Argument {name!r} has one element per record, and is a {kind}, of which no record can be "
    "read: pass a tensor, an array or a list of numbers, as in torch.tensor(list({elements}))."
)


def as_tensors(model: Callable, args: tuple, kwargs: dict) -> Arguments:
    """What has rows becomes tensors, by one rule for all; columns stay what they are.

    Floats get torch's default dtype, also those of tensors; integers int64; booleans stay. Arrays
    and frames are tables; arrays that are mapped from a file may become columns. Lists, tuples and
    ranges are tables, if they have as many elements as the longest argument has rows. Datasets
    stand for the arguments that their items have
    (:func:`~pyro_dp.records.columns.with_columns`). Everything else stays what it is.

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
    # Whatever has fewer rows is a public constant, and no data.
    found = in_memory(found, below=longest)
    tensors = tuple(found[: len(args)]), dict(zip(kwargs, found[len(args) :], strict=True))
    if longest > 1:
        # It would be shown as a public constant while the plate is looked for.
        for name, value in named_arguments(model, *tensors):
            refuse_untyped(name, value, longest)
    return tensors


def in_memory(arguments: T, *, below: int | None = None) -> T:
    """With columns as tensors of all of their rows.

    :param below: only those with fewer rows.
    """

    def read(leaf: Any) -> Any:
        if isinstance(leaf, Column) and (below is None or len(leaf) < below):
            return leaf.rows(torch.arange(len(leaf)))
        return leaf

    found: T = pytree.tree_map(read, arguments)
    return found


def flattened(args: tuple, kwargs: dict) -> tuple[list, Any]:
    """The arguments as they were given: leaves, among them lists of rows, and their places."""
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
    """
    :param size: number of records.
    :raises ModelError: an argument has one element per record, and is no tensor.
    """
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


def named_arguments(model: Callable, args: tuple, kwargs: dict) -> list[tuple[str, Any]]:
    """Arguments by the names of the model's signature, where it has one."""
    function = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        parameters = []
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
    """Whether there is a collection of numbers, or of sequences, with one element per record."""
    if isinstance(value, (Tensor, Column, str)):
        return False
    if isinstance(value, dict):
        rows = all(isinstance(each, numbers.Number) for each in value.values())
        nested = any(_is_untyped_data(each, size) for each in value.values())
        return nested or (rows and len(value) == size)
    if isinstance(value, (list, tuple)):
        rows = len(value) > 0 and isinstance(value[0], (numbers.Number, list, tuple, Tensor, str))
        if rows and len(value) == size:
            return True
        return any(_is_untyped_data(each, size) for each in value)
    return hasattr(value, "__len__") and len(value) == size
