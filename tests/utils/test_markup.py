"""Plain texts stay what they are, in Markdown and in HTML."""

import re
from html.parser import HTMLParser

import pytest

from pyro_dp import ConfigurationError
from pyro_dp.utils.markup import Bullets, Facts, Paragraph, Picture, Pictures, Table, rendered

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


def document(text, format):
    table = Table(("head", text), [(text, "cell"), (text, text)], "caption", (text, "foot"))
    facts = Facts([("fact", text)])
    blocks = [Paragraph(text), Paragraph(text, loud=True), Bullets([text]), table, facts]
    return rendered(text, {"part": blocks}, format)


@pytest.mark.parametrize("text", TEXTS)
def test_html_shows_what_the_text_says(text):
    page = Page(document(text, "html"))
    shown = [each.strip() for each in page.texts]
    assert shown.count(one_line(text)) == 11  # once more in the title
    plain = Page(document("word", "html"))
    assert page.tags == plain.tags


@pytest.mark.parametrize("text", TEXTS)
def test_markdown_has_the_structure_of_plain_words(text):
    """No character is left that has a meaning, so that only the document's own structure is."""
    found = document(text, "markdown")
    lines, plain = found.splitlines(), document("word", "markdown").splitlines()
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
    found = rendered("T", {"S": [Paragraph("a\u202eb\u200bc\x00d")]}, format)
    assert "a\ufffdb\ufffdc\ufffdd" in found


@pytest.mark.parametrize(
    "block, text",
    [
        (Bullets(["a", "b"]), "- a\n- b\n"),
        (
            Table(("h", "i"), [("1.5", "x")], "c", ("all", "")),
            "c:\n\n| h | i |\n| --- | --- |\n| 1.5 | x |\n| all |  |\n",
        ),
        (Paragraph("p"), "p\n"),
        (Paragraph("p", loud=True), "**p**\n"),
        (Facts([("a", "1. b"), ("c", "d")]), "- a: 1. b\n- c: d\n"),
    ],
)
def test_markdown_of_each_block(block, text):
    assert rendered("T", {"S": [block], "empty": []}, "markdown") == f"# T\n\n## S\n\n{text}"


def test_a_page_has_landmarks_and_tables_have_scopes():
    ticks = [(0.0, "0")]
    legend = (0, 0, [("curve", "a curve")])
    picture = Picture(
        "p", "P", "what it shows", ("x", "y"), (ticks, ticks), [("curve", "M0 0")], (1, 2), legend
    )
    table = Table(("h", "i"), [("a", "1.5")], "c", ("all", "3"), numbers=(1,))
    loud = Paragraph("p", loud=True)
    sections = {"A": [loud, Pictures([picture, picture])], "empty": [], "B": [table]}
    page = rendered("T", sections, "html")
    order = ["<title>T</title>", "<header>", "<h1>T</h1>", "<nav aria-label="]
    order += ['href="#section-0"', "<main>"]
    order += ['<section aria-labelledby="section-0">', '<h2 id="section-0">A</h2>']
    order += ['<p class="loud">p</p>']
    order += ['<div class="pictures"><figure><svg ', "<figcaption>what it shows</figcaption>"]
    order += ['<h2 id="section-1">B</h2>', "<caption>c</caption>", 'scope="col"', 'scope="row"']
    places = [page.index(each) for each in order]
    assert places == sorted(places)
    assert 'data-column="i" class="number">1.5</td>' in page
    assert page.count("pictures") == 1 + page.split("<body>")[0].count("pictures")
    assert 'lang="en"' in page and 'name="viewport"' in page
    assert "http" not in page and "@import" not in page  # nothing is fetched
    assert "what it shows" not in rendered("T", sections, "markdown")


def test_formats():
    with pytest.raises(ConfigurationError, match="format"):
        rendered("T", {}, "pdf")
