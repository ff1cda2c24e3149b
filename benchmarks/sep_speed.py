"""One full-batch DPSEP step against one Newton step in plain torch: time, and memory.

Logistic regression, N=50,000, d=100, full precision; one thread, medians, taken in turn.

    python benchmarks/sep_speed.py
"""

import argparse
import itertools
import resource
import time

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoMultivariateNormal

from pyro_dp import Execution, Noise, PaperDPSEP, PrivacyAccountant


def model(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


def newton_step(x, y, w):
    p = torch.sigmoid(x @ w)
    gradient = x.T @ (y - p) - w
    precision = (x * (p * (1 - p)).unsqueeze(1)).T @ x + torch.eye(len(w))
    return w + torch.linalg.solve(precision, gradient)


def memory():
    """Peak of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=50_000)
    parser.add_argument("--dim", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--jit", nargs="+", default=["none", "compile"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for dtype, jit in itertools.product((torch.float32, torch.float64), options.jit):
        torch.set_default_dtype(dtype)
        pyro.clear_param_store()
        torch.manual_seed(0)
        x = torch.randn(options.size, options.dim)
        truth = torch.randn(options.dim) / options.dim**0.5
        y = torch.bernoulli(torch.sigmoid(x @ truth))
        inference = PaperDPSEP(
            model,
            AutoMultivariateNormal(model),
            accountant=PrivacyAccountant(),
            num_steps=options.repeats + 4,
            noise=Noise(10.0, source=0),
            clip=10.0,
            execution=Execution(jit=jit),
        )
        for _ in range(4):  # with the structural checks, and those of graphs
            inference.step(x, y)
        before = memory()
        times = {"newton": [], "dpsep": []}
        for _ in range(options.repeats):
            start = time.perf_counter()
            newton_step(x, y, truth)
            middle = time.perf_counter()
            inference.step(x, y)
            times["newton"].append(middle - start)
            times["dpsep"].append(time.perf_counter() - middle)
        medians = {name: torch.tensor(each).median().item() for name, each in times.items()}
        print(
            f"{str(dtype):<15} {jit:<8} Newton {1e3 * medians['newton']:.0f} ms, DPSEP "
            f"{1e3 * medians['dpsep']:.0f} ms, ratio {medians['dpsep'] / medians['newton']:.1f}; "
            f"peak memory {memory():.0f} MB ({before:.0f} MB after the first steps)",
            flush=True,
        )


if __name__ == "__main__":
    main()
