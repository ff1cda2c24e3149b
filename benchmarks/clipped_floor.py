"""How fast can a clipped gradient sum of logistic regression be? Written by hand, and compiled.

    python benchmarks/clipped_floor.py    # prints the table and writes it to RESULTS.md

Each function is a page of loops for the compiler. It computes residuals, norms of the per-record
gradients (|residual| times |row|), factors, and a weighted sum of rows. In float64, neither a norm
nor the rounding of the sum can take a record over its bound. In float32, the sum of 2,000 records
may be off by a noticeable part of one record's bound.
"""

import os
import statistics
import time

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from common import write_section
from torch import Tensor

BATCH, DIM, BLOCKS = 2000, 100, 300


def floor(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (y - torch.sigmoid(x @ w)) @ x


def clipped(w: Tensor, x: Tensor, y: Tensor, norms: torch.dtype, sums: torch.dtype) -> Tensor:
    residual = y - torch.sigmoid(x @ w)
    norm = x.to(norms).square().sum(dim=1).sqrt() * residual.abs().to(norms)
    scale = torch.where(norm > 1, 1 / norm, 1.0)
    return ((scale * residual).to(sums).unsqueeze(1) * x.to(sums)).sum(dim=0)


WAYS = {
    "floor": floor,
    "norms and sum in float64": lambda *args: clipped(*args, torch.float64, torch.float64),
    "norms in float32, sum in float64": lambda *args: clipped(*args, torch.float32, torch.float64),
    "norms and sum in float32": lambda *args: clipped(*args, torch.float32, torch.float32),
}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(BATCH, DIM)
    y, w = torch.bernoulli(torch.full((BATCH,), 0.5)), torch.randn(DIM) / 10
    compiled = {name: torch.compile(way) for name, way in WAYS.items()}
    times = {name: [] for name in WAYS}
    for _ in range(BLOCKS + 10):
        for name, way in compiled.items():
            start = time.perf_counter()
            way(w, x, y)
            times[name].append(1e3 * (time.perf_counter() - start))
    medians = {name: statistics.median(each[10:]) for name, each in times.items()}
    lines = [["", "ms", "/ floor"], ["---"] * 3]
    lines += [[k, f"{v:.3f}", f"{v / medians['floor']:.1f}"] for k, v in medians.items()]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    print(table)
    write_section("clipped floor", table)


if __name__ == "__main__":
    main()
