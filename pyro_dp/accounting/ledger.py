"""The ledger and the description of its study: their saved form, and a table for display."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from pyro_dp.accounting import origins
from pyro_dp.accounting.composition import interpret
from pyro_dp.accounting.events import (
    KINDS,
    Event,
    SubsampledGaussian,
    is_whole,
    require_short_text,
    together,
)
from pyro_dp.accounting.origins import Origins, Source
from pyro_dp.utils.display import Table
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_count, same

LONGEST = 1000  # characters of a text


@dataclass(frozen=True)
class Description:
    """The arguments of :meth:`PrivacyAccountant.describe`: public texts that affect no cost.

    :raises ConfigurationError: a text is not one line of at most 1000 characters, or ``units`` is
        not a whole number > 0.
    """

    title: str = ""
    dataset: str = ""
    purpose: str = ""
    controller: str = ""
    unit: str = ""
    units: int | None = None

    def __post_init__(self) -> None:
        for name, text in vars(self).items():
            if name != "units":
                require_short_text(name, text, LONGEST, least=0)
        if self.units is not None:
            vars(self).update(units=require_count("units", self.units))

    def stated(self) -> dict[str, Any]:
        """The fields that are not empty, by name: the saved form."""
        return {name: value for name, value in asdict(self).items() if value not in ("", None)}


def described(saved: Any) -> Description:
    """Read a saved description. Fields of later versions are ignored.

    :raises ConfigurationError: it is damaged.
    """
    if not isinstance(saved, Mapping):
        raise ConfigurationError("description must be a dictionary.")
    names = {each.name for each in fields(Description)}
    return Description(**{name: value for name, value in saved.items() if name in names})


VERSION = 1
MOST = 10**12  # releases of a kind; with more, rounding errors of a step's cost would matter
_HEAD = ("release", "sample rate", "noise multiplier", "count")
# Spelt out, because readers took "Gaussian, poisson" for the family of the model.
_SAMPLING = {"poisson": "Poisson sampling", "fixed": "subsets of fixed size", "full": "all records"}
_MOST_ALONE = 3  # kinds of sums over all records that have separate rows in a table
_RETIRED = ("advanced", "basic")  # engines of older versions; any engine may replace them
_DAMAGED = "the accountant's state is damaged or not one: "


# Notes about the guarantee that a report looks for.
SEEDED = (
    "A run used a seed, so it can be repeated. It is not private against anyone who can guess "
    "the seed. Nor is it if results of other data with that seed are published: these may have the "
    "same noise, which a difference removes. Leave the seed out of runs whose results you publish."
)
SECURE = (
    "A run was in secure mode: its noise and sampling come from the operating system's "
    "cryptographic generator, and its sums and noise are integers. Other runs in a shared "
    "ledger may not."
)
_FORMER = {  # the same notes in older versions
    "A run used a seed, so it can be repeated. It is not private against anyone who can guess "
    "the seed. Leave the seed out of runs whose results you publish.": SEEDED,
    "A seeded generator was used: the run can be repeated, and is not private against anyone who "
    "can guess the seed.": SEEDED,
    "secure=True was used: noise and sampling from the operating system's cryptographic generator, "
    "sums and noise in integers. A ledger that is shared may have other runs, too.": SECURE,
    SECURE.replace("was in secure mode", "used secure=True"): SECURE,
}


def current_note(text: str) -> str:
    """A note in the words of this version."""
    return _FORMER.get(text, text)


class LedgerEntry(NamedTuple):
    """An event and how often it was recorded."""

    event: Event
    count: int  # type: ignore[assignment]  # hides tuple.count, on purpose


@dataclass
class Ledger:
    """The saved content of an accountant, without its settings."""

    counts: dict[Event, int] = field(default_factory=dict)  # in the order of first releases
    notes: dict[str, None] = field(default_factory=dict)  # an ordered set
    origins: Origins = field(default_factory=Origins)  # releases and reservations of each run
    description: Description = Description()

    def enter(self, event: Event, count: int, source: Source | None) -> None:
        """Count a release, in total and for its run."""
        self.counts[event] = self.counts.get(event, 0) + count
        if source is not None:
            self.origins.add(source, event, count)

    def counted(self, beside: str | None = None) -> Counter[Event]:
        """The releases and all reservations, without the reservation named ``beside``."""
        counts = Counter(self.counts) + self.origins.all_reserved()
        return counts - self.origins.reserved_as(beside)


def to_state(settings: Mapping[str, Any], saved: Ledger) -> dict[str, Any]:
    """The saved form of settings and ledger: plain numbers, strings and lists, by name."""
    indices = {origin: index for index, origin in enumerate(saved.origins)}
    return {
        "version": VERSION,
        **settings,
        "ledger": to_lines(saved.counts),
        "notes": list(saved.notes),
        "runs": saved.origins.state(list(saved.counts)),
        "reserved": [
            {"run": indices[origin], "releases": to_lines(left)}
            for origin, left in saved.origins.reserved()
        ],
        "description": saved.description.stated(),
    }


def to_lines(counts: Mapping[Event, int]) -> list[dict[str, Any]]:
    """The saved form of events and their counts: plain numbers and strings."""
    return [to_line(event, count) for event, count in counts.items()]


def from_lines(lines: Iterable[Mapping[str, Any]], neighboring: str) -> Counter[Event]:
    """Read events and their counts. Raises TypeError, or as :func:`from_line`."""
    found: Counter[Event] = Counter()
    for line in lines:
        event, count = from_line(line, neighboring)
        found[event] += count
    return found


def to_line(event: Event, count: int) -> dict[str, Any]:
    return {"mechanism": event.kind, **vars(event), "count": count}


def from_line(line: Mapping[str, Any], neighboring: str) -> tuple[Event, int]:
    """Read an event and its count.

    :raises KeyError: a field is missing.
    :raises ConfigurationError: a field is unknown or out of range, or the event does not fit the
        relation.
    """
    mechanism = line["mechanism"]
    if not isinstance(mechanism, str) or mechanism not in KINDS:
        raise ConfigurationError(f"mechanism={mechanism!r} is unknown.")
    kind = KINDS[mechanism]
    count = require_count("count", line["count"])
    if count > MOST:
        raise ConfigurationError(f"count: more than {MOST:g} releases of a kind.")
    event = kind(**{each.name: line[each.name] for each in fields(kind)})  # type: ignore[arg-type]
    interpret(event, neighboring)
    return event, count


def from_state(state: Any, settings: Mapping[str, Any]) -> Ledger:
    """Read a ledger.

    :param state: from :func:`to_state`, possibly of an older version.
    :raises ConfigurationError: the state is damaged, or has other settings.
    """
    if not isinstance(state, Mapping):
        raise ConfigurationError(_DAMAGED + "it is not a dictionary.")
    missing = {"version", *settings, "ledger", "notes"} - set(state)
    if missing:
        raise ConfigurationError(_DAMAGED + f"{sorted(missing)} are missing.")
    if not same(state["version"], VERSION):
        raise ConfigurationError(
            f"version={state['version']!r} of the accountant's state is unknown: this release "
            f"reads version {VERSION}."
        )
    require_settings(state, settings, "the state")
    notes, lines, neighboring = state["notes"], state["ledger"], settings["neighboring"]
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise ConfigurationError(_DAMAGED + "notes must be a list of strings.")
    if not isinstance(lines, list) or not all(isinstance(line, Mapping) for line in lines):
        raise ConfigurationError(_DAMAGED + "ledger must be a list of dictionaries.")
    try:
        counts = dict(from_lines(lines, neighboring))
        events = [from_line(line, neighboring)[0] for line in lines]
        runs = origins.from_saved(state.get("runs", []), counts, events)
        _take_reserved(state.get("reserved", []), runs, neighboring)
        about = described(state.get("description", {}))
    except KeyError as error:
        raise ConfigurationError(_DAMAGED + f"a line has no {error}.") from None
    except ConfigurationError as error:
        raise ConfigurationError(_DAMAGED + str(error)) from None
    return Ledger(counts, dict.fromkeys(map(current_note, notes)), runs, about)


def _take_reserved(saved: Any, runs: Origins, neighboring: str) -> None:
    """Read the reservations of these runs.

    :raises ConfigurationError: they are damaged.
    """
    by_index = list(runs)
    try:
        for each in saved:
            origin = by_index[require_count("run", each["run"], least=0)]
            runs.reserve(origin, from_lines(each["releases"], neighboring))
    except (TypeError, LookupError):
        raise ConfigurationError("reserved: it is not as it was saved.") from None


def require_settings(found: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> None:
    """:raises ConfigurationError: the settings found there differ from the accountant's."""
    for name, value in settings.items():
        if name == "engine" and any(same(found[name], each) for each in _RETIRED):
            continue
        if not same(found[name], value):
            raise ConfigurationError(
                f"{name}={found[name]!r} in {where} differs from this accountant's {value!r}: "
                "make an accountant with the same settings."
            )


def first_missing(counts: Mapping[Event, int], of: Mapping[Event, int]) -> Event | None:
    """An event that ``of`` counts less often than ``counts``; None if there is none."""
    return next((event for event, n in counts.items() if of.get(event, 0) < n), None)


def table(counts: Mapping[Event, int]) -> Table:
    """The releases as a table.

    If there are many kinds of sums over all records, they share a row, with the noise of the
    Gaussian to which they compose.
    """
    whole = {event: count for event, count in counts.items() if is_whole(event)}
    if len(whole) <= _MOST_ALONE:
        whole = {}
    rows = [(*_cells(event), str(n)) for event, n in counts.items() if event not in whole]
    if whole:
        rows.append((*_cells(together(whole)), f"{sum(whole.values())} together"))
    rows = rows or [("nothing was released", "", "", "")]
    return Table(_HEAD, rows, "What was released")


def _cells(event: Event) -> tuple[str, str, str]:
    if not isinstance(event, SubsampledGaussian):
        return event.brief, "", ""
    sampling = event.sampling if event.sample_rate < 1.0 else "full"
    name = f"Gaussian noise, {_SAMPLING[sampling]}"
    return name, f"{event.sample_rate:.6g}", f"{event.noise_multiplier:.6g}"
