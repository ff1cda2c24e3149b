"""Documents of headings, paragraphs, lists, tables and pictures, as Markdown or HTML.

Texts are plain: whatever characters they hold, they are shown as they are.
"""

import html
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pyro_dp.accounting.page_style import STYLE
from pyro_dp.utils.validation import require_choice

FORMATS = ("markdown", "html")


class Heading(NamedTuple):
    """:param level: 1 for the title, 2 for sections."""

    text: str
    level: int = 2


class Paragraph(NamedTuple):
    """:param loud: to be seen first."""

    text: str
    loud: bool = False


class Bullets(NamedTuple):
    items: Sequence[str]


class Table(NamedTuple):
    """The first cell of each row is its name.

    :param caption: what it shows.
    :param foot: a last row, set apart; empty: there is none.
    :param numbers: columns of numbers, by place.
    :param kept: columns whose cells are one line, by place.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    foot: Sequence[str] = ()
    numbers: Sequence[int] = ()
    kept: Sequence[int] = ()


class Facts(NamedTuple):
    """Names, and what there is to say of each."""

    pairs: Sequence[tuple[str, str]]


class Picture(NamedTuple):
    """Shown in HTML alone.

    :param svg: of this package's own making: it is not escaped.
    :param caption: says what it shows, also to who does not see it.
    """

    svg: str
    caption: str


Block = Heading | Paragraph | Bullets | Table | Facts | Picture


def rendered(blocks: Sequence[Block], format: str) -> str:
    """
    :param blocks: of the document; the first is its title, a heading of level 1.
    :param format: "markdown" or "html"; the latter is a page of its own.
    :raises ConfigurationError: the format is another one.
    """
    require_choice("format", format, FORMATS)
    if format == "markdown":
        texts = [_as_markdown(block) for block in blocks if not isinstance(block, Picture)]
        return "\n\n".join(texts) + "\n"
    title, *rest = blocks
    assert isinstance(title, Heading) and title.level == 1
    sections = list(_sections(rest))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_html(title.text)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<header>\n{_as_html(title)}\n</header>\n{_contents(sections)}<main>\n"
        f"{''.join(_section(place, each) for place, each in enumerate(sections))}"
        "</main>\n</body>\n</html>\n"
    )


def _sections(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Each begins with its heading, if it has one."""
    found: list[Block] = []
    for block in blocks:
        if isinstance(block, Heading) and found:
            yield found
            found = []
        found.append(block)
    if found:
        yield found


def _contents(sections: Sequence[Sequence[Block]]) -> str:
    """Links to the sections."""
    links = [
        f'<li><a href="#section-{place}">{_html(first.text)}</a></li>'
        for place, (first, *_) in enumerate(sections)
        if isinstance(first, Heading)
    ]
    if len(links) < 2:
        return ""
    return f'<nav aria-label="Contents"><ol>{"".join(links)}</ol></nav>\n'


def _section(place: int, blocks: Sequence[Block]) -> str:
    first, *rest = blocks
    if not isinstance(first, Heading):
        return "".join(f"{_as_html(block)}\n" for block in blocks)
    name = f"section-{place}"
    body = "".join(f"{each}\n" for each in _with_pictures_side_by_side(rest))
    heading = f'<h{first.level} id="{name}">{_html(first.text)}</h{first.level}>'
    return f'<section aria-labelledby="{name}">\n{heading}\n{body}</section>\n'


def _with_pictures_side_by_side(blocks: Sequence[Block]) -> Iterator[str]:
    row: list[str] = []
    for block in blocks:
        if isinstance(block, Picture):
            row.append(_as_html(block))
            continue
        if row:
            yield f'<div class="pictures">{"".join(row)}</div>'
            row = []
        yield _as_html(block)
    if row:
        yield f'<div class="pictures">{"".join(row)}</div>'


