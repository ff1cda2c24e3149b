"""What was found as text: a line for each element of a site."""

from collections.abc import Mapping, Sequence

from pyro_dp.infer.posterior.intervals import Line
from pyro_dp.utils import tables

MOST_LINES = 30


def table(lines: Sequence[Line], level: float, reasons: Mapping[str, str]) -> str:
    """Median, interval, share of the noise in its squared width; a star and a reason for doubts.

    :param level: of the intervals.
    :param reasons: of doubts, by coordinate.
    """
    head, rows, below = _parts(lines, level, reasons)
    return "\n".join([*aligned([("", *head), *rows]), *below])


def html_table(lines: Sequence[Line], level: float, reasons: Mapping[str, str]) -> str:
    """The same for notebooks."""
    head, rows, below = _parts(lines, level, reasons)
    return tables.table("Posterior", ("", *head), rows) + tables.remarks(below)


def _parts(
    lines: Sequence[Line], level: float, reasons: Mapping[str, str]
) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """Names of the columns, rows of the table, and what is said below it."""
    shown = lines[:MOST_LINES]
    rows: list[tuple[str, ...]] = []
    medians = tables.numbers([line.median for line in shown])
    ends = tables.numbers([end for line in shown for end in line.aware])
    for line, median, low, high in zip(shown, medians, ends[::2], ends[1::2], strict=True):
        star = " *" if line.doubtful else ""
        rows.append((line.name + star, median, f"{low} to {high}", f"{line.noise:.0%}"))
    below = starred(by_reason(reasons))
    if len(lines) > len(shown):
        below = [f"... and {len(lines) - len(shown)} more: posterior.intervals()", *below]
    return ("median", f"{level:.0%} interval", "by noise"), rows, below


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row: its name to the left, the other cells to the right of their columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = []
    for name, *cells in rows:
        right = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        text.append("  ".join([name.ljust(widths[0]), *right]))
    return text


def starred(doubts: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each reason.

    :param doubts: coordinates by reason.
    """
    return [f"* {listed(names)}: {reason}" for reason, names in doubts.items()]


def by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Coordinates of each reason."""
    found: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        found.setdefault(reason, []).append(name)
    return found


def listed(names: Sequence[str], most: int = 6) -> str:
    """The first ones, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
