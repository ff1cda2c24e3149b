"""Expressions within a formula: row by row from declared columns, and from nothing else.

An expression's value at a row may depend on that row and on the schema alone. So only operators and
functions of single numbers are allowed. ``age - age.mean()`` is refused, and so are ``center(age)``
or splines with knots at quantiles, which look at all rows.
"""

import ast
from collections.abc import Callable, Mapping

import numpy as np

from pyro_dp.tabular.arithmetic import FORMULAE, is_part, value
from pyro_dp.tabular.column import Column
from pyro_dp.tabular.ranges import Count, Date, RangeColumn
from pyro_dp.utils.errors import ConfigurationError

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
_SCALED = "numbers are centred and scaled by their declared bounds anyway: write the column itself"
_SPLINE = "its knots follow from the data: write powers, I(age ** 2), or I(maximum(age - 40, 0))"
_LEVELS = "write the name of the column, which the schema declares as Category(levels)"
_INSTEAD = {
    **dict.fromkeys(("factor", "as.factor", "ordered"), _LEVELS),
    "center": _SCALED,
    "scale": _SCALED,
    "standardize": _SCALED,
    "poly": "its coefficients follow from the data: write powers, age + I(age ** 2)",
    **dict.fromkeys(("bs", "cc", "cr", "cs", "ns", "s", "te"), _SPLINE),
    "lag": "it looks at another row: make the column before, and declare it",
    "hashed": "declare the levels of the column, Category(levels)",
    "Q": "rename the column, or write its name in backquotes",
}
_MOST_POINTS = 4096


class Expression:
    """A number that is made of each row.

    :param text: Python, as in the formula, or the name of a column.
    :param columns: the schema's.
    :ivar variables: the columns that it reads.
    :ivar centre: the middle of its range within the declared bounds.
    :ivar half: half the width of that range.
    :raises ConfigurationError: it is none that can be taken row by row, or is not finite within
        the declared bounds.
    """

    def __init__(self, text: str, columns: Mapping[str, Column]):
        if text in columns:  # its name may be none of Python's
            self.variables = [text]
            self._tree: ast.expr = ast.Name(text)
        else:
            self._tree, self.variables = _row_by_row(text, columns)
        read: dict[str, RangeColumn] = {}
        for name in self.variables:
            column = columns[name]
            if not isinstance(column, RangeColumn):
                raise ConfigurationError(
                    f"The formula computes with column {name!r} in {text!r}, and it is declared "
                    "as levels: write its name alone, or C(...) with a contrast."
                )
            read[name] = column
        self._low, self._high = -np.inf, np.inf
        found = self.values(_points(read))
        if not np.isfinite(found).all():
            raise ConfigurationError(
                f"{text!r} is not finite everywhere within the declared bounds of "
                f"{', '.join(map(repr, self.variables))}: change the bounds, or the expression."
            )
        self._low, self._high = float(found.min()), float(found.max())
        self.centre, self.half = (self._low + self._high) / 2, (self._high - self._low) / 2
        if not self.half > 0:
            raise ConfigurationError(f"{text!r} is the same for all rows: leave it out.")

    def values(self, rows: Mapping[str, np.ndarray]) -> np.ndarray:
        """The value of each row, in the range at points within the declared bounds.

        :param rows: the variables' rows, as encoded.
        """
        given = {name: np.asarray(rows[name], dtype=np.float64) for name in self.variables}
        with np.errstate(all="ignore"):
            found = np.asarray(value(self._tree, given, FUNCTIONS), dtype=np.float64)
        if self._high == np.inf:
            return found
        return np.clip(np.nan_to_num(found, nan=self._low), self._low, self._high)


def _row_by_row(text: str, columns: Mapping[str, Column]) -> tuple[ast.expr, list[str]]:
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        raise ConfigurationError(
            f"The formula has {text!r}, which is no column of the schema, and no expression of "
            "columns whose names are Python names."
        ) from None
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    variables: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            _require_function(node, text)
        elif isinstance(node, ast.Name) and node not in called:
            require_column(node.id, columns)
            if node.id not in variables:
                variables.append(node.id)
        elif not is_part(node, FORMULAE):
            raise ConfigurationError(
                f"The formula has {text!r}, which is not taken row by row: it may have operators, "
                f"numbers, columns, and {', '.join(FUNCTIONS)}."
            )
        if isinstance(node, ast.Constant) and type(node.value) not in (int, float):
            raise ConfigurationError(f"The formula has {text!r}: it may compute with numbers only.")
    if not variables:
        raise ConfigurationError(f"The formula has {text!r}, which reads no column: leave it out.")
    return tree, variables


def _require_function(call: ast.Call, text: str) -> None:
    name = called_name(call)
    if name in FUNCTIONS and isinstance(call.func, ast.Name) and not call.keywords:
        return
    if name in FUNCTIONS:
        raise ConfigurationError(f"The formula has {text!r}: write {name}(...) for it.")
    why = _INSTEAD.get(name, f"functions that can be taken row by row are {', '.join(FUNCTIONS)}")
    raise ConfigurationError(f"The formula calls {name}() in {text!r}, which is refused: {why}.")


def called_name(call: ast.Call) -> str:
    """``log`` of ``log(x)`` and of ``np.log(x)``."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)


def require_column(name: str, columns: Mapping[str, Column]) -> None:
    """:raises ConfigurationError: the schema has no such column."""
    if name not in columns:
        raise ConfigurationError(
            f"The formula names {name!r}, which is no column of the schema: it has "
            f"{', '.join(map(repr, columns))}."
        )


def _points(columns: Mapping[str, RangeColumn]) -> dict[str, np.ndarray]:
    """A grid within the declared bounds, public."""
    each = max(int(_MOST_POINTS ** (1 / len(columns))), 2)
    axes = []
    for column in columns.values():
        points = np.linspace(*column.bounds, each)
        axes.append(np.unique(np.rint(points)) if isinstance(column, (Count, Date)) else points)
    grid = np.meshgrid(*axes, indexing="ij")
    return {name: axis.ravel() for name, axis in zip(columns, grid, strict=True)}
