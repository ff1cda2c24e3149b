"""What becomes of plausible user code that leaks, or would.

    python benchmarks/leaks.py [name ...] [--write]

Prints the verdict for each of tests/leaks.py: how it is refused, or by how much a release and what
is public moves between neighbouring data sets. --write puts the verdicts into the last column of
docs/leaks.md.
"""

import argparse
import re
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "leaks.md"
sys.path.insert(0, str(ROOT / "tests"))

from leak_verdicts import Verdict, judge  # noqa: E402
from leaks import LEAKS  # noqa: E402


def cell(verdict: Verdict) -> str:
    """As a table shows it."""
    detail = verdict.figures or verdict.text
    if verdict.kind == "bounded" and not verdict.figures:
        detail = "nothing moves"
    kind = verdict.kind if verdict.good else f"**{verdict.kind}**"
    return f"{kind}: {detail}".replace("|", r"\|")


def write(cells: dict[str, str]) -> None:
    """Put these into the last column."""

    def row(match: re.Match) -> str:
        new = cells.get(match[2])
        return match[0] if new is None else f"{match[1]} {new} |"

    text = DOCUMENT.read_text()
    DOCUMENT.write_text(re.sub(r"^(\| `(\w+)` \|.*(?<!\\)\|).*\|$", row, text, flags=re.M))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *LEAKS], metavar="name")
    parser.add_argument("--write", action="store_true", help="into docs/leaks.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    cells, good = {}, 0
    for name in options.names or LEAKS:
        verdict = judge(LEAKS[name])
        cells[name], good = cell(verdict), good + verdict.good
        print(f"| `{name}` | {cells[name]} |", flush=True)
    print(f"{good} of {len(cells)} are refused by name or bounded.")
    if options.write:
        write(cells)


if __name__ == "__main__":
    main()
