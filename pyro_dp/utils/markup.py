"""Documents of paragraphs, lists, tables and pictures, as text, Markdown or HTML.

The templates lie in ``pages``. Texts are plain: all their characters appear as they are.
"""

import abc
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pyro_dp.utils.validation import require_choice


@dataclass(frozen=True)
class Paragraph:
    """:param loud: to be seen first."""

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

    :param foot: a last row, set apart; empty: there is none.
    :param numbers: columns of numbers, by index.
    :param kept: columns whose cells are one line, by index.
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
    """A chart. ``pages/picture.svg`` draws it, in whose view box all numbers are.

    :param caption: describes it, also to readers who cannot see it.
    :param paths: each with a class of the style sheet.
    :param legend: its left and top; classes with their texts, "mark" for a dot, "shade" for a box.
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
    """Side by side, in HTML alone."""

    pictures: Sequence[Picture]
    kind: ClassVar[str] = "pictures"


Block = Paragraph | Bullets | Table | Facts | Pictures


def rendered(title: str, sections: Mapping[str, Sequence[Block]], format: str) -> str:
    """
    :param sections: by their headings. Empty ones are left out.
    :param format: "markdown", or "html" for a page of its own.
    :raises ConfigurationError: the format is another one.
    """
    require_choice("format", format, ("markdown", "html"))
    filled = {name: blocks for name, blocks in sections.items() if blocks}
    template = _environment(format == "html").get_template(f"report.{format}")
    text: str = template.render(title=title, sections=filled)
    return text


class Displayed(abc.ABC):
    """An object that notebooks display as it prints."""

    @abc.abstractmethod
    def _blocks(self) -> Sequence[Table | Facts | str]:
        """Tables, facts and sentences, in their order."""

    def __repr__(self) -> str:
        blocks = ([x] if isinstance(x, str) else x.lines() for x in self._blocks())
        return "\n".join(line for lines in blocks for line in lines)

    def _repr_html_(self) -> str:
        return in_notebook(self._blocks())


def in_notebook(blocks: Sequence[Table | Facts | str]) -> str:
    """Their HTML."""
    text: str = _environment(True).get_template("notebook.html").render(blocks=blocks)
    return text


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
    """Markdown of a text that begins a line, where it could start a list or underline a heading."""
    text = re.sub(r"^([-+=])", r"\\\1", _inner(text))
    return re.sub(r"^(\d+)([.)])(?= |$)", r"\1\\\2", text)


def _inner(text: str) -> str:
    """Markdown of a text within a line."""
    return _one_line(text).replace("&", "&amp;").translate(_SPECIAL)


def _one_line(text: str) -> str:
    """Remove line breaks, and characters that are invisible or turn the text around."""
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))


def _plain(value: Any) -> Any:
    """Markup that the templates have made is no plain ``str``, and stays as it is."""
    return _one_line(value) if type(value) is str else value
