"""Columns with ranges: numbers, counts and dates between bounds, in bins."""

import datetime
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
import torch

from pyro_dp.records.data_numbers import Scale
from pyro_dp.tabular import series as of_pandas
from pyro_dp.tabular.column import LARGEST, Bins, Column
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_count, require_number

MOST_CODES = 200


class RangeColumn(Column):
    """A column with a range of numbers, in bins."""

    lower: Any
    upper: Any
    bins: Any

    def _read_range(self, read: Callable[[str, Any], Any], below: str = "below") -> None:
        for name in ("lower", "upper"):
            object.__setattr__(self, name, read(name, getattr(self, name)))
        if self.lower >= self.upper:
            raise ConfigurationError(f"lower must be {below} upper.")
        if isinstance(self.bins, list):
            object.__setattr__(self, "bins", tuple(self.bins))

    @property
    def bounds(self) -> tuple[float, float]:
        """The range of the encoded numbers."""
        return float(self.lower), float(self.upper)

    @property
    def discrete(self) -> bool:
        return False

    @property
    def fill(self) -> float:
        found: float = self.lower
        return found

    def _read(self, series: pd.Series, name: str) -> tuple[np.ndarray, np.ndarray]:
        values, observed = of_pandas.numbers(series, name)
        scale = Scale(f"Column {name!r}")
        scale.add(torch.from_numpy(values[observed & np.isfinite(values)].astype(np.float64)))
        scale.warn()
        return self._bounded(np.where(observed, values, self.fill)), observed

    @property
    def _decodes_to_integers(self) -> bool:
        return pd.api.types.is_integer_dtype(pd.api.types.pandas_dtype(self.dtype))

    def _write(self, values: np.ndarray, observed: np.ndarray) -> pd.Series:
        values = np.rint(values) if self._decodes_to_integers else values
        return of_pandas.as_series(values, observed, self.dtype)

    def within(self, allowed: Any) -> np.ndarray:
        found = self._bins.within(*self._range(allowed))
        return np.append(found, False) if self.missing else found

    def holds(self, values: np.ndarray, observed: np.ndarray, allowed: Any) -> np.ndarray:
        low, high = self._range(allowed)
        return (values >= low) & (values <= high) & observed

    def _range(self, allowed: Any) -> tuple[float, float]:
        low, high = (1.0, 0.0)
        if not isinstance(allowed, str) and len(allowed) == 2:
            low, high = map(self._end, allowed)
        if low > high:
            raise ConfigurationError("a range must be (low, high).")
        return low, high

    def _end(self, value: Any) -> float:
        return require_number("an end of the range", value, above=-np.inf, below=np.inf)


@dataclass(frozen=True, repr=False)
class Number(RangeColumn):
    """Numbers between two bounds. Values beyond, including infinities, are clipped to them.

    Drawn numbers have few decimals, such as 37.42 years. For whole numbers use a :class:`Count` or
    an integer ``dtype``.

    :param lower: bound, from the codebook, never from the data.
    :param upper: bound, above it.
    :param bins: bins of margins and rules: a number of bins of equal width, or edges from ``lower``
        to ``upper``. A bin includes its lower edge, and the last bin both edges.
    :param missing: whether values may be missing (NaN, None, NA).
    :param dtype: pandas dtype of the decoded frame. With an integer dtype, numbers are rounded, and
        drawn numbers are whole and lie within their bins.
    :raises ConfigurationError: bounds, bins or dtype do not fit.

    >>> Number(0, 100, bins=4).size, Number(0, 100, bins=4, missing=True).size  # codes
    (4, 5)
    """

    lower: float
    upper: float
    bins: int | tuple[float, ...] = 20
    missing: bool = False
    dtype: str = ""
    _default_dtype = "float64"

    def __post_init__(self) -> None:
        self._read_range(partial(require_number, above=-1e300, below=1e300))
        self._declare(np.rint([self.lower, self.upper]))

    @cached_property
    def _bins(self) -> Bins:
        whole, text = self._decodes_to_integers, "{:.6g}".format
        return of_range(self.bins, *self.bounds, text, whole=False, draws_whole=whole)

    def _bounded(self, values: np.ndarray) -> np.ndarray:
        return np.clip(values.astype(np.float64), self.lower, self.upper)


@dataclass(frozen=True, repr=False)
class Count(RangeColumn):
    """Whole numbers between two bounds, both included. Values beyond are clipped to them.

    Fractions are rounded to the nearest whole number. Use it also for ages in years:
    ``Count(18, 100, bins=(18, 30, 45, 65, 100))``. Models read the numbers, not the bins.

    :param lower: smallest number.
    :param upper: largest number.
    :param bins: number of bins, or edges from ``lower`` to ``upper``: (0, 1, 5, 20) are the bins 0,
        1 to 4, and 5 to 20. None: each number has its own code, 200 at most.
    :param missing: whether values may be missing.
    :param dtype: pandas dtype of the decoded frame; by default "int64", or "Int64" with missing
        values.
    :raises ConfigurationError: bounds, bins or dtype do not fit.

    >>> Count(0, 20).size, Count(0, 1000, bins=10).size  # codes
    (21, 10)
    """

    lower: int
    upper: int
    bins: int | tuple[int, ...] | None = None
    missing: bool = False
    dtype: str = ""

    def __post_init__(self) -> None:
        self._read_range(_integer)
        if self.bins is None and self._span > MOST_CODES:
            raise ConfigurationError(
                f"Count has {self._span} values, and at most {MOST_CODES} codes are allowed. Pass "
                "bins=20, or a list of edges."
            )
        self._declare(np.array([self.lower, self.upper]))

    @property
    def _span(self) -> int:
        return self.upper - self.lower + 1

    @cached_property
    def _bins(self) -> Bins:
        bins = self._span if self.bins is None else self.bins
        return of_range(bins, self.lower, self.upper, str, whole=True)

    @property
    def _default_dtype(self) -> str:
        return "Int64" if self.missing else "int64"

    @property
    def discrete(self) -> bool:
        return self._bins.size == self._span

    def _bounded(self, values: np.ndarray) -> np.ndarray:
        return np.rint(np.clip(values, self.lower, self.upper)).astype(np.int64)


