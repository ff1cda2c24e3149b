"""Derived columns: expressions of other columns, which a frame gets when it is decoded.

An expression is not run as Python (:mod:`~pyro_dp.tabular.arithmetic`). So somebody else's saved
schema can compute with columns, and do nothing else.
"""

import ast
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from pyro_dp.tabular.arithmetic import DERIVED, is_part, value
from pyro_dp.utils.errors import ConfigurationError

_LONGEST = 2_000  # characters
_DEEPEST = 200  # levels; the caller's depth decides whether the interpreter's own limit is met


def _where(condition: pd.Series, one: Any, other: Any) -> pd.Series:
    """A missing condition chooses the other."""
    chosen = condition.fillna(False).to_numpy(dtype=bool)
    return pd.Series(np.where(chosen, one, other), index=condition.index)


_FUNCTIONS: dict[str, Callable] = {
    "abs": abs,
    "exp": np.exp,
    "floor": np.floor,
    "log": np.log,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "where": _where,
}
_GRAMMAR = (
    "it can have columns that are named as Python names are, numbers, text, + - * / // %, "
    f"comparisons, and, or, not, and {', '.join(_FUNCTIONS)}"
)


def require_derived(derived: Any, columns: Iterable[str], unit: str | None) -> dict[str, str]:
    """
    :param derived: expressions by name; each may use the columns, and those before it.
    :param unit: name of the unit's column, which no other may have.
    :raises ConfigurationError: a name is taken, or an expression is none or uses other columns.
    """
    if derived is not None and not isinstance(derived, Mapping):
        raise ConfigurationError("derived must be a dictionary of expressions by name.")
    known = list(columns)
    for name, expression in (derived or {}).items():
        if not isinstance(name, str) or name in known or name == unit:
            raise ConfigurationError(f"derived: {name!r} must be the name of a new column.")
        _require_expression(name, expression, known)
        known.append(name)
    return dict(derived or {})


def _require_expression(name: str, expression: Any, known: Collection[str]) -> None:
    tree = _parsed(name, expression)
    if tree is None or not all(map(_is_known, ast.walk(tree))):
        raise ConfigurationError(f"derived[{name!r}] is no expression: {_GRAMMAR}.")
    calls = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    used = [x.id for x in ast.walk(tree) if isinstance(x, ast.Name) and id(x) not in calls]
    unknown = [each for each in used if each not in known]
    if unknown:
        raise ConfigurationError(
            f"derived[{name!r}] uses {unknown[0]!r}, which is no column that is declared before it."
        )
    if not used:
        raise ConfigurationError(f"derived[{name!r}] uses no column.")


def evaluated(name: str, expression: str, columns: Mapping[str, pd.Series]) -> pd.Series:
    """
    :raises ConfigurationError: its operations do not fit the columns' dtypes.
    """
    tree = _parsed(name, expression)
    try:
        with np.errstate(all="ignore"):
            found: pd.Series = value(tree, columns, _FUNCTIONS)
    except Exception as error:  # whose text may show a value
        raise ConfigurationError(
            f"derived[{name!r}] cannot be computed of columns of these dtypes "
            f"({type(error).__name__})."
        ) from None
    return found


def _parsed(name: str, expression: Any) -> Any:
    if not isinstance(expression, str) or len(expression) > _LONGEST:
        raise ConfigurationError(
            f"derived[{name!r}] must be an expression as text, of {_LONGEST} characters at most."
        )
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree if _levels(tree) <= _DEEPEST else None


def _levels(tree: ast.AST) -> int:
    nodes, levels = [tree], 0
    while nodes:
        nodes = [child for node in nodes for child in ast.iter_child_nodes(node)]
        levels += 1
    return levels


def _is_known(node: Any) -> bool:
    match node:
        case ast.Constant(value=constant):
            return isinstance(constant, (bool, int, float, str))
        case ast.Call():
            named = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
            return named and not node.keywords
    return is_part(node, DERIVED)
