"""The rows of a report: what each run released, by kind, and what that costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pyro_dp.accounting import composition
from pyro_dp.accounting.events import Event, NonPrivateLook, SubsampledGaussian
from pyro_dp.accounting.events.subsampled_gaussian import is_whole, together
from pyro_dp.accounting.ledger import Description
from pyro_dp.accounting.markup import Block, Paragraph, Table
from pyro_dp.accounting.origins import ADAPTIVE, Origin, Part
from pyro_dp.accounting.trade_off import PrivacyCurve
from pyro_dp.utils.display import spent

_MOST_SUMS = 40  # rows of which each is composed with all above it
_MOST_KINDS = 12  # of these, where records are sampled: many take seconds to compose
_UNKNOWN = "not recorded"
_SAMPLING = {
    "poisson": "each record on its own, rate {rate:.6g}",
    "fixed": "a random subset of fixed size, rate {rate:.6g}",
    "full": "all records",
}
_NAMES = {"Synthesizer (VIPS)": "synthetic rows: released counts (a noisy sum)"}  # by method
_GENERATORS = {
    "secure": "secure",
    "seeded": "seeded: repeatable",
    "ordinary": "ordinary",
}
_HEAD = (
    "release",
    "who takes part",
    "noise multiplier",
    "bound C",
    "times",
    "epsilon alone",
    "epsilon so far",
    "began (UTC)",
    "generator",
    "clipped",
)
_NUMBERS, _DATES = (2, 3, 4, 5, 6), (7,)
_LEGEND = (
    "Each row is what one run released of one kind. A noisy sum adds up the records that took "
    "part, each clipped to a norm of C or less. Its noise is Gaussian, with the noise "
    "multiplier times C as standard deviation. Other releases state their own cost, and the "
    "ledger believes them. Epsilon alone is what the row would cost if it were all. Epsilon so far "
    "is its cost together with the rows above. Several rows together cost less than their sum. "
    "Clipped is the released estimate of the fraction of records whose part was cut to C, with its "
    "standard error."
)


_RESERVED = (
    "A run counts all its planned releases, from the first one on. They count also if it stops "
    "early, so the stop may depend on what was released."
)


class Reported(PrivacyCurve, Protocol):
    """What a report reads of a :class:`PrivacyAccountant`."""

    @property
    def description(self) -> Description: ...
    @property
    def journal_digest(self) -> str | None: ...
    @property
    def reserved(self) -> list[tuple[Origin, Mapping[Event, int]]]: ...
    def runs(self) -> list[tuple[Origin | None, Part]]: ...


@dataclass(frozen=True)
class Row:
    """What one run released of one kind, or has planned and not released.

    :param looks: how many sums these are, which cost as much as one; 0: as many as ``count``.
    """

    origin: Origin | None
    event: Event
    count: int
    bounds: tuple[float, float] | None
    clipped: tuple[float, float] | None
    planned: bool = False
    looks: int = 0

    @property
    def times(self) -> int:
        return self.looks or self.count

    @property
    def name(self) -> str:
        if isinstance(self.event, SubsampledGaussian):
            if self.origin is None:
                return "noisy sum"
            method = self.origin.method
            kind = "noisy sums, with their noise together" if self.looks else "noisy sum"
            name = _NAMES.get(method, f"{method}: {kind}")
            return f"{name}, planned and not released" if self.planned else name
        return self.event.brief


def rows_of(accountant: Reported) -> list[Row]:
    """All but the looks at the data without noise; what is planned comes last."""
    made = [row for origin, part in accountant.runs() for row in _of_run(origin, part)]
    planned = [
        Row(origin, event, count, None, None, planned=True)
        for origin, left in accountant.reserved
        for event, count in left.items()
        if not isinstance(event, NonPrivateLook)
    ]
    return made + planned


def _of_run(origin: Origin | None, part: Part) -> list[Row]:
    """One for each kind of release; the looks of a run that chose their noise are one kind."""
    counts = {e: n for e, n in part.counts.items() if not isinstance(e, NonPrivateLook)}
    if origin is None or origin.plan != ADAPTIVE or not all(map(is_whole, counts)):
        found = counts.items()
        return [Row(origin, event, n, part.bounds.get(event), part.clipped) for event, n in found]
    ends = [end for bounds in part.bounds.values() for end in bounds]
    bounds = (min(ends), max(ends)) if ends else None
    looks = sum(counts.values())
    return [Row(origin, together(counts), 1, bounds, part.clipped, looks=looks)]


def releases(accountant: Reported) -> list[Block]:
    """The table, and what it means."""
    rows = rows_of(accountant)
    if not rows:
        return [Paragraph("Nothing.")]
    alone = [_epsilon(accountant, {row.event: row.count}) for row in rows]
    so_far = _so_far(accountant, rows)
    cells = [_cells(row, *costs) for row, *costs in zip(rows, alone, so_far, strict=True)]
    times = f"{sum(row.times for row in rows):,}"
    total = _composed(accountant)
    foot = ("all together", "", "", "", times, "", _cost(total), "", "", "")
    caption = "What was released, run by run, and what it costs"
    table = Table(_HEAD, cells, caption, foot, _NUMBERS, _DATES)
    return [table, *_planned(accountant), Paragraph(_LEGEND)]


def _planned(accountant: Reported) -> list[Block]:
    """In words: what runs have planned and not released."""
    left = [
        f"{origin.method} (began {_began(origin)}) has planned {sum(left.values()):,} more."
        for origin, left in accountant.reserved
    ]
    return [Paragraph(" ".join([_RESERVED, *left]))] if left else []


def _so_far(accountant: Reported, rows: Sequence[Row]) -> list[str]:
    """Of each row with those above it; the last has all, as :meth:`get_epsilon` says."""
    counts: dict[Event, int] = {}
    found = []
    kinds = {row.event for row in rows if getattr(row.event, "sample_rate", 1.0) < 1.0}
    quick = len(rows) <= _MOST_SUMS and len(kinds) <= _MOST_KINDS
    for place, row in enumerate(rows):
        counts[row.event] = counts.get(row.event, 0) + row.count
        known = quick and place < len(rows) - 1
        found.append(_epsilon(accountant, counts) if known else "")
    looked = any(isinstance(event, NonPrivateLook) for event, _ in accountant.counted)
    found[-1] = _epsilon(accountant, counts) if looked else _cost(_composed(accountant))
    return found


def _epsilon(accountant: Reported, counts: dict[Event, int]) -> str:
    """Never more than that of the whole ledger, which the budget's plan may know better."""
    found = composition.epsilon(counts, accountant.delta, accountant.neighboring, accountant.engine)
    return _cost(spent(min(found, accountant.get_epsilon()), accountant.epsilon))


