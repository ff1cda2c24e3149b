"""References of user code beside its arguments: closures, defaults, globals, attributes.

:class:`References` finds all of them from a model and a guide, and names each for messages. It also
searches library objects for values that users passed to them (a conditioned model,
``init_to_value``), but not the libraries' caches.
"""

import collections
import dis
import functools
import gc
import inspect
import random
import sys
import types
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np
import torch
from pyro.contrib.easyguide import EasyGuide
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroModule
from pyro.poutine import Trace
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin

from pyro_dp.graphs.places import (
    LISTS,
    Attributes,
    Cell,
    ClassAttributes,
    Names,
    ParameterStore,
    Place,
    ScriptAttributes,
    Slots,
    slots_of,
)
from pyro_dp.utils.errors import ModelError

_LIBRARIES = sys.stdlib_module_names | {
    *("IPython", "_pytest", "arviz", "funsor", "jax", "matplotlib", "numpy", "opt_einsum"),
    *("pandas", "pluggy", "pyro", "pyro_dp", "pytest", "scipy", "sklearn", "torch", "tqdm"),
}


def is_users(thing: Any) -> bool:
    """Whether a function, class or module is the user's, and not a library's."""
    return not is_library(_module_of(thing))


def is_library(module: str) -> bool:
    """Whether a module of this name is Python's, torch's, Pyro's, or another common one."""
    return module.split(".")[0] in _LIBRARIES


def require_torchs(name: str, tensor: Tensor) -> None:
    """:raises ModelError: the tensor's class is the user's, and its methods would see all rows."""
    kind = type(tensor)
    if is_users(kind):
        raise ModelError(_OWN_CLASS.format(name=name, kind=kind.__name__))


def keeps_for_users(kind: type) -> bool:
    """Whether users may write to objects of a library's class; not to those of this package."""
    return _module_of(kind).split(".")[0] != "pyro_dp"


def _module_of(thing: Any) -> str:
    """The name of the module that defines it; empty if none does, as for code in ``exec``."""
    if isinstance(thing, types.FunctionType):  # wraps() copies __module__ of another function
        name = thing.__globals__.get("__name__", "")
    else:
        name = thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__
    if name == "builtins" and isinstance(thing, type) and thing.__flags__ & _IN_PYTHON:
        return ""  # Python classes without a module get that name
    return name if isinstance(name, str) else "builtins"  # C classes may have another type


_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)  # methods of C classes
_CACHE = type(functools.cache(len))
# Modules of these classes have only buffers of the user.
_WITHOUT_BUFFERS = (torch.nn.Module, torch.nn.Sequential, PyroModule)
_NUMPYS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_GENERATORS = (torch.Generator, random.Random, *_NUMPYS)
_MOST_THINGS = 50_000
_LONG = 1000  # characters of a text that may be a table
LONGEST = 10_000  # elements of a container that a graph may have as constants
_TOO_MANY = (
    "{label} has too many objects to check whether they hold or keep data. All that model "
    "and guide refer to may be {most:,} objects. Keep numbers in tensors or arrays."
)
_OWN_DISPATCH = (
    "{label} is a {kind}, whose __torch_dispatch__ would see several records at once. Keep a plain "
    "tensor of its numbers instead, and pass that to the model."
)
_OWN_CLASS = (
    "Argument {name!r} is a {kind}, whose methods would see all records. Pass a plain tensor, as "
    "in {name}.as_subclass(torch.Tensor)."
)
# Autoguides keep these from their first run, which is on placeholders.
_OWN_RECORDS = ("prototype_trace", "_prototype_frames", "_pyro_context", "_init_locs", "plates")


