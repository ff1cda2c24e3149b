"""A schema's demands on a frame as a whole, before it reads a column."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import pandas as pd

from pyro_dp.tabular.series import CURATOR
from pyro_dp.utils.errors import SchemaError

T = TypeVar("T")
_SHOWN = 10


def require_columns(
    frame: Any, names: Sequence[str], unit: str | None, unread: Collection[str]
) -> None:
    """All columns that are declared, once, and no others.

    Names of undeclared columns stay hidden. If a file was read without its head, they are the
    values of its first person.

    :param unread: names of columns that may be there, and are not read.
    :raises SchemaError: names the column, or says where it is.
    """
    if not isinstance(frame, pd.DataFrame):
        raise SchemaError(
            f"A schema reads a frame of pandas, not a {type(frame).__name__}: pass a DataFrame."
        )
    wanted = list(names) if unit is None else [unit, *names]
    found = list(frame.columns)
    lacking = [name for name in wanted if name not in found]
    if lacking:
        raise SchemaError(f"The frame lacks column {', '.join(map(repr, lacking))}.")
    twice = [name for name in wanted if found.count(name) > 1]
    if twice:
        raise SchemaError(
            f"The frame has column {twice[0]!r} more than once: leave one of them, as in "
            "df.loc[:, ~df.columns.duplicated()]."
        )
    extra = [i for i, name in enumerate(found) if name not in wanted and name not in unread]
    if extra:
        places = ", ".join(map(str, extra[:_SHOWN])) + (", ..." if len(extra) > _SHOWN else "")
        listed = "schema.names" if unit is None else "[schema.unit, *schema.names]"
        whose = (
            " If one of them says whose row it is, name it as the schema's unit: without it a "
            "person with several rows is not protected."
        )
        raise SchemaError(
            f"The frame has columns that the schema does not name, at position {places}. (Their "
            "names may be data, so only positions are listed.) Declare them, or pass "
            f"df[{listed}].{whose if unit is None else ''}"
        )
    if not len(frame):
        raise SchemaError("The frame has no rows.")


def guarded(name: str, frame: pd.DataFrame, read: Callable[[pd.Series, str], T]) -> T:
    """The values read from a column.

    :raises SchemaError: an error of pandas, whose text may show a value.
    """
    try:
        return read(frame[name], name)
    except SchemaError:
        raise
    except Exception as error:
        raise SchemaError(
            f"Column {name!r} cannot be read: pandas raised {type(error).__name__}. Pass it in a "
            f"plain dtype (float64, int64, bool, str, datetime64[ns]). {CURATOR}"
        ) from None
