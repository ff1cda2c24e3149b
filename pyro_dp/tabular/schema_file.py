"""A schema as JSON, and back: plain values that say what they are, and code of nobody."""

import dataclasses
from typing import Any

from pyro_dp.tabular.column import Column
from pyro_dp.tabular.levels import Binary, Category
from pyro_dp.tabular.ranges import Count, Date, Number
from pyro_dp.utils.errors import ConfigurationError

VERSION = 1
_KINDS: dict[str, type[Column]] = {
    kind.__name__: kind for kind in (Number, Count, Category, Binary, Date)
}
_SETTINGS = ("unit", "max_rows", "constant", "derived", "impossible")
_NO_SCHEMA = "This is no schema as schema.to_json() writes it: {why}."


def as_state(columns: dict[str, Column], settings: dict[str, Any]) -> dict[str, Any]:
    """
    :param settings: a schema's settings beside its columns.
    """
    listed = [
        {"name": name, "kind": type(column).__name__, **dataclasses.asdict(column)}  # type: ignore[call-overload]
        for name, column in columns.items()
    ]
    return {"schema": VERSION, "columns": listed, **settings}


def of_state(state: Any) -> tuple[dict[str, Column], dict[str, Any]]:
    """Columns and settings.

    :raises ConfigurationError: it is of another form, or of a later version.
    """
    if not isinstance(state, dict) or "schema" not in state:
        raise ConfigurationError(_NO_SCHEMA.format(why="it has no entry 'schema'"))
    if state["schema"] != VERSION:
        raise ConfigurationError(f"This schema is of version {state['schema']!r}, not {VERSION}.")
    unknown = set(state) - {"schema", "columns", *_SETTINGS}
    if unknown or not isinstance(state.get("columns"), list):
        raise ConfigurationError(_NO_SCHEMA.format(why="it has other entries than 'columns', ..."))
    columns: dict[str, Column] = {}
    for entry in state["columns"]:
        name, column = _column(entry)
        if name in columns:
            raise ConfigurationError(f"Column {name!r} is declared twice.")
        columns[name] = column
    return columns, {name: state[name] for name in _SETTINGS if name in state}


def _column(entry: Any) -> tuple[str, Column]:
    if not isinstance(entry, dict) or not {"name", "kind"} <= entry.keys():
        raise ConfigurationError(_NO_SCHEMA.format(why="a column lacks 'name' or 'kind'"))
    fields = dict(entry)
    name, kind = fields.pop("name"), fields.pop("kind")
    if not isinstance(name, str) or not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigurationError(f"Column {name!r}: kind must be one of {', '.join(_KINDS)}.")
    try:
        return name, _KINDS[kind](**fields)
    except TypeError:
        raise ConfigurationError(f"Column {name!r}: these are no settings of {kind}.") from None
    except ConfigurationError as error:
        raise ConfigurationError(f"Column {name!r}: {error}") from None
