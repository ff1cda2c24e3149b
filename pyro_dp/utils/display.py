"""Amounts of epsilon, tables in HTML for notebooks, and empty figures.

An amount of epsilon is never understated.

Tables have the colours of the notebook's theme, light or dark. Screen readers need the captions and
scopes. Nothing has a colour of its own.
"""

import decimal
import html
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from pyro_dp.utils.errors import ConfigurationError

_DIGITS = 4


def up(value: float) -> str:
    """Four digits, rounded up: a cost must not be understated."""
    if math.isinf(value):
        return "inf"
    digits = decimal.Context(prec=_DIGITS, rounding=decimal.ROUND_CEILING)
    return f"{float(digits.create_decimal(value * (1.0 - 1e-12))):.4g}"


def spent(epsilon: float, budget: float | None) -> str:
    """Rounded up, but not beyond a budget that holds it.

    :param epsilon: in nats.
    :param budget: in nats; ``None``: there is none.
    """
    return up(epsilon) if budget is None else spent_and_left(epsilon, budget)[0]


def spent_and_left(spent: float, budget: float) -> tuple[str, str]:
    """Two texts that add up to the budget as printed, :func:`of_budget`.

    :param spent: epsilon in nats.
    :param budget: in nats, > 0.
    """
    shown, whole = up(spent), Decimal(of_budget(budget))
    if shown == "inf":
        return shown, "0"
    if spent <= whole < Decimal(shown):  # rounding up must not seem to exceed it
        return of_budget(budget), "0"
    left = max(Decimal(0), whole - Decimal(shown))
    return shown, f"{left.normalize():g}" if left < Decimal("1e-9") else f"{left.normalize():f}"


def of_budget(budget: float) -> str:
    return f"{budget:.6g}"


_TABLE = '<table style="margin:0.5em 0">'
_CAPTION = '<caption style="caption-side:top;text-align:left;color:inherit;font-weight:bold">'
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
        return _TABLE + _caption(caption) + "</table>"
    corner = f'<th scope="col"{_LEFT}>{_text(head[0])}</th>' if head[0] else "<td></td>"
    names = "".join(f'<th scope="col"{_RIGHT}>{_text(each)}</th>' for each in head[1:])
    lines = []
    for name, *cells in rows:
        numbers = "".join(f"<td{_RIGHT}>{_text(each)}</td>" for each in cells)
        lines.append(f'<tr><th scope="row"{_LEFT}>{_text(name)}</th>{numbers}</tr>')
    return (
        f"{_TABLE}{_caption(caption)}<thead><tr>{corner}{names}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def facts(caption: str, pairs: Sequence[tuple[str, str]]) -> str:
    """A name and a value a row."""
    lines = (
        f'<tr><th scope="row"{_LEFT}>{_text(name)}</th><td{_LEFT}>{_text(value)}</td></tr>'
        for name, value in pairs
    )
    return f"{_TABLE}{_caption(caption)}<tbody>{''.join(lines)}</tbody></table>"


def remarks(texts: Sequence[str]) -> str:
    """Lines below a table."""
    return "".join(f"<p>{_text(each)}</p>" for each in texts)


def _caption(text: str) -> str:
    return f"{_CAPTION}{_text(text)}</caption>"


def _text(text: str) -> str:
    return html.escape(text)


MOST_ROWS = 60
_ROW, _MARGIN = 0.25, 1.2  # inches
_WIDTH, _HEIGHT = 7.0, 4.5


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row: its name to the left, the other cells to the right of their columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = []
    for name, *cells in rows:
        right = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        text.append("  ".join([name.ljust(widths[0]), *right]))
    return text


def figure(call: str, height: float = _HEIGHT, width: float = _WIDTH) -> Any:
    """
    :param call: the user's call, for an error.
    :param height: in inches, as is the width.
    :returns: a ``matplotlib.figure.Figure``.
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
    return figure(call, _MARGIN + _ROW * rows)


def first_of(count: int) -> str:
    """A title that says if rows are left out."""
    return f"The first {MOST_ROWS} of {count}" if count > MOST_ROWS else ""
