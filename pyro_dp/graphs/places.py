"""Objects of user code that hold Python values, to read, compare and restore them."""

import collections
import operator
import types
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import numpy as np
import pyro
from torch import Tensor
from torch.distributions import Transform

LISTS = (list, collections.deque, bytearray)
MISSING = object()


class Place:
    """An object of user code that holds Python values: a namespace, a closure's cell, a container.

    :param label: its name in messages.
    """

    def __init__(self, label: str, owner: Any):
        self.label = label
        self.owner = owner

    def values(self) -> Any:
        """A shallow copy of the values."""
        return self.owner.copy()

    @property
    def reader(self) -> Callable[[Any], Any]:
        """A fast function that reads a value by name or position; ``None`` if it is gone."""
        owner = self.owner
        if isinstance(owner, dict):
            return owner.get
        if isinstance(owner, LISTS):
            return lambda i: owner[i] if i < len(owner) else None
        return lambda name: self.values().get(name)

    def described(self, name: Any) -> str:
        """The label of one of the values."""
        if isinstance(name, str) and name:
            return self.label.replace("an attribute", f"attribute {name!r}", 1)
        return self.label

    def floats(self) -> list[float]:
        """The floats among the values."""
        values = self.values()
        values = values.values() if isinstance(values, dict) else values
        return [float(value) for value in values if isinstance(value, (float, np.floating))]

    def put_back(self, values: Any) -> None:
        """Undo the changes since :meth:`values` returned these values."""
        self.owner.clear()
        (self.owner.extend if isinstance(self.owner, LISTS) else self.owner.update)(values)


class Variables(Place):
    """Named values, which are put back one by one, because the owner may hold others."""

    write: Callable = staticmethod(operator.setitem)
    delete: Callable = staticmethod(operator.delitem)

    def put_back(self, values: dict[str, Any]) -> None:
        now = self.values()
        for name in now.keys() - values.keys():
            self.delete(self.owner, name)
        for name, value in values.items():
            if now.get(name, MISSING) is not value:
                self.write(self.owner, name, value)


class Names(Variables):
    """Some names of a namespace."""

    def __init__(self, label: str, owner: MutableMapping, names: Iterable[str]):
        super().__init__(label, owner)
        self.names = sorted(names)

    def values(self) -> dict[str, Any]:
        return {name: self.owner[name] for name in self.names if name in self.owner}


class Attributes(Variables):
    """The attributes of a library's object.

    The cache of a transform is left out: it has an effect only for the same tensor.
    """

    # Thread locals refuse the methods of object.
    write: Callable = staticmethod(lambda owner, name, value: owner.__dict__.update({name: value}))
    delete: Callable = staticmethod(lambda owner, name: owner.__dict__.pop(name))

    def values(self) -> dict[str, Any]:
        hidden = ("__", "_cache") if isinstance(self.owner, Transform) else "__"
        return {k: x for k, x in vars(self.owner).items() if not k.startswith(hidden)}

    @property
    def reader(self) -> Callable[[str], Any]:
        return vars(self.owner).get


class Slots(Attributes):
    """Attributes that are declared by ``__slots__``."""

    write, delete = staticmethod(object.__setattr__), staticmethod(object.__delattr__)

    def values(self) -> dict[str, Any]:
        found = {name: getattr(self.owner, name, MISSING) for name in slots_of(type(self.owner))}
        return {name: value for name, value in found.items() if value is not MISSING}

    @property
    def reader(self) -> Callable[[str], Any]:
        return lambda name: getattr(self.owner, name, None)


class ScriptAttributes(Attributes):
    """Attributes of a TorchScript module. It returns copies, so equal values count as the same."""

    write: Callable = staticmethod(setattr)
    reader = Place.reader

    def __init__(self, label: str, owner: Any):
        super().__init__(label, owner)
        self._last: dict[str, Any] = {}

    def values(self) -> dict[str, Any]:
        for name, (_, is_parameter) in self.owner._concrete_type.get_attributes().items():
            value = getattr(self.owner, name)
            if not (is_parameter or _is_equal(value, self._last.get(name, MISSING))):
                self._last[name] = value
        return dict(self._last)


def _is_equal(one: Any, other: Any) -> bool:
    if one is other or isinstance(one, Tensor):
        return one is other
    try:
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # collections of other tensors
        return False


class Cell(Variables):
    """A variable that a function captures."""

    write = staticmethod(lambda cell, name, value: setattr(cell, "cell_contents", value))
    delete = staticmethod(lambda cell, name: delattr(cell, "cell_contents"))

    def values(self) -> dict[str, Any]:
        try:
            return {"": self.owner.cell_contents}
        except ValueError:  # not filled yet
            return {}


class ClassAttributes(Attributes):
    """Attributes of a class, which all its objects share."""

    write, delete = staticmethod(setattr), staticmethod(delattr)


class ParameterStore(Place):
    """Pyro's parameter store, into which user code can also write directly."""

    def __init__(self):
        super().__init__("Pyro's parameter store", None)

    def values(self) -> dict[tuple[str, str], Any]:
        kept = ("_params", "_constraints")
        return {(kind, name): x for kind in kept for name, x in self._part(kind).items()}

    def put_back(self, values: dict[tuple[str, str], Any]) -> None:
        for kind in ("_params", "_constraints", "_param_to_name"):
            self._part(kind).clear()
        for (kind, name), value in values.items():
            self._part(kind)[name] = value
            if kind == "_params":
                self._part("_param_to_name")[value] = name

    def described(self, name: tuple[str, str]) -> str:
        return f"parameter {name[1]!r}"

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Unconstrained parameters by name."""
        return self._part("_params")

    @staticmethod
    def _part(name: str) -> dict:
        # The store's get_state() makes parameters in use forget their unconstrained values.
        return getattr(pyro.get_param_store(), name)


def slots_of(kind: type) -> list[str]:
    """Names of attributes in ``__slots__``, also of base classes."""
    return [
        name
        for each in kind.__mro__
        if "__slots__" in vars(each)
        for name, value in vars(each).items()
        if isinstance(value, types.MemberDescriptorType)
    ]
