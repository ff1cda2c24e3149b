"""CSV files as a schema reads them: text, converted to each column's declared type.

The reading follows from the schema alone. An empty cell is missing, unless the empty text is a
declared level. Text in a column of numbers or dates counts as missing, if the column may be.
Otherwise it is refused, like all other misfits. No message shows a value.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from pyro_dp.tabular.column import Column
from pyro_dp.tabular.levels import Binary, Category
from pyro_dp.tabular.ranges import Date
from pyro_dp.tabular.schema import Schema
from pyro_dp.tabular.series import CURATOR
from pyro_dp.utils.errors import SchemaError

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def read_csv(path: Path, schema: Schema) -> pd.DataFrame:
    """
    :param path: a file in UTF-8, with commas, whose first line names the columns.
    :returns: the frame that ``schema`` reads; columns that it does not name stay, to be refused.
    :raises SchemaError: it cannot be read, or a column holds text where it may not.
    :raises OSError: there is no such file, or no permission.
    """
    try:
        frame = pd.read_csv(
            path, dtype=str, keep_default_na=False, encoding="utf-8-sig", index_col=False
        )
    except OSError:
        raise
    except Exception as error:  # its text may show a line
        raise SchemaError(
            f"The data cannot be read as CSV: pandas raised {type(error).__name__}. Save them in "
            f"UTF-8, with commas, and names of the columns in the first line. {CURATOR}"
        ) from None
    for name, column in schema.columns.items():
        if list(frame.columns).count(name) == 1:
            frame[name] = _typed(frame[name].astype(object), column, name)
    if schema.unit is not None and schema.unit in frame:
        frame[schema.unit] = frame[schema.unit].astype(object).replace("", None)
    return frame


def _typed(texts: pd.Series, column: Column, name: str) -> pd.Series:
    if isinstance(column, Category | Binary):
        return _levels(texts, column)
    filled = texts.str.strip() != ""
    if isinstance(column, Date):
        read = pd.to_datetime(texts, format="ISO8601", errors="coerce")
    else:
        read = pd.to_numeric(texts.where(filled, "nan"), errors="coerce").astype("float64")
    if not column.missing and bool((filled & read.isna()).any()):
        wanted = "dates as 2026-12-31" if isinstance(column, Date) else "numbers"
        raise SchemaError(
            f"Column {name!r} holds text where {wanted} are declared: mend the file, or declare it "
            f"with missing=True, which counts such text as missing. {CURATOR}"
        )
    return read


def _levels(texts: pd.Series, column: Category | Binary) -> pd.Series:
    kind = type(column.levels[0])
    if kind is str:
        found = list(texts)
    else:
        read = _boolean if kind is bool else _integer
        found = [read(text) for text in texts]
    if "" not in column.levels:
        found = [None if text == "" else text for text in found]
    values = np.empty(len(found), dtype=object)
    values[:] = found
    return pd.Series(values, index=texts.index, dtype=object)


def _boolean(text: str) -> bool | str:
    return _BOOLEANS.get(text.strip().lower(), text)


def _integer(text: str) -> int | str:
    """Text that is none is a level that was not declared."""
    try:
        number = float(text)
        return int(number) if number.is_integer() else text
    except ValueError:
        return text
