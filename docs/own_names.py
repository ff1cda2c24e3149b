"""For Sphinx: existing names of ours that are not on the site appear as code.

Docstrings also refer to modules and classes outside the public interface, for readers of the code.
Links for public names, in whichever module they are defined. A name that does not exist stays a
broken reference, which fails the build.
"""

import functools
import importlib
import pkgutil
import re
import sys

import pyro_dp


def setup(app):
    app.connect("builder-inited", _import_all)
    app.connect("autodoc-process-signature", _with_aliases)
    app.connect("missing-reference", _resolved)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _import_all(app):
    for module in pkgutil.walk_packages(pyro_dp.__path__, "pyro_dp."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def _with_aliases(app, what, name, found, options, signature, returned):
    """autodoc_type_aliases inside of another type is printed as the object that stands for it.

    A default that is a function is printed as one, which Sphinx cannot read: by its name it can.
    """
    if signature is None:
        return None
    signature = re.sub(r"<function (\w+)>", r"\1", signature)
    return re.sub(r"TypeAliasForwardRef\('([\w.]+)'\)", r"\1", signature), returned


def _resolved(app, env, node, contnode):
    if node.get("refdomain") != "py":
        return None
    found = _found(node["reftarget"], node.get("py:module"), node.get("py:class"))
    if found is None:
        return None
    domain = env.get_domain("py")
    for name, entry in domain.objects.items():
        if not entry.aliased and _at(name) is found:
            arguments = (env, node["refdoc"], app.builder, "obj", name, node, contnode)
            return domain.resolve_xref(*arguments)
    return contnode


@functools.cache
def _found(target, module, owner):
    """The object of a reference, from its module or class, or from anywhere."""
    places = [module, f"{module}.{owner}"] if owner else [module]
    places += _modules()
    names = [target, *(f"{place}.{target}" for place in places if place)]
    ours = (found for found in map(_at, names) if found is not None and _is_ours(found))
    return next(ours, None)


@functools.cache
def _modules():
    """The names of all, as :func:`_import_all` imported them."""
    return [name for name in sys.modules if name.split(".")[0] == "pyro_dp"]


def _is_ours(found):
    module = getattr(found, "__module__", None) or getattr(found, "__name__", "pyro_dp")
    return module.split(".")[0] == "pyro_dp"


def _at(name):
    """The object of ours of this full name, or None."""
    if name.split(".")[0] != "pyro_dp":
        return None
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        found = sys.modules.get(".".join(parts[:end]))
        if found is not None:
            for part in parts[end:]:
                if part not in getattr(found, "__annotations__", ()):  # else its class knows it
                    found = getattr(found, part, None)
            return found
    return None
