"""What user code refers to beside its arguments: closures, defaults, globals, attributes.

:class:`References` finds it all from a model and a guide, with a name for each that a message can
show. What belongs to libraries is looked through for what users handed to it (a conditioned model,
``init_to_value``), but their caches are their own.
"""

import collections
import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import numpy as np
import pyro
import torch
from pyro.poutine import Trace
from torch import Tensor

_LIBRARIES = sys.stdlib_module_names | {
    *("IPython", "_pytest", "arviz", "funsor", "jax", "matplotlib", "numpy", "opt_einsum"),
    *("pandas", "pluggy", "pyro", "pyro_dp", "pytest", "scipy", "sklearn", "torch", "tqdm"),
}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_LISTS = (list, collections.deque)
_MOST_THINGS = 50_000
_LONGEST = 10_000  # of a container whose elements are looked at
# What autoguides keep of their first run, which is on placeholders.
_OWN_RECORDS = ("prototype_trace", "_prototype_frames", "_pyro_context", "_init_locs", "plates")
MISSING = object()


class Place:
    """Where user code can keep Python values: a namespace, a closure's cell, a container.

    :param label: its name in messages.
    """

    def __init__(self, label: str, owner: Any):
        self.label = label
        self.owner = owner

    def values(self) -> Any:
        """A shallow copy of what is kept."""
        return self.owner.copy()

    @property
    def reader(self) -> Callable[[Any], Any]:
        """A fast way to one of the values, by name or position; ``None`` if it is gone."""
        owner = self.owner
        if isinstance(owner, dict):
            return owner.get
        return lambda i: owner[i] if i < len(owner) else None

    def described(self, name: Any) -> str:
        """The label of one of the values."""
        if isinstance(name, str) and name:
            return self.label.replace("an attribute", f"attribute {name!r}", 1)
        return self.label

    def floats(self) -> list[float]:
        """The numbers among the values, but for integers."""
        values = self.values()
        values = values.values() if isinstance(values, dict) else values
        return [value for value in values if isinstance(value, float)]

    def put_back(self, values: Any) -> None:
        """Undo what happened since :meth:`values`."""
        self.owner.clear()
        (self.owner.extend if isinstance(self.owner, _LISTS) else self.owner.update)(values)


