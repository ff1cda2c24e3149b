"""State of the user's code: nothing of one record may be kept for the next.

Model and guide may refer to more than their arguments (:mod:`pyro_dp.graphs.references`). A graph
has these values as constants, and is traced again when one changes. State that a model keeps of a
record is put back at once. If the kept state depends on the data, the model is refused.
"""

import collections
import contextlib
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from pyro_dp.graphs.places import MISSING
from pyro_dp.graphs.references import LONGEST, References, is_table, sentence
from pyro_dp.graphs.tracing import untraced
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.torch_state import address, set_state_of, state_of, version

KEEPS = (
    "{label} changes with the data that the model or guide sees. So one record's data would reach "
    "others, or the released parameters. Compute it from the record each time, in a local "
    "variable, or set it to a public constant before the first step."
)
_PLAIN = (bool, int, float, complex, str, type(None))
_DEPTH = 5  # nested values are compared to this depth
_SMALL = 2**16  # numbers of a tensor that is worth a copy
Changes = dict[tuple[str, str], Any]  # new values by label and name


class _Constant:
    """A tensor that a graph has as a constant."""

    def __init__(self, read: Callable[[Any], Any], name: Any, value: Tensor):
        self._read, self._name, self._value = read, name, value
        self._version = math.inf if value.requires_grad else version(value)
        self._kept = value.clone() if value.numel() <= _SMALL and self._version < math.inf else None

    @property
    def changed(self) -> bool:
        value = self._value
        if self._read(self._name) is not value:
            return True
        if self._version == math.inf or value._version == self._version:
            return False
        # A parameter that started at this tensor counts its versions, but has different memory.
        self._version = value._version
        return self._kept is None or not torch.equal(value, self._kept)


class _Kept:
    """The former state of a tensor and its gradient.

    :param whole: whether to keep a copy of the numbers; else only their address and version.
    """

    def __init__(self, tensor: Tensor, whole: bool):
        self.tensor = tensor
        self._memory, self._version = tensor.data, version(tensor)
        self._numbers = tensor.detach().clone() if whole else None
        self._gradient = tensor.grad if tensor.is_leaf else None
        self._of_gradient = None if self._gradient is None else _Kept(self._gradient, whole)

    @property
    def changed(self) -> bool:
        if self._has_new_gradient or (self._of_gradient and self._of_gradient.changed):
            return True
        if self._numbers is not None:
            return not _same_numbers(self.tensor.data, self._numbers)
        return self._has_new_memory or version(self.tensor) != self._version

    def put_back(self) -> None:
        if self._numbers is not None and self.changed:
            self._memory.copy_(self._numbers)
        if self._has_new_memory:
            self.tensor.data = self._memory
        if self._has_new_gradient:
            self.tensor.grad = self._gradient
        if self._of_gradient:
            self._of_gradient.put_back()

    @property
    def _has_new_gradient(self) -> bool:
        return self.tensor.is_leaf and self.tensor.grad is not self._gradient

    @property
    def _has_new_memory(self) -> bool:
        return address(self.tensor) != address(self._memory)


