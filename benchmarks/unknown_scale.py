"""Linear regressions whose residuals have an unknown scale, which the prior may put far away.

N = 5,000 records, an intercept and four covariates. ``DPSVI`` has nothing set, delta = 1e-5. A
width is the median over the coefficients, relative to least squares; an error is in intervals' sds.

    python benchmarks/unknown_scale.py
    python benchmarks/unknown_scale.py --report
"""

import argparse
import itertools
import warnings

import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from common import ROOT, write_section
from pyro.infer.autoguide import AutoMultivariateNormal
from tqdm.auto import tqdm

from pyro_dp import DPSVI, Noise, PrivacyAccountant

RESULTS = ROOT / "benchmarks" / "results" / "unknown_scale.csv"
SIZE, SEEDS, EPSILONS = 5000, 10, (0.3, 1.0, 4.0)
WEAK, STRONG = [0.5, -0.3, 0.2, 0.0, 0.4], [1.0, -3.0, 2.0, 0.0, 2.0]
# Prior sd of a coefficient, prior of the scale, coefficients, residuals.
CASES = {
    "prior fits": (1.0, dist.LogNormal(0.0, 1.0), WEAK, dist.Normal(0.0, 1.0)),
    "strong signal": (3.0, dist.HalfNormal(1.0), STRONG, dist.Normal(0.0, 0.3)),
    "prior too wide": (3.0, dist.Uniform(0.0, 10.0), STRONG, dist.Normal(0.0, 0.5)),
    "prior too small": (3.0, dist.HalfNormal(0.1), STRONG, dist.Normal(0.0, 2.0)),
    "Student residuals": (3.0, dist.HalfNormal(0.3), STRONG, dist.StudentT(2.5)),
}


def run(case: str, epsilon: float, seed: int) -> dict:
    wide, scale_prior, truth, residuals = CASES[case]

    def model(x, y):
        scale = pyro.sample("scale", scale_prior)
        w = pyro.sample("w", dist.Normal(torch.zeros(5), wide).to_event(1))
        with pyro.plate("people", len(x)):
            pyro.sample("y", dist.Normal(x @ w, scale), obs=y)

    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    x = torch.cat([torch.ones(SIZE, 1), torch.randn(SIZE, 4)], dim=1)
    y = x @ torch.tensor(truth) + residuals.sample((SIZE,))
    inverse = torch.linalg.inv(x.T @ x)
    exact = inverse @ x.T @ y
    sds = (inverse.diagonal() * (y - x @ exact).var()).sqrt()
    accountant = PrivacyAccountant(epsilon=epsilon, delta=1e-5)
    svi = DPSVI(
        model, AutoMultivariateNormal(model), accountant=accountant, noise=Noise(source=seed)
    )
    svi.run(x, y, progress=False)
    posterior = svi.posterior()
    w = posterior.draws(1000)["w"]
    error = ((w.mean(0) - exact) / w.std(0)).square().mean().sqrt().item()
    width = (w.std(0) / sds).median().item()
    status = str(posterior.status).split(":")[0]
    return {"width": round(width, 3), "error": round(error, 3), "status": status}


def report(runs: pd.DataFrame) -> str:
    lines = ["| case | epsilon | runs | median width | largest width | median error | ok |"]
    lines.append("|---" * 7 + "|")
    for (case, epsilon), own in runs.groupby(["case", "epsilon"], sort=False):
        numbers = f"{own.width.median():.2f} | {own.width.max():.1f} | {own.error.median():.2f}"
        ok = (own.status == "ok").sum()
        lines.append(f"| {case} | {epsilon:g} | {len(own)} | {numbers} | {ok} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--report", action="store_true")
    if not parser.parse_args().report:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        cells = list(itertools.product(CASES, EPSILONS, range(SEEDS)))
        rows = [
            dict(zip(("case", "epsilon", "seed"), x, strict=True)) | run(*x) for x in tqdm(cells)
        ]
        pd.DataFrame(rows).to_csv(RESULTS, index=False, lineterminator="\n")
    text = report(pd.read_csv(RESULTS))
    print(text)
    write_section("unknown scale", text)


if __name__ == "__main__":
    main()
