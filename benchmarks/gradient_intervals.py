"""Do intervals of gradient steps cover, with the noise in them? DPSVI, 95% intervals.

A user who sets a bound gets gradient steps. The logistic regressions have nine normal features with
correlation rho, and an intercept. The patients have a random intercept each, a latent per record,
and three measurements: their mean and log scale are global. N is 5,000, delta=1e-5, add or remove
one record. Parameters are drawn from the prior, and data from the model. So honest intervals cover
95% of them. A cell has --seeds data sets.

    python benchmarks/gradient_intervals.py
"""

import argparse
import itertools
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from common import write_section
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from sep_regression import DIM, model_of
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dp import DPSVI, Noise, PrivacyAccountant

RESULTS = Path(__file__).parent / "results" / "gradient_intervals.csv"
SIZE, FIRST_SEED = 5_000, 100
EPSILONS = 4.0, 1.0, 0.5
logistic = model_of("logistic")


@dataclass
class Row:
    """One run, as it stands in the file: shares of parameters in their intervals, and widths."""

    model: str
    guide: str
    epsilon: float
    seed: int
    plain: float = 0.0
    covered: float = 0.0
    times_as_wide: float = 0.0
    status: str = ""


def regression(rho: float) -> tuple[tuple, dict[str, Tensor]]:
    """Features, labels, and the coefficients."""
    correlation = torch.full((DIM - 1, DIM - 1), rho).fill_diagonal_(1.0)
    x = torch.randn(SIZE, DIM - 1) @ torch.linalg.cholesky(correlation).mT
    x = torch.cat([x, torch.ones(SIZE, 1)], dim=1)
    w = torch.randn(DIM)
    return (x, torch.bernoulli(torch.sigmoid(x @ w))), {"w": w}


def patients(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    with pyro.plate("patients", len(y)):
        own = pyro.sample("own", dist.Normal(mean, scale))
        pyro.sample("y", dist.Normal(own.unsqueeze(-1), 0.5).expand([len(y), 3]).to_event(1), obs=y)


def patients_data() -> tuple[tuple, dict[str, Tensor]]:
    mean, scale = torch.randn(()), (0.5 * torch.randn(())).exp()
    own = mean + scale * torch.randn(SIZE, 1)
    return (own + 0.5 * torch.randn(SIZE, 3),), {"mean": mean, "scale": scale}


CELLS: dict[str, tuple[Callable, Callable, tuple[type, ...]]] = {
    "logistic": (logistic, lambda: regression(0.0), (AutoNormal, AutoMultivariateNormal)),
    "logistic, rho = .9": (
        logistic,
        lambda: regression(0.9),
        (AutoNormal, AutoMultivariateNormal),
    ),
    "patients": (patients, patients_data, (AutoNormal,)),
}


def measured(name: str, guide: type, epsilon: float, seed: int) -> Row:
    model, draw, _ = CELLS[name]
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    data, truth = draw()
    accountant = PrivacyAccountant(epsilon=epsilon, delta=1e-5)
    svi = DPSVI(model, guide(model), accountant=accountant, clip=5.0, noise=Noise(source=seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        svi.run(*data, progress=False)
    posterior = svi.posterior()
    ends = [each.intervals(0.95) for each in (posterior.plain, posterior)]
    inside = [
        torch.cat([((e[n].lower < x) & (x < e[n].upper)).reshape(-1) for n, x in truth.items()])
        for e in ends
    ]
    widths = [torch.cat([(e[n].upper - e[n].lower).reshape(-1) for n in truth]) for e in ends]
    shares = [each.double().mean().item() for each in inside]
    ratio = (widths[1] / widths[0]).median().item()
    status = posterior.status
    return Row(name, guide.__name__, epsilon, seed, *shares, ratio, status.cause or status.level)


def measure(seeds: int) -> None:
    cells = [(n, g, e) for n, (*_, guides) in CELLS.items() for g in guides for e in EPSILONS]
    runs = list(itertools.product(range(FIRST_SEED, FIRST_SEED + seeds), cells))
    rows = [asdict(measured(*cell, seed)) for seed, cell in tqdm(runs)]
    pd.DataFrame(rows).to_csv(RESULTS, index=False, float_format="%.4g", lineterminator="\n")


def report(runs: pd.DataFrame) -> str:
    lines = [
        "| model | guide | epsilon | runs | without the noise | with it | times as wide | ok "
        "| if ok | if not |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (model, guide, epsilon), cell in runs.groupby(["model", "guide", "epsilon"], sort=False):
        ok = cell.status == "ok"
        covered = [f"{x.covered.mean():.2f}" if len(x) else "-" for x in (cell[ok], cell[~ok])]
        lines.append(
            f"| {model} | {guide} | {epsilon:g} | {len(cell)} | {cell.plain.mean():.2f} "
            f"| {cell.covered.mean():.2f} | {cell.times_as_wide.median():.2f} | {ok.sum()} "
            f"| {covered[0]} | {covered[1]} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--report", action="store_true", help="no runs: rewrite RESULTS.md")
    options = parser.parse_args()
    if not options.report:
        measure(options.seeds)
    write_section("gradient intervals", report(pd.read_csv(RESULTS)))


if __name__ == "__main__":
    main()
