"""Plain texts stay what they are, in Markdown, in HTML and in notebooks.

A column of numbers has one number of decimals.
"""

import math
import re
from html.parser import HTMLParser

import pytest

from pyro_dp import ConfigurationError
from pyro_dp.utils.display import (
    Bullets,
    Displayed,
    Facts,
    Paragraph,
    Picture,
    Pictures,
    Table,
    numbers,
    rendered,
)

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


BAD = "<script>alert('x')</script> & \"y\""
SAFE = "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; &#34;y&#34;"


class Both(Displayed):
    def _blocks(self):
        table = Table(("", "a", "b"), [("x", "1", "22"), ("y", "3", "4")], "c")
        return [table, Facts([("x", "1")], "f"), "done"]


def test_texts_are_escaped(monkeypatch):
    blocks = [Table((BAD, BAD), [(BAD, BAD)], BAD), Facts([(BAD, BAD)], BAD), BAD]
    monkeypatch.setattr(Both, "_blocks", lambda self: blocks)
    whole = Both()._repr_html_()
    assert whole.count(SAFE) == 9 and "<script" not in whole


def test_text_and_notebooks_say_the_same():
    assert repr(Both()).splitlines() == ["   a   b", "x  1  22", "y  3   4", "f", "  x: 1", "done"]
    found = Both()._repr_html_()
    assert ">c</caption>" in found and ">f</caption>" in found and found.endswith("<p>done</p>")
    assert found.count('scope="col"') == 2 and found.count('scope="row"') == 3
    assert "<th></th>" not in found and found.count("<thead>") == 1


def test_colours_are_those_of_the_theme():
    whole = Both()._repr_html_()
    assert set(whole.split("color:")[1:]) and all(
        each.startswith("inherit") for each in whole.split("color:")[1:]
    )
    assert "background" not in whole


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.2, 0.25], ["0.200", "0.250"]),
        ([0.245, 0.0586, -0.375], ["0.2450", "0.0586", "-0.3750"]),
        ([0.0314, 0.000556], ["0.031400", "0.000556"]),
        ([20_480.0, 12.5, -3.04], ["20480.0", "12.5", "-3.0"]),
        ([9.999, -0.0, math.inf, math.nan], ["10.00", "0.00", "inf", "nan"]),
        ([0.0, 0.0], ["0.00", "0.00"]),
        ([], []),
    ],
)
def test_a_column_has_one_number_of_decimals(values, texts):
    assert numbers(values) == texts


def test_magnitudes_that_differ_much_have_digits_of_their_own():
    assert numbers([250.0, 0.0002, 0.0]) == ["250", "0.000200", "0.00"]
    assert numbers([3e-9, 2e8]) == ["3.00e-09", "2.00e+08"]
