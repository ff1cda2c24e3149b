"""Columns with levels: categories and binary values."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from pyro_dp.tabular import series as of_pandas
from pyro_dp.tabular.column import LARGEST, Bins, Column
from pyro_dp.utils.errors import CURATOR, ConfigurationError, SchemaError
from pyro_dp.utils.validation import require_flag

_UNKNOWN = (
    "Column {name!r} has values that are not declared levels. Declare all levels of the codebook, "
    "or other=True (a Category), or missing=True. " + CURATOR
)


class LevelColumn(Column):
    """A column with levels, in the order of their declaration."""

    levels: tuple[Any, ...]
    other = ordered = False
    fill = 0
    _dtypes = ("text", "categories", "Python objects", "numbers", "booleans")

    @property
    def all_levels(self) -> list[Any]:
        """The levels in the order of their codes, including "other" if declared."""
        return [*self.levels, "other"] if self.other else list(self.levels)

    @cached_property
    def _bins(self) -> Bins:
        labels = tuple(map(str, self.all_levels))
        return Bins(tuple(range(len(labels) + 1)), labels, whole=True)

    @property
    def _default_dtype(self) -> str:
        if len({type(level) for level in self.all_levels}) > 1 or self.ordered:
            return "category"
        plain = {str: "str", int: "int64", bool: "bool"}
        nullable = {str: "str", int: "Int64", bool: "boolean"}
        return (nullable if self.missing else plain)[type(self.levels[0])]

    def _check(self) -> None:
        if isinstance(self.levels, str) or not isinstance(self.levels, Sequence):
            raise ConfigurationError("levels must be a tuple of text, integers or booleans.")
        levels = tuple(x.item() if isinstance(x, np.generic) else x for x in self.levels)
        object.__setattr__(self, "levels", levels)
        kinds = {type(level) for level in levels}
        if len(kinds) != 1 or not kinds <= {str, int, bool} or len(set(levels)) < len(levels):
            raise ConfigurationError(
                "levels must be different, and all text, all integers, or all booleans."
            )
        # A missing value turns a column into floats, which round larger integers.
        if kinds == {int} and any(abs(int(x)) >= LARGEST for x in levels):
            raise ConfigurationError("levels must lie above -2**53 and below 2**53.")
        self._declare(objects(self.all_levels))

    def _read(self, series: pd.Series, name: str) -> tuple[np.ndarray, np.ndarray]:
        values, observed = of_pandas.levels(series, name, self.levels)
        known = values >= 0
        if self.other:
            return np.where(known, values, len(self.levels)), observed
        if not self.missing and not (known | ~observed).all():
            raise SchemaError(_UNKNOWN.format(name=name))
        return values, observed & known

    def _bounded(self, values: np.ndarray) -> np.ndarray:
        return np.clip(values.astype(np.int64), 0, len(self.all_levels) - 1)

    def _write(self, values: np.ndarray, observed: np.ndarray) -> pd.Series:
        if self.dtype == "category":
            return of_pandas.as_categories(values, observed, self.all_levels, self.ordered)
        return of_pandas.as_series(objects(self.all_levels)[values], observed, self.dtype)

    def within(self, allowed: Any) -> np.ndarray:
        known = [*self.all_levels, *[None] * self.missing]
        unknown = [level for level in allowed if level not in known]
        if isinstance(allowed, str) or unknown:
            raise ConfigurationError("expected a list of declared levels.")
        return np.array([level in allowed for level in known])


@dataclass(frozen=True, repr=False)
class Category(LevelColumn):
    """One of several levels.

    :param levels: text, integers or booleans, from the codebook, never from the data.
    :param other: undeclared levels become one more, "other", the last code. By default they are
        missing if ``missing`` is declared, and otherwise refused.
    :param missing: whether values may be missing.
    :param ordered: whether levels are ordered, from low to high.
    :param dtype: pandas dtype of the decoded frame. By default that of the levels, or "category"
        for ordered levels and for integers with "other".
    :raises ConfigurationError: levels or dtype do not fit.

    >>> Category(("north", "south")).size, Category(("north", "south"), other=True).size
    (2, 3)
    """

    levels: tuple[Any, ...]
    other: bool = False
    missing: bool = False
    ordered: bool = False
    dtype: str = ""

    def __post_init__(self) -> None:
        for name in ("other", "ordered"):
            object.__setattr__(self, name, require_flag(name, getattr(self, name)))
        self._check()
        if self.other and "other" in self.levels:
            raise ConfigurationError("A level is already named 'other': leave other=False.")


@dataclass(frozen=True, repr=False)
class Binary(LevelColumn):
    """One of two levels, 0 and 1 for a model.

    :param levels: the values for 0 and 1, in the frame's type.
    :param missing: whether values may be missing. If so, other levels count as missing.
    :param dtype: pandas dtype of the decoded frame; by default that of the levels.
    :raises ConfigurationError: levels or dtype do not fit.

    >>> Binary(("no", "yes")).size
    2
    """

    levels: tuple[Any, ...] = (False, True)
    missing: bool = False
    dtype: str = ""

    def __post_init__(self) -> None:
        self._check()
        if len(self.levels) != 2:
            raise ConfigurationError("A Binary needs two levels. For more, use Category().")


def objects(values: Sequence[Any]) -> np.ndarray:
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found
