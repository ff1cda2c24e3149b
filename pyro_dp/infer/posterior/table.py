"""What was found as text: a line for each element of a site."""

from collections.abc import Mapping, Sequence

from pyro_dp.infer.posterior.intervals import Line

MOST_LINES = 30


def table(lines: Sequence[Line], level: float, reasons: Mapping[str, str]) -> str:
    """Median, interval, share of the noise in its squared width; a star and a reason for doubts.

    :param level: of the intervals.
    :param reasons: of doubts, by coordinate.
    """
    shown = lines[:MOST_LINES]
    rows = [("", "median", f"{level:.0%} interval", "by noise")]
    for line in shown:
        star = " *" if line.doubtful else ""
        interval = f"{line.aware[0]:.3g} to {line.aware[1]:.3g}"
        rows.append((line.name + star, f"{line.median:.3g}", interval, f"{line.noise:.0%}"))
    text = aligned(rows)
    if len(lines) > len(shown):
        text.append(f"... and {len(lines) - len(shown)} more: posterior.intervals()")
    return "\n".join([*text, *starred(by_reason(reasons))])


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
