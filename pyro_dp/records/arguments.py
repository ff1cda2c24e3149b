"""The arguments of a step, as users have them: turned into tensors, or refused by name."""

import inspect
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from pyro_dp.utils.errors import ModelError

Arguments = tuple[tuple, dict]

_LOADER = (
    "Argument {name!r} is a {kind}: pass the tensors themselves, all records at once, as in "
    "svi.run(*dataset.tensors). Which records take part in a step is drawn privately."
)
_KIND = (
    "Argument {name!r} holds {kind}: encode them as numbers first (a category as integers 0, 1, "
    "...), by a rule that was fixed before the data."
)
_UNTYPED = (
    "Argument {name!r} has one element per record, but is no tensor: use one, as "
    "torch.tensor({name})."
)


def as_tensors(model: Callable, args: tuple, kwargs: dict) -> Arguments:
    """NumPy arrays and pandas frames become tensors: floats of torch's default dtype, integers
    of int64, booleans as they are. Everything else stays what it is.

    :raises ModelError: an argument is no such thing, and none that a model could read record by
        record; names it.
    """
    names = argument_names(model, args, kwargs)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    converted = [_as_tensor(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
    longest = max((len(x) for x in converted if isinstance(x, Tensor) and x.dim()), default=None)
    tensors = pytree.tree_unflatten(converted, spec)
    if longest is None or longest > 1:
        # Such a list would be shown as a public constant while the plate is looked for.
        for name, value in named_arguments(model, *tensors):
            refuse_untyped(name, value, longest)
    return tensors


def refuse_untyped(name: str, value: Any, size: int | None) -> None:
    """
    :param size: number of records, if it is known.
    :raises ModelError: an argument has one element per record, and is no tensor.
    """
    if _is_untyped_data(value, size):
        raise ModelError(_UNTYPED.format(name=name))


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


def _as_tensor(name: str, leaf: Any) -> Any:
    if isinstance(leaf, (DataLoader, Dataset)):
        raise ModelError(_LOADER.format(name=name, kind=type(leaf).__name__))
    if hasattr(leaf, "to_numpy") and not isinstance(leaf, np.ndarray):  # of pandas
        leaf = leaf.to_numpy()
    if not isinstance(leaf, np.ndarray):
        return leaf
    kind = leaf.dtype.kind
    if kind == "O":
        try:
            leaf, kind = leaf.astype(float), "f"
        except (TypeError, ValueError):  # whose text would show a value
            raise ModelError(_KIND.format(name=name, kind="text or other objects")) from None
    if kind not in "fiub":
        kinds = {"U": "text", "S": "text", "M": "dates", "m": "time spans", "c": "complex numbers"}
        raise ModelError(_KIND.format(name=name, kind=kinds.get(kind, str(leaf.dtype))))
    dtype = {"f": torch.get_default_dtype(), "b": torch.bool}.get(kind, torch.int64)
    return torch.from_numpy(np.array(leaf)).to(dtype)


def _is_untyped_data(value: Any, size: int | None) -> bool:
    """Whether there is a sequence of numbers, or of sequences, with one element per record."""
    if isinstance(value, (Tensor, str)):
        return False
    if isinstance(value, dict):
        return any(_is_untyped_data(each, size) for each in value.values())
    if isinstance(value, (list, tuple)):
        rows = len(value) and isinstance(value[0], (numbers.Number, list, tuple, Tensor, str))
        if rows and (len(value) == size or size is None):
            return True
        return any(_is_untyped_data(each, size) for each in value)
    return hasattr(value, "__len__") and len(value) == size
