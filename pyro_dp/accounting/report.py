"""A ledger's guarantee in words, for the person who decides on publication."""

import importlib.metadata
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from pyro_dp.accounting import composition
from pyro_dp.accounting.events import ApproximateDP, Event, NonPrivateLook, SubsampledGaussian
from pyro_dp.accounting.events.subsampled_gaussian import is_whole, together
from pyro_dp.accounting.figures import pictures
from pyro_dp.accounting.ledger import SECURE, SEEDED, LedgerEntry
from pyro_dp.accounting.markup import Block, Bullets, Facts, Paragraph, Table, rendered
from pyro_dp.accounting.origins import ADAPTIVE, Origin, Part
from pyro_dp.accounting.second_opinion import TOLERANCE, second_opinion, third_opinion
from pyro_dp.accounting.trade_off import FALSE_POSITIVES, PrivacyCurve, best_power
from pyro_dp.utils.display import of_budget, spent, spent_and_left, up

_MOST_SUMS = 40  # rows, each composed with all above it
_MOST_KINDS = 12  # kinds that sample records: many take seconds to compose
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
_NUMBERS, _DATES = (2, 3, 4, 5, 6), (7,)
_LEGEND = (
    "Each row has one run's releases of one kind. A noisy sum adds up the records that took "
    "part, each clipped to a norm of C or less. Its noise is Gaussian, with the noise "
    "multiplier times C as standard deviation. Other releases state their own cost, and the "
    "ledger believes them. Epsilon alone is the cost of the row by itself. Epsilon so far "
    "is its cost together with the rows above. Several rows together cost less than their sum. "
    "Clipped is the released estimate of the fraction of records whose part was cut to C, with its "
    "standard error. A high share can go with good results: C is chosen by what clipping costs."
)
_RESERVED = (
    "A run counts all its planned releases, from the first one on. They count also if it stops "
    "early, so the stop may depend on the releases."
)


@dataclass(frozen=True)
class Row:
    """One run's releases of one kind, made or still planned.

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


def rows_of(accountant: PrivacyCurve) -> list[Row]:
    """All but the looks at the data without noise; planned releases come last."""
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


def releases(accountant: PrivacyCurve) -> list[Block]:
    rows = rows_of(accountant)
    if not rows:
        return [Paragraph("Nothing.")]
    alone = [_cost(accountant, {row.event: row.count}) for row in rows]
    so_far = _so_far(accountant, rows)
    cells = [_cells(row, *costs) for row, *costs in zip(rows, alone, so_far, strict=True)]
    times = f"{sum(row.times for row in rows):,}"
    foot = ("all together", "", "", "", times, "", _cost(accountant), "", "", "")
    caption = "Releases, run by run, and their cost"
    table = Table(_HEAD, cells, caption, foot, _NUMBERS, _DATES)
    left = [
        f"{origin.method} (began {_began(origin)}) has planned {sum(left.values()):,} more."
        for origin, left in accountant.reserved
    ]
    planned = [Paragraph(" ".join([_RESERVED, *left]))] if left else []
    return [table, *planned, Paragraph(_LEGEND)]


def _so_far(accountant: PrivacyCurve, rows: Sequence[Row]) -> list[str]:
    """The cost of each row with those above it; the last has all, as :meth:`get_epsilon` says."""
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


def _cost(accountant: PrivacyCurve, counts: dict[Event, int] | None = None) -> str:
    """Never more than that of the whole ledger, which the budget's plan may know better."""
    found, how = accountant.get_epsilon(), (accountant.neighboring, accountant.engine)
    if counts is not None:
        found = min(composition.epsilon(counts, accountant.delta, *how), found)
    shown = spent(found, accountant.epsilon)
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


