"""Outcomes that vary more than the model says: does the status see it, and do intervals hold?

N = 5,000 records, an intercept and four covariates, 20 runs a row. ``DPSEP`` has nothing set,
delta = 1e-5. An outcome's variance is the model's times a dispersion. An interval holds if the
truth is in it.

    python benchmarks/overdispersion.py
    python benchmarks/overdispersion.py --report
"""

import argparse
import itertools
import warnings

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from common import ROOT, write_section
from pyro.infer.autoguide import AutoMultivariateNormal
from tqdm.auto import tqdm

from pyro_dp import DPSEP, Noise, PrivacyAccountant

RESULTS = ROOT / "benchmarks" / "results" / "overdispersion.csv"
SIZE, SEEDS, EPSILONS, DISPERSIONS = 5000, 20, (1.0, 2.0, 4.0), (1, 2, 4, 9)
TRUTH = torch.tensor([0.5, 0.3, -0.3, 0.2, 0.0])
COVARIATES = {
    "normal": lambda rng: rng.normal(size=(SIZE, 4)),
    "in 10% each": lambda rng: 1.0 * (rng.random((SIZE, 4)) < 0.1),
}


def counts(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(5), 1.0).to_event(1))
    with pyro.plate("people", len(x)):
        pyro.sample("y", dist.Poisson((x @ w).exp()), obs=y)


def numbers(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(5), 1.0).to_event(1))
    with pyro.plate("people", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def drawn_counts(mean: np.ndarray, dispersion: int, rng: np.random.Generator) -> np.ndarray:
    if dispersion == 1:
        return rng.poisson(mean)
    return rng.poisson(rng.gamma(mean / (dispersion - 1), dispersion - 1))


def drawn_numbers(mean: np.ndarray, dispersion: int, rng: np.random.Generator) -> np.ndarray:
    return np.log(mean) + dispersion**0.5 * rng.normal(size=SIZE)


MODELS = {"Poisson": (counts, drawn_counts), "Normal": (numbers, drawn_numbers)}


def run(name: str, covariates: str, epsilon: float, dispersion: int, seed: int) -> dict:
    model, draw = MODELS[name]
    rng = np.random.default_rng(seed)
    x = np.concatenate([np.ones((SIZE, 1)), COVARIATES[covariates](rng)], axis=1)
    y = draw(np.exp(x @ TRUTH.numpy()), dispersion, rng)
    pyro.clear_param_store()
    accountant = PrivacyAccountant(epsilon=epsilon, delta=1e-5)
    sep = DPSEP(
        model, AutoMultivariateNormal(model), accountant=accountant, noise=Noise(source=seed)
    )
    sep.run(*(torch.as_tensor(each, dtype=torch.float32) for each in (x, y)), progress=False)
    posterior = sep.posterior()
    holds = ((posterior.mean - TRUTH).abs() < 1.96 * posterior.stddev).sum().item()
    status = posterior.status
    return {"hold": holds, "status": status.level, "cause": status.cause}


def report(runs: pd.DataFrame) -> str:
    lines = ["| model | covariates | epsilon | dispersion | ok | cause model | intervals hold |"]
    lines[0] += " hold if ok |"
    lines.append("|---" * 8 + "|")
    keys = ["model", "covariates", "epsilon", "dispersion"]
    for (name, covariates, epsilon, dispersion), own in runs.groupby(keys, sort=False):
        ok = own[own.status == "ok"]
        share = f"{ok.hold.sum() / (5 * len(ok)):.1%} of {5 * len(ok)}" if len(ok) else "-"
        cells = (name, covariates, f"{epsilon:g}", dispersion, len(ok))
        cells += ((own.cause == "model").sum(),)
        held = f"{own.hold.mean() / 5:.1%}"
        lines.append("| " + " | ".join(map(str, (*cells, held, share))) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--report", action="store_true")
    if not parser.parse_args().report:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        cells = itertools.product(MODELS, COVARIATES, EPSILONS, DISPERSIONS, range(SEEDS))
        rows = []
        for name, covariates, epsilon, dispersion, seed in tqdm(list(cells), mininterval=10):
            keys = {"model": name, "covariates": covariates, "epsilon": epsilon}
            keys |= {"dispersion": dispersion, "seed": seed}
            rows.append(keys | run(name, covariates, epsilon, dispersion, seed))
        pd.DataFrame(rows).to_csv(RESULTS, index=False, lineterminator="\n")
    write_section("overdispersion", report(pd.read_csv(RESULTS, keep_default_na=False)))


if __name__ == "__main__":
    main()
