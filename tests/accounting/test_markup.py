"""Plain texts stay what they are, in Markdown and in HTML."""

import re
from html.parser import HTMLParser

import pytest

from pyro_dp import ConfigurationError
from pyro_dp.accounting.markup import Bullets, Heading, Paragraph, Table, rendered

TEXTS = [
    "<script>alert('x')</script>",
    "a & b &amp; c < d > e",
    "`code` *bold* _under_ __init__ ~~gone~~ $x$",
    "[link](http://example.org) ![image](x.png)",
    "a | b || c \\| d \\",
    "# heading",
    "- list",
    "1. list",
    "--- ",
    "\"quoted\" 'text'",
    "two\nlines\r\n\n# not a heading\t|",
]


class Page(HTMLParser):
    """Tags, and the text of every innermost element."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.texts.append("")

    def handle_data(self, data):
        if self.texts:
            self.texts[-1] += data


def one_line(text):
    return " ".join(text.split())


def blocks(text):
    table = Table(("head", text), [(text, "cell"), (text, text)])
    return [Heading(text, 1), Paragraph(text), Paragraph(text, loud=True), Bullets([text]), table]


@pytest.mark.parametrize("text", TEXTS)
def test_html_shows_what_the_text_says(text):
    page = Page(rendered(blocks(text), "html"))
    shown = [each.strip() for each in page.texts]
    assert shown.count(one_line(text)) == 9  # once more in the title
    plain = Page(rendered(blocks("word"), "html"))
    assert page.tags == plain.tags


@pytest.mark.parametrize("text", TEXTS)
def test_markdown_has_the_structure_of_plain_words(text):
    """No character is left that has a meaning, so that only the document's own structure is."""
    found = rendered(blocks(text), "markdown")
    lines, plain = found.splitlines(), rendered(blocks("word"), "markdown").splitlines()
    assert len(lines) == len(plain)
    for line, like in zip(lines, plain, strict=True):
        bare = re.sub(r"\\[!-/:-@\[-`{-~]", "", line)  # without escaped characters
        assert bare.count("|") == like.count("|")
        for mark in ("**", "# ", "|"):
            if mark in like:
                bare = bare.replace(mark, "")
        assert not re.search(r"[`*_\[\]#~$<>|]", bare)
        if line != like:
            content = re.sub(r"^(# |- |\*\*|\| )", "", line)
            assert not re.match(r"[-+=]|\d+[.)]( |$)", content)
    unescaped = re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", lines[2])
    for entity, character in (("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")):
        unescaped = unescaped.replace(entity, character)
    assert unescaped == one_line(text)


@pytest.mark.parametrize("format", ["markdown", "html"])
def test_characters_that_are_not_seen_are_shown(format):
    found = rendered([Paragraph("a\u202eb\u200bc\x00d")], format)
    assert "a\ufffdb\ufffdc\ufffdd" in found


def test_markdown_and_html_of_each_block():
    assert rendered([Heading("T", 1), Heading("S")], "markdown") == "# T\n\n## S\n"
    assert rendered([Bullets(["a", "b"])], "markdown") == "- a\n- b\n"
    table = rendered([Table(("h", "i"), [("1.5", "x")])], "markdown")
    assert table == "| h | i |\n| --- | --- |\n| 1.5 | x |\n"
    assert rendered([Paragraph("p", loud=True)], "markdown") == "**p**\n"
    page = rendered([Heading("T", 1), Paragraph("p", loud=True)], "html")
    assert "<title>T</title>" in page
    assert '<p class="loud">p</p>' in page


def test_formats():
    with pytest.raises(ConfigurationError, match="format"):
        rendered([Heading("T", 1)], "pdf")
