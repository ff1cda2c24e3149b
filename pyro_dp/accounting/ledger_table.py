"""The ledger as a table, for terminals and notebooks."""

import html
from collections.abc import Iterable

from pyro_dp.accounting.events import (
    Event,
    SubsampledGaussian,
    brief,
)
from pyro_dp.accounting.ledger import LedgerEntry

Facts = list[tuple[str, str]]
_HEAD = ("release", "sample rate", "noise multiplier", "count")


def _rows(entries: Iterable[LedgerEntry]) -> list[tuple[str, ...]]:
    return [(*_cells(event), str(count)) for event, count in entries]


def _cells(event: Event) -> tuple[str, str, str]:
    if not isinstance(event, SubsampledGaussian):
        return brief(event), "", ""
    name = f"Gaussian, {event.sampling}"
    return name, f"{event.sample_rate:.6g}", f"{event.noise_multiplier:.6g}"


def as_text(entries: Iterable[LedgerEntry], facts: Facts) -> str:
    """
    :param entries: of the ledger.
    :param facts: names and values to show below it.
    :returns: an aligned table.
    """
    rows = _rows(entries)
    widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]
    lines = ["PrivacyAccountant"]
    for name, *numbers in (_HEAD, *rows):
        cells = [n.rjust(w) for n, w in zip(numbers, widths[1:], strict=True)]
        lines.append("  " + "  ".join([name.ljust(widths[0]), *cells]))
    if not rows:
        lines.append("  nothing was released")
    return "\n".join(lines + [f"  {name}: {value}" for name, value in facts])


def as_html(entries: Iterable[LedgerEntry], facts: Facts) -> str:
    """As :func:`as_text`, for notebooks."""

    def row(cells: tuple[str, ...], tag: str = "td") -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    table = row(_HEAD, "th") + "".join(map(row, _rows(entries)))
    return f"<table>{table}</table><table>{''.join(map(row, facts))}</table>"
