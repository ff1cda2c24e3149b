"""The arguments of a model, seen as records: which are data, and what one record shows of them."""

import inspect
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp.errors import ModelError
from pyro_dp.plates import PrivatePlate

Arguments = tuple[tuple, dict]


class Records:
    """The arguments of one step.

    Every tensor whose first dimension is N is data: row i belongs to record i. Everything else is a
    public constant.

    Nothing that is released comes from a model that was shown the data as a whole. For record i
    each data tensor is either that row alone (``slice_data=True``) or row i repeated N times (a
    view, not a copy), so that whatever it reads of "other records" is record i again: by
    construction a record's term depends on that record only. Everything outside the plate, and
    every initial value, is computed on placeholders and depends on no record at all.

    :raises ModelError: no argument is data.
    """

    def __init__(
        self, model: Callable, plate: PrivatePlate, args: tuple, kwargs: dict, slice_data: bool
    ):
        self.plate = plate
        self.slice_data = slice_data
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._versions = [_version(x) for x in self._leaves]
        self._data = [
            i
            for i, leaf in enumerate(self._leaves)
            if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == plate.size
        ]
        if not self._data:
            raise ModelError(
                f"No argument of step() is a tensor of length {plate.size}, the size of the "
                f"private plate {plate.name!r}: pass the data as arguments; what a model captures "
                "by closure cannot be protected."
            )
        self._names = [
            name
            for name, value in _named_arguments(model, args, kwargs)
            for _ in pytree.tree_leaves(value)
        ]
        for name, value in _named_arguments(model, args, kwargs):
            if _is_untyped_data(value, plate.size):
                raise ModelError(
                    f"Argument {name!r} has one element per record, but is no tensor: use one."
                )

    @property
    def device(self) -> torch.device:
        return self._leaves[self._data[0]].device

    def require_finite(self) -> None:
        """:raises ModelError: a data tensor holds NaN or infinity; names the argument only."""
        for i in self._data:
            if not torch.isfinite(self._leaves[i]).all():
                raise ModelError(
                    f"Argument {self._names[i]!r} holds NaN or infinite values: impute them, or "
                    "drop or mask the records. (This message depends on the data: it is for the "
                    "curator only.)"
                )

    def rows(self, indices: Tensor, *, distinct: bool = True) -> list[Tensor]:
        """Rows of every data tensor, each (B, ...).

        :param indices: (B,); ascending, if they are distinct.
        """
        if distinct and len(indices) == self.plate.size:
            return [self._leaves[i] for i in self._data]
        return [
            self._leaves[i].index_select(0, indices.to(self._leaves[i].device)) for i in self._data
        ]

    def row(self, index: int) -> list[Tensor]:
        """One row of every data tensor, without the batch dimension."""
        return [rows[0] for rows in self.rows(torch.tensor([index]))]

    def examples(self, count: int = 3) -> list[int]:
        """At most so many indices, evenly spread: the records that the checks look at."""
        return sorted({i * (self.plate.size - 1) // (count - 1) for i in range(count)})

    def placeholder(self) -> list[Tensor]:
        """A public row in place of data, without batch dimension: ones; zeros for integers."""
        return [
            leaf.new_full(leaf.shape[1:], 1 if leaf.is_floating_point() or leaf.is_complex() else 0)
            for leaf in (self._leaves[i] for i in self._data)
        ]

    def arguments(self, row: Sequence[Tensor], *, length: int | None = None) -> Arguments:
        """The arguments as the model sees them for one record.

        :param row: one row per data tensor, without the batch dimension.
        :param length: how often the row is repeated; by default once with ``slice_data``, else N
            times.
        """
        length = length or (1 if self.slice_data else self.plate.size)
        leaves = list(self._leaves)
        for i, value in zip(self._data, row, strict=True):
            leaves[i] = value.expand(length, *value.shape)
        return pytree.tree_unflatten(leaves, self._spec)

    def unprotected_arguments(self) -> Arguments:
        """The arguments as given: only for checks whose outcome goes to the curator."""
        return pytree.tree_unflatten(self._leaves, self._spec)

    def same_as(self, args: tuple, kwargs: dict) -> bool:
        """Whether these are the very arguments, unchanged."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        return spec == self._spec and all(map(_same, leaves, self._leaves, self._versions))


def _version(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, Tensor) else 0


def _same(new: Any, old: Any, version: int) -> bool:
    if isinstance(old, Tensor):
        return isinstance(new, Tensor) and _memory(new) == (*_memory(old)[:-1], version)
    if new is old:
        return True
    return isinstance(new, (bool, int, float, str)) and type(new) is type(old) and new == old


def _memory(tensor: Tensor) -> tuple:
    """Where the numbers are, and how often they were changed. The old tensor keeps it taken."""
    place = (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride())
    return (*place, _version(tensor))


def _is_untyped_data(value: Any, size: int) -> bool:
    """Whether there is an array, or a list of numbers, with one element per record."""
    if isinstance(value, (Tensor, str)):
        return False
    if isinstance(value, dict):
        return any(_is_untyped_data(each, size) for each in value.values())
    if isinstance(value, (list, tuple)):
        if len(value) == size and isinstance(value[0], numbers.Number):
            return True
        return any(_is_untyped_data(each, size) for each in value)
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return len(shape) > 0 and shape[0] == size
    return hasattr(value, "__len__") and len(value) == size


def _named_arguments(model: Callable, args: tuple, kwargs: dict) -> list[tuple[str, Any]]:
    """Arguments by the names of the model's signature, where it has one."""
    function = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        parameters = []
    parameters += [f"argument {i}" for i in range(len(parameters), len(args))]
    return [*zip(parameters, args, strict=False), *kwargs.items()]
