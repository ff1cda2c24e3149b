"""DPSEP and VIPS against the arithmetic that they cannot do without: records a second.

    python benchmarks/floor.py --write    # prints the tables and writes them to RESULTS.md

Logistic regression in float64, one thread, processor time (not wall-clock time), in one run. Row
"clipped" is a gradient and Hessian by NumPy on whole arrays, with each record's part clipped. Row
"Newton" is the same without clipping, and a solve. The first steps of DPSEP have a row of their
own. They look at records for the first time, or have a wide cavity.
"""

import argparse
import os
import statistics
import time
from functools import partial

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from common import write_section
from pyro.infer.autoguide import AutoMultivariateNormal

from pyro_dp import DPSEP, VIPS, Noise, PaperDPSEP, PrivacyAccountant
from pyro_dp.vips import LogisticRegression

SIZES = {20: 2_000_000, 100: 50_000}
WARM = 3  # steps


def model(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


def clipped(x, y, w, bound=3.0):
    p = 1 / (1 + np.exp(-(x @ w)))
    curvature, residual = p * (1 - p), y - p
    squared = np.einsum("ij,ij->i", x, x)
    norm = np.sqrt(residual**2 * squared + (curvature * squared) ** 2)
    scale = np.minimum(1.0, bound / norm)
    return x.T @ (scale * residual), (x * (scale * curvature)[:, None]).T @ x


def newton(x, y, w):
    p = 1 / (1 + np.exp(-(x @ w)))
    gradient = x.T @ (y - p) - w
    hessian = (x * (p * (1 - p))[:, None]).T @ x + np.eye(len(w))
    return w + np.linalg.solve(hessian, gradient)


def dpsep(kind, dim, **options):
    pyro.clear_param_store()
    return kind(
        model,
        AutoMultivariateNormal(model),
        accountant=PrivacyAccountant(epsilon=10.0, delta=1e-8),
        noise=Noise(source=0),
        **options,
    ).step


def measure(size: int, dim: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of processor time of each, repeat by repeat."""
    torch.manual_seed(0)
    x = torch.randn(size, dim)
    y = torch.bernoulli(torch.sigmoid(x @ torch.randn(dim) / dim**0.5))
    short, start = x / dim, np.zeros(dim)
    vips = VIPS(
        LogisticRegression(dim=dim),
        accountant=PrivacyAccountant(delta=1e-8),
        num_steps=repeats + WARM,
        noise=Noise(1.0, source=0),
    )
    makers = {
        "NumPy, clipped": lambda: lambda: clipped(x.numpy(), y.numpy(), start),
        "NumPy, Newton": lambda: lambda: newton(x.numpy(), y.numpy(), start),
        "DPSEP": lambda: partial(dpsep(DPSEP, dim), x, y),
        "DPSEP, C set": lambda: partial(dpsep(PaperDPSEP, dim, clip=10.0, num_steps=30), x, y),
        "VIPS": lambda: partial(vips.step, short, y),
    }
    times: dict[str, list[float]] = {name: [] for name in makers}
    for name, make in makers.items():  # one after the other: large arrays are slow at first
        step = make()
        for _ in range(repeats + WARM):
            before = time.process_time()
            step()
            times[name].append(time.process_time() - before)
    return times


def table(size: int, dim: int, times: dict[str, list[float]]) -> str:
    medians = {name: statistics.median(each[WARM:]) for name, each in times.items()}
    firsts = {name: each[:WARM] for name, each in times.items() if name.startswith("DPSEP")}
    lines = [
        [f"N = {size:,}, d = {dim}", "ms", "million records a second", "/ clipped", "/ Newton"],
        ["---"] * 5,
    ]
    for name, seconds in medians.items():
        ratios = [f"{seconds / medians[f'NumPy, {by}']:.2f}" for by in ("clipped", "Newton")]
        lines.append([name, f"{1e3 * seconds:.0f}", f"{size / seconds / 1e6:.2f}", *ratios])
    for name, seconds in firsts.items():
        each = ", ".join(f"{size / s / 1e6:.2f}" for s in seconds)
        lines.append([f"{name}: first {WARM} steps", "", each, "", ""])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    # DPSEP ends after nine looks.
    parser.add_argument("--repeats", type=int, default=9 - WARM)
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    tables = []
    for dim, size in SIZES.items():
        tables.append(table(size, dim, measure(size, dim, options.repeats)))
        print(tables[-1] + "\n", flush=True)
    if options.write:
        write_section("floor", "\n\n".join(tables))


if __name__ == "__main__":
    main()
