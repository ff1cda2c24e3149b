"""A formula and its design matrix, in which each row depends on that row and the schema alone.

Formulaic makes the columns. It learns contrasts and levels from a public frame drawn from the
schema. So an unused level still has its column. A model reads numbers as (age - 50) / 30, by their
declared bounds. A public matrix transforms its coefficients back to the user's columns.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from pyro_dp.tabular.column import Column
from pyro_dp.tabular.expressions import CONTRASTS, Expression, called_name, require_column
from pyro_dp.tabular.levels import LevelColumn
from pyro_dp.tabular.ranges import Count, RangeColumn
from pyro_dp.utils.errors import ConfigurationError, no_warnings

_PUBLIC_ROWS = 4000
_EXACT = 1e-8
_NONE = 1e-300  # divisor of a column that is 0 in all public rows
_GROUPED = (
    "The formula has '|', which marks groups in other packages. For an intercept per level of a "
    "column, pass group='column'. For a slope per level, write an interaction: age * region."
)
Term = tuple[str, ...]  # texts of its factors; () is the intercept


class Design:
    """The design matrix of a formula's right side.

    :param terms: the terms.
    :param columns: the columns of the schema.
    :ivar names: names of the matrix' K columns, for the user.
    :ivar variables: the columns of the schema that the matrix depends on.
    :ivar to_user: (K, K). Coefficients b of :meth:`matrix` are ``to_user @ b`` in the user's units.
    :ivar of_levels: names of columns that contain a factor's levels.
    :ivar scaled: centre and half width of each number, by its text.
    :raises ConfigurationError: a term names no column, is not computed row by row, or is collinear
        with others.
    """

    def __init__(self, terms: Sequence[Term], columns: Mapping[str, Column]):
        self._columns = columns
        self._numbers: dict[str, Expression] = {}
        self._levels: dict[str, LevelColumn] = {}
        parts = ["0" if () not in terms else "1"]
        for term in terms:
            if term:
                parts.append(":".join(self._factor(text) for text in term))
        of_numbers = [v for each in self._numbers.values() for v in each.variables]
        self.variables = list(dict.fromkeys([*of_numbers, *self._levels]))
        self._settle(" + ".join(parts))

    def matrix(self, rows: Mapping[str, np.ndarray]) -> np.ndarray:
        """The matrix, (rows, K).

        :param rows: the rows of :attr:`variables`, as :meth:`Schema.encode` gives them, (rows,)
            each.
        """
        return self._matrix(rows, self.scaled)

    def _factor(self, text: str) -> str:
        """The text of a factor for formulaic."""
        column = self._columns.get(text)
        if isinstance(column, LevelColumn):
            self._levels[text] = column
            return f"`{text}`"
        if text.startswith("C("):
            self._levels.update([_coded(text, self._columns)])
            return text
        self._numbers.setdefault(text, Expression(text, self._columns))
        return f"`{text}`"

    def _settle(self, right_side: str) -> None:
        """Find the names and the inverse map, from rows drawn from the schema."""
        from formulaic import model_matrix

        rows = self._public_rows()
        raw = dict.fromkeys(self._numbers, (0.0, 1.0))
        with no_warnings():
            try:
                made = model_matrix(right_side, self._frame(rows, raw))
            except Exception as error:  # formulaic's own, of many types; no data was seen
                raise ConfigurationError(f"The formula cannot be read: {error}") from None
        self._spec = made.model_spec
        self.names = [str(name) for name in made.columns]
        if not self.names:
            raise ConfigurationError("The formula needs a term on its right side.")
        self.of_levels = {
            self.names[place]
            for term, places in self._spec.term_indices.items()
            if any(factor in self._spec.factor_contrasts for factor in term.factors)
            for place in places
        }
        plain = self._matrix(rows, raw)
        sizes = np.abs(plain).max(axis=0).clip(min=_NONE)
        if np.linalg.matrix_rank(plain / sizes, tol=1e-7 * len(plain) ** 0.5) < len(self.names):
            raise ConfigurationError(
                "Some terms of the formula are linear combinations of others for any data. Remove "
                f"such terms from {', '.join(self.names)}."
            )
        centred = {text: (each.centre, each.half) for text, each in self._numbers.items()}
        only_scaled = {t: (0.0, abs(each.centre) + each.half) for t, each in self._numbers.items()}
        for scaled in (centred, only_scaled):  # centring a product needs the terms of its factors
            wanted = self._matrix(rows, scaled)
            back = np.linalg.lstsq(plain / sizes, wanted, rcond=None)[0]
            if np.abs(plain / sizes @ back - wanted).max() < _EXACT:
                back[np.abs(back) < _EXACT] = 0.0
                self.scaled, self.to_user = scaled, back / sizes[:, None]
                return
        raise AssertionError("products of scaled numbers are multiples of the numbers' products")

    def _public_rows(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        rows: dict[str, np.ndarray] = {}
        if not self.variables:  # an intercept alone
            rows["1"] = np.ones(_PUBLIC_ROWS)
        for name in self.variables:
            column = self._columns[name]
            if isinstance(column, LevelColumn):
                rows[name] = rng.integers(len(column.all_levels), size=_PUBLIC_ROWS)
            elif isinstance(column, RangeColumn):
                low, high = column.bounds  # a third lies at a bound, for I(income > 0)
                beyond = (high - low) / 4
                drawn = rng.uniform(low - beyond, high + beyond, _PUBLIC_ROWS).clip(low, high)
                rows[name] = np.rint(drawn) if isinstance(column, Count) else drawn
        return rows

    def _frame(
        self, rows: Mapping[str, np.ndarray], scaled: Mapping[str, tuple[float, float]]
    ) -> pd.DataFrame:
        found: dict[str, Any] = {}
        for name, column in self._levels.items():
            found[name] = pd.Categorical.from_codes(rows[name], categories=column.all_levels)
        for text, number in self._numbers.items():
            centre, half = scaled[text]
            found[text] = (number.values(rows) - centre) / half
        if not found:
            found["1"] = np.ones(len(next(iter(rows.values()))))
        return pd.DataFrame(found)

    def _matrix(
        self, rows: Mapping[str, np.ndarray], scaled: Mapping[str, tuple[float, float]]
    ) -> np.ndarray:
        with no_warnings():
            made = self._spec.get_model_matrix(self._frame(rows, scaled))
        return np.asarray(made, dtype=np.float64)


def _coded(text: str, columns: Mapping[str, Column]) -> tuple[str, LevelColumn]:
    """Name and declaration of the column in ``C(column, contrast)``."""
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError:
        call = None
    if not isinstance(call, ast.Call) or not call.args or not isinstance(call.args[0], ast.Name):
        raise ConfigurationError(
            f"The formula has {text!r}. Write C(column) or C(column, contrast)."
        )
    name = call.args[0].id
    require_column(name, columns)
    column = columns[name]
    if not isinstance(column, LevelColumn):
        raise ConfigurationError(
            f"The formula has {text!r}, but column {name!r} has numbers and not levels. Declare it "
            "as Category(levels)."
        )
    if any(each.arg == "levels" for each in call.keywords):
        raise ConfigurationError(
            f"The formula has {text!r}, but the schema declares the levels and their order. Choose "
            "the reference by contr.treatment(base=...)."
        )
    rest = [*call.args[1:], *(each.value for each in call.keywords)]
    for node in (each for part in rest for each in ast.walk(part)):
        if isinstance(node, ast.Call) and called_name(node).split(".")[0] in columns:
            raise ConfigurationError(
                f"The formula has {text!r}, but a contrast cannot use a column."
            )
        if isinstance(node, ast.Name) and node.id not in CONTRASTS:
            raise ConfigurationError(
                f"The formula has {text!r}. Contrasts are contr.treatment(base=...), contr.sum, "
                "contr.helmert, contr.diff and contr.poly."
            )
    return name, column


@dataclass(frozen=True)
class Formula:
    """A formula as the user wrote it, its outcome, and the terms of its right side."""

    text: str
    outcome: str
    terms: tuple[Term, ...]

    @classmethod
    def read(cls, text: str, columns: Mapping[str, Column]) -> "Formula":
        """Parse a formula.

        :param text: "visits ~ age + chronic * income".
        :raises ConfigurationError: it is no formula with one outcome (the text names the part), or
            formulaic is not installed.
        """
        try:
            import formulaic
            from formulaic.parser.algos.tokenize import tokenize
        except ImportError:
            raise ConfigurationError(
                "PrivateGLM needs formulaic, which is not installed: pip install "
                "'pyro-dp[tabular]'."
            ) from None
        if not isinstance(text, str):
            raise ConfigurationError("formula must be text, such as 'visits ~ age + chronic'.")
        if re.search(r"(?<![\w.])\.(?![\w.])", text):
            raise ConfigurationError("The formula has '.'. Name the columns instead.")
        try:
            if "|" in [each.token for each in tokenize(text)]:  # that of I(...) is within a token
                raise ConfigurationError(_GROUPED)
            read = formulaic.Formula(text)
        except ConfigurationError:
            raise
        except Exception as error:  # formulaic's own, of many types
            first = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()[0]
            raise ConfigurationError(f"The formula cannot be read: {first}") from None
        sides: tuple[Any, Any] = getattr(read, "lhs", ()), getattr(read, "rhs", read)
        if len(sides[0]) != 1 or len(sides[0][0].factors) != 1 or isinstance(sides[1], tuple):
            raise ConfigurationError(
                "The formula must have one outcome and one right side: 'visits ~ age + chronic'."
            )
        outcome = sides[0][0].factors[0].expr
        if outcome not in columns and re.search(r"\W", outcome):
            raise ConfigurationError(
                f"The outcome {outcome!r} must be a column. Compute it beforehand, and declare it."
            )
        require_column(outcome, columns)
        terms = []
        for term in sides[1]:
            texts = tuple(each.expr for each in term.factors)
            if any(each.startswith("offset(") for each in texts):
                raise ConfigurationError(
                    f"The formula has the term {str(term)!r}. Pass exposure='column' instead."
                )
            if texts == ("1",):
                texts = ()
            elif any(re.fullmatch(r"[\d.]+|'.*'|\".*\"", each) for each in texts):
                raise ConfigurationError(
                    f"The formula has the term {str(term)!r}. Write numbers within I(...) only."
                )
            elif outcome in texts:
                raise ConfigurationError(f"The outcome {outcome!r} is on both sides.")
            terms.append(texts)
        return cls(text, outcome, tuple(terms))
