"""Verdicts on plausible user code that leaks, or would.

    python benchmarks/leaks.py [name ...] [--write]

It prints the verdict for each case of tests/leaks.py. Either the case is refused, or a release and
public values move between neighbouring data sets, by so much. With --write it keeps the verdicts in
results/leaks.csv, beside those of version 0.1.0, and writes the list of docs/leaks.md.
"""

import argparse
import re
import sys
from pathlib import Path

import pandas as pd
import torch

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "leaks.md"
RESULTS = Path(__file__).parent / "results" / "leaks.csv"
sys.path.insert(0, str(ROOT / "tests"))

from leak_verdicts import Verdict, judge  # noqa: E402
from leaks import LEAKS  # noqa: E402

BEGIN, END = "<!-- leaks: begin -->\n", "<!-- leaks: end -->\n\n"
# A heading of the list, a pattern of the verdicts below it, and what they have in common.
GROUPS = (
    (
        "It keeps a record",
        "something of them is kept|changes with the data",
        "`Variable 'cache', which model() captures, changes with the data that the model or guide "
        "sees.`",
    ),
    (
        "It holds data beside the arguments",
        "rows, as many as there are records|has numbers of the data",
        "`Variable 'x', which model() captures, has 40 rows, as many as there are records.`",
    ),
    (
        "It starts at the data",
        "initial value|outside the private plate|lies outside",
        "`The initial value of parameter 'loc' depends on the data, and would be public.`",
    ),
    (
        "It reads other records",
        "moves when other records change",
        "`The term of a record in plate 'data' moves when other records change.`",
    ),
    (
        "It quotes a record in an error",
        "The text of the error is withheld",
        "`The text of the error is withheld because it may quote data.`",
    ),
    (
        "It runs, and is bounded",
        "bounded",
        "State is put back after each record, and warnings about records are withheld.",
    ),
)


def told(verdict: Verdict) -> str:
    """As the results have it."""
    detail = verdict.figures or verdict.text
    if verdict.kind == "bounded" and not verdict.figures:
        detail = "nothing moves"
    return f"{verdict.kind}: {detail}"


def listed(results: pd.DataFrame) -> str:
    """The list of docs/leaks.md: how many leaked in 0.1.0, and all by what becomes of them now."""
    rest = results.set_index("case")
    before = rest.before.str.split(":").str[0]
    count = {kind: before.str.contains(kind).sum() for kind in ("move|public", "warning", "not by")}
    fine = before.isin(["refused", "bounded"]).sum()
    text = (
        f"In version 0.1.0, {count['move|public']} of these {len(rest)} put data past the release. "
        f"A warning revealed a record in {count['warning']}, {count['not by']} were refused "
        f"without a name, and {fine} were fine.\n\n"
    )
    for heading, pattern, message in GROUPS:
        found = rest[rest.now.str.contains(pattern)]
        rest = rest.drop(found.index)
        text += f"### {heading}\n\n{message}\n\n{''.join(map(_item, found.itertuples()))}\n"
    assert rest.empty, f"no heading for {list(rest.index)}"
    return text


def _item(row) -> str:
    parts = re.split("(``.*?``)", LEAKS[row.Index].description)  # code stays as it is
    parts[::2] = [re.sub(r"([*_\[\]<>])", r"\\\1", part) for part in parts[::2]]
    return f"* `{row.Index}`. {''.join(parts)}\n"


def write(results: pd.DataFrame) -> None:
    results.to_csv(RESULTS, index=False)
    text = DOCUMENT.read_text()
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    DOCUMENT.write_text(f"{head}{BEGIN}{listed(results)}{END}{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *LEAKS], metavar="name")
    parser.add_argument("--write", action="store_true", help="into results and docs/leaks.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    results, good = pd.read_csv(RESULTS).set_index("case").reindex(LEAKS), 0
    results.index.name = "case"
    names = options.names or list(LEAKS)
    for name in names:
        verdict = judge(LEAKS[name])
        results.loc[name, "now"] = told(verdict)
        good += verdict.good
        print(f"{name}: {told(verdict)}", flush=True)
    print(f"{good} of {len(names)} are refused by name or bounded.")
    if options.write:
        write(results.reset_index())


if __name__ == "__main__":
    main()
