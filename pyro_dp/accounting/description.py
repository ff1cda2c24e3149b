"""What a ledger is about, in its owner's words: for the report, and for nothing else."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_count

LONGEST = 1000  # characters of a text


@dataclass(frozen=True)
class Description:
    """What a report says of the study. All of it is public, and no cost depends on it.

    :param title: of the study or the release.
    :param dataset: which data these are.
    :param purpose: of the processing.
    :param controller: who is responsible for the data.
    :param unit: whom the guarantee protects: what one record is, such as "a person with all their
        visits".
    :param units: their number, > 0; None: not stated.
    :raises ConfigurationError: a text is no line of at most 1000 characters, or the number is none.
    """

    title: str = ""
    dataset: str = ""
    purpose: str = ""
    controller: str = ""
    unit: str = ""
    units: int | None = None

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self) if each.name != "units"):
            text = getattr(self, name)
            if not (isinstance(text, str) and (text == "" or text.isprintable())):
                raise ConfigurationError(f"{name} must be one line of text.")
            if len(text) > LONGEST:
                raise ConfigurationError(f"{name} must be at most {LONGEST} characters long.")
        if self.units is not None:
            object.__setattr__(self, "units", require_count("units", self.units))

    def stated(self) -> dict[str, Any]:
        """What is not left open, by name: the saved form."""
        return {name: value for name, value in asdict(self).items() if value not in ("", None)}

    def with_(self, said: Mapping[str, Any]) -> "Description":
        """With these in place of its own."""
        return replace(self, **said)


def from_saved(said: Any) -> Description:
    """
    :param said: from :meth:`Description.stated`; what a later version adds is not known here.
    :raises ConfigurationError: it is damaged.
    """
    if not isinstance(said, Mapping):
        raise ConfigurationError("description must be a dictionary.")
    known = {each.name for each in fields(Description)}
    return Description(**{name: value for name, value in said.items() if name in known})
