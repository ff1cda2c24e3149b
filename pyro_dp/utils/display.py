"""Amounts of epsilon, tables in HTML for notebooks, and empty figures.

Tables have the colours of the notebook's theme, light or dark: nothing has a colour of its own.
Screen readers need the captions and scopes.
"""

import decimal
import math
from collections.abc import Sequence
from decimal import Decimal
from html import escape
from typing import Any

from pyro_dp.utils.errors import ConfigurationError


def up(value: float) -> str:
    """Four digits, rounded up: a cost must not be understated."""
    if math.isinf(value):
        return "inf"
    digits = decimal.Context(prec=4, rounding=decimal.ROUND_CEILING)
    return f"{float(digits.create_decimal(value * (1.0 - 1e-12))):.4g}"


def spent(epsilon: float, budget: float | None) -> str:
    """Rounded up, but not beyond a budget that holds it."""
    return up(epsilon) if budget is None else spent_and_left(epsilon, budget)[0]


def spent_and_left(spent: float, budget: float) -> tuple[str, str]:
    """Two texts that add up to the budget as printed, :func:`of_budget`."""
    shown, whole = up(spent), Decimal(of_budget(budget))
    if shown == "inf":
        return shown, "0"
    if spent <= whole < Decimal(shown):  # rounding up must not seem to exceed it
        return of_budget(budget), "0"
    left = max(Decimal(0), whole - Decimal(shown))
    return shown, f"{left.normalize():g}" if left < Decimal("1e-9") else f"{left.normalize():f}"


def of_budget(budget: float) -> str:
    return f"{budget:.6g}"


_SMALLEST, _LARGEST, _SPAN = -6, 6, 5  # powers of ten that a column shows without exponents
_LEFT, _RIGHT = ' style="text-align:left"', ' style="text-align:right"'


def numbers(values: Sequence[float]) -> list[str]:
    """The texts of a column, all with the same number of decimals.

    Every number other than zero has three significant digits, or the largest has six. If the
    magnitudes differ too much for that, each number has three significant digits of its own.
    """
    powers = [math.floor(math.log10(abs(each))) for each in values if each and math.isfinite(each)]
    least, most = min(powers, default=0), max(powers, default=0)
    if _SMALLEST <= least and most <= _LARGEST and most - least <= _SPAN:
        decimals = max(0, min(2 - least, 5 - most))
        return [f"{each + 0.0:.{decimals}f}" for each in values]  # + 0.0: zero has no sign
    return [f"{each:#.3g}".rstrip(".") for each in values]


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table whose rows begin with their names.

    :param head: the columns' headings. The first may be empty.
    """
    if not rows:
        return _table(caption, "")
    corner = f'<th scope="col"{_LEFT}>{escape(head[0])}</th>' if head[0] else "<td></td>"
    names = "".join(f'<th scope="col"{_RIGHT}>{escape(each)}</th>' for each in head[1:])
    lines = []
    for name, *cells in rows:
        numbers = "".join(f"<td{_RIGHT}>{escape(each)}</td>" for each in cells)
        lines.append(f'<tr><th scope="row"{_LEFT}>{escape(name)}</th>{numbers}</tr>')
    body = f"<tbody>{''.join(lines)}</tbody>"
    return _table(caption, f"<thead><tr>{corner}{names}</tr></thead>{body}")


def facts(caption: str, pairs: Sequence[tuple[str, str]]) -> str:
    """A name and a value a row."""
    lines = (
        f'<tr><th scope="row"{_LEFT}>{escape(name)}</th><td{_LEFT}>{escape(value)}</td></tr>'
        for name, value in pairs
    )
    return _table(caption, f"<tbody>{''.join(lines)}</tbody>")


def remarks(texts: Sequence[str]) -> str:
    """Lines below a table."""
    return "".join(f"<p>{escape(each)}</p>" for each in texts)


def _table(caption: str, rows: str) -> str:
    style = "caption-side:top;text-align:left;color:inherit;font-weight:bold"
    head = f'<caption style="{style}">{escape(caption)}</caption>'
    return f'<table style="margin:0.5em 0">{head}{rows}</table>'


MOST_ROWS = 60


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row: its name to the left, the other cells to the right of their columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = []
    for name, *cells in rows:
        right = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        text.append("  ".join([name.ljust(widths[0]), *right]))
    return text


def figure(call: str, height: float = 4.5, width: float = 7.0) -> Any:
    """A ``matplotlib.figure.Figure`` for the user's call.

    :raises ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError(
            f"{call} needs matplotlib, which is not installed: pip install matplotlib."
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def with_rows(call: str, rows: int) -> Any:
    """A figure as high as so many rows need."""
    return figure(call, 1.2 + 0.25 * rows)


def first_of(count: int) -> str:
    """A title that says if rows are left out."""
    return f"The first {MOST_ROWS} of {count}" if count > MOST_ROWS else ""
