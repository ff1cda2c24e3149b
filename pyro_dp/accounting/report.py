"""A report on a ledger's guarantee, for the person who decides on publication."""

import functools
import importlib.metadata
import importlib.resources
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from pyro_dp.accounting import composition
from pyro_dp.accounting.events import (
    ApproximateDP,
    Event,
    NonPrivateLook,
    SubsampledGaussian,
    is_whole,
    together,
)
from pyro_dp.accounting.figures import pictures
from pyro_dp.accounting.ledger import SECURE, SEEDED, LedgerEntry
from pyro_dp.accounting.origins import ADAPTIVE, Origin, Part
from pyro_dp.accounting.second_opinion import TOLERANCE, second_opinion, third_opinion
from pyro_dp.accounting.trade_off import FALSE_POSITIVES, Accountant, best_power
from pyro_dp.utils.display import (
    Block,
    Bullets,
    Facts,
    Paragraph,
    Table,
    of_budget,
    rendered,
    spent,
    spent_and_left,
    up,
)

_MOST_SUMS = 40  # rows up to which each is composed with all rows above it
_MOST_KINDS = 12  # kinds of sampled releases up to which this takes little time
_UNKNOWN = "not recorded"
_SAMPLING = {
    "poisson": "each record on its own, rate {rate:.6g}",
    "fixed": "a random subset of fixed size, rate {rate:.6g}",
    "full": "all records",
}
_NAMES = {"Synthesizer (VIPS)": "synthetic rows: released counts (a noisy sum)"}  # by method
_GENERATORS = {"secure": "secure", "seeded": "seeded: repeatable", "ordinary": "ordinary"}
_HEAD: tuple[str, ...] = ("release", "who takes part", "noise multiplier", "bound C", "times")
_HEAD += ("epsilon alone", "epsilon so far", "began (UTC)", "generator", "clipped")


@functools.cache
def _words() -> dict[str, list[str]]:
    """The paragraphs under each heading of ``words.md``."""
    page = importlib.resources.files("pyro_dp.accounting") / "pages" / "words.md"
    _, *parts = page.read_text(encoding="utf-8").split("\n## ")
    found = ([" ".join(each.split()) for each in part.split("\n\n")] for part in parts)
    return {name: paragraphs for name, *paragraphs in found}


def words(name: str, **values: Any) -> str:
    """The paragraph under a heading of ``words.md``, formatted with these values."""
    [text] = _words()[name]
    return text.format(**values)


@dataclass(frozen=True)
class Row:
    """One run's releases of one kind, made or still planned."""

    origin: Origin | None
    event: Event
    count: int
    bounds: tuple[float, float] | None = None
    clipped: tuple[float, float] | None = None
    planned: bool = False
    looks: int = 0  # number of sums with different noise that share this row; 0: they are equal

    @property
    def times(self) -> int:
        return self.looks or self.count

    @property
    def name(self) -> str:
        if not isinstance(self.event, SubsampledGaussian):
            return self.event.brief
        kind = "noisy sums, with their noise together" if self.looks else "noisy sum"
        if self.origin is None:
            return kind
        name = _NAMES.get(self.origin.method, f"{self.origin.method}: {kind}")
        return f"{name}, planned and not released" if self.planned else name


def rows_of(accountant: Accountant) -> list[Row]:
    """The rows of the table of releases. Planned releases come last, and looks are left out."""
    made = [row for origin, part in accountant.runs() for row in _of_run(origin, part)]
    planned = [
        Row(origin, event, count, planned=True)
        for origin, left in accountant.reserved
        for event, count in left.items()
        if not isinstance(event, NonPrivateLook)
    ]
    return made + planned


def _of_run(origin: Origin | None, part: Part) -> list[Row]:
    """A row for each kind of release of a run. Looks with adaptive noise share one row."""
    counts = {e: n for e, n in part.counts.items() if not isinstance(e, NonPrivateLook)}
    adaptive = origin is not None and origin.plan == ADAPTIVE and all(map(is_whole, counts))
    if not adaptive or not counts:  # a run with a reservation may have no release yet
        return [Row(origin, e, n, part.bounds.get(e), part.clipped) for e, n in counts.items()]
    ends = [end for bounds in part.bounds.values() for end in bounds]
    bounds = (min(ends), max(ends)) if ends else None
    looks = sum(counts.values())
    return [Row(origin, together(counts), 1, bounds, part.clipped, looks=looks)]


def releases(accountant: Accountant) -> list[Block]:
    """The section on releases: a table with their cost, and notes on planned releases."""
    rows = rows_of(accountant)
    if not rows:
        return [Paragraph("Nothing.")]
    alone = [_cost(accountant, {row.event: row.count}) for row in rows]
    so_far = _so_far(accountant, rows)
    cells = [_cells(row, *costs) for row, *costs in zip(rows, alone, so_far, strict=True)]
    times = f"{sum(row.times for row in rows):,}"
    foot = ("all together", "", "", "", times, "", _cost(accountant), "", "", "")
    caption = "Releases, run by run, and their cost"
    table = Table(_HEAD, cells, caption, foot, numbers=(2, 3, 4, 5, 6), kept=(7,))
    left = [
        f"{origin.method} (began {_began(origin)}) has planned {sum(left.values()):,} more."
        for origin, left in accountant.reserved
    ]
    planned = [Paragraph(" ".join([words("reserved"), *left]))] if left else []
    return [table, *planned, Paragraph(words("legend"))]