_NEIGHBOURS = {
    "add_or_remove_one": (
        "Two data sets are neighbours if they agree in all records but one. One of the two "
        "contains this record. In the other it is empty and contributes nothing. The number of "
        "records is the same public number in both. So the guarantee is about whether "
        "somebody's record took part."
    ),
    "replace_one": (
        "Two data sets are neighbours if they agree in all records but one, and this one may be "
        "any record in either. The number of records is the same public number in both. So the "
        "guarantee is about the values in somebody's record."
    ),
}
_DIFFER = {
    "add_or_remove_one": "in one data set this record is empty",
    "replace_one": "this record may be any other one",
}
_PAPER = (
    "The results{by} (pyro-dp {version}) are together ({epsilon}, {delta:.4g})-differentially "
    "private. Neighbouring data sets differ in one record{unit}: {differ}."
)
_IF_TRUE = "Add this if it is true: bounds, models and settings were fixed without these data."
_ATTACK = {
    "add_or_remove_one": "an absent record for present",
    "replace_one": "one record for the other",
}
_PUBLIC = [
    "The number of records.",
    "The model, the guide and the priors; which features are used, and in which units.",
    "How records are sampled, the sample rates, noise multipliers and counts in the table above.",
    "The bounds to which contributions of a record and its features are clipped.",
    "Step sizes, initial values and numbers of steps.",
    "The budget, delta, and the neighbouring relation.",
]
_CANDIDATES = "The candidates of every private selection, and how its number of trials was drawn."
_NOT_COVERED = [
    "Results from these data that were published without this ledger. Costs of several ledgers "
    "add up.",
    "People with several records, such as two ids. A guarantee for k records of one person is "
    "weaker: k times epsilon and more, at the same delta. (A record should hold all that belongs "
    "to a person.)",
    "Facts about people in general. Anyone who learns from the results that a group has a high "
    "risk learns it about its members, too. It makes no difference whether they took part.",
    "Choices made by looking at the data other than through the releases above: the model, the "
    "features, the settings, or the moment to stop. Also noise, sample rates or numbers of later "
    "releases that you chose in view of earlier ones.",
    "Everything except the releases: logs, error messages, running times, the memory of the "
    "machine.",
    "Attacks on the rounding of floating-point numbers, except for runs in secure mode.",
    "Data that are not finite, parameters with a row per record, and exceptions in the notes "
    "below.",
]
_NOT_STATED = "not stated (accountant.describe)"
_JOURNAL = "kept; its last line has the digest {digest}, which covers all lines above it, too"
_PACKAGES = ("pyro-dp", "pyro-ppl", "torch", "numpy", "scipy", "dp-accounting", "autodp")


def report(accountant: PrivacyCurve, format: str = "markdown") -> str:
    """See :meth:`PrivacyAccountant.report`."""
    entries, title = accountant.counted, accountant.description.title
    notes, shown = accountant.notes, pictures(accountant) if format == "html" else []
    sections: dict[str, Sequence[Block]] = {
        "What this report is about": [_about(accountant)],
        "The guarantee": _summary(accountant, entries),
        "What the guarantee means": [*_meaning(accountant), *shown],
        "Looks at the data without noise": _looks(entries),
        "What was released": releases(accountant),
        "Quality of the result": _quality(accountant),
        "For a paper": _methods(accountant, entries),
        "What is public": _public(entries),
        "Random numbers": _random_numbers(notes),
        "What is not covered": [Bullets(_NOT_COVERED)],
        "Notes": [Bullets(notes) if notes else Paragraph("There are none.")],
        "Versions": [Table(("what", "version"), _versions(), "What wrote this report")],
    }
    return rendered(f"Privacy report: {title}" if title else "Privacy report", sections, format)


def _about(accountant: PrivacyCurve) -> Facts:
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


def _summary(accountant: PrivacyCurve, entries: Sequence[LedgerEntry]) -> list[Block]:
    epsilon, delta, budget = accountant.get_epsilon(), accountant.delta, accountant.epsilon
    if not entries:
        text = (
            "Epsilon is 0: nothing was released under this ledger so far. It says nothing about "
            "results that were computed without it."
        )
        return [Paragraph(text)]
    if epsilon == math.inf:
        text = f"There is no privacy guarantee: epsilon is infinite, for good. {_why(entries)}"
        return [Paragraph(text, loud=True)]
    spent, left = (up(epsilon), "") if budget is None else spent_and_left(epsilon, budget)
    text = (
        f"All releases in this ledger together are (epsilon, delta)-differentially private "
        f"with epsilon = {spent} and delta = {delta:.4g}, for one record, under the "
        f"relation {accountant.neighboring}."
    )
    blocks: list[Block] = [Paragraph(text), _second_opinion(accountant, entries, epsilon)]
    blocks += _third_opinion(accountant, entries, epsilon)
    if budget is not None:
        blocks.append(Paragraph(f"The budget is epsilon = {of_budget(budget)}; {left} remains."))
    return blocks


