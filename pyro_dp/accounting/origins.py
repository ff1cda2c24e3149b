"""The releases and the reservation of each run.

A ledger merges equal events of different runs, and this module separates them. For each run it also
stores the method, the generator, the start, clipping bounds, and facts about the result.

A run may reserve releases before it makes them. Each of its releases uses up an equal reserved one.
A reservation has a name, by which a run that goes on from a saved state takes it over.
"""

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, NamedTuple

from pyro_dp.accounting.events import Event, require_short_text
from pyro_dp.utils.errors import ConfigurationError, PrivacyError
from pyro_dp.utils.validation import require_choice, require_count, require_number

# The plan of a run's releases. Planned releases are fixed beforehand. Adaptive releases are
# Gaussian sums over all records that share a fixed mu^2. The number of open releases is not fixed.
PLANNED, ADAPTIVE, OPEN = "planned", "adaptive", "open"
PLANS = (PLANNED, ADAPTIVE, OPEN)
_LONGEST_STATUS = 1000


def new_name() -> str:
    """A random name for a reservation."""
    return secrets.token_hex(8)


@dataclass(frozen=True, eq=False)
class Origin:
    """A run. Two runs are never equal, even if their fields are.

    :param method: the inference's name, such as ``"DPSVI"``: a short public text.
    :param generator: "secure" (the operating system's, and integers), "seeded", or "ordinary".
    :param time: the time of its start (UTC, ISO 8601, to the minute).
    :param reservation: name of its reservation. Runs that continue each other share it.
    :param plan: "planned", "adaptive" or "open": see :data:`PLANNED`.
    :raises ConfigurationError: a text is not a short line, or generator or plan is unknown.
    """

    method: str
    generator: str
    time: str
    reservation: str = field(default_factory=new_name)
    plan: str = PLANNED

    def __post_init__(self) -> None:
        for name in ("method", "time", "reservation"):
            require_short_text(name, getattr(self, name))
        require_choice("generator", self.generator, ("secure", "seeded", "ordinary"))
        require_choice("plan", self.plan, PLANS)

    @staticmethod
    def now(
        method: str,
        *,
        seeded: bool,
        secure: bool,
        reservation: str | None = None,
        plan: str = PLANNED,
    ) -> "Origin":
        """A run that begins now."""
        generator = "secure" if secure else "seeded" if seeded else "ordinary"
        return Origin(method, generator, _minute(), reservation or new_name(), plan)

    def saved(self) -> dict[str, str]:
        fields = asdict(self)
        if self.plan == PLANNED:  # as older versions wrote it
            del fields["plan"]
        return fields


def _minute() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ")


class Source(NamedTuple):
    """The source of one release."""

    origin: Origin
    bound: float | None = None  # C, to which records were clipped
    # All releases of the run from here on, to be reserved. None: the reservation does not change.
    reserves: Mapping[Event, int] | None = None


@dataclass
class Part:
    """The releases of one run, and facts about its result."""

    counts: Counter[Event] = field(default_factory=Counter)
    bounds: dict[Event, tuple[float, float]] = field(default_factory=dict)  # smallest, largest C
    clipped: tuple[float, float] | None = None  # released fraction of records, and standard error
    status: str | None = None  # a line that says whether the result can be published


