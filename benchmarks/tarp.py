"""Coverage of posteriors by the test TARP, on the models of NA-DPVI.

Models, priors, N = 5,000 and epsilons are those of Alrawajfeh, Jälkö & Honkela 2025
(arXiv 2410.19371, and their published code). Each run draws latents from the prior and data from
the model. ``DPSVI`` with nothing set sees the data, delta = 1e-5. TARP (Lemos et al. 2023,
arXiv 2302.03026) draws a random reference point. The share of posterior draws that are closer to
it than the truth has a uniform distribution, if the posterior is right.

    python benchmarks/tarp.py             # runs that are not yet in results/tarp.csv
    python benchmarks/tarp.py --report
"""

import argparse
import csv
import itertools
import warnings
from collections.abc import Callable

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from common import ROOT, write_section
from pyro.infer.autoguide import AutoMultivariateNormal
from torch import Tensor
from torch.distributions import biject_to
from tqdm.auto import tqdm

from pyro_dp import DPSVI, PrivacyAccountant

RESULTS = ROOT / "benchmarks" / "results" / "tarp.csv"
EPSILONS = (0.1, 0.3, 1.0)
SIZE, DIM, DRAWS, REACH = 5000, 10, 1000, 4.0
FIELDS = ("model", "epsilon", "seed", "closer", "status")
LEVELS = np.array([0.001, *np.arange(0.05, 1.0, 0.05), 0.999])


def gamma_exponential(y=None):
    rate = pyro.sample("rate", dist.Gamma(8.0, 2.0))
    with pyro.plate("people", SIZE if y is None else len(y)):
        return pyro.sample("y", dist.Exponential(rate), obs=y)


def beta_bernoulli(y=None):
    share = pyro.sample("share", dist.Beta(10.0, 10.0))
    with pyro.plate("people", SIZE if y is None else len(y)):
        return pyro.sample("y", dist.Bernoulli(share), obs=y)


def dirichlet_categorical(y=None):
    shares = pyro.sample("shares", dist.Dirichlet(torch.full((3,), 5.0)))
    with pyro.plate("people", SIZE if y is None else len(y)):
        return pyro.sample("y", dist.Categorical(shares), obs=y)


def linear_regression(x, y=None):
    variance = pyro.sample("variance", dist.InverseGamma(20.0, 0.5))
    sd = variance.sqrt()
    w = pyro.sample("w", dist.Normal(torch.zeros(DIM + 1), 2 * sd).to_event(1))
    with pyro.plate("people", len(x)):
        return pyro.sample("y", dist.Normal(x @ w, sd), obs=y)


def features() -> Tensor:
    return torch.cat([torch.randn(SIZE, DIM), torch.ones(SIZE, 1)], 1)


MODELS: dict[str, tuple[Callable, Callable[[], tuple]]] = {
    "Gamma, exponential": (gamma_exponential, tuple),
    "Beta, Bernoulli": (beta_bernoulli, tuple),
    "Dirichlet, categorical": (dirichlet_categorical, tuple),
    "linear regression, 10 features": (linear_regression, lambda: (features(),)),
}


def measured(name: str, epsilon: float, seed: int) -> tuple[float, str]:
    """The share of draws that are closer to the reference than the truth, and the status."""
    model, arguments = MODELS[name]
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    data = arguments()
    trace = pyro.poutine.trace(model).get_trace(*data)
    inference = DPSVI(
        model,
        AutoMultivariateNormal(model),
        accountant=PrivacyAccountant(epsilon=epsilon, delta=1e-5),
        generator=seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inference.run(*data, trace.nodes["_RETURN"]["value"], progress=False)
        found = inference.posterior()
    draws, truth = [], []
    for site, values in found.draws(DRAWS).items():
        inverse = biject_to(trace.nodes[site]["fn"].support).inv
        draws.append(inverse(values).reshape(DRAWS, -1))
        truth.append(inverse(trace.nodes[site]["value"]).reshape(1, -1))
    points, true = torch.cat(draws, 1), torch.cat(truth, 1)
    reach = REACH * points.std(dim=0)
    reference = points.mean(dim=0) + reach * (2 * torch.rand(len(reach)) - 1)
    # Its own units for each coordinate.
    points, true = ((each - reference) / reach for each in (points, true))
    return (points.norm(dim=1) < true.norm()).double().mean().item(), found.status.level


def run(names: list[str], seeds: int) -> None:
    """Append what is missing."""
    if not RESULTS.exists():
        RESULTS.write_text(",".join(FIELDS) + "\n")
    done = set(pd.read_csv(RESULTS)[list(FIELDS[:3])].itertuples(index=False, name=None))
    cells = itertools.product(range(seeds), names, EPSILONS)
    for seed, name, epsilon in tqdm([c for c in cells if (c[1], c[2], c[0]) not in done]):
        closer, status = measured(name, epsilon, seed)
        with RESULTS.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([name, epsilon, seed, closer, status])


def error(closer: np.ndarray) -> float:
    """Root mean square of coverage minus level."""
    covered = (closer[:, None] < LEVELS).mean(axis=0)
    return float(np.sqrt(np.mean((covered - LEVELS) ** 2)))


def table() -> str:
    """Errors of coverage, beside those of a perfect posterior with as many runs."""
    lines = ["| model | epsilon | runs | coverage error | perfect, 95% | ok |", "|---" * 6 + "|"]
    random = np.random.default_rng(0)
    for (name, epsilon), cell in pd.read_csv(RESULTS).groupby(["model", "epsilon"], sort=False):
        perfect = [error(random.uniform(size=len(cell))) for _ in range(2000)]
        lines.append(
            f"| {name} | {epsilon:g} | {len(cell)} | {error(cell.closer.to_numpy()):.3f} "
            f"| {np.quantile(perfect, 0.95):.3f} | {cell.status.eq('ok').sum()} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if not options.report:
        run(options.only, options.seeds)
    print(table())
    write_section("tarp", table())


if __name__ == "__main__":
    main()
