"""How time and memory of a step of DPSVI grow: with N, batch, microbatch, number of parameters.

    python benchmarks/scaling.py

Logistic regression, diagonal guide, Poisson batches, jit="trace"; one thread; each point in a
process of its own. Time: median of 50 steps. Memory: the most that the tensors of one step hold at
a time, data and parameters not counted. Slopes: of the logarithms, over the upper half of a range.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from common import write_section
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal

from pyro_dp import Execution, PaperDPSVI, PrivacyAccountant

ROOT = Path(__file__).resolve().parents[1]
# size, features, batch, microbatch size
POINTS = {
    "records N": [(n, 10, 200, None) for n in (10_000, 50_000, 100_000, 1_000_000, 10_000_000)],
    "batch": [(50_000, 100, b, None) for b in (100, 300, 1000, 3000, 10_000, 20_000)],
    "microbatch": [(50_000, 100, 20_000, m) for m in (100, 300, 1000, 3000, 10_000, 20_000)],
    "batch, microbatches of 500": [(50_000, 100, b, 500) for b in (500, 2000, 5000, 20_000)],
    "parameters": [(200, d, 50, None) for d in (50, 500, 5000, 50_000, 500_000)],
}
VARIES = {
    "records N": 0,
    "batch": 2,
    "microbatch": 3,
    "batch, microbatches of 500": 2,
    "parameters": 1,
}


def model(x, y):
    w = pyro.sample("w", dist.Normal(x.new_zeros(x.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(x)) as i:
        pyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def measure(size: int, dim: int, batch: int, microbatch: int | None, jit: str) -> dict:
    """Median step in ms, and the most memory that a step holds in MB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.empty(size, dim), torch.bernoulli(torch.full((size,), 0.5))
    for rows in x.split(100_000):
        rows.normal_()
    inference = PaperDPSVI(
        model,
        AutoNormal(model),
        pyro.optim.Adam({"lr": 1e-3}),
        Trace_ELBO(),
        accountant=PrivacyAccountant(delta=1e-9),
        noise=1.0,
        sampling=batch / size,
        execution=Execution(microbatch_size=microbatch, jit=jit),
    )
    times = []
    for _ in range(60):
        start = time.perf_counter()
        inference.step(x, y)
        times.append(1e3 * (time.perf_counter() - start))
    with torch.profiler.profile(profile_memory=True) as profile:
        inference.step(x, y)
    return {"ms": statistics.median(times[10:]), "MB": _most_allocated(profile) / 2**20}


def _most_allocated(profile) -> int:
    """The most bytes that tensors of one step held at a time."""
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def in_process(point: tuple, jit: str) -> dict:
    command = [sys.executable, __file__, "--jit", jit, "--point", json.dumps(point)]
    output = subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ).stdout
    return json.loads(output.splitlines()[-1])


def slope(sizes: list[float], values: list[float]) -> float:
    """The slope of log value against log size, over the upper half of the range."""
    half = len(sizes) // 2
    return np.polyfit(np.log(sizes[half:]), np.log(values[half:]), 1)[0]


def draw(results: dict[str, list[tuple[float, dict]]], path: Path) -> None:
    figure, axes = plt.subplots(2, len(results), figsize=(4 * len(results), 6), sharey="row")
    for column, (what, points) in zip(axes.T, results.items(), strict=True):
        sizes = [size for size, _ in points]
        for axis, unit in zip(column, ("ms", "MB"), strict=True):
            values = [found[unit] for _, found in points]
            axis.loglog(sizes, values, marker="o", color="#0072B2")
            axis.set_title(f"slope {slope(sizes, values):.2f}", fontsize=10)
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        column[1].set_xlabel(what)
    axes[0, 0].set_ylabel("step (ms)")
    axes[1, 0].set_ylabel("memory of a step (MB)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jit", default="trace", choices=("none", "trace", "compile"))
    parser.add_argument("--what", nargs="+", default=list(POINTS), choices=list(POINTS))
    parser.add_argument("--point", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        print(json.dumps(measure(*json.loads(options.point), options.jit)))
        return
    results, tables = {}, []
    for what in options.what:
        points = [(point[VARIES[what]], in_process(point, options.jit)) for point in POINTS[what]]
        results[what] = [(2 * size if what == "parameters" else size, r) for size, r in points]
        sizes = [size for size, _ in results[what]]
        lines = [
            [what, *(f"{size:,}" for size in sizes), "slope"],
            ["---"] * (len(sizes) + 2),
        ]
        for name, unit in (("step (ms)", "ms"), ("memory (MB)", "MB")):
            values = [found[unit] for _, found in points]
            cells = [f"{value:.3g}" for value in values]
            lines.append([name, *cells, f"{slope(sizes, values):.2f}"])
        tables.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
        print(tables[-1] + "\n", flush=True)
    if len(results) == len(POINTS):
        write_section("scaling", "\n\n".join(tables))
        draw(results, ROOT / "benchmarks" / "figures" / "scaling.png")


if __name__ == "__main__":
    main()