class Origins(dict[Origin, Part]):
    """The releases of a ledger by run, in the order of the runs' first releases."""

    def __init__(self) -> None:
        super().__init__()
        self._reserved: dict[str, Counter[Event]] = {}  # by the names of reservations

    def copy(self) -> "Origins":
        found = Origins()
        for origin, part in self.items():
            counts, bounds = Counter(part.counts), dict(part.bounds)
            found[origin] = replace(part, counts=counts, bounds=bounds)
        found._reserved.update({name: Counter(left) for name, left in self._reserved.items()})
        return found

    def reserve(self, origin: Origin, releases: Mapping[Event, int]) -> None:
        """Replace this run's reservation."""
        self.setdefault(origin, Part())
        self._reserved[origin.reservation] = Counter(releases)

    def reserved_as(self, name: str | None) -> Counter[Event]:
        """The rest of the reservation with this name."""
        return Counter(self._reserved.get(name, {})) if name else Counter()

    def all_reserved(self) -> Counter[Event]:
        return sum(self._reserved.values(), Counter())

    def reserved(self) -> list[tuple[Origin, Counter[Event]]]:
        """The latest run and the rest of each reservation that is not used up."""
        latest = {origin.reservation: origin for origin in self}
        return [(latest[name], Counter(left)) for name, left in self._reserved.items() if left]

    def keep_reserved(self, earlier: "Origins") -> None:
        """Also keep those earlier reservations whose names no run here has."""
        names = {origin.reservation for origin in self}
        for origin, left in earlier.reserved():
            if origin.reservation not in names:
                self.reserve(origin, left)

    def add(self, source: Source, event: Event, count: int) -> None:
        """Add releases of a run. They use up its reservation."""
        origin, bound = source.origin, source.bound
        part = self.setdefault(origin, Part())
        part.counts[event] += count
        left = self.reserved_as(origin.reservation)
        if left:
            self._reserved[origin.reservation] = left - Counter({event: count})
        if bound is not None:
            low, high = part.bounds.get(event, (bound, bound))
            part.bounds[event] = min(low, bound), max(high, bound)

    def note_result(
        self, origin: Origin, clipped: tuple[float, float] | None, status: str | None
    ) -> None:
        if status is not None:
            require_short_text("status", status, _LONGEST_STATUS)
        part = self[origin]
        part.clipped, part.status = clipped or part.clipped, status or part.status

    def require_provable(self, origin: Origin, event: Event) -> None:
        """Refuse a run with adaptive noise beside an open loop on samples: no theorem covers both.

        :raises PrivacyError: with this release, the ledger would have both.
        """
        for each, part in self.items():
            plans = origin.plan, each.plan
            if plans == (OPEN, ADAPTIVE) and event.sample_rate < 1.0:
                raise PrivacyError(
                    "This ledger has a run that chooses its noise as it goes. A loop of "
                    f"{origin.method} on samples of the records, without a planned number of "
                    "steps, has no guarantee beside it. Pass num_steps and call run(), or use an "
                    "accountant with a budget and no noise_multiplier."
                )
            if plans == (ADAPTIVE, OPEN) and any(own.sample_rate < 1.0 for own in part.counts):
                raise PrivacyError(
                    f"This ledger has a loop of {each.method} on samples of the records, with no "
                    f"planned number of steps. {origin.method} chooses its noise as it goes, which "
                    "has no guarantee beside it. Use PaperDPSEP, or plan the loop: num_steps and "
                    "run()."
                )

    def unknown(self, counts: Mapping[Event, int]) -> dict[Event, int]:
        """The releases of the ledger that belong to no run.

        :param counts: the ledger's.
        """
        left = Counter(dict(counts))
        for part in self.values():
            left.subtract(part.counts)
        return dict(left)

    def state(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """The saved form: plain numbers, strings and lists.

        :param events: the ledger's events. Their indices are saved.
        """
        indices = {event: index for index, event in enumerate(events)}
        return [
            {
                **origin.saved(),
                "releases": [
                    [indices[event], count, *part.bounds.get(event, ())]
                    for event, count in part.counts.items()
                ],
                **({} if part.clipped is None else {"clipped": list(part.clipped)}),
                **({} if part.status is None else {"status": part.status}),
            }
            for origin, part in self.items()
        ]


def from_saved(state: Any, counts: Mapping[Event, int], events: Sequence[Event]) -> Origins:
    """Read the releases of each run.

    :param state: from :meth:`Origins.state`, with the same events.
    :param counts: the ledger's, which must contain all releases of the runs.
    :raises ConfigurationError: the state is damaged.
    """
    found = Origins()
    try:
        for run in state:
            origin = origin_of(run)
            for index, count, *bounds in run["releases"]:
                event = events[require_count("index", index, least=0)]
                count = require_count("count", count)
                for number, bound in enumerate(bounds or [None]):
                    found.add(Source(origin, bound_of(bound)), event, 0 if number else count)
            clipped = clipped_of(run["clipped"]) if "clipped" in run else None
            found.note_result(origin, clipped, run.get("status"))
    except (TypeError, LookupError, ValueError, AttributeError):
        raise ConfigurationError("runs: they are not as they were saved.") from None
    if any(count < 0 for count in found.unknown(counts).values()):
        raise ConfigurationError("runs: they have more releases than the ledger.")
    return found


def origin_of(saved: Mapping[str, Any]) -> Origin:
    """Read a run. Older versions saved neither ``reservation`` nor ``plan``.

    :raises KeyError: a field is missing.
    :raises ConfigurationError: a field is damaged.
    """
    method, generator, time = saved["method"], saved["generator"], saved["time"]
    return Origin(
        method, generator, time, saved.get("reservation", new_name()), saved.get("plan", PLANNED)
    )


def bound_of(value: Any) -> float | None:
    """Read a clipping bound. :raises ConfigurationError: it is not a number > 0."""
    return None if value is None else require_number("bound", value, above=0.0)


def clipped_of(pair: Any) -> tuple[float, float]:
    """Read a fraction and its standard error. :raises ValueError: they are damaged."""
    fraction, error = pair
    return (
        require_number("fraction", fraction, above=0.0, below=1.0, closed=True, or_equal=True),
        require_number("error", error, above=0.0, or_equal=True),
    )