def _composed(accountant: Reported) -> str:
    return spent(accountant.get_epsilon(), accountant.epsilon)


def _cost(shown: str) -> str:
    return "no guarantee" if shown == "inf" else shown


def _cells(row: Row, alone: str, so_far: str) -> tuple[str, ...]:
    event, origin = row.event, row.origin
    sampling = sigma = bound = clipped = ""
    if isinstance(event, SubsampledGaussian):
        kind = event.sampling if event.sample_rate < 1.0 else "full"
        sampling = _SAMPLING[kind].format(rate=event.sample_rate)
        sigma = f"{event.noise_multiplier:.6g}" if event.noise_multiplier else "0: not private"
        bound = _UNKNOWN if origin is None else "" if row.planned else _bound(row.bounds)
        clipped = "" if row.planned else _UNKNOWN
        if row.clipped is not None:
            fraction, error = row.clipped
            clipped = f"{fraction:.1%} ± {error:.1%}"
    time = _UNKNOWN if origin is None else _began(origin)
    generator = _UNKNOWN if origin is None else _GENERATORS[origin.generator]
    times = f"{row.times:,}"
    return row.name, sampling, sigma, bound, times, alone, so_far, time, generator, clipped


def _began(origin: Origin) -> str:
    return origin.time.replace("T", " ").removesuffix("Z")


def _bound(bounds: tuple[float, float] | None) -> str:
    if bounds is None:
        return "none"
    low, high = (f"{each:.4g}" for each in bounds)
    return low if low == high else f"{low} to {high}"
