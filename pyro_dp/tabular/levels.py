"""Columns of levels: categories and binary values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from pyro_dp.tabular import series as of_pandas
from pyro_dp.tabular.column import LARGEST, Column
from pyro_dp.utils.errors import ConfigurationError, SchemaError
from pyro_dp.utils.validation import require_flag

_UNKNOWN = (
    "Column {name!r} has values that are none of its declared levels: declare all levels of the "
    "codebook, or other=True (a Category), or missing=True. " + of_pandas.CURATOR
)


class _Levels(Column):
    """Levels, in the order of their declaration."""

    levels: tuple[Any, ...]
    _dtypes: ClassVar[tuple[str, ...]] = (
        "text",
        "categories",
        "Python objects",
        "numbers",
        "booleans",
    )

    @property
    def fill(self) -> int:
        return 0

    @property
    def _all(self) -> tuple[Any, ...]:
        """Levels, with that of all others, where there is one."""
        return self.levels

    @property
    def _ordered(self) -> bool:
        return False

    @property
    def _labels(self) -> Sequence[str]:
        return [str(level) for level in self._all]

    @property
    def _default_dtype(self) -> str:
        if len({type(level) for level in self._all}) > 1 or self._ordered:
            return "category"
        plain = {str: "str", int: "int64", bool: "bool"}
        nullable = {str: "str", int: "Int64", bool: "boolean"}
        return (nullable if self.missing else plain)[type(self.levels[0])]

    def _check(self) -> None:
        if isinstance(self.levels, str) or not isinstance(self.levels, Sequence):
            raise ConfigurationError("levels must be a tuple of text, integers or booleans.")
        levels = tuple(x.item() if isinstance(x, np.generic) else x for x in self.levels)
        self._set("levels", levels)
        kinds = {type(level) for level in levels}
        if len(kinds) != 1 or not kinds <= {str, int, bool} or len(set(levels)) < len(levels):
            raise ConfigurationError(
                "levels must be different, and all text, all integers, or all booleans."
            )
        if kinds == {int} and any(abs(int(x)) > LARGEST for x in levels):
            raise ConfigurationError("levels must be between -2**53 and 2**53.")
        self._declare(self._objects(list(self._all)))

    def _objects(self, values: Sequence[Any]) -> np.ndarray:
        found = np.empty(len(values), dtype=object)
        found[:] = values
        return found

    def _read(self, series: pd.Series, name: str) -> tuple[np.ndarray, np.ndarray]:
        values, observed = of_pandas.levels(series, name, self.levels)
        return self._unknown(values, observed, name)

    def _unknown(
        self, values: np.ndarray, observed: np.ndarray, name: str
    ) -> tuple[np.ndarray, np.ndarray]:
        known = values >= 0
        if not self.missing and not (known | ~observed).all():
            raise SchemaError(_UNKNOWN.format(name=name))
        return values, observed & known

    def _bounded(self, values: np.ndarray) -> np.ndarray:
        return np.clip(values.astype(np.int64), 0, len(self._all) - 1)

    def _write(self, values: np.ndarray, observed: np.ndarray) -> pd.Series:
        if self.dtype == "category":
            return of_pandas.as_categories(values, observed, self._all, self._ordered)
        return of_pandas.as_series(self._objects(self._all)[values], observed, self.dtype)

    def _codes(self, values: np.ndarray) -> np.ndarray:
        return values

    def _draw(self, codes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return codes.astype(np.int64)

    def within(self, allowed: Any) -> np.ndarray:
        known = (*self._all, None) if self.missing else self._all
        unknown = [level for level in allowed if level not in known]
        if isinstance(allowed, str) or unknown:
            raise ConfigurationError("there must be a list of declared levels.")
        return np.array([level in allowed for level in known])


@dataclass(frozen=True, repr=False)
class Category(_Levels):
    """One of several levels.

    :param levels: text, integers or booleans, from the codebook, never from the data.
    :param other: undeclared levels become one more, "other", the last code. By default they are
        missing if ``missing`` is declared, and otherwise refused.
    :param missing: values may be missing.
    :param ordered: from low to high.
    :param dtype: the dtype of pandas in the decoded frame. By default that of the levels, or
        "category" for ordered levels and for integers with "other".
    :raises ConfigurationError: levels or dtype do not fit.

    >>> from pyro_dp.tabular import Category
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
            self._set(name, require_flag(name, getattr(self, name)))
        self._check()
        if self.other and "other" in self.levels:
            raise ConfigurationError("levels: 'other' needs other=False.")

    @property
    def _all(self) -> tuple[Any, ...]:
        return (*self.levels, "other") if self.other else self.levels

    @property
    def _ordered(self) -> bool:
        return self.ordered

    def _unknown(
        self, values: np.ndarray, observed: np.ndarray, name: str
    ) -> tuple[np.ndarray, np.ndarray]:
        if self.other:
            return np.where(values < 0, len(self.levels), values), observed
        return super()._unknown(values, observed, name)


@dataclass(frozen=True, repr=False)
class Binary(_Levels):
    """One of two levels, 0 and 1 for a model.

    :param levels: the values for 0 and 1, in the frame's type.
    :param missing: values may be missing. Then levels other than these count as missing.
    :param dtype: the dtype of pandas in the decoded frame; by default that of the levels.
    :raises ConfigurationError: levels or dtype do not fit.

    >>> from pyro_dp.tabular import Binary
    >>> Binary(("no", "yes")).size
    2
    """

    levels: tuple[Any, ...] = (False, True)
    missing: bool = False
    dtype: str = ""

    def __post_init__(self) -> None:
        self._check()
        if len(self.levels) != 2:
            raise ConfigurationError("levels of a Binary must be two; Category() has more.")
