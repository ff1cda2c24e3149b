"""Convert pandas series to NumPy arrays and back.

The dtype decides the kind of a series, never its values. So a refusal applies to all data of that
dtype. No message shows a value. Messages name the kind, because a categorical dtype would show its
values.
"""

import datetime
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from pyro_dp.utils.errors import CURATOR, ConfigurationError, SchemaError

_KIND = "Column {name!r} holds {found}, and its schema declares {wanted}: {advice}."


def kind(series: pd.Series | pd.Index) -> str:
    """The kind of a series' dtype, in words."""
    dtype = series.dtype
    types = pd.api.types
    if isinstance(dtype, pd.CategoricalDtype):
        return "categories"
    if types.is_bool_dtype(dtype):
        return "booleans"
    if types.is_complex_dtype(dtype):
        return "complex numbers"
    if types.is_numeric_dtype(dtype):
        return "numbers"
    if types.is_datetime64_any_dtype(dtype) or str(dtype).startswith("date32"):
        return "dates"
    if types.is_timedelta64_dtype(dtype):
        return "time spans"
    if types.is_object_dtype(dtype):
        return "Python objects"
    return "text" if types.is_string_dtype(dtype) else "other things"


def refuse_kind(series: pd.Series | pd.Index, name: str, wanted: str, advice: str) -> SchemaError:
    """The error for a series whose kind differs from its declaration."""
    found = kind(series)
    return SchemaError(_KIND.format(name=name, found=found, wanted=wanted, advice=advice))


