"""Amounts of epsilon, tables as text and in HTML for notebooks, and empty figures.

Tables in HTML have the colours of the notebook's theme, light or dark: nothing has a colour of its
own. Screen readers need the captions and scopes.
"""

import abc
import decimal
import math
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Table:
    """Rows that begin with their names; the first one has the headings."""

    caption: str
    rows: Sequence[Sequence[str]]

    def text(self) -> list[str]:
        """A line for each row: its name to the left, other cells to the right of their columns."""
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = []
        for name, *cells in self.rows:
            right = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *right]))
        return lines

    def html(self) -> str:
        return _table(self.caption, self.rows, _RIGHT, heads=1)


@dataclass(frozen=True)
class Facts:
    """A name and a value a row."""

    caption: str
    pairs: Sequence[tuple[str, str]]

    def text(self) -> list[str]:
        return [self.caption, *(f"  {name}: {value}" for name, value in self.pairs)]

    def html(self) -> str:
        return _table(self.caption, self.pairs, _LEFT)


Block = Table | Facts | str


class Displayed(abc.ABC):
    """An object that notebooks display as it prints."""

    @abc.abstractmethod
    def _blocks(self) -> Sequence[Block]:
        """Tables, facts and sentences, in their order."""

    def __repr__(self) -> str:
        blocks = ([x] if isinstance(x, str) else x.text() for x in self._blocks())
        return "\n".join(line for lines in blocks for line in lines)

    def _repr_html_(self) -> str:
        blocks = self._blocks()
        return "".join(f"<p>{escape(x)}</p>" if isinstance(x, str) else x.html() for x in blocks)


def _table(caption: str, rows: Sequence[Sequence[str]], style: str, heads: int = 0) -> str:
    """
    :param style: that of cells other than the first of their row.
    :param heads: rows of headings.
    """
    lines = []
    for place, (name, *texts) in enumerate(rows):
        first, other = ["col"] * 2 if place < heads else ["row", ""]
        cells = [(name, first, _LEFT), *((text, other, style) for text in texts)]
        lines.append(f"<tr>{''.join(_cell(*cell) for cell in cells)}</tr>")
    head = f"<thead>{''.join(lines[:heads])}</thead>" * bool(heads)
    bold = "caption-side:top;text-align:left;color:inherit;font-weight:bold"
    title = f'<caption style="{bold}">{escape(caption)}</caption>'
    whole = f"{title}{head}<tbody>{''.join(lines[heads:])}</tbody>"
    return f'<table style="margin:0.5em 0">{whole}</table>'


def _cell(text: str, scope: str, style: str) -> str:
    kind = f'th scope="{scope}"' if scope and text else "td"
    return f"<{kind}{style}>{escape(text)}</{kind[:2]}>"


MOST_ROWS = 60


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
