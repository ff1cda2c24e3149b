"""Datasets of torch, as the arguments that their items have."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from pyro_dp.records.sandbox import guarded
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.rng import forked_rng

_ITERABLE = (
    "Argument {name!r} is a {kind}, which has no length or no items by number: pass a dataset with "
    "__len__ and __getitem__, or all its records, as in svi.run(*torch.utils.data.default_collate("
    "list({name})))."
)
_STACK = (
    "The items of argument {name!r} (a {kind}) cannot be stacked: all must have one shape, "
    "as numbers, arrays or tensors, or as tuples or dictionaries of such (images by a transform "
    "such as ToTensor()). list({name}) shows the error, if it is the dataset's own."
)


def opened(args: tuple) -> list:
    """The positional arguments, a :class:`TensorDataset` as its tensors."""
    found: list[Any] = []
    for arg in args:
        found += arg.tensors if isinstance(arg, TensorDataset) else [arg]
    return found


def with_columns(args: tuple, kwargs: dict, names: Sequence[str]) -> tuple[tuple, dict]:
    """The arguments, each dataset among the positional ones as those that its items have.

    A ``TensorDataset`` stands for its tensors. Of any other one all items are read, once, and
    stacked: a tuple is arguments in their order, a dictionary arguments by name, and anything else
    one argument.

    :param names: of the positional arguments, for messages.
    :raises ModelError: a dataset has no length, or items that cannot be stacked.
    """
    found: list[Any] = []
    for name, arg in zip(names, args, strict=True):
        if not isinstance(arg, Dataset) or isinstance(arg, TensorDataset):
            found += opened((arg,))
            continue
        columns, named = _columns(name, arg)
        found += columns
        kwargs = kwargs | named
    return tuple(found), kwargs


def _columns(name: str, dataset: Any) -> tuple[list, dict]:
    """Arguments by position and by name."""
    kind = type(dataset).__name__
    readable = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not readable:
        raise ModelError(_ITERABLE.format(name=name, kind=kind))
    try:
        # Its transforms may draw: that must not move the public generators.
        with forked_rng(), guarded("Reading the dataset"):
            items = [dataset[i] for i in range(len(dataset))]
            stacked = default_collate(items)
            several = isinstance(items[0], (list, tuple))
    except ModelError:
        raise ModelError(_STACK.format(name=name, kind=kind)) from None
    if isinstance(stacked, dict):
        return [], stacked
    return (list(stacked) if several else [stacked]), {}
