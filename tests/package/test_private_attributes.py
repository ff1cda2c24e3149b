"""Nothing in the package assigns to a private attribute of another object.

This reads the source: an assignment is a place where ``x._y`` stands on the left, x other than
``self`` or ``cls``.
"""

import ast
from pathlib import Path

import pyro_dp

ALLOWED = {
    # Tensors of the parameter store, which outlive whoever learnt them: a mark that they are
    # private, and where Pyro's plates note which rows they took.
    "_pyro_dp_rows",
    "_pyro_unconstrained_param",
    "_pyro_dims",  # of packed tensors: so Pyro's contractions know them
    "_problem",  # of journals, by their own module, in a process that was forked
}


def assigned(source):
    """Private attributes that are assigned to from outside."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if node.attr.startswith("_") and not node.attr.startswith("__") and not own:
                yield node.attr


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
