"""Python values that a model refers to beside its arguments: a graph has them as constants."""

import inspect
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor

_PLAIN = (bool, int, float, complex, str, type(None))


class PythonState:
    """Numbers, strings and tensors in closures, globals and attributes of models and guides.

    They are found from functions, methods, modules and other callables, and from whatever of the
    same package these refer to by name. What sits deeper, in lists or other objects, is not seen.
    """

    def __init__(self, *roots: Callable):
        self._values: list[tuple[MutableMapping, str, Any, int]] = []
        self._cells: list[tuple[Any, Any, int]] = []
        self._seen: set[int] = set()
        owners = [getattr(root, "__self__", root) for root in roots]
        self._packages = {_package(thing) for thing in (*roots, *map(type, owners))}
        self._packages -= {"builtins", "pyro", "torch"}
        for root in roots:
            self._look_into(root)

    @property
    def changed(self) -> bool:
        """Whether a value is no more what it was."""
        return not (
            all(_same(m.get(name, self), old, version) for m, name, old, version in self._values)
            and all(_same(cell.cell_contents, old, version) for cell, old, version in self._cells)
        )

    def _look_into(self, thing: Any) -> None:
        if id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        if isinstance(thing, torch.nn.Module):
            for module in thing.modules():
                self._seen.add(id(module))
                # A library's own modules may keep caches.
                own = _package(type(module)) in self._packages
                self._keep(vars(module), list(vars(module)) if own else ["training"])
                if own:
                    self._look_into(type(module).forward)
        elif inspect.ismethod(thing):
            self._look_into(thing.__self__)
            self._look_into(thing.__func__)
        elif inspect.isfunction(thing):
            if _package(thing) in self._packages:
                self._look_into_function(thing)
        elif _package(type(thing)) in self._packages and hasattr(thing, "__dict__"):
            self._keep(vars(thing), list(vars(thing)))
            if callable(thing):
                self._look_into(type(thing).__call__)

    def _look_into_function(self, function: Any) -> None:
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            if isinstance(content, (*_PLAIN, Tensor)):
                self._cells.append((cell, content, _version(content)))
            else:
                self._look_into(content)
        self._keep(function.__globals__, function.__code__.co_names)

    def _keep(self, mapping: MutableMapping, names: Iterable[str]) -> None:
        for name in names:
            if name not in mapping:
                continue
            value = mapping[name]
            if isinstance(value, (*_PLAIN, Tensor)):
                self._values.append((mapping, name, value, _version(value)))
            else:
                self._look_into(value)


def _package(thing: Any) -> str:
    return (getattr(thing, "__module__", None) or "builtins").split(".")[0]


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0


def _same(new: Any, old: Any, version: int) -> bool:
    if isinstance(old, Tensor):
        # Parameters are inputs of the graph, and change in every step.
        return new is old and (old.requires_grad or new._version == version)
    return new is old or (type(new) is type(old) and new == old)