class Names(Place):
    """Some names of a namespace that holds others, too."""

    def __init__(self, label: str, owner: MutableMapping, names: Iterable[str]):
        super().__init__(label, owner)
        self.names = sorted(names)

    def values(self) -> dict[str, Any]:
        return {name: self.owner.get(name, MISSING) for name in self.names}

    def put_back(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if value is MISSING:
                self.owner.pop(name, None)
            else:
                self.owner[name] = value


class Cell(Place):
    """A variable that a function captures."""

    def values(self) -> dict[str, Any]:
        try:
            return {"": self.owner.cell_contents}
        except ValueError:  # not filled yet
            return {}

    @property
    def reader(self) -> Callable[[str], Any]:
        return lambda name: self.values().get(name)

    def put_back(self, values: dict[str, Any]) -> None:
        if values:
            self.owner.cell_contents = values[""]
        else:
            del self.owner.cell_contents


class ClassAttributes(Place):
    """What a class keeps for all its objects."""

    def values(self) -> dict[str, Any]:
        return {
            name: value for name, value in vars(self.owner).items() if not name.startswith("__")
        }

    @property
    def reader(self) -> Callable[[str], Any]:
        return vars(self.owner).get

    def put_back(self, values: dict[str, Any]) -> None:
        for name in self.values().keys() - values.keys():
            delattr(self.owner, name)
        for name, value in values.items():
            if vars(self.owner).get(name, MISSING) is not value:
                setattr(self.owner, name, value)


class ParameterStore(Place):
    """Pyro's, in which user code can also write by hand."""

    def __init__(self):
        super().__init__("Pyro's parameter store", None)

    def values(self) -> dict[tuple[str, str], Any]:
        kept = (("_params", self.leaves), ("_constraints", self._own("_constraints")))
        return {(own, name): value for own, values in kept for name, value in values.items()}

    def put_back(self, values: dict[tuple[str, str], Any]) -> None:
        for own in ("_params", "_constraints", "_param_to_name"):
            self._own(own).clear()
        for (own, name), value in values.items():
            self._own(own)[name] = value
            if own == "_params":
                self._own("_param_to_name")[value] = name

    def described(self, name: tuple[str, str]) -> str:
        return f"parameter {name[1]!r}"

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Unconstrained parameters by name."""
        return self._own("_params")

    @staticmethod
    def _own(name: str) -> dict:
        # Its get_state() makes parameters that are in use forget their unconstrained values.
        return getattr(pyro.get_param_store(), name)


class References:
    """All that some functions, methods, modules and other callables refer to.

    :ivar places: where they can keep Python values.
    :ivar tensors: (label, tensor), parameters and buffers of modules included.
    :ivar held: (label, thing), the tensors, arrays and sequences that user code itself holds.
    :ivar caches: functions with an ``lru_cache``.
    """

    def __init__(self, *roots: Callable):
        self.places: list[Place] = [ParameterStore()]
        self.tensors: list[tuple[str, Tensor]] = []
        self.held: list[tuple[str, Any]] = []
        self.caches: list[Any] = []
        self._seen: dict[int, Any] = {}  # alive, so that no id is used twice
        self._waiting = collections.deque((root, _name(root), True) for root in roots)
        while self._waiting and len(self._seen) < _MOST_THINGS:
            thing, label, users = self._waiting.popleft()
            if not isinstance(thing, (*_PLAIN, Trace)) and id(thing) not in self._seen:
                self._seen[id(thing)] = thing
                self._look_at(thing, label, users)

    def _look_at(self, thing: Any, label: str, users: bool) -> None:
        """
        :param users: whether the user's own code holds it.
        """
        if isinstance(thing, Tensor):
            self.tensors.append((label, thing))
            if users:
                self.held.append((label, thing))
        elif isinstance(thing, np.ndarray) or _is_frame(thing):
            self.held.append((label, thing))
        elif isinstance(thing, (dict, set, list, tuple, frozenset, collections.deque)):
            self._look_at_container(thing, label, users)
        elif inspect.isfunction(thing):
            self._look_at_function(thing)
        elif inspect.ismethod(thing):
            self._wait(thing.__self__, _name(thing.__self__))
            self._wait(thing.__func__, _name(thing.__func__))
        elif isinstance(thing, functools.partial):
            of = f"of partial({_name(thing.func)})"
            self._wait(thing.func, _name(thing.func))
            for i, value in enumerate(thing.args):
                self._wait(value, f"argument {i} {of}")
            for name, value in {**thing.keywords, **vars(thing)}.items():
                self._wait(value, f"argument {name!r} {of}")
        elif hasattr(thing, "cache_clear") and hasattr(thing, "__wrapped__"):
            self.caches.append(thing)
            self._wait(thing.__wrapped__, label)
        elif isinstance(thing, type):
            self._look_at_class(thing)
        elif isinstance(thing, property):
            self._wait(thing.fget, label)
        elif isinstance(thing, (staticmethod, classmethod)):
            self._wait(thing.__func__, label)
        elif not isinstance(thing, types.ModuleType) and hasattr(thing, "__dict__"):
            self._look_at_object(thing, label, users)

    def _wait(self, thing: Any, label: str, users: bool = True) -> None:
        self._waiting.append((thing, label, users))

    def _look_at_container(self, thing: Any, label: str, users: bool) -> None:
        if users:
            self.held.append((label, thing))
        if len(thing) > _LONGEST:
            return
        if isinstance(thing, (dict, set, *_LISTS)):
            self.places.append(Place(label, thing))
        if isinstance(thing, dict):
            for key, value in thing.items():
                self._wait(
                    value, f"element {key!r} of {label}" if type(key) is str else label, users
                )
        else:
            for value in thing:
                self._wait(value, label, users)

    def _look_at_function(self, function: types.FunctionType) -> None:
        name = _name(function)
        names = function.__code__.co_freevars
        for variable, cell in zip(names, function.__closure__ or (), strict=True):
            label = f"variable {variable!r}, which {name} captures,"
            self.places.append(Cell(label, cell))
            for value in self.places[-1].values().values():
                self._wait(value, label)
        if not is_users(function):
            return
        for parameter in inspect.signature(function).parameters.values():
            self._wait(parameter.default, f"the default of argument {parameter.name!r} of {name}")
        self._look_at_namespace(vars(function), f"of {name}", None)
        loaded, named = _globals_of(function.__code__)
        self._look_at_namespace(function.__globals__, f"that {name} reads", loaded)
        for module in [function.__globals__.get(each) for each in loaded]:
            if isinstance(module, types.ModuleType) and is_users(module):
                self._look_at_namespace(vars(module), f"of module {module.__name__}", named)

    def _look_at_namespace(
        self, mapping: MutableMapping, owner: str, names: set[str] | None
    ) -> None:
        """
        :param names: those that matter; ``None``: all.
        """
        word = "attribute" if names is None else "global variable"
        if names is None:
            self.places.append(Place(f"an attribute {owner}", mapping))
            names = set(mapping)
        elif names:
            self.places.append(Names(f"global variable {', '.join(sorted(names))}", mapping, names))
        for name in names & mapping.keys():
            self._wait(mapping[name], f"{word} {name!r} {owner}")

    def _look_at_class(self, kind: type) -> None:
        if not is_users(kind):
            return
        label = f"an attribute of class {kind.__name__}"
        self.places.append(ClassAttributes(label, kind))
        for name, value in self.places[-1].values().items():
            self._wait(value, f"attribute {name!r} of class {kind.__name__}")
        for special in ("__call__", "__init__", "__getattr__"):
            self._wait(vars(kind).get(special), f"{kind.__name__}.{special}")
        for base in kind.__bases__:
            self._wait(base, base.__name__)

    def _look_at_object(self, thing: Any, label: str, users: bool) -> None:
        owner = f"of {type(thing).__name__}"
        if "'" in label and "(" not in label:
            owner += f" ({label.rstrip(',')})"
        values = dict(vars(thing))
        if isinstance(thing, torch.nn.Module):
            users = self._look_at_module(thing, values, owner)
        elif is_users(type(thing)) or isinstance(thing, types.SimpleNamespace):
            self._look_at_namespace(vars(thing), owner, None)
        for name, value in values.items():
            if name not in _OWN_RECORDS:
                self._wait(value, f"attribute {name!r} {owner}", users)
        self._wait(type(thing), type(thing).__name__)

    def _look_at_module(self, module: torch.nn.Module, values: dict, owner: str) -> bool:
        """Takes what modules have in common out of the values; whether it is a user's own."""
        users = is_users(type(module))
        for kind in ("buffer", "parameter"):
            own = values.pop(f"_{kind}s")
            self.places.append(Place(f"a {kind} {owner}", own))
            for name, value in own.items():
                # A library's own buffers, such as permutations, are not what users hold.
                self._wait(value, f"{kind} {name!r} {owner}", users)
        for name, value in values.pop("_modules").items():
            self._wait(value, f"module {name!r} {owner}", users)
        if users:
            self.places.append(Place(f"an attribute {owner}", vars(module)))
        else:
            self.places.append(Names(f"an attribute {owner}", vars(module), ["training"]))
        return users


def _globals_of(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Global names that code, or a function defined in it, reads or sets; and all its names."""
    found, named = set(), set(code.co_names)
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"):
            found.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, names = _globals_of(constant)
            found, named = found | inner, named | names
    return found, named


def is_users(thing: Any) -> bool:
    """Whether a function, class or module is the user's own, and no library's."""
    name = thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__
    return not is_library(name or "builtins")


def is_library(module: str) -> bool:
    """Whether a module of this name is Python's, torch's, Pyro's, or another well-known one."""
    return module.split(".")[0] in _LIBRARIES


def _is_frame(thing: Any) -> bool:
    return type(thing).__module__.split(".")[0] == "pandas" and hasattr(thing, "to_numpy")


def _name(thing: Any) -> str:
    if isinstance(thing, functools.partial):
        return _name(thing.func)
    name = getattr(thing, "__qualname__", None)
    if not isinstance(name, str):
        return type(thing).__name__
    return f"{name.split('<locals>.')[-1]}()"
