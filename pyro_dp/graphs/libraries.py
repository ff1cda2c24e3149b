"""Which code is the user's own, and which a library's."""

import sys
import types
from typing import Any

_LIBRARIES = sys.stdlib_module_names | {
    *("IPython", "_pytest", "arviz", "funsor", "jax", "matplotlib", "numpy", "opt_einsum"),
    *("pandas", "pluggy", "pyro", "pyro_dp", "pytest", "scipy", "sklearn", "torch", "tqdm"),
}


def is_users(thing: Any) -> bool:
    """Whether a function, class or module is the user's own, and no library's."""
    name = thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__
    return not is_library(name or "builtins")


def is_library(module: str) -> bool:
    """Whether a module of this name is Python's, torch's, Pyro's, or another well-known one."""
    return module.split(".")[0] in _LIBRARIES


def keeps_for_users(kind: type) -> bool:
    """Whether a library's objects are made to be written to: handlers, namespaces."""
    root = (kind.__module__ or "").split(".")[0]
    return root == "pyro" or root in sys.stdlib_module_names
