"""Nothing in the package assigns to a private attribute of another object.

This reads the source: an assignment has ``x._y`` on its left, with x other than ``self`` or
``cls``.
"""

import ast
from pathlib import Path

import pytest

import pyro_dp

ALLOWED = {
    # Tensors of the parameter store outlive the inference. One attribute marks private ones, and
    # another has the rows that Pyro's plates took.
    "_pyro_dp_rows",
    "_pyro_unconstrained_param",
    "_pyro_dims",  # packed tensors': Pyro's contractions read them
    "_problem",  # journals', set by their own module in a process that was forked
}


def assigned(source):
    """Private attributes that are assigned to from outside."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if node.attr.startswith("_") and not node.attr.startswith("__") and not own:
                yield node.attr


@pytest.mark.slow
def test_nothing_is_assigned_from_outside():
    root = Path(pyro_dp.__file__).parent
    found = {
        f"{path.relative_to(root)}: {name}"
        for path in root.rglob("*.py")
        for name in assigned(path.read_text())
        if name not in ALLOWED
    }
    assert not found


def test_an_assignment_is_found():
    text = "x._a = 1\nself._b = 2\nx.y._c, z = 3, 4\nwith f() as x._d: pass\ny = x._e\n"
    assert set(assigned(text)) == {"_a", "_c", "_d"}
