"""Draft a schema from public data."""

import datetime
import math
import warnings

import numpy as np
import pandas as pd

from pyro_dp.tabular.column import Column
from pyro_dp.tabular.levels import Binary, Category
from pyro_dp.tabular.ranges import MOST_CODES, Count, Date, Number
from pyro_dp.tabular.series import kind
from pyro_dp.utils.errors import ConfigurationError, NotPrivateWarning, SchemaError

_MOST_LEVELS = 50
_NOT_PRIVATE = (
    "Schema.suggest() writes bounds and levels of this frame into the schema, which is public. "
    "Use it only for a codebook, or for data that are already public."
)


def drafted(frame: pd.DataFrame, unit: str | None) -> dict[str, Column]:
    """Declarations that fit the frame: bounds rounded outwards, and the levels that occur.

    :param unit: name of the column of ids, which is left out.
    :raises SchemaError: a column has no suitable declaration, or two columns have the same name.
    """
    if not isinstance(frame, pd.DataFrame) or not frame.columns.is_unique:
        raise SchemaError("Schema.suggest() needs a DataFrame whose columns have different names.")
    if unit is not None:
        if unit not in frame.columns:
            raise SchemaError(f"The frame lacks column {unit!r}.")
        frame = frame.drop(columns=unit)
    warnings.warn(_NOT_PRIVATE, NotPrivateWarning, stacklevel=3)
    return {str(name): _column(str(name), frame.iloc[:, i]) for i, name in enumerate(frame.columns)}


def _column(name: str, series: pd.Series) -> Column:
    try:
        return _drafted(name, series)
    except ConfigurationError as error:
        raise SchemaError(f"Column {name!r} cannot be declared as it is: {error}") from None


def _drafted(name: str, series: pd.Series) -> Column:
    found, missing = kind(series), bool(series.isna().any())
    some = series.dropna()
    if not len(some):
        raise SchemaError(f"Column {name!r} has no values: declare it by hand.")
    dtype = series.dtype
    if found == "Python objects":
        found, dtype = _of_objects(some), "object"
    if found == "categories":
        levels, ordered = tuple(dtype.categories), bool(dtype.ordered)
        return Category(levels, missing=missing, ordered=ordered, dtype="category")
    if found == "booleans":
        return Binary((False, True), missing=missing, dtype=str(dtype))
    if found == "text":
        counted = some.value_counts().index
        levels = tuple(sorted({*map(str, counted[:_MOST_LEVELS])} - {"other"}))
        other = len(levels) < len(counted)
        return Category(levels, other=other, missing=missing, dtype=str(dtype))
    if found == "dates":
        return _date(some, missing, str(dtype))
    if found == "numbers":
        return _number(some, missing, str(dtype))
    raise SchemaError(f"Column {name!r} holds {found}: declare it by hand, as text or numbers.")


def _of_objects(some: pd.Series) -> str:
    if all(isinstance(x, str) for x in some):
        return "text"
    return "booleans" if all(isinstance(x, (bool, np.bool_)) for x in some) else "Python objects"


def _date(some: pd.Series, missing: bool, dtype: str) -> Column:
    days = some.dt.date
    first, last = days.min(), days.max()
    if first == last:
        last += datetime.timedelta(days=1)
    bins = min(20, (last - first).days + 1)
    return Date(first.isoformat(), last.isoformat(), bins=bins, missing=missing, dtype=dtype)


def _number(some: pd.Series, missing: bool, dtype: str) -> Column:
    values = some.to_numpy(dtype=np.float64)
    values = values[np.isfinite(values)]
    if not len(values):
        values = np.zeros(1)
    whole = bool((values == np.rint(values)).all()) and np.abs(values).max() < 2**53
    if whole:
        lower, upper = int(values.min()), int(values.max())
        if (lower, upper) == (0, 1):
            return Binary((0, 1), missing=missing, dtype=dtype)
        upper += lower == upper
        bins = None if upper - lower < MOST_CODES else 20
        return Count(lower, upper, bins=bins, missing=missing, dtype=dtype)
    least, most = float(values.min()), float(values.max())
    unit = 10.0 ** (math.floor(math.log10(most - least or abs(most))) - 1)
    low, high = math.floor(least / unit) * unit, math.ceil(most / unit) * unit
    high += unit * (low == high)
    digits = max(0, -math.floor(math.log10(unit)))
    return Number(round(low, digits), round(high, digits), missing=missing, dtype=dtype)
