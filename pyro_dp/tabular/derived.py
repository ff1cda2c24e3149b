"""Derived columns: expressions of other columns, which a frame gets when it is decoded.

An expression is a small language of its own, not run as Python. So somebody else's saved schema can
compute with columns, and do nothing else.
"""

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import pandas as pd

from pyro_dp.utils.errors import ConfigurationError

_LONGEST = 2_000  # characters
_DEEPEST = 200  # levels; the caller's depth decides whether the interpreter's own limit is met
_BINARY: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type, Callable] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_UNARY: dict[type, Callable] = {ast.USub: operator.neg, ast.Not: operator.invert}


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


def require_expression(name: str, expression: Any, known: Collection[str]) -> None:
    """
    :param name: the derived column's.
    :param known: the columns that it may use.
    :raises ConfigurationError: it is none, or uses other columns.
    """
    tree = _parsed(name, expression)
    if tree is None or not _is_known(tree):
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
            found: pd.Series = _value(tree, columns)
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
        case ast.Name():
            return True
        case ast.Constant(value=value):
            return isinstance(value, (bool, int, float, str))
        case ast.BinOp(left=one, op=op, right=other):
            return type(op) in _BINARY and _is_known(one) and _is_known(other)
        case ast.UnaryOp(op=op, operand=one):
            return type(op) in _UNARY and _is_known(one)
        case ast.BoolOp(values=values):
            return all(map(_is_known, values))
        case ast.Compare(left=one, ops=[op], comparators=[other]):
            return type(op) in _COMPARE and _is_known(one) and _is_known(other)
        case ast.Call(func=ast.Name(id=function), args=args, keywords=[]):
            return function in _FUNCTIONS and all(map(_is_known, args))
    return False


def _value(node: Any, columns: Mapping[str, pd.Series]) -> Any:
    match node:
        case ast.Name(id=name):
            return columns[name]
        case ast.Constant(value=value):
            return value
        case ast.BinOp(left=one, op=op, right=other):
            return _BINARY[type(op)](_value(one, columns), _value(other, columns))
        case ast.UnaryOp(op=op, operand=one):
            return _UNARY[type(op)](_value(one, columns))
        case ast.BoolOp(op=op, values=values):
            join = operator.and_ if isinstance(op, ast.And) else operator.or_
            found = _value(values[0], columns)
            for each in values[1:]:
                found = join(found, _value(each, columns))
            return found
        case ast.Compare(left=one, ops=[op], comparators=[other]):
            return _COMPARE[type(op)](_value(one, columns), _value(other, columns))
        case ast.Call(func=ast.Name(id=function), args=args):
            return _FUNCTIONS[function](*(_value(each, columns) for each in args))
    raise TypeError
