"""Plain texts stay what they are, in Markdown and in HTML."""

import re
from html.parser import HTMLParser

import pytest

from pyro_dp import ConfigurationError
from pyro_dp.accounting.markup import Bullets, Facts, Heading, Paragraph, Picture, Table, rendered

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
        self.tags.append((tag, [name for name, _ in attrs]))
        self.texts.append("")

    def handle_data(self, data):
        if self.texts:
            self.texts[-1] += data


def one_line(text):
    return " ".join(text.split())


def blocks(text):
    table = Table(("head", text), [(text, "cell"), (text, text)], "caption", (text, "foot"))
    facts = Facts([("fact", text)])
    first = [Heading(text, 1), Heading("part"), Paragraph(text), Paragraph(text, loud=True)]
    return [*first, Bullets([text]), table, facts]


@pytest.mark.parametrize("text", TEXTS)
def test_html_shows_what_the_text_says(text):
    page = Page(rendered(blocks(text), "html"))
    shown = [each.strip() for each in page.texts]
    assert shown.count(one_line(text)) == 11  # once more in the title
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
        for mark in ("**", "## ", "# ", "|"):
            if mark in like:
                bare = bare.replace(mark, "")
        assert not re.search(r"[`*_\[\]#~$<>|]", bare)
        if line != like:
            content = re.sub(r"^(# |- |\*\*|\| )", "", line)
            assert not re.match(r"[-+=]|\d+[.)]( |$)", content)
    unescaped = re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", lines[4])
    for entity, character in (("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")):
        unescaped = unescaped.replace(entity, character)
    assert unescaped == one_line(text)


@pytest.mark.parametrize("format", ["markdown", "html"])
def test_characters_that_are_not_seen_are_shown(format):
    found = rendered([Heading("T", 1), Paragraph("a\u202eb\u200bc\x00d")], format)
    assert "a\ufffdb\ufffdc\ufffdd" in found


def test_markdown_and_html_of_each_block():
    assert rendered([Heading("T", 1), Heading("S")], "markdown") == "# T\n\n## S\n"
    assert rendered([Bullets(["a", "b"])], "markdown") == "- a\n- b\n"
    table = rendered([Table(("h", "i"), [("1.5", "x")], "c", ("all", ""))], "markdown")
    assert table == "c:\n\n| h | i |\n| --- | --- |\n| 1.5 | x |\n| all |  |\n"
    assert rendered([Paragraph("p", loud=True)], "markdown") == "**p**\n"
    assert rendered([Facts([("a", "1. b"), ("c", "d")])], "markdown") == "- a: 1. b\n- c: d\n"
    page = rendered([Heading("T", 1), Paragraph("p", loud=True)], "html")
    assert "<title>T</title>" in page
    assert '<p class="loud">p</p>' in page


def test_a_page_has_landmarks_and_tables_have_scopes():
    picture = Picture("<svg></svg>", "what it shows")
    table = Table(("h", "i"), [("a", "1.5")], "c", ("all", "3"), numbers=(1,))
    blocks = [Heading("T", 1), Heading("A"), Paragraph("p"), picture, picture, Heading("B"), table]
    page = rendered(blocks, "html")
    order = ["<header>", "<h1>T</h1>", "<nav aria-label=", 'href="#section-0"', "<main>"]
    order += ['<section aria-labelledby="section-0">', '<h2 id="section-0">A</h2>', "<p>p</p>"]
    order += ['<div class="pictures"><figure><svg>', "<figcaption>what it shows</figcaption>"]
    order += ['<h2 id="section-1">B</h2>', "<caption>c</caption>", 'scope="col"', 'scope="row"']
    places = [page.index(each) for each in order]
    assert places == sorted(places)
    assert 'data-column="i" class="number">1.5</td>' in page
    assert page.count("pictures") == 1 + page.split("<body>")[0].count("pictures")
    assert 'lang="en"' in page and 'name="viewport"' in page
    assert "http" not in page and "@import" not in page  # nothing is fetched
    assert "what it shows" not in rendered(blocks, "markdown")


def test_formats():
    with pytest.raises(ConfigurationError, match="format"):
        rendered([Heading("T", 1)], "pdf")
