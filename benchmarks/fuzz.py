"""Fuzz the whole package at random, for longer than the tests do.

    python benchmarks/fuzz.py --cases 100000 --seed 1

Prints what became of the cases and writes it to benchmarks/results/fuzz.json, now and then also
while it runs. The cases and the contract that they must keep are those of
tests/package/test_fuzz.py.
"""

import argparse
import dataclasses
import json
import logging
import sys
import warnings
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from fuzz_cases import CASES, FAMILIES  # noqa: E402
from fuzz_contract import Figures  # noqa: E402

_CHUNK = 500  # cases; hypothesis remembers all of a run


def fuzz(strategy, cases: int, first_seed: int, figures: Figures) -> None:
    """Add so many cases to the figures. A case that breaks the contract is noted; the rest run."""

    @seed(first_seed)
    @settings(
        max_examples=cases,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(case) -> None:
        figures.add(case)

    run()


def table(figures: Figures) -> str:
    """The outcomes of the cases, by family."""
    names = sorted({name for family in figures.outcomes.values() for name in family})
    names = ["valid", *(name for name in names if name != "valid")]
    rows = [["family", "cases", *names], ["---"] * (len(names) + 2)]
    for family, outcomes in sorted(figures.outcomes.items()):
        counts = [outcomes.get(name, 0) for name in names]
        rows.append([family, *map(str, (sum(counts), *counts))])
    sums = [sum(f.get(name, 0) for f in figures.outcomes.values()) for name in names]
    rows.append(["all", *map(str, (sum(sums), *sums))])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def write(figures: Figures, first_seed: int, path: Path) -> None:
    text = json.dumps({"seed": first_seed} | dataclasses.asdict(figures), indent=1)
    path.write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=list(FAMILIES), help="only these cases")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "fuzz.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    strategy = FAMILIES[options.family][0] if options.family else CASES
    figures = Figures()
    for chunk in range((options.cases + _CHUNK - 1) // _CHUNK):
        size = min(_CHUNK, options.cases - chunk * _CHUNK)
        found = len(figures.violations)
        fuzz(strategy, size, 1_000_000 * options.seed + chunk, figures)
        for each in figures.violations[found:]:
            print(f"{each['text']}\n    {each['case']}", flush=True)
        print(
            f"{figures.cases} cases, {figures.seconds:.0f} s, {len(figures.violations)} violations",
            flush=True,
        )
        write(figures, options.seed, options.out)
    print(table(figures))
    slowest, case = figures.slowest
    print(f"slowest: {slowest:.2f} s, {case}")


if __name__ == "__main__":
    main()
