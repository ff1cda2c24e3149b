"""A latent per record, and nothing set: DPSVI sums it out and makes looks. Do intervals cover?

Patients have three measurements around their own mean. Visitors have a number of visits, with a
log rate of their own around a regression on three covariates. Pupils answer eight questions, and
have an ability each. Players have a chance of a hit, and 30 to 60 attempts. N is 5,000, delta=1e-5,
add or remove one record. Parameters are drawn from the prior, and data from the model. So honest
95% intervals cover 95% of them. A cell has --seeds data sets.

"Before" has gradient steps, which these models took before.

    python benchmarks/latents_of_records.py
"""

import argparse
import itertools
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from common import write_section
from gradient_intervals import patients
from pyro.infer.autoguide import AutoNormal
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dp import DPSVI, Noise, PrivacyAccountant, RowAdam

RESULTS = Path(__file__).parent / "results" / "latents_of_records.csv"
SIZE, FIRST_SEED, QUESTIONS = 5_000, 400, 8
EPSILONS = 4.0, 1.0, 0.3


@dataclass
class Row:
    """One run, as it stands in the file: share of parameters in their intervals, and widths."""

    model: str
    epsilon: float
    fit: str
    seed: int
    covered: float = 0.0
    distance: float = 0.0  # from mean to truth, in standard deviations without noise
    times_as_wide: float = 0.0  # as without noise
    status: str = ""
    seconds: float = 0.0


def visitors(x, visits):
    w = pyro.sample("w", dist.Normal(torch.zeros(4), 0.5).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(-0.5, 0.5))
    with pyro.plate("visitors", len(x)):
        own = pyro.sample("own", dist.Normal(0.0, scale))
        pyro.sample("visits", dist.Poisson((x @ w + own).exp()), obs=visits)


def pupils(answers):
    difficulty = pyro.sample("difficulty", dist.Normal(torch.zeros(QUESTIONS), 1.0).to_event(1))
    spread = pyro.sample("spread", dist.LogNormal(0.0, 0.5))
    with pyro.plate("pupils", len(answers)):
        ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
        logits = spread * ability.unsqueeze(-1) - difficulty
        pyro.sample("answers", dist.Bernoulli(logits=logits).to_event(1), obs=answers)


def players(attempts, hits):
    chance = pyro.sample("chance", dist.Beta(2.0, 4.0))
    alike = pyro.sample("alike", dist.LogNormal(3.0, 0.5))
    with pyro.plate("players", len(attempts)):
        own = pyro.sample("own", dist.Beta(chance * alike, (1 - chance) * alike))
        pyro.sample("hits", dist.Binomial(attempts, own), obs=hits)


def inputs(name: str) -> tuple:
    if name == "visitors":
        return torch.cat([torch.randn(SIZE, 3), torch.ones(SIZE, 1)], dim=1), None
    if name == "players":
        return torch.randint(30, 61, (SIZE,)).float(), None
    return (torch.zeros(SIZE, 3 if name == "patients" else QUESTIONS),)


MODELS: dict[str, tuple[Callable, list[str]]] = {
    "patients": (patients, ["mean", "scale"]),
    "visitors": (visitors, ["w", "scale"]),
    "pupils": (pupils, ["difficulty", "spread"]),
    "players": (players, ["chance", "alike"]),
}


def drawn(name: str) -> tuple[tuple, dict[str, Tensor]]:
    """Data and global latents, from the model itself."""
    model, names = MODELS[name]
    given = inputs(name)
    trace = pyro.poutine.trace(pyro.poutine.uncondition(model)).get_trace(*given)
    observed = {"patients": "y", "visitors": "visits", "pupils": "answers", "players": "hits"}[name]
    data = (*given[:-1], trace.nodes[observed]["value"])
    return data, {n: trace.nodes[n]["value"] for n in names}


def measured(name: str, epsilon: float, fit: str, seed: int) -> Row:
    model, _ = MODELS[name]
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    data, truth = drawn(name)
    accountant = PrivacyAccountant(epsilon=epsilon, delta=1e-5)
    optim = RowAdam(lr=0.1) if fit == "before" else None  # whose use asks for gradient steps
    svi = DPSVI(model, AutoNormal(model), optim, accountant=accountant, noise=Noise(source=seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.perf_counter()
        svi.run(*data, progress=False)
        seconds = time.perf_counter() - began
    posterior = svi.posterior()
    ends = [each.intervals(0.95) for each in (posterior.plain, posterior)]

    def flat(read: Callable) -> Tensor:
        return torch.cat([read(n).reshape(-1) for n in truth])

    covered = flat(lambda n: (ends[1][n].lower < truth[n]) & (truth[n] < ends[1][n].upper))
    plain, noisy = (flat(lambda n, e=e: e[n].upper - e[n].lower) for e in ends)
    middle = flat(lambda n: (ends[0][n].upper + ends[0][n].lower) / 2 - truth[n])
    return Row(
        name,
        epsilon,
        fit,
        seed,
        covered.double().mean().item(),
        (middle.abs() / (plain / 3.92)).median().item(),
        (noisy / plain).median().item(),
        posterior.status.cause or posterior.status.level,
        round(seconds, 1),
    )


def measure(seeds: int) -> None:
    cells = list(itertools.product(MODELS, EPSILONS, ("looks", "before")))
    runs = list(itertools.product(range(FIRST_SEED, FIRST_SEED + seeds), cells))
    known = (
        pd.read_csv(RESULTS) if RESULTS.exists() else pd.DataFrame(columns=[*Row.__annotations__])
    )
    done = set(known[["model", "epsilon", "fit", "seed"]].itertuples(index=False, name=None))
    for seed, cell in tqdm([(s, c) for s, c in runs if (*c, s) not in done]):
        row = pd.DataFrame([asdict(measured(*cell, seed))])
        row.to_csv(RESULTS, mode="a", index=False, header=not RESULTS.exists())


def report(runs: pd.DataFrame) -> str:
    head = ["model", "epsilon", "fit", "runs", "covered", "ok", "covered if ok"]
    head += ["distance in sd", "times as wide", "s"]
    lines = [head, ["---"] * len(head)]
    for (name, epsilon, fit), mine in runs.groupby(["model", "epsilon", "fit"], sort=False):
        ok = mine[mine.status == "ok"]
        lines.append(
            [
                name,
                f"{epsilon:g}",
                fit,
                f"{len(mine)}",
                f"{mine.covered.mean():.2f}",
                f"{len(ok)}",
                f"{ok.covered.mean():.2f}" if len(ok) else "-",
                f"{mine.distance.median():.2f}",
                f"{mine.times_as_wide.median():.2f}",
                f"{mine.seconds.median():.0f}",
            ]
        )
    return "\n".join("| " + " | ".join(each) + " |" for each in lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--report", action="store_true")
    asked = parser.parse_args()
    if not asked.report:
        measure(asked.seeds)
    found = pd.read_csv(RESULTS).sort_values(
        ["model", "epsilon", "fit"], ascending=[True, False, False]
    )
    write_section("latents of records", report(found))
