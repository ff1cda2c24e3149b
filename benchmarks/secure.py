"""The cost of secure mode: steps of DPSVI with and without, in turns.

    python benchmarks/secure.py    # prints the table and writes it to RESULTS.md

Timed as in ``benchmarks/speed.py``, by its code, on its settings.
"""

import os
import statistics

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from common import write_section
from speed import BLOCK, BLOCKS, SECURE, WARM, Contender

CELLS = [
    ("logistic", 200),
    ("logistic", 2000),
    ("network", 200),
    ("network", 2000),
    ("mixture", 2000),
]
JIT = ("trace", "compile", "none")


def medians(setting: str, batch: int) -> dict[str, float]:
    """Median step in ms, by contender."""
    names = [name + suffix for name in JIT for suffix in ("", SECURE)]
    contenders = {name: Contender(name, setting, batch, "cpu") for name in names}
    times = {name: [] for name in names}
    for contender in contenders.values():
        contender.times(WARM, "cpu")
    for _ in range(BLOCKS):
        for name, contender in contenders.items():
            times[name] += contender.times(BLOCK, "cpu")
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    torch.set_num_threads(1)
    lines = [["setting", "batch", *(f"{name}: plain, secure (ratio)" for name in JIT)]]
    lines.append(["---"] * len(lines[0]))
    for setting, batch in CELLS:
        found = medians(setting, batch)
        cells = []
        for name in JIT:
            plain, secure = found[name], found[name + SECURE]
            cells.append(f"{plain:.3g}, {secure:.3g} ({secure / plain:.2f})")
        lines.append([setting, str(batch), *cells])
        print(*lines[-1], sep=" | ", flush=True)
    write_section("secure", "\n".join("| " + " | ".join(line) + " |" for line in lines))


if __name__ == "__main__":
    main()