def _so_far(accountant: Accountant, rows: Sequence[Row]) -> list[str]:
    """The cost of each row together with all rows above it, or "" if that would take long.

    The last row always has the total, as in :meth:`PrivacyAccountant.get_epsilon`.
    """
    counts: dict[Event, int] = {}
    found = []
    kinds = {row.event for row in rows if row.event.sample_rate < 1.0}
    quick = len(rows) <= _MOST_SUMS and len(kinds) <= _MOST_KINDS
    for row in rows:
        counts[row.event] = counts.get(row.event, 0) + row.count
        found.append(_cost(accountant, counts) if quick and row is not rows[-1] else "")
    looked = any(isinstance(event, NonPrivateLook) for event, _ in accountant.counted)
    found[-1] = _cost(accountant, counts if looked else None)
    return found


def _cost(accountant: Accountant, counts: dict[Event, int] | None = None) -> str:
    """Epsilon of these releases in words; of the whole ledger if None.

    It is at most that of the whole ledger, for which the budget's plan may have a better bound.
    """
    found, how = accountant.get_epsilon(), (accountant.neighboring, accountant.engine)
    if counts is not None:
        found = min(composition.epsilon(counts, accountant.delta, *how), found)
    text = spent(found, accountant.epsilon)
    return "no guarantee" if text == "inf" else text


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


_DIFFER = {
    "add_or_remove_one": "in one data set this record is empty",
    "replace_one": "this record may be any other one",
}
_ATTACK = {
    "add_or_remove_one": "an absent record for present",
    "replace_one": "one record for the other",
}
_NOT_STATED = "not stated (accountant.describe)"
_JOURNAL = "kept; its last line has the digest {digest}, which covers all lines above it, too"
_PACKAGES = ("pyro-dp", "pyro-ppl", "torch", "numpy", "scipy", "dp-accounting", "autodp")


def report(accountant: Accountant, format: str = "markdown") -> str:
    """See :meth:`PrivacyAccountant.report`."""
    entries, title = accountant.counted, accountant.description.title
    notes, images = accountant.notes, pictures(accountant) if format == "html" else []
    sections: dict[str, Sequence[Block]] = {
        "What this report is about": [_about(accountant)],
        "The guarantee": _summary(accountant, entries),
        "What the guarantee means": [*_meaning(accountant), *images],
        "Looks at the data without noise": _looks(entries),
        "What was released": releases(accountant),
        "Quality of the result": _quality(accountant),
        "For a paper": _methods(accountant, entries),
        "What is public": _public(entries),
        "Random numbers": _random_numbers(notes),
        "What is not covered": [Bullets(_words()["not covered"])],
        "Notes": [Bullets(notes) if notes else Paragraph("There are none.")],
        "Versions": [Table(("what", "version"), _versions(), "What wrote this report")],
    }
    return rendered(f"Privacy report: {title}" if title else "Privacy report", sections, format)


def _about(accountant: Accountant) -> Facts:
    about, digest = accountant.description, accountant.journal_digest
    facts = {
        "Data set": about.dataset or _NOT_STATED,
        "Purpose": about.purpose or _NOT_STATED,
        "Controller": about.controller or _NOT_STATED,
        "Protected unit": about.unit or f"{_NOT_STATED}: one record, whatever that is",
        "Number of units": _NOT_STATED if about.units is None else f"{about.units:,}",
        "Journal": "none was kept" if digest is None else _JOURNAL.format(digest=digest),
        "Written on (UTC)": datetime.now(timezone.utc).date().isoformat(),
    }
    return Facts(list(facts.items()))


def _summary(accountant: Accountant, entries: Sequence[LedgerEntry]) -> list[Block]:
    epsilon, delta, budget = accountant.get_epsilon(), accountant.delta, accountant.epsilon
    if not entries:
        return [Paragraph(words("empty"))]
    if epsilon == math.inf:
        return [Paragraph(words("infinite", why=_why(entries)), loud=True)]
    spent, left = (up(epsilon), "") if budget is None else spent_and_left(epsilon, budget)
    relation = accountant.neighboring
    blocks: list[Block] = [
        Paragraph(words("guarantee", epsilon=spent, delta=delta, neighboring=relation)),
        _second_opinion(accountant, entries, epsilon),
        *_third_opinion(accountant, entries, epsilon),
    ]
    if budget is not None:
        blocks.append(Paragraph(words("budget", budget=of_budget(budget), left=left)))
    return blocks


