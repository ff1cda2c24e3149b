"""Row-by-row expressions of columns, for formulae and derived columns.

They form a small language, which is not run as Python. So a schema from somebody else can compute
with columns and do nothing else. Each row's value depends on that row and the schema alone.
``age @ age`` and ``40 in age`` are refused, and so are ``age - age.mean()``, ``center(age)`` and
splines with knots at quantiles, which look at all rows.
"""

import ast
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from pyro_dp.tabular.column import Column
from pyro_dp.tabular.ranges import Count, Date, RangeColumn
from pyro_dp.utils.errors import ConfigurationError

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
_LONGEST = 2_000  # characters
_DEEPEST = 200  # levels of a tree, below the interpreter's limit at any usual call depth


def is_part(node: ast.AST, parts: tuple[type, ...]) -> bool:
    """Whether a node belongs to the language, one comparison at a time."""
    return isinstance(node, parts) or (isinstance(node, ast.Compare) and len(node.ops) == 1)


def value(node: Any, columns: Mapping[str, Any], functions: Mapping[str, Callable]) -> Any:
    """Evaluate an expression at each row. All of its nodes must belong to the language.

    :param functions: row-by-row functions by name.
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


def _is_call(call: ast.Call, functions: Mapping[str, Callable]) -> bool:
    """Whether it calls one of these functions. Numpy would write into an extra argument."""
    if not isinstance(call.func, ast.Name) or call.func.id not in functions or call.keywords:
        return False
    return len(call.args) <= getattr(functions[call.func.id], "nin", len(call.args))


def _parsed(text: str) -> Any:
    """The syntax tree; None if the text is no expression."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _levels(tree: ast.AST) -> int:
    nodes, levels = [tree], 0
    while nodes:
        nodes = [child for node in nodes for child in ast.iter_child_nodes(node)]
        levels += 1
    return levels


def _variables(tree: ast.AST) -> list[str]:
    """Names of columns, without repetition."""
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = [x.id for x in ast.walk(tree) if isinstance(x, ast.Name) and x not in called]
    return list(dict.fromkeys(names))


# Derived columns


def _where(condition: pd.Series, one: Any, other: Any) -> pd.Series:
    """Choose ``one`` if the condition holds. A missing condition chooses ``other``."""
    chosen = condition.fillna(False).to_numpy(dtype=bool)
    return pd.Series(np.where(chosen, one, other), index=condition.index)


_OF_SERIES: dict[str, Callable] = {
    "abs": abs,
    "exp": np.exp,
    "floor": np.floor,
    "log": np.log,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "where": _where,
}
_GRAMMAR = (
    "it can use columns whose names are Python names, numbers, text, + - * / // %, comparisons, "
    f"and, or, not, and {', '.join(_OF_SERIES)}"
)


def require_derived(derived: Any, columns: Iterable[str], unit: str | None) -> dict[str, str]:
    """Check the derived columns.

    :param derived: expressions by name. Each may use the columns and earlier expressions.
    :param unit: name of the unit's column, which no other column may have.
    :raises ConfigurationError: a name is taken, an expression is invalid, or uses other columns.
    """
    if derived is not None and not isinstance(derived, Mapping):
        raise ConfigurationError("derived must be a dictionary of expressions by name.")
    declared = list(columns)
    for name, expression in (derived or {}).items():
        if not isinstance(name, str) or name in declared or name == unit:
            raise ConfigurationError(f"derived: {name!r} must be the name of a new column.")
        _require_expression(name, expression, declared)
        declared.append(name)
    return dict(derived or {})


def _require_expression(name: str, expression: Any, declared: Collection[str]) -> None:
    if not isinstance(expression, str) or len(expression) > _LONGEST:
        raise ConfigurationError(
            f"derived[{name!r}] must be an expression as text, with at most {_LONGEST} characters."
        )
    tree = _parsed(expression)
    if tree is None or _levels(tree) > _DEEPEST or not all(map(_is_known, ast.walk(tree))):
        raise ConfigurationError(f"derived[{name!r}] is not an expression: {_GRAMMAR}.")
    used = _variables(tree)
    unknown = [each for each in used if each not in declared]
    if unknown:
        raise ConfigurationError(
            f"derived[{name!r}] uses {unknown[0]!r}, and no earlier column has this name."
        )
    if not used:
        raise ConfigurationError(f"derived[{name!r}] must use a column.")


def evaluated(name: str, expression: str, columns: Mapping[str, pd.Series]) -> pd.Series:
    """:raises ConfigurationError: its operations do not fit the columns' dtypes."""
    try:
        with np.errstate(all="ignore"):
            found: pd.Series = value(_parsed(expression), columns, _OF_SERIES)
    except Exception as error:  # whose text may show a value
        raise ConfigurationError(
            f"derived[{name!r}] cannot be computed from columns of these dtypes "
            f"({type(error).__name__})."
        ) from None
    return found


def _is_known(node: Any) -> bool:
    match node:
        case ast.Constant(value=constant):
            return isinstance(constant, (bool, int, float, str))
        case ast.Call():
            return _is_call(node, _OF_SERIES)
    return is_part(node, DERIVED)


# Formulae