class CapturedState:
    """All objects that model and guide refer to, and their values when this object was made."""

    def __init__(self, *roots: Callable | tuple[str, Any]):
        self.references = References(*roots)
        self._places = self.references.places
        self._is_watched = False
        values = [
            (place.reader, name, value)
            for place in self._places[1:]  # without Pyro's parameters
            if not isinstance(place.owner, (set, collections.deque))
            and len(items := _items(place.values())) <= LONGEST
            for name, value in items.items()
        ]
        self._plain = [each for each in values if isinstance(each[2], _PLAIN)]
        # Parameters are inputs of a graph, and change in every step.
        self._constants = [
            _Constant(*each)
            for each in values
            if isinstance(each[2], Tensor) and not is_lazy(each[2])
        ]

    @property
    def changed(self) -> bool:
        """Whether a number, string or tensor has changed."""
        for read, name, value in self._plain:
            new = read(name)
            if new is not value and not (type(new) is type(value) and new == value):
                return True
        return any(constant.changed for constant in self._constants)

    @contextlib.contextmanager
    def preserved(self, *, batched: bool = False) -> Iterator[None]:
        """Run code on records inside. At the end, state that it kept of them is put back.

        :param batched: the code runs under ``torch.vmap``. It cannot write records into a captured
            tensor or array, so these need no copies.
        :raises ModelError: a tensor or array was overwritten; names it.
        """
        if self._is_watched:
            yield
            return
        memory: Changes = {}
        with self._put_back({}, memory, largest=-1 if batched else _SMALL):
            yield
        require_no_changes(memory)

    @contextlib.contextmanager
    def pristine(self) -> Iterator[Changes]:
        """The same without the error, and also for large tensors.

        Inside, :meth:`preserved` puts nothing back, so that kept state has its effect.

        :returns: the changes, which are complete at the end.
        """
        changes: Changes = {}
        self._is_watched = True
        try:
            with self._put_back(changes, changes):
                yield changes
        finally:
            self._is_watched = False

    def forget(self) -> None:
        """Clear the caches of functions, because users may have called them with data."""
        for cache in self.references.caches:
            cache.cache_clear()

    @contextlib.contextmanager
    def _put_back(
        self, changes: Changes, memory: Changes, largest: float = math.inf
    ) -> Iterator[None]:
        """Put all state back at the end, and record its changes.

        :param changes: receives the changes, except the contents of tensors and arrays.
        :param memory: receives the changed contents.
        :param largest: size of the largest tensor that is copied before.
        """
        before = [(place, place.values()) for place in self._places]
        misses = [cache.cache_info().misses for cache in self.references.caches]
        with untraced():
            tensors = [(label, _Kept(t, t.numel() <= largest)) for label, t in self._tensors()]
            generators = [(label, x, state_of(x)) for label, x in self.references.generators]
        held = self.references.held if largest >= 0 else ()
        arrays = [(n, x, x.copy()) for n, x in held if isinstance(x, np.ndarray) or is_table(x)]
        try:
            yield
        finally:
            for place, values in before:
                now = place.values()
                if not _identical(now, values):
                    old, new = _items(values), _items(now)
                    for name in old | new:
                        if (value := new.get(name, MISSING)) is not old.get(name, MISSING):
                            changes[place.described(name), _key(name)] = value
                    place.put_back(values)
            with untraced():
                for label, kept in tensors:
                    if kept.changed:
                        memory[label, ""] = kept.tensor.detach().clone()
                    kept.put_back()
                for label, generator, state in generators:
                    changes[label, ""] = state_of(generator)
                    set_state_of(generator, state)
            for label, array, values in arrays:
                if is_table(array):
                    if not array.equals(values):
                        memory[label, ""] = array.copy()
                        array.__init__(values)
                elif not np.array_equal(array, values, equal_nan=array.dtype.kind in "fc"):
                    memory[label, ""] = array.copy()
                    array[...] = values
            for cache, before_run in zip(self.references.caches, misses, strict=True):
                if cache.cache_info().misses != before_run:
                    changes[f"the cache of {cache.__name__}()", ""] = None
                    cache.cache_clear()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from (
            (label, t)
            for label, t in self.references.tensors
            if t.layout is torch.strided and not is_lazy(t)
        )
        for name, leaf in self.references.parameters.leaves.items():
            yield f"parameter {name!r}", leaf


def require_same_changes(one: Changes, other: Changes) -> None:
    """:raises ModelError: two runs on different data left different changes."""
    for key in one | other:
        if not alike(one.get(key, MISSING), other.get(key, MISSING)):
            raise ModelError(KEEPS.format(label=sentence(key[0])))


def require_no_changes(changes: Changes) -> None:
    """:raises ModelError: state changed during a run on data."""
    for label, _ in changes:
        raise ModelError(KEEPS.format(label=sentence(label)))


def _items(values: Any) -> dict[Any, Any]:
    return values if isinstance(values, dict) else dict(enumerate(values))


def _key(name: Any) -> str:
    """A key that is the same in another run, in which objects have other addresses."""
    return str(name) if isinstance(name, (*_PLAIN, tuple)) else type(name).__name__


def _identical(now: Any, before: Any) -> bool:
    if isinstance(before, dict):
        return now.keys() == before.keys() and all(now[k] is v for k, v in before.items())
    if isinstance(before, set):
        return now == before
    return len(now) == len(before) and all(map(operator.is_, now, before))


def alike(one: Any, other: Any, depth: int = _DEPTH) -> bool:
    """Whether two values are equal, as far as can be compared."""
    if one is other or depth == 0:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return _same_numbers(one, other)
    if isinstance(one, np.ndarray):
        if one.shape != other.shape:
            return False
        return bool(np.all((one == other) | ((one != one) & (other != other))))
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[k], other[k], depth - 1) for k in one)
    if isinstance(one, (list, tuple)):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(alike(*pair, depth - 1) for pair in pairs)
    if hasattr(one, "__dict__"):
        return alike(vars(one), vars(other), depth - 1)
    return True if not isinstance(one, (*_PLAIN, set, frozenset)) else one == other


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether tensors have equal shapes, dtypes and numbers; NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
