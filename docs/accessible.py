"""For Sphinx: pages that can be read with a keyboard and by ear, beyond what furo does."""

import re

_SIGNATURE = re.compile(r'<dt class="sig .*?</dt>', flags=re.DOTALL)
_EMPTY_HEADER = re.compile("<th( [^>]*)?>(?:<p></p>)?</th>")  # it is no header


def setup(app):
    # After furo, which makes the navigation from Sphinx's own.
    app.connect("html-page-context", _mend, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _mend(app, page, template, context, doctree):
    if "furo_navigation_tree" in context:
        context["furo_navigation_tree"] = context["furo_navigation_tree"].replace(
            'role="heading"', 'role="heading" aria-level="2"'
        )
    if "body" in context:
        body = _EMPTY_HEADER.sub(r"<td\1></td>", _SIGNATURE.sub(_as_lines, context["body"]))
        context["body"] = _scrolled(_named(body))


def _as_lines(signature):
    """Parameters a line each are a list of definitions without terms: as plain lines instead."""
    text = re.sub(r"<dl>(.*)</dl>", r'<span class="sig-lines">\1</span>', signature[0], flags=re.S)
    return text.replace("<dd>", '<span class="sig-line">').replace("</dd>", "</span>")


def _named(body):
    """A folded cell gets its name from its visible text."""
    return body.replace(' aria-label="Toggle hidden content"', "")


def _scrolled(body):
    """Tables and code can be scrolled without a mouse."""
    for kind in ("table-wrapper", "output text_html"):
        body = body.replace(f'<div class="{kind}', f'<div tabindex="0" class="{kind}')
    return body.replace("<pre>", '<pre tabindex="0">').replace("<pre id", '<pre tabindex="0" id')