def numbers(series: pd.Series, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Values as float64, or int64 if they are integers (clipped to its range), and which are
    observed.

    :raises SchemaError: the dtype is not numeric.
    """
    found = kind(series)
    if found != "numbers":
        advice = {
            "booleans": "declare it as Binary()",
            "dates": "declare it as Date(lower, upper)",
            "time spans": f"pass df[{name!r}].dt.total_seconds()",
            "categories": f"pass df[{name!r}].astype('float64')",
        }.get(found, f"pass pd.to_numeric(df[{name!r}], errors='coerce'), and missing=True")
        raise refuse_kind(series, name, "numbers", advice)
    missing = series.isna().to_numpy(dtype=bool)
    code = getattr(series.dtype, "kind", "f")
    if code == "u":
        wide = series.to_numpy(dtype=np.uint64, na_value=0)
        return np.minimum(wide, np.iinfo(np.int64).max).astype(np.int64), ~missing
    if code == "i":
        return series.to_numpy(dtype=np.int64, na_value=0), ~missing
    values = series.to_numpy(dtype=np.float64, na_value=math.nan)
    return values, ~np.isnan(values)


def days(series: pd.Series, name: str, origin: datetime.date) -> tuple[np.ndarray, np.ndarray]:
    """Days since the origin, int64, by the local date, and which are observed.

    :raises SchemaError: the dtype has no dates.
    """
    if kind(series) != "dates":
        text = f"df[{name!r}].astype(str).str[:10]"  # objects and periods have no .str
        advice = f"pass pd.to_datetime({text}, format='ISO8601', errors='coerce')"
        raise refuse_kind(series, name, "dates", advice)
    if str(series.dtype).startswith("date32"):
        series = series.astype("timestamp[s][pyarrow]")
    if getattr(series.dt, "tz", None) is not None:
        series = series.dt.tz_localize(None)
    seconds = series.to_numpy(dtype="datetime64[s]", na_value=np.datetime64("NaT", "s"))
    found = seconds.astype("M8[D]")
    observed = ~np.isnat(found)
    return np.where(observed, (found - np.datetime64(origin)).astype(np.int64), 0), observed


def levels(series: pd.Series, name: str, declared: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """The index of each value's level (-1 if undeclared), and which values are observed.

    Values match a level by value and type: ``1``, ``True`` and ``"1"`` are three levels. A float
    matches an equal integer, because a missing value turns integers into floats.

    :param declared: levels, all text, all integers or all booleans.
    :raises SchemaError: the series and the levels have different types.
    """
    observed = ~series.isna().to_numpy(dtype=bool)
    table = {level: code for code, level in enumerate(declared)}
    wanted = type(declared[0])
    found = kind(series)
    if str(series.dtype).startswith("dictionary"):  # categories of Arrow
        series, found = series.astype(object), "Python objects"
    if found == "categories":
        own = series.cat.categories
        if len(own) and kind(own) not in ("Python objects", _KINDS[wanted]):
            raise refuse_kind(own, name, _NAMES[wanted], _ADVICE[wanted, kind(own) in _NUMERIC])
        of_category = np.array([_level(x, wanted, table) for x in own] + [-1])
        return of_category[series.cat.codes.to_numpy()].astype(np.int64), observed
    if found == "Python objects":
        codes = np.array([_level(x, wanted, table) for x in series], dtype=np.int64)
        _require_some(series, observed, name, wanted)
        return codes, observed
    if found != _KINDS[wanted]:
        raise refuse_kind(series, name, _NAMES[wanted], _ADVICE[wanted, found in _NUMERIC])
    index, unique = pd.factorize(series)
    of_unique = np.array([_level(x, wanted, table) for x in unique.tolist()] + [-1])
    return of_unique[index].astype(np.int64), observed


_NAMES = {str: "levels of text", int: "levels of integers", bool: "levels False and True"}
_KINDS = {str: "text", int: "numbers", bool: "booleans"}
_NUMERIC = ("numbers", "booleans")
_ADVICE = {
    (str, True): "declare levels of its type, such as (0, 1), or pass it as text",
    (str, False): "pass it as text",
    (int, True): "declare levels False and True, or pass it as integers",
    (int, False): "declare levels of text, such as ('0', '1'), or pass it as integers",
    (bool, True): "declare levels=(0, 1), or pass it as booleans",
    (bool, False): "declare levels of text, such as ('no', 'yes'), or pass it as booleans",
}


def _level(value: Any, wanted: type, table: dict[Any, int]) -> int:
    """The code of a value of any type; -1 if undeclared."""
    if isinstance(value, np.generic):
        value = value.item()
    if wanted is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    fits = type(value) is wanted or (wanted is str and isinstance(value, str))
    return table.get(value, -1) if fits else -1


def _require_some(series: pd.Series, observed: np.ndarray, name: str, wanted: type) -> None:
    """Refuse values that all have the wrong type: the declaration must be wrong."""
    kinds = (wanted, np.bool_) if wanted is bool else (wanted, float, np.number)
    kinds = (str,) if wanted is str else kinds
    if observed.any() and not any(isinstance(x, kinds) for x in series):
        raise SchemaError(
            f"Column {name!r} holds Python objects, and none is of the type of its declared "
            f"{_NAMES[wanted]}. Declare levels of its type, or pass it in theirs. {CURATOR}"
        )


def require_dtype(dtype: str, kinds: Sequence[str], missing: bool, probe: np.ndarray) -> None:
    """Check the dtype of a column.

    :param probe: values that it must represent: bounds or levels.
    :raises ConfigurationError: pandas has no such dtype, or it cannot hold the declared values.
    """
    try:
        empty = pd.Series([], dtype=_own(dtype))
        known = kind(empty)
        back = _probed(probe, dtype).tolist()
    except Exception:
        raise ConfigurationError(
            f"dtype={dtype!r} is none that pandas knows and that holds this column."
        ) from None
    exact = known != "numbers" or pd.api.types.is_float_dtype(empty.dtype)
    if known not in kinds or not (exact or back == probe.tolist()):
        raise ConfigurationError(
            f"dtype={dtype!r} cannot hold the values that this column declares."
        )
    if missing and isinstance(empty.dtype, np.dtype) and empty.dtype.kind in "iub":
        raise ConfigurationError(
            f"dtype={dtype!r} cannot mark a missing value. Use 'Int64' or 'boolean'."
        )


def _probed(probe: np.ndarray, dtype: str) -> pd.Series:
    there = np.ones(len(probe), dtype=bool)
    if probe.dtype.kind == "M":
        return as_dates(probe.astype("datetime64[D]").astype(np.int64), there, dtype)
    return as_series(probe, there, dtype)


def as_series(values: np.ndarray, observed: np.ndarray, dtype: str) -> pd.Series:
    """A series of the dtype, with unobserved values missing."""
    series = pd.Series(values).astype(_own(dtype))
    return series if observed.all() else series.mask(~observed)


def as_dates(days: np.ndarray, observed: np.ndarray, dtype: str) -> pd.Series:
    """A series of dates. :param days: days since 1970-01-01."""
    dates = pd.Series(days.astype("datetime64[D]").astype("datetime64[s]"))
    wanted = pd.api.types.pandas_dtype(dtype)
    if isinstance(wanted, pd.DatetimeTZDtype):  # midnight, or the first time after it
        first = np.ones(len(dates), dtype=bool)
        zoned = dates.dt.tz_localize(wanted.tz, nonexistent="shift_forward", ambiguous=first)
        return zoned.astype(wanted).mask(~observed)
    return dates.astype(wanted).mask(~observed)


def as_categories(
    codes: np.ndarray, observed: np.ndarray, labels: Sequence[Any], ordered: bool
) -> pd.Series:
    found = np.where(observed, codes, -1)
    return pd.Series(pd.Categorical.from_codes(found, categories=list(labels), ordered=ordered))


def _own(dtype: str) -> str:
    """Replace "str" by "object" before pandas 3, which has no dtype for text."""
    return "object" if dtype == "str" and pd.api.types.pandas_dtype("str").kind == "U" else dtype
