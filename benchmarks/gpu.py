"""Fits on a GPU: as on the CPU, and how long they take.

    python benchmarks/gpu.py --write     # prints the tables and writes them to RESULTS.md
    python benchmarks/gpu.py --device cpu --size 100000 --steps 1    # tests the script itself

Without CUDA it says so, and ends. Agreement is in float64, of short fits with the same draws,
samples and noise on both devices. Times are of whole steps in float32. The script waits for the
device only at the end of each block of steps.
"""

import argparse
import math
import statistics
import sys
import time

import pyro
import pyro.distributions as dist
import torch
from common import ROOT, write_section
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal

sys.path.insert(0, str(ROOT / "tests"))
from device_runs import (
    POSTERIORS,
    PROBLEMS,
    VAE,
    apart,
    fitted,
    gaussian_guide,
    logistic,
    steps_that_wait,
)

from pyro_dp import DPSEP, VIPS, Clip, Execution, Noise, PaperDPSVI, PrivacyAccountant
from pyro_dp.vips import LogisticRegression

BLOCKS, WARM = 3, 5
MADE = 2**20  # records that are made at a time
DIM = 20
IMAGES, PIXELS = 60_000, 784


class Network:
    """Ten classes, one layer of so many units, and a normal prior of all weights."""

    def __init__(self, hidden=100):
        self.hidden = hidden

    def model(self, x, y):
        w = self._weights("w", x, x.shape[1], self.hidden)
        v = self._weights("v", x, self.hidden, 10)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=torch.tanh(x @ w) @ v), obs=y)

    @staticmethod
    def _weights(name, x, *shape):
        scale = 1 / math.sqrt(shape[0])
        return pyro.sample(name, dist.Normal(x.new_zeros(shape), scale).to_event(2))


def agreement(device: str) -> str:
    torch.set_default_dtype(torch.float64)
    lines = ["| fit | largest difference from the CPU, relative |", "| --- | --- |"]
    for name in (*PROBLEMS, *POSTERIORS):
        found, expected = (fitted(name, each) for each in (device, "cpu"))
        label = name.upper() if name in POSTERIORS else f"PaperDPSVI, {name}"
        lines.append(f"| {label} | {apart(found, expected):.1e} |")
    torch.set_default_dtype(torch.float32)
    return "\n".join(lines)


def made(count: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows within the unit ball and outcomes, made on the device a part at a time."""
    torch.manual_seed(0)
    x, y = torch.empty(count, DIM, device=device), torch.empty(count, device=device)
    for rows, outcomes in zip(x.split(MADE), y.split(MADE), strict=True):
        rows.normal_()
        rows /= rows.norm(dim=1, keepdim=True)
        outcomes.copy_(torch.bernoulli(torch.sigmoid(3 * rows[:, 0])))
    return x, y


def images(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    pixels = torch.rand(IMAGES, PIXELS, device=device)
    return pixels, torch.randint(10, (IMAGES,), device=device)


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def seconds(step, data, device: str, steps: int) -> float:
    """Seconds of one step, the median of blocks."""
    for _ in range(WARM):
        step(*data)
    found = []
    for _ in range(BLOCKS):
        wait(device)
        start = time.perf_counter()
        for _ in range(steps):
            step(*data)
        wait(device)
        found.append((time.perf_counter() - start) / steps)
    return statistics.median(found)


def problem(name: str, device: str, data: dict):
    """A fresh model and guide, and the rows that they are fitted to."""
    pyro.clear_param_store()
    torch.manual_seed(0)
    if name == "logistic":
        return logistic, AutoNormal(logistic), data["regression"]
    if name == "network":
        model = Network().model
        return model, AutoNormal(model, init_scale=0.01), data["images"]
    vae = VAE(PIXELS, hidden=400, latent=20).to(device)
    return vae.model, vae.guide, data["images"][:1]


def plain(name: str, device: str, data: dict):
    """Pyro's SVI, and its arguments."""
    model, guide, rows = problem(name, device, data)
    return SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), Trace_ELBO()), rows


