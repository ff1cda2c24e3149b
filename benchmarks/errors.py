"""Write docs/errors.md: wrong first attempts and what they get, and warnings and what to do then.

They are those of tests/first_attempts.py and tests/first_warnings.py.

python benchmarks/errors.py
"""

import inspect
import sys
import textwrap
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import first_warnings  # noqa: E402
from first_attempts import ATTEMPTS, SHARED, Attempt  # noqa: E402

PAGE = ROOT / "docs" / "errors.md"
_INTRODUCTION = """\
# Errors

What new users get wrong first, and what `pyro_dp` says. Each attempt is run as it stands here,
with the functions below. `tests/package/test_first_attempts.py` holds each error to naming the
line, the argument or the site, and what to try next; to coming before anything is spent, where no
step was taken before; and to quoting no number of the data. Made by `python benchmarks/errors.py`,
which wraps the lines of the messages; `first_attempts.py` in them is the user's file.
[Warnings](#warnings-and-status), which come at the end of a run that did happen, are below.
"""
_WARNINGS = """\
## Warnings and status

An error says that nothing was done; a warning, that something was done and may not be what it
looks like. What was released, is paid for. The *status* of a posterior is the last line where it is
printed, and `posterior().status`: see [what the status means](methods.md#what-the-status-means).
Warnings and status are made from what was released, and cost nothing. Each run below is run
as it stands here, with these functions, by `tests/package/test_first_attempts.py`, too; a table
has means and 95% intervals, in the frame's own units.
"""


def page() -> str:
    """All attempts, by group, and all runs with warnings."""
    shared = "\n\n".join(inspect.getsource(function).rstrip() for function in SHARED)
    parts = [_INTRODUCTION, _fenced(shared, "python")]
    for group, attempts in groupby(ATTEMPTS, key=lambda attempt: attempt.group):
        parts += [f"## {group}\n", *map(_entry, attempts)]
    shared = "\n\n".join(inspect.getsource(each).rstrip() for each in first_warnings.SHARED)
    parts += [_WARNINGS, _fenced(shared, "python")]
    for group, runs in groupby(first_warnings.RUNS, key=lambda run: run.group):
        parts += [f"### {group}\n", *map(_run, runs)]
    return "\n".join(parts)


def _entry(attempt: Attempt) -> str:
    text, _ = attempt.run()
    if text is None:
        outcome = "No error: this works.\n"
    else:
        outcome = _text(text)
    return "\n".join([f"### {attempt.title}\n", _fenced(attempt.code, "python"), outcome])


def _run(run: first_warnings.Run) -> str:
    given, status, table = run.outcome
    said = [f"{type(each).__name__}: {each}" for each in given]
    said += [status.line] if status is not None else []
    outcome = [_fenced(table, "text")] if table else []
    outcome.append(_text("\n".join(said)) if said else "No warning.\n")
    return "\n".join(
        [f"#### {run.title}\n", _fenced(run.code, "python"), *outcome, f"{_wrapped(run.do)}\n"]
    )


def _text(text: str) -> str:
    return _fenced("\n".join(_wrapped(line) for line in text.splitlines()), "text")


def _wrapped(line: str) -> str:
    return "\n".join(textwrap.wrap(line, 110, break_long_words=False))


def _fenced(text: str, language: str) -> str:
    return f"```{language}\n{text}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(
        f"{len(ATTEMPTS)} attempts and {len(first_warnings.RUNS)} runs in {PAGE.relative_to(ROOT)}"
    )
