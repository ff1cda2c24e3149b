"""What was found as text: a line for each element of a site."""

from collections.abc import Sequence

from pyro_dp.infer.posterior.intervals import Line
from pyro_dp.infer.posterior.status import Status
from pyro_dp.utils import display

MOST_LINES = 30


def table(lines: Sequence[Line], level: float, status: Status) -> str:
    """Median, interval and share of the noise in its squared width, and the status below.

    :param level: of the intervals.
    """
    head, rows, below = _parts(lines, level, status)
    return "\n".join([*aligned([("", *head), *rows]), *below])


def html_table(lines: Sequence[Line], level: float, status: Status) -> str:
    """The same for notebooks."""
    head, rows, below = _parts(lines, level, status)
    return display.table("Posterior", ("", *head), rows) + display.remarks(below)


def _parts(
    lines: Sequence[Line], level: float, status: Status
) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """Names of the columns, rows of the table, and what is said below it."""
    shown = lines[:MOST_LINES]
    rows: list[tuple[str, ...]] = []
    medians = display.numbers([line.median for line in shown])
    ends = display.numbers([end for line in shown for end in line.aware])
    for line, median, low, high in zip(shown, medians, ends[::2], ends[1::2], strict=True):
        rows.append((line.name, median, f"{low} to {high}", f"{line.noise:.0%}"))
    more = len(lines) - len(shown)
    below = [f"... and {more} more: posterior.intervals()"] * (more > 0) + [status.line]
    return ("median", f"{level:.0%} interval", "by noise"), rows, below


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row: its name to the left, the other cells to the right of their columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = []
    for name, *cells in rows:
        right = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        text.append("  ".join([name.ljust(widths[0]), *right]))
    return text
