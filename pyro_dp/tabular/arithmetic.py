"""Arithmetic of columns: the expressions of formulae and of derived columns.

They are a small language of its own, not run as Python. A value at a row is computed from that row
alone, so no operator looks at several: ``age @ age`` and ``40 in age`` are refused.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

_BOTH: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.USub: operator.neg,
}
_OF_DERIVED: dict[type, Callable] = {
    ast.And: operator.and_,
    ast.Or: operator.or_,
    ast.Not: operator.invert,
}
_OF_FORMULAE: dict[type, Callable] = {
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Invert: operator.invert,
    ast.UAdd: operator.pos,
}
_OPERATORS = _BOTH | _OF_DERIVED | _OF_FORMULAE
_NODES = (ast.Constant, ast.Name, ast.Load, ast.BinOp, ast.UnaryOp, ast.Call)
DERIVED = (*_NODES, ast.BoolOp, *_BOTH, *_OF_DERIVED)
FORMULAE = (*_NODES, *_BOTH, *_OF_FORMULAE)


def is_part(node: ast.AST, parts: tuple[type, ...]) -> bool:
    """Whether a node belongs to the language, one comparison at a time.

    :param parts: :data:`DERIVED` or :data:`FORMULAE`.
    """
    return isinstance(node, parts) or (isinstance(node, ast.Compare) and len(node.ops) == 1)


def value(node: Any, columns: Mapping[str, Any], functions: Mapping[str, Callable]) -> Any:
    """The value of an expression at each row.

    :param node: all of its nodes belong to the language.
    :param columns: the rows' values, by column.
    :param functions: each maps a row by itself, by name.
    """

    def of(part: Any) -> Any:
        return value(part, columns, functions)

    match node:
        case ast.Name(id=name):
            return columns[name]
        case ast.Constant(value=constant):
            return constant
        case ast.BinOp(left=one, op=op, right=other):
            return _OPERATORS[type(op)](of(one), of(other))
        case ast.Compare(left=one, ops=[op], comparators=[other]):
            return _OPERATORS[type(op)](of(one), of(other))
        case ast.UnaryOp(op=op, operand=one):
            return _OPERATORS[type(op)](of(one))
        case ast.BoolOp(op=op, values=values):
            found = of(values[0])
            for each in values[1:]:
                found = _OPERATORS[type(op)](found, of(each))
            return found
        case ast.Call(func=ast.Name(id=function), args=args):
            return functions[function](*map(of, args))
    raise TypeError
