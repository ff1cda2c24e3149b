"""Rare outcomes, with nothing set: how far off is the posterior, and does it say so?

The models are logistic and Poisson regressions. An intercept makes the outcome rare, and d - 1
features are uniform in [-1, 1]. Priors are N(0, 5^2) and N(0, 2.5^2); delta=1e-5, add or remove one
record, AutoMultivariateNormal.

* "off": the largest distance of a coefficient's mean from the exact posterior's (Laplace's). It is
  in standard deviations of the private posterior, median and largest of the seeds.
* "width": the median standard deviation over the exact one.
* "not ok": the share of runs with such a status.
* "silent": runs that are ok, and more than four standard deviations off.

    python benchmarks/rare_outcomes.py --write
"""

import argparse
import statistics
import warnings

import pyro
import pyro.distributions as dist
import torch
from common import write_section
from pyro.infer.autoguide import AutoMultivariateNormal
from torch import Tensor

from pyro_dp import DPSVI, Noise, PrivacyAccountant

CELLS = [  # outcome, N, d, intercept, epsilon
    ("logistic", 8_000, 4, -5.0, 1.0),
    ("logistic", 8_000, 4, -5.0, 0.3),
    ("logistic", 20_000, 6, -4.0, 1.0),
    ("logistic", 20_000, 6, -6.0, 4.0),
    ("logistic", 20_000, 8, -3.0, 1.0),
    ("Poisson", 8_000, 4, -4.0, 1.0),
]
WEIGHTS = [1.0, -1.0, 0.5, -0.5, 0.3, 0.0, 0.0]
FAR = 4.0


def simulate(kind: str, size: int, dim: int, intercept: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(size, dim - 1, generator=generator) * 2 - 1
    x = torch.cat([torch.ones(size, 1), x], dim=1)
    predictor = intercept + x[:, 1:] @ torch.tensor(WEIGHTS[: dim - 1])
    if kind == "logistic":
        return x, torch.bernoulli(torch.sigmoid(predictor), generator=generator)
    return x, torch.poisson(predictor.exp(), generator=generator)


def scales(dim: int) -> Tensor:
    return torch.tensor([5.0] + [2.5] * (dim - 1))


def model_of(kind: str):
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[1]), scales(x.shape[1])).to_event(1))
        with pyro.plate("people", len(x)):
            predictor = x @ w
            if kind == "logistic":
                pyro.sample("y", dist.Bernoulli(logits=predictor), obs=y)
            else:
                pyro.sample("y", dist.Poisson(predictor.clamp(max=8.0).exp()), obs=y)

    return model


def exact(kind: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mode, and standard deviations of the Gaussian there, by Newton's method."""
    prior = scales(x.shape[1]) ** -2
    w = torch.zeros(x.shape[1])
    w[0] = torch.logit(y.mean()) if kind == "logistic" else y.mean().log()
    for _ in range(60):
        mean = torch.sigmoid(x @ w) if kind == "logistic" else (x @ w).exp()
        variance = mean * (1 - mean) if kind == "logistic" else mean
        precision = x.T @ (variance.unsqueeze(1) * x) + prior.diag()
        w = w + torch.linalg.solve(precision, x.T @ (y - mean) - prior * w)
    return w, precision.inverse().diagonal().sqrt()


def measured(cell: tuple, seed: int) -> tuple[float, float, float, bool]:
    """How far off, how wide, whether the status is not ok, and whether it is wrong in silence."""
    kind, size, dim, intercept, epsilon = cell
    x, y = simulate(kind, size, dim, intercept)
    mean, sd = exact(kind, x, y)
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    model = model_of(kind)
    accountant = PrivacyAccountant(epsilon=epsilon, delta=1e-5)
    svi = DPSVI(
        model, AutoMultivariateNormal(model), accountant=accountant, noise=Noise(source=seed)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        svi.run(x, y, progress=False)
        found = svi.posterior()
    off = ((found.mean - mean) / found.stddev).abs()
    marked = torch.full(off.shape, not found.status.is_ok)
    silent = bool((off[~marked] > FAR).any()) and not caught
    width = (found.stddev / sd).median().item()
    return off.max().item(), width, marked.double().mean().item(), silent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    head = ["outcome", "N, d", "with it", "epsilon", "off", "width", "not ok", "silent"]
    lines = [head, ["---"] * len(head)]
    for cell in CELLS:
        kind, size, dim, _, epsilon = cell
        count = int((simulate(*cell[:4])[1] > 0).sum())
        runs = [measured(cell, seed) for seed in range(options.seeds)]
        off, width, marked, silent = zip(*runs, strict=True)
        figures = [f"{statistics.median(off):.1f} ({max(off):.1f})"]
        figures += [f"{statistics.median(width):.1f}", f"{statistics.mean(marked):.2f}"]
        figures.append(f"{sum(silent)} of {len(runs)}")
        lines.append([kind, f"{size:,}, {dim}", f"{count:,}", f"{epsilon:g}", *figures])
        print(" | ".join(lines[-1]), flush=True)
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    if options.write:
        write_section("rare outcomes", table)


if __name__ == "__main__":
    main()
