"""Classes and functions are small. Those above the limits may only become smaller."""

import ast
import functools
from pathlib import Path

import pytest

import pyro_dp

METHODS, ATTRIBUTES, ARGUMENTS = 25, 12, 7
# Methods and attributes. Accountants and inferences, which users see, may have 35 methods.
LARGER = {
    "DPSEP": (28, 9),
    "PaperDPSEP": (29, 10),
    "PaperDPSVI": (29, 11),
    "PrivacyAccountant": (35, 8),
    "TrialAccountant": (35, 10),
}
LONGER = {
    "_forecast": 9,
    "audit": 10,
    "audit_one_run": 10,
    "first_look": 8,
    "forecast": 8,
}


@functools.cache
def trees():
    """By room."""
    root, found = Path(pyro_dp.__file__).parent, {}
    for path in root.rglob("*.py"):
        room = path.relative_to(root).parts[0]
        found.setdefault(room, []).append(ast.parse(path.read_text()))
    return found


def named(node):
    """The name of a base class, as in ``Base``, ``module.Base`` and ``Base[T]``."""
    if isinstance(node, ast.Subscript):
        return named(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@functools.cache
def written(node):
    """Attributes that a class declares, or that its methods set."""
    found = {x.target.id for x in node.body if isinstance(x, ast.AnnAssign)}
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            if isinstance(each.value, ast.Name) and each.value.id == "self":
                found.add(each.attr)
    return found


def sizes(modules):
    """By class, the number of its methods and attributes, inherited ones included."""
    classes = {
        (room, x.name): x
        for room, own in modules.items()
        for tree in own
        for x in ast.walk(tree)
        if isinstance(x, ast.ClassDef)
    }

    def family(room, name):
        """The class and its bases, of its own room first."""
        places = [(room, name), *(each for each in classes if each[1] == name)]
        found = next((each for each in places if each in classes), None)
        if found is None:
            return {}
        bases = [family(found[0], named(base)) for base in classes[found].bases]
        return {found: classes[found]} | {k: v for each in bases for k, v in each.items()}

    found = {}
    for room, name in classes:
        nodes = family(room, name).values()
        methods = {x.name for each in nodes for x in each.body if isinstance(x, ast.FunctionDef)}
        found[name] = len(methods), len(set().union(*map(written, nodes)))
    return found


def arguments(modules):
    """By function, the number of its arguments; those of constructors are settings."""
    trees = (tree for own in modules.values() for tree in own)
    nodes = (x for tree in trees for x in ast.walk(tree) if isinstance(x, ast.FunctionDef))
    found = {}
    for node in nodes:
        names = [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
        if node.name != "__init__":
            count = len(names) - (names[:1] in (["self"], ["cls"]))
            found[node.name] = max(count, found.get(node.name, 0))
    return found


@pytest.mark.slow
def test_no_class_grows():
    found = sizes(trees())
    large = {n: x for n, x in found.items() if x[0] > METHODS or x[1] > ATTRIBUTES}
    assert large == LARGER


@pytest.mark.long
def test_no_function_takes_more():
    found = arguments(trees())
    assert {name: count for name, count in found.items() if count > ARGUMENTS} == LONGER
