"""Coverage of posteriors by the test TARP, on the models of NA-DPVI.

Models, priors, N = 5,000 and epsilons are those of Alrawajfeh, Jälkö & Honkela 2025
(arXiv 2410.19371, and their published code). Each run draws latents from the prior and data from
the model. ``DPSVI`` with nothing set sees the data, delta = 1e-5. TARP (Lemos et al. 2023,
arXiv 2302.03026) draws a random reference point. The share of posterior draws that are closer to
it than the truth has a uniform distribution, if the posterior is right.

    python benchmarks/tarp.py             # runs that are not yet in results/tarp.csv
    python benchmarks/tarp.py --report

The authors' code can see the same data. Each run has a file MODEL-SEED.npz with x and y. Its draws,
site by site, come in mcmc/MODEL-EPSILON-SEED.npz and in laplace/.

    python benchmarks/tarp.py --data FOLDER
    python benchmarks/tarp.py --beside SECOND
"""

import argparse
import csv
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from common import ROOT, write_section
from pyro.infer.autoguide import AutoMultivariateNormal
from pyro.poutine import Trace
from torch import Tensor
from torch.distributions import biject_to
from tqdm.auto import tqdm

from pyro_dp import DPSVI, Noise, PrivacyAccountant

RESULTS = ROOT / "benchmarks" / "results" / "tarp.csv"
BESIDE = RESULTS.with_name("tarp_nadpvi.csv")
THEIRS = ("mcmc", "laplace")
MEASURES = ("closer", "width", "off")
EPSILONS = (0.1, 0.3, 1.0)
SIZE, DIM, DRAWS, REACH = 5000, 10, 1000, 4.0
FIELDS = ("model", "epsilon", "seed", *MEASURES, "status")
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


def exact_rate(y):
    return {"rate": dist.Gamma(8.0 + len(y), 2.0 + y.sum()).sample((DRAWS,))}


def exact_share(y):
    return {"share": dist.Beta(10.0 + y.sum(), 10.0 + (1 - y).sum()).sample((DRAWS,))}


def exact_shares(y):
    return {"shares": dist.Dirichlet(5.0 + torch.bincount(y, minlength=3)).sample((DRAWS,))}


def exact_regression(x, y):
    precision = x.mT @ x + torch.eye(DIM + 1) / 4
    mean = torch.linalg.solve(precision, x.mT @ y)
    rest = (y.square().sum() - mean @ precision @ mean) / 2
    variance = dist.InverseGamma(20.0 + SIZE / 2, 0.5 + rest).sample((DRAWS,))
    unit = dist.MultivariateNormal(torch.zeros(DIM + 1), precision_matrix=precision)
    return {"variance": variance, "w": mean + variance.sqrt()[:, None] * unit.sample((DRAWS,))}


EXACT = dict(zip(MODELS, (exact_rate, exact_share, exact_shares, exact_regression), strict=True))


def simulated(name: str, seed: int) -> tuple[tuple, Trace]:
    """The features, if there are any, and a trace of latents and outcomes."""
    model, arguments = MODELS[name]
    pyro.set_rng_seed(seed)
    data = arguments()
    return data, pyro.poutine.trace(model).get_trace(*data)


def measured(
    name: str, data: tuple, trace: Trace, found: dict[str, Tensor]
) -> tuple[float, float, float]:
    """Draws beside truth and exact posterior, in unconstrained coordinates.

    :returns: ``closer``, the share of draws that are closer to the reference than the truth.
        ``width``, the median of their standard deviations, in exact ones. ``off``, the root mean
        square error of their means, in exact standard deviations.
    """

    def flat(values: dict[str, Tensor]) -> Tensor:
        sites = {site: biject_to(trace.nodes[site]["fn"].support).inv for site in found}
        rows = [inverse(values[site]) for site, inverse in sites.items()]
        return torch.cat([row.reshape(len(row), -1) for row in rows], 1)

    points = flat(found)
    true = flat({site: trace.nodes[site]["value"].unsqueeze(0) for site in found})
    reach = REACH * points.std(dim=0)
    reference = points.mean(dim=0) + reach * (2 * torch.rand(len(reach)) - 1)
    # Its own units for each coordinate.
    near, far = ((each - reference) / reach for each in (points, true))
    closer = (near.norm(dim=1) < far.norm()).double().mean().item()
    exact = flat(EXACT[name](*data, trace.nodes["_RETURN"]["value"]))
    sd = exact.std(dim=0)
    off = ((points.mean(dim=0) - exact.mean(dim=0)) / sd).square().mean().sqrt().item()
    return closer, (points.std(dim=0) / sd).median().item(), off


