"""Documents of headings, paragraphs, lists and tables, as Markdown or HTML.

Texts are plain: whatever characters they hold, they are shown as they are.
"""

import html
import re
from collections.abc import Sequence
from typing import NamedTuple

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
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


Block = Heading | Paragraph | Bullets | Table


def rendered(blocks: Sequence[Block], format: str) -> str:
    """
    :param blocks: of the document; the first text is its title.
    :param format: "markdown" or "html"; the latter is a page of its own.
    :raises ConfigurationError: the format is another one.
    """
    require_choice("format", format, FORMATS)
    if format == "markdown":
        return "\n\n".join(map(_as_markdown, blocks)) + "\n"
    text = next((each.text for each in blocks if isinstance(each, Heading | Paragraph)), "")
    body = "\n".join(map(_as_html, blocks))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{_html(text)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n"
        "</html>\n"
    )


_STYLE = (
    "body{font-family:sans-serif;line-height:1.5;max-width:50em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}th,td{border:1px solid #999;padding:.3em .6em;text-align:left}"
    ".loud{border:2px solid #b00;background:#fee;padding:.6em;font-weight:bold}"
)


def _as_html(block: Block) -> str:
    if isinstance(block, Heading):
        return _tag(f"h{block.level}", block.text)
    if isinstance(block, Paragraph):
        start = '<p class="loud">' if block.loud else "<p>"
        return f"{start}{_html(block.text)}</p>"
    if isinstance(block, Bullets):
        return f"<ul>{''.join(_tag('li', item) for item in block.items)}</ul>"
    rows = [("th", block.head), *(("td", row) for row in block.rows)]
    cells = ("".join(_tag(tag, cell) for cell in row) for tag, row in rows)
    return f"<table>{''.join(f'<tr>{each}</tr>' for each in cells)}</table>"


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
    rule = ["---"] * len(block.head)
    rows = [list(map(_markdown, row)) for row in (block.head, *block.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))


_SPECIAL = str.maketrans({c: f"\\{c}" for c in "\\`*_[]|#~$"} | {"<": "&lt;", ">": "&gt;"})
# At its beginning a text could also start a list or underline a heading.
_AT_START = [(r"^([-+=])", r"\\\1"), (r"^(\d+)([.)])(?= |$)", r"\1\\\2")]


def _markdown(text: str) -> str:
    text = _one_line(text).replace("&", "&amp;").translate(_SPECIAL)
    for pattern, replacement in _AT_START:
        text = re.sub(pattern, replacement, text)
    return text


def _one_line(text: str) -> str:
    """Without line breaks, and without characters that are not seen or turn the text around."""
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))