class References:
    """All objects that some functions, methods, modules and other callables refer to.

    They include the active Pyro handlers.

    :param roots: the callables, or pairs (label, object).
    :param without: classes of objects to skip.
    :ivar parameters: Pyro's parameter store.
    :ivar places: holders of Python values; Pyro's parameter store comes first.
    :ivar tensors: (label, tensor), including parameters and buffers of modules.
    :ivar held: (label, object), the tensors, arrays and collections that user code itself holds.
    :ivar floats: by label, the floats in tuples, arguments and defaults.
    :ivar caches: functions with an ``lru_cache``.
    :ivar generators: (label, generator of random numbers), without the global ones.
    """

    def __init__(self, *roots: Callable | tuple[str, Any], without: tuple[type, ...] = ()):
        self.parameters = ParameterStore()
        self.places: list[Place] = [self.parameters]
        self.tensors: list[tuple[str, Tensor]] = []
        self.held: list[tuple[str, Any]] = []
        self.floats: dict[str, list[float]] = collections.defaultdict(list)
        self.caches: list[Any] = []
        self.generators: list[tuple[str, Any]] = []
        self._seen: dict[int, Any] = {}  # kept alive, so that no id is used twice
        roots = (*roots, *(("a handler", each) for each in _PYRO_STACK))
        self._waiting = collections.deque(
            (root[1], root[0], True) if isinstance(root, tuple) else (root, _name(root), True)
            for root in roots
        )
        self._last = ""
        while self._waiting and len(self._seen) < _MOST_THINGS:
            thing, self._last, users = self._waiting.popleft()
            if isinstance(thing, (float, np.floating)):
                self.floats[self._last].append(float(thing))
            elif _is_long(thing):
                self.held.append((self._last, thing))
            elif not isinstance(thing, (*_PLAIN, *without)) and id(thing) not in self._seen:
                self._seen[id(thing)] = thing
                self._look_at(thing, self._last, users)

    def require_all(self) -> None:
        """:raises ModelError: there were too many objects to look at all of them."""
        if self._waiting:
            text = _TOO_MANY.format(label=sentence(self._last), most=_MOST_THINGS)
            raise ModelError(text)

    def require_plain(self) -> None:
        """:raises ModelError: a tensor is of a user's class that handles torch's operations."""
        for label, tensor in self.tensors:
            kind = type(tensor)
            if is_users(kind) and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
                text = _OWN_DISPATCH.format(label=sentence(label), kind=kind.__name__)
                raise ModelError(text)

    def _look_at(self, thing: Any, label: str, users: bool) -> None:
        """:param users: whether the user's own code holds it."""
        if isinstance(thing, Tensor):
            self.tensors.append((label, thing))
            if users:
                self.held.append((label, thing))
        elif isinstance(thing, np.ndarray) or _is_frame(thing) or _is_column(thing):
            self.held.append((label, thing))
            if isinstance(thing, np.ndarray) and thing.dtype.kind == "O":
                for each in thing.flat:
                    self._wait(each, label, users)
        elif isinstance(thing, Trace):  # its values are public, but changes may not be
            self.places.append(Attributes(label, thing))
            self.places += [Place(label, each) for each in (thing.nodes, *thing.nodes.values())]
        elif isinstance(thing, (dict, set, tuple, frozenset, *LISTS)):
            self._look_at_container(thing, label, users)
        elif inspect.isfunction(thing):
            self._look_at_function(thing)
        elif inspect.ismethod(thing):
            self._wait(thing.__self__, _name(thing.__self__))
            self._wait(thing.__func__, _name(thing.__func__))
        elif isinstance(thing, functools.partial):
            of = f"of partial({_name(thing.func)})"
            self._wait(thing.func, _name(thing.func))
            for key, value in [*enumerate(thing.args), *thing.keywords.items()]:
                self._wait(value, f"argument {key!r} {of}")
            self._look_at_namespace(vars(thing), of, None)
        elif isinstance(thing, _BOUND):
            self._wait(thing.__self__, label, users)
        elif isinstance(thing, _CACHE):
            self.caches.append(thing)
            self._wait(thing.__wrapped__, label)
        elif isinstance(thing, type):
            self._look_at_class(thing)
        elif isinstance(thing, property):
            self._wait(thing.fget, label)
        elif isinstance(thing, (staticmethod, classmethod)):
            self._wait(thing.__func__, label)
        elif isinstance(thing, types.MappingProxyType):
            (mapping,) = gc.get_referents(thing)
            if "__module__" not in mapping:  # attributes of a class are looked at with the class
                self._wait(mapping, label, users)
        elif isinstance(thing, weakref.ref):
            self._wait(thing(), label, users)
        elif not isinstance(thing, types.ModuleType):
            if _is_generator(thing):
                self.generators.append((label, thing))
            if users and _has_length(thing):
                self.held.append((label, thing))
            self._look_at_object(thing, label, users)

    def _wait(self, thing: Any, label: str, users: bool = True) -> None:
        self._waiting.append((thing, label, users))

    def _look_at_container(self, thing: Any, label: str, users: bool) -> None:
        if users:
            self.held.append((label, thing))
        if isinstance(thing, (dict, set, *LISTS)):
            self.places.append(Place(label, thing))
        if isinstance(thing, collections.defaultdict):
            self._wait(thing.default_factory, label)
        if is_users(type(thing)):
            self._look_at_object(thing, label, users)
        for key in thing if isinstance(thing, dict) else ():
            if isinstance(key, float) or not isinstance(key, _PLAIN):
                self._wait(key, f"a key of {label}", users)
        items = thing.items() if isinstance(thing, dict) else ((None, each) for each in thing)
        fixed = isinstance(thing, (tuple, frozenset))
        for key, value in items:
            own = f"element {key!r} of {label}" if type(key) is str else label
            if type(value) is tuple and all(isinstance(each, _PLAIN) for each in value):
                self._look_at_container(value, own, users)  # it keeps nothing, and is not counted
            elif _is_long(value) or not isinstance(value, _PLAIN):
                self._wait(value, own, users)
            elif fixed and isinstance(value, float):
                self._wait(value, own, users)

    def _look_at_function(self, function: types.FunctionType) -> None:
        name = _name(function)
        names = function.__code__.co_freevars
        modules = []
        for variable, cell in zip(names, function.__closure__ or (), strict=True):
            label = f"variable {variable!r}, which {name} captures,"
            self.places.append(Cell(label, cell))
            for value in self.places[-1].values().values():
                self._wait(value, label)
                modules.append(value)
        if not is_users(function):
            return
        for parameter, value in _defaults(function).items():
            self._wait(value, f"the default of argument {parameter!r} of {name}")
        self._look_at_namespace(vars(function), f"of {name}", None)
        loaded, imported, named = _globals_of(function.__code__)
        self._look_at_namespace(function.__globals__, f"that {name} reads", loaded)
        modules += [function.__globals__.get(each) for each in sorted(loaded)]
        modules += [sys.modules.get(each) for each in sorted(imported)]
        self._look_at_modules(modules, named)

    def _look_at_modules(self, modules: list[Any], names: set[str]) -> None:
        """Look at the modules among some objects, and at their attributes with these names."""
        seen: set[int] = set()
        while modules:
            module = modules.pop()
            users = isinstance(module, types.ModuleType) and is_users(module)
            if users and id(module) not in seen:
                seen.add(id(module))
                self._look_at_namespace(vars(module), f"of module {module.__name__}", names)
                modules += [value for each, value in vars(module).items() if each in names]

    def _look_at_namespace(
        self, mapping: MutableMapping, owner: str, names: set[str] | None
    ) -> None:
        """:param names: the names to look at; ``None``: all."""
        word = "attribute" if names is None else "global variable"
        if names is None:
            self.places.append(Place(f"an attribute {owner}", mapping))
            names = set(mapping)
        elif names:
            self.places.append(Names(f"global variable {', '.join(sorted(names))}", mapping, names))
        for name in [name for name in mapping if name in names]:  # in the order of definition
            self._wait(mapping[name], f"{word} {name!r} {owner}")

    def _look_at_class(self, kind: type) -> None:
        if not is_users(kind):
            return
        label = f"an attribute of class {kind.__name__}"
        self.places.append(ClassAttributes(label, kind))
        for name, value in self.places[-1].values().items():
            self._wait(value, f"attribute {name!r} of class {kind.__name__}")
        for name, value in vars(kind).items():
            if name.startswith("__") and inspect.isfunction(value):
                self._wait(value, f"{kind.__name__}.{name}")
        for base in (*kind.__bases__, type(kind)):
            self._wait(base, base.__name__)

    def _look_at_object(self, thing: Any, label: str, users: bool) -> None:
        owner = f"of {type(thing).__name__}"
        if "'" in label and "(" not in label:
            owner += f" ({label.rstrip(',')})"
        attributes = getattr(thing, "__dict__", {})
        values = dict(attributes)
        skipped = _OWN_RECORDS if isinstance(thing, (AutoGuide, EasyGuide)) else ("_pyro_context",)
        if isinstance(thing, torch.jit.ScriptModule):
            self._look_at_script(thing, values, owner, users)
            return
        if isinstance(thing, torch.nn.Module):
            self._look_at_module(thing, values, owner, users)
        elif is_users(type(thing)) or isinstance(thing, types.SimpleNamespace):
            self._look_at_namespace(attributes, owner, None)
        elif users and values and keeps_for_users(type(thing)):
            self.places.append(Attributes(f"an attribute {owner}", thing))
        if is_users(type(thing)) and slots_of(type(thing)):
            self.places.append(Slots(f"an attribute {owner}", thing))
            values |= self.places[-1].values()
        library = isinstance(thing, torch.nn.Module) and not is_users(type(thing))
        for name, value in values.items():
            if name not in skipped:
                theirs = users and not (library and name.startswith("_"))
                self._wait(value, f"attribute {name!r} {owner}", theirs)
        self._wait(type(thing), type(thing).__name__)

    def _look_at_script(
        self, module: torch.jit.ScriptModule, values: dict, owner: str, held: bool
    ) -> None:
        """A TorchScript module has attributes beside those of Python."""
        label = f"an attribute {owner}"
        script = ScriptAttributes(label, module)
        self.places += [script, Attributes(label, module)]
        for name, value in (values | script.values()).items():
            self._wait(value, f"attribute {name!r} {owner}", held and not name.startswith("_"))
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            self._wait(value, f"attribute {name!r} {owner}", users=False)
        for name, child in module.named_children():
            self._wait(child, f"module {name!r} {owner}", held)

    def _look_at_module(
        self, module: torch.nn.Module, values: dict, owner: str, held: bool
    ) -> None:
        """Look at buffers, parameters and submodules, and remove them from the values.

        :param held: whether the user's own code holds the module.
        """
        users = is_users(type(module))
        if isinstance(module, LazyModuleMixin) and not users:
            values.clear()  # its first input sets its shapes, and changes its class
            return
        for kind in ("buffer", "parameter"):
            tensors = values.pop(f"_{kind}s")
            self.places.append(Place(f"a {kind} {owner}", tensors))
            # A library's own buffers, such as permutations, are not the user's.
            theirs = users or (held and (kind == "parameter" or type(module) in _WITHOUT_BUFFERS))
            for name, value in tensors.items():
                self._wait(value, f"{kind} {name!r} {owner}", theirs)
        modules = values.pop("_modules")
        for name, value in modules.items():
            self._wait(value, f"module {name!r} {owner}", held)
        label = f"an attribute {owner}"
        self.places.append(Place(label, modules))
        self.places.append(Place(label, vars(module)) if users else Attributes(label, module))


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    # Not from the signature, which may be that of a wrapped function.
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return dict(zip(names, values, strict=True)) | (function.__kwdefaults__ or {})


