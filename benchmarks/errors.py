"""Write docs/errors.md: an index of errors and warnings, each with its fix.

They are those of tests/first_attempts.py and tests/first_warnings.py.

python benchmarks/errors.py
"""

import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import first_warnings  # noqa: E402
from first_attempts import ATTEMPTS, Attempt  # noqa: E402

PAGE = ROOT / "docs" / "errors.md"
_INTRODUCTION = """\
# What errors say

Paste your message into the field, or search for its words. An entry has the first words of a
message, with the names of an example, and then the fix. Messages that themselves say what to pass
are not listed. A refused run has spent nothing. No error quotes your data. The examples are in
[tests/first_attempts.py](../tests/first_attempts.py).
"""
_WARNED = "Warnings and status"
_WARNINGS = f"""\
## {_WARNED}

A warning comes after the run, when its budget is spent. The
[status](explain.md#what-the-status-means) is printed below a posterior. Both come from
released numbers, and cost nothing. The examples are in
[tests/first_warnings.py](../tests/first_warnings.py).
"""
GROUPS = [*dict.fromkeys(attempt.group for attempt in ATTEMPTS), _WARNED]
_WORDS = 9  # They are enough to find a message.
_BREAK = "\\\n  "
_ASIDE = re.compile(r" \((?![^()]*`)[^()]{40,}\)")  # beside a fix
_FILE = "first_attempts.py"  # the user's file in messages
# Clauses that end before they say what is wrong: a setting, a site, the type of an error.
_UNFINISHED = re.compile(
    r"^(\w+|up_to\([\d.]+\)|Site '\w+' of the \w+|pyro\.settings):$|raised \w+( at site '\w+')?:$"
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
    return "\n".join([_INTRODUCTION, *map(section, GROUPS)])


def section(group: str) -> str:
    """One group of attempts, or the runs."""
    if group == _WARNED:
        return f"{_WARNINGS}\n{_entries(map(_warned, first_warnings.RUNS))}"
    attempts = (each for each in ATTEMPTS if each.group == group)
    return f"## {group}\n\n{_entries(map(_refused, attempts))}"


def _entries(found: Iterable[tuple[str, str]]) -> str:
    """Each fix once, below the messages that it mends, once each whatever they name."""
    entries: dict[str, tuple[str, dict[str, str]]] = {}
    for message, fix in found:
        if fix:
            _, messages = entries.setdefault(_CODE.sub("", fix), (fix, {}))
            messages.setdefault(re.sub(r"'\w+'|[\d.]+", "", message), message)
    lines = ([*(f"`{each}`" for each in said.values()), fix] for fix, said in entries.values())
    return "".join(f"* {_BREAK.join(each)}\n" for each in lines)


def _refused(attempt: Attempt) -> tuple[str, str]:
    """The message of an attempt and its fix."""
    text, _ = attempt.outcome
    cause, fix = split(text.split(": ", 1)[1], attempt.says)
    return _head(re.sub(r"^Running .* raised ", "", cause)), _marked(_ASIDE.sub("", fix))


def _warned(run: first_warnings.Run) -> tuple[str, str]:
    """The warning or status of a run and what to do; empty if the status is ok."""
    given, status, _ = run.outcome
    if given:
        return _head(_sentence(str(given[0]))), run.do
    return (_head(status.line), run.do) if not status.is_ok else ("", "")


def _head(message: str) -> str:
    """Its first words."""
    words = message.split()
    head = " ".join(words[:_WORDS])
    return head.rstrip(",;:(") + (" ..." if len(words) > _WORDS else "")


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