@dataclass(frozen=True, repr=False)
class Date(RangeColumn):
    """Dates between two bounds, both included, as days since the first of them.

    The time of day and the time zone are ignored. Only the local date counts.

    :param lower: first date, as "2020-01-31".
    :param upper: last date.
    :param bins: number of bins of equal width, or edges: dates from ``lower`` to ``upper``.
    :param missing: whether values may be missing (NaT, None, NA).
    :param dtype: pandas dtype of the decoded frame. With a time zone, dates become midnight there.
    :raises ConfigurationError: bounds, bins or dtype do not fit.

    >>> Date("2024-01-01", "2024-12-31", bins=12).size
    12
    """

    lower: str
    upper: str
    bins: int | tuple[str, ...] = 20
    missing: bool = False
    dtype: str = ""
    fill = 0.0
    _dtypes = ("dates",)
    _default_dtype = "datetime64[s]"

    def __post_init__(self) -> None:
        self._read_range(_date, below="before")
        if isinstance(self.bins, tuple):
            object.__setattr__(self, "bins", tuple(_date("bins", edge) for edge in self.bins))
        self._declare(np.array([self.lower, self.upper], dtype="datetime64[s]"))

    @property
    def _origin(self) -> datetime.date:
        return datetime.date.fromisoformat(self.lower)

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, float(self._days(self.upper))

    def _days(self, date: str) -> int:
        return (datetime.date.fromisoformat(date) - self._origin).days

    @cached_property
    def _bins(self) -> Bins:
        bins: Any = self.bins
        if isinstance(bins, tuple):
            bins = [self._days(edge) for edge in bins]

        def text(day: int) -> str:
            return (self._origin + datetime.timedelta(days=day)).isoformat()

        return of_range(bins, *self.bounds, text, whole=True)

    def _read(self, series: pd.Series, name: str) -> tuple[np.ndarray, np.ndarray]:
        values, observed = of_pandas.days(series, name, self._origin)
        return self._bounded(values), observed

    def _bounded(self, values: np.ndarray) -> np.ndarray:
        return np.rint(np.clip(values, *self.bounds)).astype(np.float64)

    def _write(self, values: np.ndarray, observed: np.ndarray) -> pd.Series:
        since_1970 = values.astype(np.int64) + (self._origin - datetime.date(1970, 1, 1)).days
        return of_pandas.as_dates(since_1970, observed, self.dtype)

    def _end(self, value: Any) -> float:
        return self._days(_date("an end of the range", value))


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ConfigurationError(f"{name} must be an integer. For floats, use Number().")
    if abs(int(value)) > LARGEST:
        raise ConfigurationError(f"{name} must be between -2**53 and 2**53.")
    return int(value)


def _date(name: str, value: Any) -> str:
    """A date in ISO form."""
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return value.isoformat()
    try:
        return datetime.date.fromisoformat(value).isoformat()
    except (TypeError, ValueError):
        raise ConfigurationError(f"{name} must be a date, such as '2020-01-31'.") from None


def of_range(
    bins: int | Sequence[float],
    lower: float,
    upper: float,
    text: Callable[[Any], str],
    *,
    whole: bool,
    draws_whole: bool = False,
) -> Bins:
    """The bins of a range.

    :param bins: number of bins of equal width, or edges from ``lower`` to ``upper``.
    :param text: formats an edge for a label.
    :raises ConfigurationError: bins are neither, or more than whole numbers.
    """
    edges = _edges(bins, lower, upper, whole)
    if any(low >= high for low, high in itertools.pairwise(edges)):
        raise ConfigurationError("bins: edges must increase, also as floats.")
    if whole:
        edges = [int(edge) for edge in edges]
        pairs = [(text(low), text(high - 1)) for low, high in itertools.pairwise(edges)]
        labels = [low if low == high else f"{low} to {high}" for low, high in pairs]
    else:
        labels = [f"[{text(low)}, {text(high)})" for low, high in itertools.pairwise(edges)]
        labels[-1] = labels[-1][:-1] + "]"
    return Bins(tuple(edges), tuple(labels), whole, draws_whole)


def _edges(bins: Any, lower: float, upper: float, whole: bool) -> list[float]:
    top = upper + 1 if whole else upper
    if not isinstance(bins, (tuple, list)):
        count = require_count("bins", bins)
        if whole and count > top - lower:
            raise ConfigurationError(
                f"bins={count} is too many: there are fewer whole numbers from lower to upper."
            )
        equal = np.linspace(lower, top, count + 1)
        return (np.floor(equal) if whole else equal).tolist()
    edges = [require_number("bins", edge, above=-np.inf, below=np.inf) for edge in bins]
    if len(edges) < 2 or edges[0] != lower or edges[-1] != upper:
        raise ConfigurationError("bins: the first edge must equal lower, and the last one upper.")
    if whole and any(edge % 1 for edge in edges):
        raise ConfigurationError("bins: edges must be whole numbers here.")
    return [*edges[:-1], top]