def dpsvi(name: str, device: str, data: dict, batch: int, num_steps: int, jit: str, source=None):
    """A fresh inference, and its arguments."""
    model, guide, rows = problem(name, device, data)
    inference = PaperDPSVI(
        model,
        guide,
        pyro.optim.Adam({"lr": 1e-3}),
        accountant=PrivacyAccountant(delta=1e-10),
        noise=Noise(1.0, source=source),
        sampling=batch / len(rows[0]),
        clip=Clip(1.0, report=False),
        num_steps=num_steps,
        execution=Execution(jit=jit),
    )
    return inference, rows


def step_times(device: str, steps: int, data: dict) -> str:
    lines = [
        "| ms a step | batch | `SVI` | trace | compile | trace, secure | steps that wait |",
        "| " + " | ".join(["---"] * 7) + " |",
    ]
    number = BLOCKS * steps + WARM
    for name in ("logistic", "network", "vae"):
        for batch in (200, 2000):
            svi, rows = plain(name, device, data)
            part = [row[:batch] for row in rows]
            cells = [f"{1e3 * seconds(svi.step, part, device, steps):.2f}"]
            for jit, secure in (("trace", False), ("compile", False), ("trace", True)):
                own = (device, data, batch, number)
                inference, rows = dpsvi(name, *own, jit, "system" if secure else None)
                timed = max(1, steps // 20) if secure else steps  # noise of the host takes long
                cells.append(f"{1e3 * seconds(inference.step, rows, device, timed):.2f}")
            inference, rows = dpsvi(name, device, data, batch, 40, jit="trace")
            waited, seen = steps_that_wait(inference, rows, device)
            line = [name, f"{batch:,}", *cells, f"{waited} of {seen}"]
            lines.append("| " + " | ".join(line) + " |")
            print(lines[-1], flush=True)
    return "\n".join(lines)


def full_passes(device: str, count: int) -> str:
    """DPSEP and VIPS on so many records."""
    lines = [
        f"| N = {count:,} x {DIM} | s, first step | s, later ones | million records a second |",
        "| " + " | ".join(["---"] * 4) + " |",
    ]
    data = made(count, device)
    pyro.clear_param_store()
    own = {"accountant": PrivacyAccountant(delta=1e-10), "noise": 1.0}
    for inference in (
        DPSEP(logistic, gaussian_guide(), **own),
        VIPS(LogisticRegression(DIM), num_steps=6, **own),
    ):
        found = []
        for _ in range(6):
            wait(device)
            start = time.perf_counter()
            inference.step(*data)
            wait(device)
            found.append(time.perf_counter() - start)
        later = statistics.median(found[2:])
        line = [type(inference).__name__, f"{found[0]:.2f}", f"{later:.3f}"]
        lines.append("| " + " | ".join([*line, f"{count / later / 1e6:.1f}"]) + " |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def described(device: str) -> str:
    if device == "cpu":
        return "On the CPU, which tests this script."
    name, memory = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
    return f"{name}, {memory / 1e9:.0f} GB, torch {torch.__version__}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--size", type=int, default=10**8, help="records of DPSEP and VIPS")
    parser.add_argument("--steps", type=int, default=200, help="of DPSVI, in a block")
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    options = parser.parse_args()
    device = options.device
    if device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA here: nothing ran on a GPU.")
        return
    tables = [described(device), agreement(device)]
    print("\n\n".join(tables), flush=True)
    data = {"regression": made(min(options.size, 10**6), device), "images": images(device)}
    tables.append(step_times(device, options.steps, data))
    del data
    tables.append(full_passes(device, options.size))
    if options.write and device == "cuda":
        write_section("gpu", "\n\n".join(tables))


if __name__ == "__main__":
    main()
