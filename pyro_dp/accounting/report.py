"""What a ledger guarantees, in words: for whoever must decide whether results may be published."""

import decimal
import importlib.metadata
import math
import platform
from collections.abc import Sequence
from datetime import datetime, timezone

from pyro_dp.accounting.events import (
    SECURE,
    SEEDED,
    ApproximateDP,
    NonPrivateLook,
    SubsampledGaussian,
)
from pyro_dp.accounting.ledger import LedgerEntry
from pyro_dp.accounting.markup import Block, Bullets, Heading, Paragraph, Table, rendered
from pyro_dp.accounting.second_opinion import TOLERANCE, second_opinion
from pyro_dp.accounting.trade_off import PrivacyCurve, trade_off

FALSE_POSITIVES = 0.05  # the attacker's, in the sentence about the power

_NEIGHBOURS = {
    "add_or_remove_one": (
        "Two data sets are neighbours if they agree in all records but one, and this one is there "
        "in one of them, and empty in the other, where it contributes nothing. The number of "
        "records is the same public number in both. So the guarantee is about whether somebody's "
        "record took part."
    ),
    "replace_one": (
        "Two data sets are neighbours if they agree in all records but one, and this one may be "
        "any record in the one and any other in the other. The number of records is the same "
        "public number in both. So the guarantee is about what somebody's record says."
    ),
}
_ATTACK = {
    "add_or_remove_one": "an absent record for present",
    "replace_one": "one record for the other",
}
_ENGINES = {
    "pld": "privacy loss distributions",
    "rdp": "Rényi differential privacy",
    "advanced": "the advanced composition theorem",
    "basic": "the basic composition theorem",
}
_SAMPLING = {
    "poisson": "each record on its own",
    "fixed": "a random subset of fixed size",
    "full": "all records",
}
_PUBLIC = [
    "The number of records.",
    "The model, the guide and the priors; which features are used, and in which units.",
    "How records are sampled, the sample rates, noise multipliers and counts in the table above.",
    "The bounds to which contributions of a record and its features are clipped.",
    "Step sizes, initial values and numbers of steps; when and why a run was stopped.",
    "The budget, delta, and the neighbouring relation.",
]
_CANDIDATES = "The candidates of every private selection, and how its number of trials was drawn."
_NOT_COVERED = [
    "What was published of these data without this ledger. Costs of several ledgers add up.",
    "People with several records: a guarantee for k records of one person is weaker, about k times "
    "epsilon. (A record should hold all that belongs to a person.)",
    "What is true of people in general. Who learns from the results that some group has a high "
    "risk learns it of its members, too, whether they took part or not.",
    "Choices made by looking at the data other than through the releases above: of the model, the "
    "features, the settings, or the moment to stop. Settings of later releases that were chosen in "
    "view of earlier ones are not proven to cost no more.",
    "Anything but the releases: logs, error messages, running times, the memory of the machine.",
    "Attacks on the rounding of floating-point numbers, but for runs in secure mode.",
    "Data that are not finite, parameters with a row per record, and what a note below says.",
]
_PACKAGES = ("pyro-dp", "pyro-ppl", "torch", "numpy", "scipy", "dp-accounting", "autodp")


def report(accountant: PrivacyCurve, format: str = "markdown") -> str:
    """See :meth:`PrivacyAccountant.report`."""
    entries = accountant.ledger
    blocks = [
        Heading("Privacy report", 1),
        *_summary(accountant, entries),
        Heading("What the guarantee means"),
        *_meaning(accountant),
        *_looks(entries),
        Heading("What was released"),
        *_releases(entries),
        Heading("What is public"),
        *_public(entries),
        Heading("Random numbers"),
        *_random_numbers(accountant.notes),
        Heading("What is not covered"),
        Bullets(_NOT_COVERED),
        Heading("Notes"),
        Bullets(accountant.notes) if accountant.notes else Paragraph("There are none."),
        Heading("Versions"),
        Table(("what", "version"), _versions()),
    ]
    return rendered(blocks, format)


def best_power(accountant: PrivacyCurve) -> str:
    """The largest power of an attacker at :data:`FALSE_POSITIVES`, in percent, rounded up."""
    power = 1.0 - float(trade_off(accountant, FALSE_POSITIVES))
    return f"{math.ceil(1000.0 * power - 1e-9) / 10.0:.1f}%"


def _summary(accountant: PrivacyCurve, entries: Sequence[LedgerEntry]) -> list[Block]:
    epsilon, delta, budget = accountant.get_epsilon(), accountant.delta, accountant.epsilon
    if not entries:
        text = (
            "Nothing was released under this ledger so far: epsilon is 0. It says nothing about "
            "results that were computed without it."
        )
        return [Paragraph(text)]
    if epsilon == math.inf:
        text = f"There is no privacy guarantee: epsilon is infinite, for good. {_why(entries)}"
        return [Paragraph(text, loud=True)]
    text = (
        f"All releases in this ledger together are (epsilon, delta)-differentially private "
        f"with epsilon = {_up(epsilon)} and delta = {delta:.4g}, for one record, under the "
        f"relation {accountant.neighboring}."
    )
    blocks: list[Block] = [Paragraph(text), _second_opinion(accountant, entries, epsilon)]
    if budget is not None:
        left = max(0.0, budget - epsilon)
        blocks.append(Paragraph(f"The budget is epsilon = {budget:.6g}; {left:.4g} remains."))
    return blocks


