"""Effects of ten clinics in two parametrisations, by DPSVI, beside the exact posterior.

12,000 people in ten clinics of 100 to 2,300 have a binary outcome. The log odds by clinic are
N(-.5, .5^2), drawn anew for each seed. The prior of w0 is N(0, 1.5^2). Form "plus" is w0 +
a[clinic], a ~ Normal(0, .5). Form "centred" is a ~ Normal(w0, .5). Form "scale" is centred, with a
standard deviation that is HalfNormal(1). Nothing set, delta = 1e-5, AutoMultivariateNormal. The
exact posterior is computed on a grid, since clinics are independent conditionally on w0 and the
scale.

    python benchmarks/groups.py
"""

import argparse
import csv
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from common import write_section
from pyro.infer.autoguide import AutoMultivariateNormal
from torch import Tensor
from torch.nn.functional import logsigmoid
from tqdm.auto import tqdm

from pyro_dp import DPSVI, Noise, PrivacyAccountant

RESULTS = Path(__file__).parent / "results" / "groups.csv"
FORMS = ("plus", "centred", "scale")
SIZES = torch.tensor([100, 300, 600, 900, 1100, 1300, 1500, 1800, 2100, 2300])
MEAN, SD = -0.5, 0.5
FIELDS = ("form", "epsilon", "seed", "place", "away", "width", "covered", "marked")


def simulate(seed: int) -> tuple[Tensor, Tensor]:
    """Clinic and outcome of each person, (N,) each."""
    generator = torch.Generator().manual_seed(seed)
    rates = MEAN + SD * torch.randn(len(SIZES), generator=generator)
    clinic = torch.repeat_interleave(torch.arange(len(SIZES)), SIZES)
    return clinic, torch.bernoulli(torch.sigmoid(rates[clinic]), generator=generator)


def model_of(form: str) -> Callable:
    def model(clinic, y):
        sd = pyro.sample("sd", dist.HalfNormal(1.0)) if form == "scale" else SD
        w0 = pyro.sample("w0", dist.Normal(0.0, 1.5))
        centre = 0.0 if form == "plus" else w0
        a = pyro.sample("a", dist.Normal(centre, sd).expand([len(SIZES)]).to_event(1))
        with pyro.plate("people", len(y)) as i:
            logits = w0 + a[clinic[i]] if form == "plus" else a[clinic[i]]
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i])

    return model


def exact(clinic: Tensor, y: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Means and standard deviations of w0 and the clinics' log odds, (11,) each."""
    n = torch.bincount(clinic).to(y)
    yes = torch.zeros_like(n).index_add(0, clinic, y)
    w0, odds = torch.linspace(-2.5, 1.5, 161), torch.linspace(-4.0, 3.0, 1401)
    scale = torch.linspace(-3.0, 1.5, 46).exp() if form == "scale" else torch.tensor([SD])
    likelihood = yes[:, None] * logsigmoid(odds) + (n - yes)[:, None] * logsigmoid(-odds)
    likelihood = (likelihood - likelihood.amax(1, keepdim=True)).exp()  # (clinic, odds)
    prior = dist.Normal(w0[:, None, None], scale[:, None]).log_prob(odds).exp()  # (w0, scale, odds)
    clinics = (prior @ likelihood.T).clamp(min=1e-300)  # (w0, scale, clinic)
    joint = clinics.log().sum(2) + dist.Normal(0.0, 1.5).log_prob(w0)[:, None]
    joint = joint + dist.HalfNormal(1.0).log_prob(scale) + scale.log()
    joint = (joint - joint.max()).exp()
    joint = joint / joint.sum()
    found = torch.einsum("ws,wsk,wso,ko->ko", joint, 1 / clinics, prior, likelihood)
    moments = [_moments(w0, joint.sum(1))] + [_moments(odds, each / each.sum()) for each in found]
    return torch.tensor([m for m, _ in moments]), torch.tensor([s for _, s in moments])


def _moments(values: Tensor, weights: Tensor) -> tuple[float, float]:
    mean = (values * weights).sum()
    return mean.item(), ((values - mean) ** 2 * weights).sum().sqrt().item()


def measured(form: str, epsilon: float, seed: int) -> list[tuple]:
    """For w0 and each clinic: distance to the exact mean, width, whether covered, and marked."""
    clinic, y = simulate(seed)
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    model = model_of(form)
    accountant = PrivacyAccountant(epsilon=epsilon, delta=1e-5)
    run = DPSVI(
        model, AutoMultivariateNormal(model), accountant=accountant, noise=Noise(source=seed)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.run(clinic, y, progress=False)
    posterior, size = run.posterior(), len(SIZES) + 1
    mean, covariance = posterior.mean[-size:], posterior.covariance_matrix[-size:, -size:]
    marked = [not posterior.status.is_ok] * size
    if form == "plus":
        turn = torch.eye(size)
        turn[1:, 0] = 1.0
        mean, covariance = turn @ mean, turn @ covariance @ turn.T
    centre, sd = exact(clinic, y, form)
    width = covariance.diagonal().sqrt()
    away, covered = (mean - centre).abs() / sd, (mean - centre).abs() < 1.96 * width
    rows = zip(away.tolist(), (width / sd).tolist(), covered.int().tolist(), strict=True)
    return [(*row, int(mark)) for row, mark in zip(rows, marked, strict=True)]


def run(seeds: int, path: Path) -> None:
    """Append what is missing."""
    if not path.exists():
        path.write_text(",".join(FIELDS) + "\n")
    done = set(pd.read_csv(path)[list(FIELDS[:3])].itertuples(index=False, name=None))
    cells = itertools.product(range(seeds), FORMS, (1.0, 4.0, 0.3))
    cells = [(form, epsilon, seed) for seed, form, epsilon in cells]
    for cell in tqdm([cell for cell in cells if cell not in done]):
        rows = measured(*cell)
        with path.open("a") as file:
            for place, row in enumerate(rows):
                csv.writer(file).writerow([*cell, place, *(f"{each:.4g}" for each in row)])


def report(path: Path) -> str:
    header = ["form", "epsilon", "runs", "w0", "smallest clinic", "the others"]
    header += ["status ok: covered", "not ok: covered", "share not ok"]
    lines = [header, ["---"] * len(header)]
    found = pd.read_csv(path)
    for form, epsilon in itertools.product(FORMS, (0.3, 1.0, 4.0)):
        cell = found.query("form == @form and epsilon == @epsilon")
        parts = [cell[cell.place == 0], cell[cell.place == 1], cell[cell.place > 1]]
        texts = [f"{p.away.median():.2f}, {p.away.max():.1f}; {p.width.mean():.2f}" for p in parts]
        covered = [cell.covered[cell.marked == each] for each in (0, 1)]
        texts += [f"{c.mean():.3f} of {len(c)}" if len(c) else "" for c in covered]
        seeds = f"{cell.seed.nunique()}"
        lines.append([form, f"{epsilon:g}", seeds, *texts, f"{cell.marked.mean():.2f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20, help="runs of a cell (default 20)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    run(options.seeds, options.out)
    table = report(options.out)
    print(table)
    if options.out == RESULTS:
        write_section("groups", table)


if __name__ == "__main__":
    main()