def ours(name: str, epsilon: float, seed: int) -> tuple[float, float, float, str]:
    """The measures of one run of DPSVI, and its status."""
    model, _ = MODELS[name]
    pyro.clear_param_store()
    data, trace = simulated(name, seed)
    inference = DPSVI(
        model,
        AutoMultivariateNormal(model),
        accountant=PrivacyAccountant(epsilon=epsilon, delta=1e-5),
        noise=Noise(source=seed),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inference.run(*data, trace.nodes["_RETURN"]["value"], progress=False)
        found = inference.posterior()
    return *measured(name, data, trace, found.draws(DRAWS)), found.status.level


def run(names: list[str], seeds: int) -> None:
    """Append what is missing."""
    if not RESULTS.exists():
        RESULTS.write_text(",".join(FIELDS) + "\n")
    done = set(pd.read_csv(RESULTS)[list(FIELDS[:3])].itertuples(index=False, name=None))
    cells = itertools.product(range(seeds), names, EPSILONS)
    for seed, name, epsilon in tqdm([c for c in cells if (c[1], c[2], c[0]) not in done]):
        row = [name, epsilon, seed, *ours(name, epsilon, seed)]
        with RESULTS.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(row)


def write_data(folder: Path, seeds: int) -> None:
    """The data of all runs, for another program."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, seed in itertools.product(MODELS, range(seeds)):
        data, trace = simulated(name, seed)
        arrays = dict(zip("x", data, strict=False)) | {"y": trace.nodes["_RETURN"]["value"]}
        np.savez(folder / f"{name}-{seed}.npz", **arrays)


def compare(folder: Path) -> None:
    """Measures of NA-DPVI's draws. Its runs of a cell have the seeds from 0 on."""
    rows = []
    for name, epsilon, method in itertools.product(MODELS, EPSILONS, THEIRS):
        measures = []
        for seed in itertools.count():
            path = folder / method / f"{name}-{epsilon:g}-{seed}.npz"
            if not path.exists():
                break
            data, trace = simulated(name, seed)
            draws = {site: torch.from_numpy(each) for site, each in np.load(path).items()}
            measures.append(measured(name, data, trace, draws))
        rows.append((name, epsilon, method, len(measures), *summary(np.array(measures))))
    columns = ("model", "epsilon", "method", "runs", "error", "width", "off")
    pd.DataFrame(rows, columns=columns).to_csv(BESIDE, index=False, lineterminator="\n")


def summary(measures: np.ndarray) -> tuple[float, float, float]:
    """The error of coverage, and medians of width and of the mean's error, of runs (n, 3)."""
    width, off = np.median(measures[:, 1:], axis=0).round(3)
    return round(error(measures[:, 0]), 4), width, off


def error(closer: np.ndarray) -> float:
    """Root mean square of coverage minus level."""
    covered = (closer[:, None] < LEVELS).mean(axis=0)
    return float(np.sqrt(np.mean((covered - LEVELS) ** 2)))


def perfect(runs: int) -> float:
    """The error that a perfect posterior stays below in 95% of experiments."""
    random = np.random.default_rng(0)
    errors = [error(random.uniform(size=runs)) for _ in range(2000)]
    return round(float(np.quantile(errors, 0.95)), 4)


def table() -> str:
    """Errors of coverage, beside those of a perfect posterior with as many runs."""
    lines = ["| model | epsilon | runs | coverage error | perfect, 95% | ok |", "|---" * 6 + "|"]
    for (name, epsilon), cell in pd.read_csv(RESULTS).groupby(["model", "epsilon"], sort=False):
        lines.append(
            f"| {name} | {epsilon:g} | {len(cell)} | {error(cell.closer.to_numpy()):.3f} "
            f"| {perfect(len(cell)):.3f} | {cell.status.eq('ok').sum()} |"
        )
    return "\n".join(lines)


def table_beside() -> str:
    """DPSVI, NA-DPVI with chains, and NA-DPVI with Laplace's approximation, on the same data."""
    lines = ["| model | epsilon | runs | coverage error | perfect, 95% | width | mean off |"]
    lines.append("|---" * 7 + "|")
    kept = pd.read_csv(RESULTS)
    for (name, epsilon), cell in pd.read_csv(BESIDE).groupby(["model", "epsilon"], sort=False):
        runs = cell.runs.min()
        own = kept[(kept.model == name) & (kept.epsilon == epsilon) & (kept.seed < runs)]
        rows = np.vstack([summary(own[list(MEASURES)].to_numpy()), cell[["error", "width", "off"]]])
        scores, widths, offs = (
            ", ".join(f"{value:.{digits}f}" for value in column)
            for column, digits in zip(rows.T, (3, 1, 1), strict=True)
        )
        lines.append(
            f"| {name} | {epsilon:g} | {runs} | {scores} | {perfect(runs):.3f} "
            f"| {widths} | {offs} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--data", type=Path, help="write the data of all runs to this folder")
    parser.add_argument("--beside", type=Path, help="measure draws of NA-DPVI in this folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if options.data:
        write_data(options.data, options.seeds)
        return
    if options.beside:
        compare(options.beside)
    elif not options.report:
        run(options.only, options.seeds)
    for name, text in (("tarp", table()), ("tarp beside NA-DPVI", table_beside())):
        print(text)
        write_section(name, text)


if __name__ == "__main__":
    main()
