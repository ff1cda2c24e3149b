"""The slides of the course: their numbers and pictures are those of the notebooks."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def slides(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import slides

    yield slides
    sys.modules.pop("slides")


@pytest.mark.slow
def test_pdf_has_all_slides(slides):
    pdf = (DOCS / "slides.pdf").read_bytes()
    assert len(re.findall(rb"/Type /Page\b", pdf)) == len(slides.DECK)
    assert re.findall(rb"/Contents \((.*)\)\n", pdf) == [each.note.encode() for each in slides.DECK]
    assert len(pdf) < 1_000_000


@pytest.mark.long
def test_numbers_are_those_of_the_pages(slides):
    pages = [*DOCS.parent.glob("tutorials/*.ipynb"), DOCS / "officer.md", DOCS / "quiz.md"]
    written = set(re.findall(r"\d[\d.,]*\d", "\n".join(page.read_text() for page in pages)))
    for slide in slides.DECK:
        for number in re.findall(r"\d[\d.,]*\d", slide.text + slide.code):
            assert number in written or number in ("22", "93"), number  # 22% and 93%: of odds


def test_pictures_are_there(slides):
    for slide in slides.DECK:
        if slide.picture:
            notebook, index = slide.picture
            assert slides.pictures(notebook)[index]