def _second_opinion(
    accountant: PrivacyCurve, entries: Sequence[LedgerEntry], epsilon: float
) -> Paragraph:
    found, source = second_opinion(dict(entries), accountant.delta, accountant.neighboring)
    if found is None:
        return Paragraph(f"There is no second opinion by dp_accounting: {source}.")
    if found <= epsilon * (1.0 + TOLERANCE):
        same = f"the same to within {TOLERANCE:.1%}"
        same = "which is lower" if found < epsilon * (1.0 - TOLERANCE) else same
        text = (
            f"Confirmed by dp_accounting, another implementation: its {source} accountant finds "
            f"the upper bound {up(found)} for the same releases and delta, {same}."
        )
        if found > epsilon:
            text += (
                " It is rounded up on its own grid, so it may lie a little above. The epsilon "
                "that is stated first counts against the budget."
            )
        return Paragraph(text)
    if source == "RDP":
        return Paragraph(
            f"A second opinion by dp_accounting, another implementation: {up(found)} is an upper "
            "bound of epsilon by its RDP accountant. It has only this loose bound for subsets of "
            "fixed size, which neither confirms nor contradicts the epsilon above."
        )
    text = (
        f"dp_accounting, another implementation, disagrees. Its {source} accountant finds "
        f"epsilon = {up(found)} for the same releases and delta, and {up(epsilon)} is stated "
        f"above. Its grids explain only {TOLERANCE:.1%} of that. One of the two is wrong. Rely "
        "on the larger one, and show this report to the maintainers of pyro_dp."
    )
    return Paragraph(text, loud=True)


def _third_opinion(
    accountant: PrivacyCurve, entries: Sequence[LedgerEntry], epsilon: float
) -> list[Block]:
    """An opinion by the engine "rdp". Theorems of the teaching engines may be looser than that."""
    found = third_opinion(dict(entries), accountant.delta, accountant.neighboring)
    if found is None or accountant.engine != "pld":
        return []
    text = (
        f"The Rényi divergences of autodp, a third implementation, give the upper bound "
        f"{up(found)} for the same releases and delta."
    )
    if found < epsilon * (1.0 - TOLERANCE):
        contradiction = f"{text} It should not be below {up(epsilon)}, so one of the two is wrong."
        return [Paragraph(f"{contradiction} Show this report to the maintainers of pyro_dp.", True)]
    return [Paragraph(f"{text} By nature it is looser, so it does not contradict.")]


def _why(entries: Sequence[LedgerEntry]) -> str:
    kinds = [event for event, _ in entries]
    if any(isinstance(event, NonPrivateLook) for event in kinds):
        return "Somebody looked at the data without noise, as listed below."
    if any(isinstance(event, SubsampledGaussian) and not event.noise_multiplier for event in kinds):
        return "Something was released without noise (noise multiplier 0)."
    return "The noise is too small, or the deltas of single releases exceed the accountant's delta."


