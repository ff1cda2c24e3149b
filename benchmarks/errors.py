"""Write docs/errors.md: an index of errors and warnings, each with its fix.

They are those of tests/first_attempts.py and tests/first_warnings.py.

python benchmarks/errors.py
"""

import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate, groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import first_warnings  # noqa: E402
from first_attempts import ATTEMPTS, Attempt  # noqa: E402

PAGE = ROOT / "docs" / "errors.md"
_INTRODUCTION = """\
# What errors say

Find your message by its first words, with Ctrl-F or the search of this site. The line below it says
what to do. Names and numbers are those of an example. If the message quotes a line of your code, it
is left out here. A run that is refused has spent nothing. No error quotes your data. The code of
each example is in [tests/first_attempts.py](../tests/first_attempts.py).
"""
_WARNINGS = """\
## Warnings and status

A warning means that the run has happened, and that its budget is spent. The
[status](explain.md#what-the-status-means) is the last line of a printed posterior. Both are made
from released numbers, and cost nothing. The code of each run is in
[tests/first_warnings.py](../tests/first_warnings.py).
"""
_FILE = "first_attempts.py"  # the user's file in messages
# Clauses that end before they say what is wrong: a setting, a site, the type of an error.
_UNFINISHED = re.compile(
    r"^(\w+|Site '\w+' of the \w+|pyro\.settings):$|raised \w+( at site '\w+')?:$"
)
_ROUND = r"\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*\)"
_SQUARE = r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]"
# A call or an element; a setting; a name of several words.
_CODE = re.compile(
    rf"[~*\w.]*\w(?:(?:{_ROUND}|{_SQUARE})(?:\.\w+)*)+"
    r"|\w+=(?:\{[^}]*\}|'[^']*'|\.{3}|[\w.]*\w)?|\w*_\w+|~?[A-Za-z]\w*\.[\w.]*\w"
)


def page() -> str:
    """All attempts, by group, and all runs with warnings."""
    parts = [_INTRODUCTION]
    for group, attempts in groupby(ATTEMPTS, key=lambda attempt: attempt.group):
        parts.append(f"## {group}\n\n{_entries(attempts)}")
    parts.append(_WARNINGS)
    for group, runs in groupby(first_warnings.RUNS, key=lambda run: run.group):
        parts.append(f"### {group}\n\n" + "".join(map(_run, runs)))
    return "\n".join(parts)


def _entries(attempts: Iterable[Attempt]) -> str:
    """A line for each message, once, and one for what works."""
    entries, working = [], []
    for attempt in attempts:
        text, _ = attempt.run()
        if text is None:
            working.append(attempt.title)
        else:
            entries.append(_entry(*split(text.split(": ", 1)[1], attempt.says)))
    if working:
        entries.append(f"* These work, and raise no error. {' '.join(working)}\n")
    return "".join(dict.fromkeys(entries))


def _entry(cause: str, fix: str) -> str:
    return f"* `{cause}`" + (f"\\\n  {_marked(fix)}\n" if fix else "\n")


def _run(run: first_warnings.Run) -> str:
    given, status, _ = run.outcome
    said = str(given[0]) if given else status.line
    return f"* {run.title}\\\n  `{_sentence(said)}`\\\n  {run.do}\n"


def split(text: str, says: str) -> tuple[str, str]:
    """The first clause of a message, and what it says to do: from there to the sentence's end."""
    clauses = list(_clauses(_without_line(text)))
    begins = [0, *accumulate(len(clause) + 1 for clause in clauses)]
    *_, found = re.finditer(says, " ".join(clauses), flags=re.IGNORECASE)
    advice = bisect_right(begins, found.start()) - 1
    if not clauses[advice][0].isalpha() and clauses[advice][0] != "(":  # what the last one names
        advice -= 1
    cause = next(n for n, clause in enumerate(clauses, 1) if not _UNFINISHED.search(clause))
    end = next(n for n in range(advice + 1, len(clauses) + 1) if clauses[n - 1].endswith("."))
    if advice < cause:
        return " ".join(clauses[:end]).rstrip("."), ""
    fix = re.sub(r"^\((.*)\.\)\.$", r"\1.", " ".join(clauses[advice:end]))
    return " ".join(clauses[:cause]).rstrip(".:;"), fix[0].upper() + fix[1:]


def _without_line(text: str) -> str:
    """Without the line of the user's code that the message quotes in brackets."""
    head, quoted, tail = text.partition(f" ({_FILE}:")
    depth = 1 if quoted else 0
    while depth:
        depth += (tail[0] in "([{") - (tail[0] in ")]}")
        tail = tail[1:]
    return head + tail


def _clauses(text: str) -> Iterator[str]:
    """Parts that end with a full stop, colon or semicolon outside of brackets."""
    depth = begin = 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if not depth and text[place : place + 2] in (". ", ": ", "; "):
            yield text[begin : place + 1]
            begin = place + 2
    yield text[begin:].rstrip(".") + "."


def _sentence(text: str) -> str:
    """The first one, without its full stop."""
    clauses = list(_clauses(text))
    first = next(n for n, clause in enumerate(clauses, 1) if clause.endswith("."))
    return " ".join(clauses[:first])[:-1]


def _marked(text: str) -> str:
    """With its code as code, and no other Markdown."""
    parts = re.split(f"({_CODE.pattern})", text)
    parts[::2] = [re.sub(r"([*_\[\]<>`|])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [f"`{part}`" for part in parts[1::2]]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(
        f"{len(ATTEMPTS)} attempts and {len(first_warnings.RUNS)} runs in {PAGE.relative_to(ROOT)}"
    )
