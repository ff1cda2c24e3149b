"""The names by which columns are asked for."""

from collections.abc import Sequence
from typing import Any

from pyro_dp.utils.errors import ModelError

Name = str | Sequence[str]  # of a column; of several, whose numbers make one row

_NO_NAME = "columns(): a name is a text, or a list of texts for one column with all of them."
_NAMES = (
    "columns(): say which columns, as in x, y = pyro_dp.columns(source, 'x', 'y'); source has "
    "{known}."
)
_UNKNOWN = "columns(): source has no column {name!r}; it has {known}."


def parts(name: Name) -> list[str]:
    """The columns of the source that one column is made of.

    :raises ModelError: it is no name.
    """
    if isinstance(name, str):
        return [name]
    if not (isinstance(name, (list, tuple)) and name and all(isinstance(x, str) for x in name)):
        raise ModelError(_NO_NAME)
    return list(name)


def require_names(names: Sequence[str], known: Sequence[Any]) -> None:
    """:raises ModelError: none are asked for, or one that is not there."""
    listed = ", ".join(map(repr, known))
    if not names:
        raise ModelError(_NAMES.format(known=listed))
    for name in names:
        if name not in known:
            raise ModelError(_UNKNOWN.format(name=name, known=listed))