FUNCTIONS: dict[str, Callable] = {
    "I": lambda x: x,
    "abs": np.abs,
    "cos": np.cos,
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "log10": np.log10,
    "log1p": np.log1p,
    "log2": np.log2,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "sin": np.sin,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
}
CONTRASTS = ("Diff", "Helmert", "Poly", "SAS", "Sum", "Treatment", "contr")
_SCALED = "numbers are always centred and scaled by their declared bounds. Write the column itself"
_SPLINE = "its knots depend on the data. Write powers, I(age ** 2), or I(maximum(age - 40, 0))"
_LEVELS = "write the name of the column, which the schema declares as Category(levels)"
_INSTEAD = {
    **dict.fromkeys(("factor", "as.factor", "ordered"), _LEVELS),
    "center": _SCALED,
    "scale": _SCALED,
    "standardize": _SCALED,
    "poly": "its coefficients depend on the data. Write powers, age + I(age ** 2)",
    **dict.fromkeys(("bs", "cc", "cr", "cs", "ns", "s", "te"), _SPLINE),
    "lag": "it reads another row. Compute this column beforehand, and declare it",
    "hashed": "declare the levels of the column, Category(levels)",
    "Q": "rename the column, or write its name in backquotes",
}
_MOST_POINTS = 4096


class Expression:
    """A numeric expression, evaluated for each row.

    :param text: an expression as in the formula, or the name of a column.
    :ivar variables: the columns that it reads.
    :ivar centre: the middle of its range within the declared bounds.
    :ivar half: half the width of that range.
    :raises ConfigurationError: it cannot be computed row by row, or is not finite within the
        declared bounds.
    """

    def __init__(self, text: str, columns: Mapping[str, Column]):
        if text in columns:  # it may be no name in Python
            self.variables = [text]
            self._tree: ast.expr = ast.Name(text)
        else:
            self._tree, self.variables = _row_by_row(text, columns)
        read: dict[str, RangeColumn] = {}
        for name in self.variables:
            column = columns[name]
            if not isinstance(column, RangeColumn):
                raise ConfigurationError(
                    f"{text!r} computes with column {name!r}, which has levels and not numbers. "
                    "Write its name alone, or C(...) with a contrast."
                )
            read[name] = column
        self._low, self._high = -np.inf, np.inf
        try:
            found = self.values(_points(read))
        except TypeError as error:  # numpy's own; no data was seen
            raise ConfigurationError(f"{text!r} cannot be computed: {error}.") from None
        if not np.isfinite(found).all():
            raise ConfigurationError(
                f"{text!r} is not finite everywhere within the declared bounds of "
                f"{', '.join(map(repr, self.variables))}. Change the bounds or the expression."
            )
        self._low, self._high = float(found.min()), float(found.max())
        self.centre, self.half = (self._low + self._high) / 2, (self._high - self._low) / 2
        if not self.half > 0:
            raise ConfigurationError(
                f"{text!r} is the same for all rows. Remove it from the formula."
            )

    def values(self, rows: Mapping[str, np.ndarray]) -> np.ndarray:
        """The value of each encoded row, clipped to the range within the declared bounds."""
        numbers = {name: np.asarray(rows[name], dtype=np.float64) for name in self.variables}
        with np.errstate(all="ignore"):
            found = np.asarray(value(self._tree, numbers, FUNCTIONS), dtype=np.float64)
        if self._high == np.inf:
            return found
        return np.clip(np.nan_to_num(found, nan=self._low), self._low, self._high)


def _row_by_row(text: str, columns: Mapping[str, Column]) -> tuple[ast.expr, list[str]]:
    tree = _parsed(text)
    if tree is None:
        raise ConfigurationError(
            f"The formula has {text!r}. It is neither a column of the schema nor an expression. "
            "Expressions can use columns whose names are Python names."
        )
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            _require_function(node, text)
        elif not is_part(node, FORMULAE):
            raise ConfigurationError(
                f"The formula has {text!r}, which cannot be computed row by row. Use operators, "
                f"numbers, columns, and {', '.join(FUNCTIONS)}."
            )
        if isinstance(node, ast.Constant) and type(node.value) not in (int, float):
            raise ConfigurationError(f"The formula has {text!r}. It can compute with numbers only.")
    variables = _variables(tree)
    for name in variables:
        require_column(name, columns)
    if not variables:
        raise ConfigurationError(f"The formula has {text!r}, which uses no column. Remove it.")
    return tree, variables


def _require_function(call: ast.Call, text: str) -> None:
    if _is_call(call, FUNCTIONS):
        return
    name = called_name(call)
    if name in FUNCTIONS:
        numbers = ", ".join(["..."] * getattr(FUNCTIONS[name], "nin", 1))
        raise ConfigurationError(f"The formula has {text!r}. Write {name}({numbers}) instead.")
    why = _INSTEAD.get(name, f"functions that work row by row are {', '.join(FUNCTIONS)}")
    raise ConfigurationError(f"The formula calls {name}() in {text!r}, which is refused: {why}.")


def called_name(call: ast.Call) -> str:
    """``log`` for both ``log(x)`` and ``np.log(x)``."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)


def require_column(name: str, columns: Mapping[str, Column]) -> None:
    """:raises ConfigurationError: the schema has no such column."""
    if name not in columns:
        raise ConfigurationError(
            f"The formula names {name!r}, which is not in the schema. Its columns are "
            f"{', '.join(map(repr, columns))}."
        )


def _points(columns: Mapping[str, RangeColumn]) -> dict[str, np.ndarray]:
    """A public grid within the declared bounds."""
    each = max(int(_MOST_POINTS ** (1 / len(columns))), 2)
    axes = []
    for column in columns.values():
        points = np.linspace(*column.bounds, each)
        axes.append(np.unique(np.rint(points)) if isinstance(column, (Count, Date)) else points)
    grid = np.meshgrid(*axes, indexing="ij")
    return {name: axis.ravel() for name, axis in zip(columns, grid, strict=True)}