def _second_opinion(
    accountant: Accountant, entries: Sequence[LedgerEntry], epsilon: float
) -> Paragraph:
    found, source = second_opinion(dict(entries), accountant.delta, accountant.neighboring)
    if found is None:
        return Paragraph(words("no second opinion", source=source))
    numbers = dict(source=source, found=up(found), epsilon=up(epsilon), tolerance=TOLERANCE)
    if found <= epsilon * (1.0 + TOLERANCE):
        same = f"the same to within {TOLERANCE:.1%}"
        same = "which is lower" if found < epsilon * (1.0 - TOLERANCE) else same
        text = words("confirmed", same=same, **numbers)
        return Paragraph(f"{text} {words('rounded up')}" if found > epsilon else text)
    if source == "RDP":
        return Paragraph(words("loose", **numbers))
    return Paragraph(words("contradicted", **numbers), loud=True)


def _third_opinion(
    accountant: Accountant, entries: Sequence[LedgerEntry], epsilon: float
) -> list[Block]:
    """Compare the engine "pld" with the engine "rdp"."""
    found = third_opinion(dict(entries), accountant.delta, accountant.neighboring)
    if found is None or accountant.engine != "pld":
        return []
    text, below = words("third opinion", found=up(found)), found < epsilon * (1.0 - TOLERANCE)
    verdict = words("third opinion below" if below else "third opinion above", epsilon=up(epsilon))
    return [Paragraph(f"{text} {verdict}", loud=below)]


def _why(entries: Sequence[LedgerEntry]) -> str:
    kinds = [event for event, _ in entries]
    if any(isinstance(event, NonPrivateLook) for event in kinds):
        return words("looked")
    if any(isinstance(event, SubsampledGaussian) and not event.noise_multiplier for event in kinds):
        return words("noiseless")
    return words("too little noise")


def _meaning(accountant: Accountant) -> list[Block]:
    epsilon, delta = accountant.get_epsilon(), accountant.delta
    relation, unit, often = accountant.neighboring, accountant.description.unit, FALSE_POSITIVES
    bound = words("epsilon")
    if 0.0 < epsilon < math.inf:
        factor = up(math.exp(epsilon)) if epsilon < 50.0 else "more than 10^21"
        bound = f"{bound} {words('factor', factor=factor, delta=delta)}"
    attacker = words("attacker", mistake=_ATTACK[relation], often=often)
    if epsilon == math.inf:
        power = words("all power")
    else:
        power = words("power", power=best_power(accountant), often=often)
    bounds = words("bounds", engine=composition.ENGINES[accountant.engine])
    found = [words(relation), bound, f"{attacker} {power}", bounds]
    return [Paragraph(text) for text in ([f"One record is: {unit}."] if unit else []) + found]


def _looks(entries: Sequence[LedgerEntry]) -> list[Block]:
    rows = [
        (event.what, event.time or "not known", str(count))
        for event, count in entries
        if isinstance(event, NonPrivateLook)
    ]
    if not rows:
        return []
    table = Table(("what", "when (UTC)", "times"), rows, "What was read without noise")
    return [Paragraph(words("looks"), loud=True), table]


def _quality(accountant: Accountant) -> list[Block]:
    runs = ((origin, part.status) for origin, part in accountant.runs())
    rows = [(origin.method, origin.time, status) for origin, status in runs if origin and status]
    table = Table(("method", "begun (UTC)", "status"), rows, "Status of each run")
    return [Paragraph(words("status")), table] if rows else []


def _methods(accountant: Accountant, entries: Sequence[LedgerEntry]) -> list[Block]:
    """The sentence for a paper's methods section; none without a guarantee."""
    epsilon, unit = accountant.get_epsilon(), accountant.description.unit
    if not entries or epsilon == math.inf:
        return []
    methods = dict.fromkeys(origin.method for origin, _ in accountant.runs() if origin)
    text = words(
        "paper",
        by=f" by {' and by '.join(methods)}" if methods else "",
        version=dict(_versions())["pyro-dp"],
        epsilon=spent(epsilon, accountant.epsilon),
        delta=accountant.delta,
        unit=f" ({unit})" if unit else "",
        differ=_DIFFER[accountant.neighboring],
    )
    return [Paragraph(text), Paragraph(words("if true"))]


def _public(entries: Sequence[LedgerEntry]) -> list[Block]:
    selects = any(
        isinstance(event, ApproximateDP) and event.name.startswith("private_selection")
        for event, _ in entries
    )
    more = _words()["selection"] if selects else []
    return [Paragraph(words("settings")), Bullets(_words()["public"] + more)]


def _random_numbers(notes: Sequence[str]) -> list[Block]:
    blocks: list[Block] = []
    if SEEDED in notes:
        blocks.append(Paragraph(words("seeded"), loud=True))
    if SECURE in notes:
        blocks.append(Paragraph(words("secure")))
    return blocks or [Paragraph(words("ordinary"))]


def _versions() -> list[tuple[str, str]]:
    found = [("Python", platform.python_version())]
    for name in _PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append((name, "not installed as a package"))
    return found
