"""Small tables in HTML for notebooks: in the colours of the notebook's theme, light or dark.

Captions and scopes are for who hears them. Nothing has a colour of its own.
"""

import html
from collections.abc import Sequence

_TABLE = '<table style="margin:0.5em 0">'
_CAPTION = '<caption style="caption-side:top;text-align:left;color:inherit;font-weight:bold">'
_LEFT, _RIGHT = ' style="text-align:left"', ' style="text-align:right"'


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first cell of each row is its name.

    :param head: of the columns; where the first is empty, the rows' names need none.
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