def _globals_of(code: types.CodeType) -> tuple[set[str], set[str], set[str]]:
    """Names that code uses, also in inner functions: global names, imported modules, all names."""
    found, imported, named = set(), set(), set(code.co_names)
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"):
            found.add(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            imported.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _globals_of(constant)
            found, imported, named = found | inner[0], imported | inner[1], named | inner[2]
    return found, imported, named


def sentence(label: str) -> str:
    """A label at the beginning of a message."""
    return label[:1].upper() + label[1:]


def _is_long(thing: Any) -> bool:
    """Whether this is bytes, which may be numbers, or a long text, which may be a table."""
    return isinstance(thing, bytes) or (isinstance(thing, str) and len(thing) >= _LONG)


def _is_frame(thing: Any) -> bool:
    return _module_of(type(thing)).split(".")[0] == "pandas" and hasattr(thing, "to_numpy")


def is_table(thing: Any) -> bool:
    """Whether this is a frame or a series of pandas."""
    return _is_frame(thing) and hasattr(thing, "iloc")


def _is_column(thing: Any) -> bool:
    """Whether this is a table of rows, in memory or not: it has a shape and a method ``take``."""
    return isinstance(getattr(thing, "shape", None), tuple) and hasattr(type(thing), "take")


def _has_length(thing: Any) -> bool:
    """Whether an object may have an element per record: a sparse matrix, a view, a file reader."""
    kind = type(thing)
    sized = hasattr(kind, "__len__") or hasattr(kind, "shape")
    return sized and not isinstance(thing, (range, torch.nn.Module))


def _is_generator(thing: Any) -> bool:
    on_devices = (torch.default_generator, *torch.cuda.default_generators)
    shared = (random.getstate.__self__, np.random.get_state.__self__, *on_devices)  # type: ignore
    stateful = isinstance(thing, _GENERATORS) and not isinstance(thing, random.SystemRandom)
    return stateful and all(thing is not each for each in shared)


def _name(thing: Any) -> str:
    if isinstance(thing, functools.partial):
        return _name(thing.func)
    name = getattr(thing, "__qualname__", None)
    if not isinstance(name, str):
        return type(thing).__name__
    return f"{name.split('<locals>.')[-1]}()"