def _meaning(accountant: PrivacyCurve) -> list[Block]:
    epsilon, delta = accountant.get_epsilon(), accountant.delta
    bound = (
        "Epsilon bounds how much the releases may depend on that record. For two neighbours, "
        "the probability of any set of results under one is at most exp(epsilon) times that "
        "under the other, plus delta."
    )
    if 0.0 < epsilon < math.inf:
        factor = up(math.exp(epsilon)) if epsilon < 50.0 else "more than 10^21"
        bound += f" Here that is {factor} times, plus {delta:.4g}."
    who = (
        "Consider the best possible attacker. They have all other records, all settings and "
        f"everything that was released, and accept mistaking {_ATTACK[accountant.neighboring]} "
        f"in {FALSE_POSITIVES:.0%} of cases."
    )
    if epsilon == math.inf:
        found = "Nothing keeps this attacker from being right in all other cases (power 100%)."
    else:
        found = (
            f"Against this noise, the attacker finds a true difference in at most "
            f"{best_power(accountant)} of cases (the power). Guessing without any release would "
            f"give {FALSE_POSITIVES:.0%}."
        )
    unit = accountant.description.unit
    return [
        *([Paragraph(f"One record is: {unit}.")] if unit else []),
        Paragraph(_NEIGHBOURS[accountant.neighboring]),
        Paragraph(bound),
        Paragraph(f"{who} {found}"),
        Paragraph(
            "Both are upper bounds. The costs of all releases are composed by "
            f"{composition.ENGINES[accountant.engine]}."
        ),
    ]


def _looks(entries: Sequence[LedgerEntry]) -> list[Block]:
    rows = [
        (event.what, event.time or "not known", str(count))
        for event, count in entries
        if isinstance(event, NonPrivateLook)
    ]
    if not rows:
        return []
    text = (
        "These numbers were read without any protection. Anyone who learns them, or decisions "
        "based on them, may learn about single records."
    )
    table = Table(("what", "when (UTC)", "times"), rows, "What was read without noise")
    return [Paragraph(text, loud=True), table]


def _quality(accountant: PrivacyCurve) -> list[Block]:
    runs = ((origin, part.status) for origin, part in accountant.runs())
    rows = [(origin.method, origin.time, status) for origin, status in runs if origin and status]
    text = (
        "The status of each run says whether its intervals can be published. It follows from "
        "released numbers alone."
    )
    table = Table(("method", "begun (UTC)", "status"), rows, "Status of each run")
    return [Paragraph(text), table] if rows else []


def _methods(accountant: PrivacyCurve, entries: Sequence[LedgerEntry]) -> list[Block]:
    """The sentence that a methods section needs, with its numbers."""
    epsilon, unit = accountant.get_epsilon(), accountant.description.unit
    if not entries or epsilon == math.inf:
        return []
    methods = dict.fromkeys(origin.method for origin, _ in accountant.runs() if origin)
    text = _PAPER.format(
        by=f" by {' and by '.join(methods)}" if methods else "",
        version=dict(_versions())["pyro-dp"],
        epsilon=spent(epsilon, accountant.epsilon),
        delta=accountant.delta,
        unit=f" ({unit})" if unit else "",
        differ=_DIFFER[accountant.neighboring],
    )
    return [Paragraph(text), Paragraph(_IF_TRUE)]


def _public(entries: Sequence[LedgerEntry]) -> list[Block]:
    selects = any(
        isinstance(event, ApproximateDP) and event.name.startswith("private_selection")
        for event, _ in entries
    )
    text = (
        "These settings are not hidden by the guarantee. They must have been chosen without "
        "looking at the data."
    )
    return [Paragraph(text), Bullets([*_PUBLIC, _CANDIDATES] if selects else _PUBLIC)]


def _random_numbers(notes: Sequence[str]) -> list[Block]:
    blocks: list[Block] = []
    if SEEDED in notes:
        text = (
            "At least one run used a seed. Anyone who has or guesses the seed can compute its "
            "noise, and there is no guarantee against them. The table above says which runs "
            "were seeded."
        )
        blocks.append(Paragraph(text, loud=True))
    if SECURE in notes:
        text = (
            "At least one run was in secure mode. Its noise and sampling come from the "
            "operating system's cryptographic generator, and its sums and noise are integers. "
            "The table above says which runs were."
        )
        blocks.append(Paragraph(text))
    text = (
        "No run that is listed here used a seed. Noise and sampling come from generators that "
        "are made anew for every release, from the operating system's entropy. A run whose "
        'generator is "ordinary" has floating-point noise. Its last digits can reveal more: '
        "publish results rounded to two digits of their standard deviation."
    )
    return blocks or [Paragraph(text)]


def _versions() -> list[tuple[str, str]]:
    found = [("Python", platform.python_version())]
    for name in _PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append((name, "not installed as a package"))
    return found
