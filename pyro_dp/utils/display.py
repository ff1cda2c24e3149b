"""Render reports as text, Markdown or HTML, format numbers and epsilon, and make figures."""

import abc
import decimal
import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar

from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_choice


@dataclass(frozen=True)
class Paragraph:
    """:param loud: highlighted."""

    text: str
    loud: bool = False
    kind: ClassVar[str] = "paragraph"


@dataclass(frozen=True)
class Bullets:
    items: Sequence[str]
    kind: ClassVar[str] = "bullets"


@dataclass(frozen=True)
class Table:
    """The first cell of each row is its name.

    :param foot: a last row, set apart; none if empty.
    :param numbers: columns of numbers, by index.
    :param kept: columns whose cells do not wrap, by index.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    foot: Sequence[str] = ()
    numbers: Sequence[int] = ()
    kept: Sequence[int] = ()
    kind: ClassVar[str] = "table"

    def lines(self) -> list[str]:
        """A line for each row: its name to the left, other cells to the right of their columns."""
        rows = [self.head, *self.rows]
        first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        right = [map(str.rjust, cells, widths) for _, *cells in rows]
        return ["  ".join([row[0].ljust(first), *c]) for row, c in zip(rows, right, strict=True)]


@dataclass(frozen=True)
class Facts:
    pairs: Sequence[tuple[str, str]]
    caption: str = ""
    kind: ClassVar[str] = "facts"

    def lines(self) -> list[str]:
        return [self.caption, *(f"  {name}: {value}" for name, value in self.pairs)]


Ticks = list[tuple[float, str]]


@dataclass(frozen=True)
class Picture:
    """A chart for ``pages/picture.svg``. All coordinates are in its view box.

    :param caption: a description, also for screen readers.
    :param paths: each with a class of the style sheet.
    :param legend: its left and top, and texts by class: "mark" for a dot, "shade" for a box.
    """

    name: str
    title: str
    caption: str
    labels: tuple[str, str]
    ticks: tuple[Ticks, Ticks]
    paths: Sequence[tuple[str, str]]
    mark: tuple[float, float]
    legend: tuple[float, float, Sequence[tuple[str, str]]]


@dataclass(frozen=True)
class Pictures:
    """Pictures side by side, which only HTML shows."""

    pictures: Sequence[Picture]
    kind: ClassVar[str] = "pictures"


Block = Paragraph | Bullets | Table | Facts | Pictures


def rendered(title: str, sections: Mapping[str, Sequence[Block]], format: str) -> str:
    """The text of a document.

    :param sections: by their headings. Empty ones are left out.
    :param format: "markdown", or "html" for a complete page.
    :raises ConfigurationError: the format is unknown.
    """
    require_choice("format", format, ("markdown", "html"))
    filled = {name: blocks for name, blocks in sections.items() if blocks}
    template = _environment(format == "html").get_template(f"report.{format}")
    return str(template.render(title=title, sections=filled))


class Displayed(abc.ABC):
    """An object that looks the same in print and in notebooks."""

    @abc.abstractmethod
    def _blocks(self) -> Sequence[Table | Facts | str]:
        """Tables, facts and sentences, in the order of display."""

    def __repr__(self) -> str:
        blocks = ([x] if isinstance(x, str) else x.lines() for x in self._blocks())
        return "\n".join(line for lines in blocks for line in lines)

    def _repr_html_(self) -> str:
        return in_notebook(self._blocks())


def in_notebook(blocks: Sequence[Table | Facts | str]) -> str:
    """HTML of the blocks for a notebook."""
    return str(_environment(True).get_template("notebook.html").render(blocks=blocks))


@functools.cache
def _environment(escapes: bool) -> Any:
    import jinja2

    found = jinja2.Environment(
        loader=jinja2.PackageLoader("pyro_dp.utils", "pages"),
        autoescape=escapes,
        finalize=_plain if escapes else None,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters |= {"line": _line, "inner": _inner}
    return found


_SPECIAL = str.maketrans({c: f"\\{c}" for c in "\\`*_[]|#~$"} | {"<": "&lt;", ">": "&gt;"})


def _line(text: str) -> str:
    """Escape text at the start of a line, where it could begin a list or underline a heading."""
    text = re.sub(r"^([-+=])", r"\\\1", _inner(text))
    return re.sub(r"^(\d+)([.)])(?= |$)", r"\1\\\2", text)


def _inner(text: str) -> str:
    """Escape text within a line of Markdown."""
    return _one_line(text).replace("&", "&amp;").translate(_SPECIAL)


def _one_line(text: str) -> str:
    """Remove line breaks, and characters that are invisible or turn the text around."""
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))


def _plain(value: Any) -> Any:
    """Clean plain strings. Markup from the templates has another type, and stays as it is."""
    return _one_line(value) if type(value) is str else value


def up(value: float) -> str:
    """Format a cost with four digits. Rounding up never understates it."""
    if math.isinf(value):
        return "inf"
    digits = decimal.Context(prec=4, rounding=decimal.ROUND_CEILING)
    return f"{float(digits.create_decimal(value * (1.0 - 1e-12))):.4g}"


def spent(epsilon: float, budget: float | None) -> str:
    """Format the spent epsilon, rounded up, but not beyond a budget that it fits."""
    return up(epsilon) if budget is None else spent_and_left(epsilon, budget)[0]


def spent_and_left(spent: float, budget: float) -> tuple[str, str]:
    """Format the spent and the remaining epsilon. They add up to :func:`of_budget`."""
    shown, whole = up(spent), Decimal(of_budget(budget))
    if shown == "inf":
        return shown, "0"
    if spent <= whole < Decimal(shown):  # rounding up must not seem to exceed the budget
        return of_budget(budget), "0"
    left = max(Decimal(0), whole - Decimal(shown))
    return shown, f"{left.normalize():g}" if left < Decimal("1e-9") else f"{left.normalize():f}"


def of_budget(budget: float) -> str:
    return f"{budget:.6g}"


_SMALLEST, _LARGEST, _SPAN = -6, 6, 5  # powers of ten that a column shows without exponents


def numbers(values: Sequence[float]) -> list[str]:
    """Format a column, with the same number of decimals in each row.

    Every number other than zero has three significant digits, or the largest has six. If the
    magnitudes differ too much for that, each number has three significant digits of its own.
    """
    powers = [math.floor(math.log10(abs(each))) for each in values if each and math.isfinite(each)]
    least, most = min(powers, default=0), max(powers, default=0)
    if _SMALLEST <= least and most <= _LARGEST and most - least <= _SPAN:
        decimals = max(0, min(2 - least, 5 - most))
        return [f"{each + 0.0:.{decimals}f}" for each in values]  # + 0.0: zero has no sign
    return [f"{each:#.3g}".rstrip(".") for each in values]


MOST_ROWS, MOST_LINES = 60, 30  # rows of a picture, lines of a table


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


def with_rows(call: str, names: Sequence[str], of: int = 0) -> tuple[Any, Any]:
    """A figure and its axes, which have a row for each name.

    :param of: the total number of rows, if some are left out.
    """
    found = figure(call, 1.2 + 0.25 * len(names))
    axes = found.subplots()
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_title(f"The first {len(names)} of {of}" if of > len(names) else "")
    return found, axes


def left_out(count: int, where: str) -> list[str]:
    """The line below a table that says where to find rows beyond :data:`MOST_LINES`, if any."""
    return [f"... and {count - MOST_LINES} more: {where}"] * (count > MOST_LINES)