def _as_html(block: Block) -> str:
    if isinstance(block, Heading):
        return _tag(f"h{block.level}", block.text)
    if isinstance(block, Paragraph):
        start = '<p class="loud">' if block.loud else "<p>"
        return f"{start}{_html(block.text)}</p>"
    if isinstance(block, Bullets):
        return f"<ul>{''.join(_tag('li', item) for item in block.items)}</ul>"
    if isinstance(block, Facts):
        pairs = (f"<div>{_tag('dt', name)}{_tag('dd', text)}</div>" for name, text in block.pairs)
        return f"<dl>{''.join(pairs)}</dl>"
    if isinstance(block, Picture):
        return f"<figure>{block.svg}{_tag('figcaption', block.caption)}</figure>"
    return _html_table(block)


def _html_table(table: Table) -> str:
    """Where the page is narrow, each row is a card of its own (:data:`STYLE`).

    A cell then shows the name of its column, and what is what must be said by roles: browsers
    forget it where tables are not laid out as such.
    """

    def row(cells: Sequence[str]) -> str:
        first, *others = (
            f' data-column="{_html(name)}"{_kind(place, table)}>{_html(cell)}'
            for place, (name, cell) in enumerate(zip(table.head, cells, strict=True))
        )
        rest = "".join(f'<td role="cell"{cell}</td>' for cell in others)
        return f'<tr role="row"><th scope="row" role="rowheader"{first}</th>{rest}</tr>'

    head = "".join(
        f'<th scope="col" role="columnheader"{_kind(place, table)}>{_html(name)}</th>'
        for place, name in enumerate(table.head)
    )
    foot = f'<tfoot role="rowgroup">{row(table.foot)}</tfoot>' if table.foot else ""
    kind = ' class="wide"' if len(table.head) > 4 else ""
    return (
        f'<table role="table"{kind}>{_tag("caption", table.caption)}'
        f'<thead role="rowgroup"><tr role="row">{head}</tr></thead>'
        f'<tbody role="rowgroup">{"".join(map(row, table.rows))}</tbody>{foot}</table>'
    )


def _kind(place: int, table: Table) -> str:
    """Of a column, for the style sheet."""
    if place in table.numbers:
        return ' class="number"'
    return ' class="kept"' if place in table.kept else ""


def _html(text: str) -> str:
    return html.escape(_one_line(text))


def _tag(name: str, text: str) -> str:
    return f"<{name}>{_html(text)}</{name}>"


def _as_markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {_markdown(block.text)}"
    if isinstance(block, Paragraph):
        text = _markdown(block.text)
        return f"**{text}**" if block.loud else text
    if isinstance(block, Bullets):
        return "\n".join(f"- {_markdown(item)}" for item in block.items)
    if isinstance(block, Facts):
        return "\n".join(f"- {_markdown(name)}: {_inner(text)}" for name, text in block.pairs)
    assert isinstance(block, Table)
    rule = ["---"] * len(block.head)
    foot = [block.foot] if block.foot else []
    rows = [list(map(_markdown, row)) for row in (block.head, *block.rows, *foot)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))
    return f"{_markdown(block.caption)}:\n\n{table}"


_SPECIAL = str.maketrans({c: f"\\{c}" for c in "\\`*_[]|#~$"} | {"<": "&lt;", ">": "&gt;"})
# At its beginning a text could also start a list or underline a heading.
_AT_START = [(r"^([-+=])", r"\\\1"), (r"^(\d+)([.)])(?= |$)", r"\1\\\2")]


def _markdown(text: str) -> str:
    text = _inner(text)
    for pattern, replacement in _AT_START:
        text = re.sub(pattern, replacement, text)
    return text


def _inner(text: str) -> str:
    """Where it does not begin a line."""
    return _one_line(text).replace("&", "&amp;").translate(_SPECIAL)


def _one_line(text: str) -> str:
    """Without line breaks, and without characters that are not seen or turn the text around."""
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))
