"""Write docs/errors.md: the wrong first attempts of tests/first_attempts.py, and what they get.

python benchmarks/errors.py
"""

import inspect
import sys
import textwrap
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from first_attempts import ATTEMPTS, SHARED, Attempt  # noqa: E402

PAGE = ROOT / "docs" / "errors.md"
_INTRODUCTION = """\
# Errors

What new users get wrong first, and what `pyro_dp` says. Each attempt is run as it stands here,
with the functions below. `tests/package/test_first_attempts.py` holds each error to naming the
line, the argument or the site, and what to try next; to coming before anything is spent, where no
step was taken before; and to quoting no number of the data. Made by `python benchmarks/errors.py`,
which wraps the lines of the messages; `first_attempts.py` in them is the user's file.
"""


def page() -> str:
    """All attempts, by group."""
    shared = "\n\n".join(inspect.getsource(function).rstrip() for function in SHARED)
    parts = [_INTRODUCTION, _fenced(shared, "python")]
    for group, attempts in groupby(ATTEMPTS, key=lambda attempt: attempt.group):
        parts += [f"## {group}\n", *map(_entry, attempts)]
    return "\n".join(parts)


def _entry(attempt: Attempt) -> str:
    text, _ = attempt.run()
    if text is None:
        outcome = "No error: this works.\n"
    else:
        lines = [textwrap.wrap(line, 110, break_long_words=False) for line in text.splitlines()]
        outcome = _fenced("\n".join("\n".join(line) for line in lines), "text")
    return "\n".join([f"### {attempt.title}\n", _fenced(attempt.code, "python"), outcome])


def _fenced(text: str, language: str) -> str:
    return f"```{language}\n{text}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{len(ATTEMPTS)} attempts in {PAGE.relative_to(ROOT)}")