def _second_opinion(
    accountant: PrivacyCurve, entries: Sequence[LedgerEntry], epsilon: float
) -> Paragraph:
    found, source = second_opinion(dict(entries), accountant.delta, accountant.neighboring)
    if found is None:
        return Paragraph(f"There is no second opinion by dp_accounting: {source}.")
    if found <= epsilon * (1.0 + TOLERANCE):
        lower = found < epsilon * (1.0 - TOLERANCE)
        same = "which is lower" if lower else f"the same to within {TOLERANCE:.1%}"
        return Paragraph(
            f"Confirmed by dp_accounting, another implementation: its {source} accountant finds "
            f"the upper bound {_up(found)} for the same releases and delta, {same}."
        )
    if source == "RDP":
        return Paragraph(
            f"A second opinion by dp_accounting, another implementation: {_up(found)} is an upper "
            "bound of epsilon by its RDP accountant. It has only this loose bound for subsets of "
            "fixed size, which neither confirms nor contradicts the epsilon above."
        )
    text = (
        f"dp_accounting, another implementation, disagrees: its {source} accountant finds epsilon "
        f"= {_up(found)} for the same releases and delta, where {_up(epsilon)} is stated above, "
        f"and only {TOLERANCE:.1%} of that is explained by its grids. One of the two is wrong. "
        "Rely on the larger one, and show this report to those who maintain pyro_dp."
    )
    return Paragraph(text, loud=True)


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
        "Epsilon bounds how much the releases may depend on that record: the probability of "
        "whatever can come out under one of two neighbours is at most exp(epsilon) times that "
        "under the other, plus delta."
    )
    if 0.0 < epsilon < math.inf:
        bound += f" Here that is {_factor(epsilon)} times, plus {delta:.4g}."
    who = (
        "Think of the best attacker there can be, who knows all other records and all settings, "
        "sees everything that was released, and accepts mistaking "
        f"{_ATTACK[accountant.neighboring]} in {FALSE_POSITIVES:.0%} of cases."
    )
    if epsilon == math.inf:
        found = "Nothing keeps this attacker from being right in all other cases (power 100%)."
    else:
        found = (
            f"Then this attacker is right in at most {best_power(accountant)} of the cases in "
            f"which there is something to detect (the power). By guessing, without any release, "
            f"it would be {FALSE_POSITIVES:.0%}."
        )
    return [
        Paragraph(_NEIGHBOURS[accountant.neighboring]),
        Paragraph(bound),
        Paragraph(f"{who} {found}"),
        Paragraph(f"Both are upper bounds, by {_ENGINES[accountant.engine]}."),
    ]


def _looks(entries: Sequence[LedgerEntry]) -> list[Block]:
    rows = [
        (event.what, event.time or "not known", str(count))
        for event, count in entries
        if isinstance(event, NonPrivateLook)
    ]
    if not rows:
        return []
    return [
        Heading("Looks at the data without noise"),
        Paragraph(
            "These numbers were read without any protection. Whoever learns of them, or of "
            "decisions that were made in view of them, may learn about single records.",
            loud=True,
        ),
        Table(("what", "when (UTC)", "times"), rows),
    ]


def _releases(entries: Sequence[LedgerEntry]) -> list[Block]:
    rows = [_row(event, count) for event, count in entries if not isinstance(event, NonPrivateLook)]
    if not rows:
        return [Paragraph("Nothing.")]
    head = ("release", "takes part", "sample rate", "noise multiplier", "times")
    return [
        Table(head, rows),
        Paragraph(
            "Each release is a sum over the records that took part, each of them clipped to a "
            "bound, plus Gaussian noise whose standard deviation is the noise multiplier times "
            "that bound; or it is (epsilon, delta)-differentially private by itself, as stated."
        ),
    ]


def _row(event: SubsampledGaussian | ApproximateDP, count: int) -> tuple[str, ...]:
    if isinstance(event, ApproximateDP):
        cost = f"epsilon = {_up(event.epsilon)}, delta = {event.delta:.4g}"
        return f"{event.name}: {cost}", "", "", "", str(count)
    sigma = f"{event.noise_multiplier:.6g}" if event.noise_multiplier else "0: not private"
    return "noisy sum", _SAMPLING[event.sampling], f"{event.sample_rate:.6g}", sigma, str(count)


def _public(entries: Sequence[LedgerEntry]) -> list[Block]:
    selects = any(
        isinstance(event, ApproximateDP) and event.name.startswith("private_selection")
        for event, _ in entries
    )
    return [
        Paragraph(
            "These settings are not hidden by the guarantee. They must have been chosen without "
            "looking at the data."
        ),
        Bullets([*_PUBLIC, _CANDIDATES] if selects else _PUBLIC),
    ]


def _random_numbers(notes: Sequence[str]) -> list[Block]:
    blocks: list[Block] = []
    if SEEDED in notes:
        text = (
            "At least one run was given a seed. Its noise can be computed by anyone who knows or "
            "guesses the seed, and there is no guarantee against them."
        )
        blocks.append(Paragraph(text, loud=True))
    if SECURE in notes:
        text = (
            "At least one run was in secure mode: its noise and sampling come from the "
            "cryptographic generator of the operating system, and sums and noise are integers."
        )
        blocks.append(Paragraph(text))
    text = (
        "No run that is listed here was given a seed. Noise and sampling come from generators "
        "that are made anew for every release, from the entropy of the operating system."
    )
    return blocks or [Paragraph(text)]


def _versions() -> list[tuple[str, str]]:
    today = datetime.now(timezone.utc).date().isoformat()
    found = [("this report, written on (UTC)", today), ("Python", platform.python_version())]
    for name in _PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append((name, "not installed as a package"))
    return found


def _up(value: float) -> str:
    """Four digits, rounded up: a cost must not be understated."""
    digits = decimal.Context(prec=4, rounding=decimal.ROUND_CEILING)
    return f"{float(digits.create_decimal(value * (1.0 - 1e-12))):.4g}"


def _factor(epsilon: float) -> str:
    return _up(math.exp(epsilon)) if epsilon < 50.0 else "more than 10^21"
