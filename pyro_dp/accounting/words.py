"""The words of a report: the paragraphs of ``pages/words.md``, by their headings."""

import functools
import importlib.resources
from typing import Any


@functools.cache
def _words() -> dict[str, list[str]]:
    page = importlib.resources.files("pyro_dp.accounting") / "pages" / "words.md"
    _, *parts = page.read_text(encoding="utf-8").split("\n## ")
    texts = ([" ".join(each.split()) for each in part.split("\n\n")] for part in parts)
    return {name: found for name, *found in texts}


def texts(name: str) -> list[str]:
    """The paragraphs under a heading of ``words.md``."""
    return _words()[name]


def words(name: str, **values: Any) -> str:
    """The one paragraph under a heading of ``words.md``, with these values filled in."""
    [text] = texts(name)
    return text.format(**values)
