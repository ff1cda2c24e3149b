"""Which method comes closest to the exact posterior? Logistic regression, N=20,000, d=10.

The table has KL(q || posterior) in nats of VIPS, DPSEP, DPSVI and DP-SGLD at the same (epsilon,
delta). It has each without noise and clipping, and DPSVI with nothing set. The problem is that of
sep_regression.py: nine standard normal features and an intercept, w ~ N(0, 0.7^2 I), prior N(0, I).
Runs have delta=1e-5, add or remove one record. Rows of x are clipped to norm 5, since VIPS
needs a bound (about 0.4% are longer). For VIPS they are divided by 5, which changes neither
posterior nor KL. The exact posterior is that of the clipped rows, by importance sampling with
10,000 draws.

VIPS's hyperprior on the precision is concentrated, which makes it the same prior. DP-SGLD returns
samples: its q is the Gaussian with their mean and covariance.

Settings were chosen once for all epsilons by --tune, on four data sets with seeds of their own. The
criterion was the mean logarithm of the KL at epsilon = 0.3, 1 and 4; --tune prints the candidates.
DP-SGLD's step size is a multiple of h = 4 (q / (sigma C))^2, but no more than a public constant. At
h its privacy noise has temperature 1.

    python benchmarks/methods.py
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable

import pandas as pd
import pyro
import torch
from common import ROOT, summarise, write_section
from pyro.infer.autoguide import AutoMultivariateNormal, init_to_value
from sep_regression import DIM, accountant_for, exact, fit, fit_dpsvi, kl, model_of, simulate
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dp import DPSVI, Noise
from pyro_dp.vips import VIPS, LogisticRegression

sys.path.insert(0, str(ROOT / "examples" / "methods"))

from dpsgld import DPSGLD

SIZE, RADIUS = 20_000, 5.0
EPSILONS = (0.3, 1.0, 4.0)
TUNING = range(1000, 1004)  # seeds
KNOWN = 1e6  # concentration of the precision's prior
SGLD_STEPS, SGLD_RATE, SGLD_MOST = 2000, 0.05, 3e-5  # the last: of the step size
# What --tune chooses from.
CANDIDATES = {
    # number of steps, sample rate, kappa
    "VIPS": [
        (30, 1.0, 0.7),
        (60, 1.0, 0.6),
        (60, 1.0, 0.7),
        (60, 1.0, 1.0),
        (100, 1.0, 0.7),
        (100, 1.0, 0.85),
        (100, 1.0, 1.0),
        (300, 0.05, 1.0),
    ],
    "DPSEP": [(2.5,), (3.5,), (4.0,), (5.0,)],  # C
    "DPSVI": [(3.0,), (4.0,), (5.0,)],  # C
    # temperature, C
    "DP-SGLD": [
        *itertools.product((1.5, 3.0, 5.0), (3.0, 3.5)),
        *((2.0, 3.0), (3.0, 4.5)),
    ],
}
CHOSEN = {
    "DPSVI, nothing set": (),
    "VIPS": (30, 1.0, 0.7),
    "DPSEP": (4.0,),
    "DPSVI": (4.0,),
    "DP-SGLD": (1.5, 3.5),
}
Moments = tuple[Tensor, Tensor]  # mean (d,) and covariance (d, d)


def vips(x: Tensor, y: Tensor, epsilon: float, seed: int, settings) -> dict[str, Moments]:
    num_steps, rate, kappa = settings
    model = LogisticRegression(DIM, concentration=KNOWN, rate=KNOWN * RADIUS**2)
    inference = VIPS(
        model,
        accountant=accountant_for(epsilon),
        num_steps=num_steps,
        noise=Noise(0 if math.isinf(epsilon) else None, source=seed),
        sampling=rate,
        step_size=(0.0, kappa),
    )
    inference.run(x / RADIUS, y, progress=False)
    q = inference.posterior(noise_aware=False)["weights"]
    return {"VIPS": (q.mean / RADIUS, q.covariance_matrix / RADIUS**2)}


def dpsep(x: Tensor, y: Tensor, epsilon: float, seed: int, settings) -> dict[str, Moments]:
    inference, _ = fit("logistic", x, y, epsilon, seed, bound=settings[0])
    plain, aware = inference.posterior(False), inference.posterior(True)
    return {
        "DPSEP": (aware.mean, aware.covariance_matrix),
        "DPSEP, plain": (plain.mean, plain.covariance_matrix),
    }


def dpsvi(x: Tensor, y: Tensor, epsilon: float, seed: int, settings) -> dict[str, Moments]:
    return {"DPSVI": fit_dpsvi("logistic", x, y, epsilon, seed, bound=settings[0])}


def dpsgld(x: Tensor, y: Tensor, epsilon: float, seed: int, settings) -> dict[str, Moments]:
    temperature, bound = settings
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    accountant, sigma, step_size = accountant_for(epsilon), 0.0, SGLD_MOST
    if not math.isinf(epsilon):
        sigma = accountant.noise_multiplier(num_steps=SGLD_STEPS, sample_rate=SGLD_RATE)
        step_size = min(step_size, temperature * 4 * (SGLD_RATE / (sigma * bound)) ** 2)
    inference = DPSGLD(
        model_of("logistic"),
        accountant=accountant,
        num_steps=SGLD_STEPS,
        step_size=step_size,
        noise=Noise(sigma, source=seed),
        clip=bound if sigma else math.inf,
        init_loc_fn=init_to_value(values={"w": torch.zeros(DIM)}),
        sampling=SGLD_RATE,
    )
    inference.run(x, y, progress=False)
    samples = inference.get_samples()["w"]
    return {"DP-SGLD": (samples.mean(dim=0), torch.cov(samples.T))}


def nothing_set(x: Tensor, y: Tensor, epsilon: float, seed: int, settings) -> dict[str, Moments]:
    """Fit with what a user types; without noise there is nothing to type."""
    if math.isinf(epsilon):
        return {}
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    model = model_of("logistic")
    guide = AutoMultivariateNormal(model)
    svi = DPSVI(model, guide, accountant=accountant_for(epsilon), noise=Noise(source=seed))
    svi.run(x, y, progress=False)
    found = {"DPSVI, nothing set": True, "DPSVI, nothing set, plain": False}
    posteriors = {name: svi.posterior(aware) for name, aware in found.items()}
    return {name: (q.mean, q.covariance_matrix) for name, q in posteriors.items()}


METHODS: dict[str, Callable] = {
    "DPSVI, nothing set": nothing_set,
    "VIPS": vips,
    "DPSEP": dpsep,
    "DPSVI": dpsvi,
    "DP-SGLD": dpsgld,
}
ROWS = (
    *("DPSVI, nothing set", "DPSVI, nothing set, plain", "VIPS", "DPSEP", "DPSEP, plain"),
    *("DPSVI", "DP-SGLD"),
)


def problem(seed: int) -> tuple[Tensor, Tensor, Moments]:
    """Clipped rows, labels, and the posterior's mean and precision."""
    x, y, _ = simulate("logistic", SIZE, seed)
    x = x * (RADIUS / x.norm(dim=1, keepdim=True)).clamp(max=1.0)
    return x, y, exact("logistic", x, y)


def compared(q: Moments, posterior: Moments) -> list[float]:
    """KL, what of it is the mean's, and the geometric mean of the sds' ratios."""
    (mean, covariance), (target, precision) = q, posterior
    shift = mean - target
    sds = torch.linalg.inv(precision).diagonal().sqrt()
    ratio = (covariance.diagonal().sqrt() / sds).log().mean().exp().item()
    return [kl(*q, *posterior), 0.5 * (shift @ precision @ shift).item(), ratio]


def tune() -> None:
    """Print each candidate's KL, mean over the data sets, and the score."""
    problems = {seed: problem(seed) for seed in TUNING}
    print("method, settings: KL at epsilon =", *EPSILONS, "exp of the mean log KL")
    for method, candidates in CANDIDATES.items():
        for settings in candidates:
            means, logs = [], []
            for epsilon in EPSILONS:
                found = []
                for seed, (x, y, posterior) in problems.items():
                    q = METHODS[method](x, y, epsilon, seed, settings)[method]
                    found.append(compared(q, posterior)[0])
                values = torch.tensor(found)
                means.append(values.mean().item())
                logs.append(values.log().mean())
            score = torch.stack(logs).mean().exp().item()
            print(method, settings, *(f"{v:.3f}" for v in [*means, score]), flush=True)


def repeat(names: list[str], seeds: int, path) -> pd.DataFrame:
    """Runs of these methods, one row each, beside those of others that are there already."""
    columns = ["method", "epsilon", "seed", "kl", "kl_of_mean", "sd_ratio"]
    runs = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=columns)
    runs = runs[~runs.method.str.removesuffix(", plain").isin(names)]
    rows = runs.to_numpy().tolist()
    for seed in tqdm(range(seeds)):
        x, y, posterior = problem(seed)
        for epsilon, name in itertools.product((math.inf, *EPSILONS), names):
            for row, q in METHODS[name](x, y, epsilon, seed, CHOSEN[name]).items():
                rows.append([row, epsilon, seed, *compared(q, posterior)])
        runs = pd.DataFrame(rows, columns=columns)
        runs.to_csv(path, index=False, float_format="%.6g")
    return runs


def report(runs: pd.DataFrame) -> str:
    """A Markdown table of the KL, with the mean's part and the ratio of sds at epsilon = 1."""
    wide = summarise(runs, ["method", "epsilon"], "kl").set_index(["method", "epsilon"])
    mean_part = runs.groupby(["method", "epsilon"])["kl_of_mean"].mean()
    ratio = runs.groupby(["method", "epsilon"])["sd_ratio"].mean()
    epsilons = (*EPSILONS, math.inf)
    header = ["method", *(f"epsilon = {e:g}" for e in EPSILONS), "infinity"]
    header += ["mean's part, epsilon = 1", "sd ratio, epsilon = 1"]
    lines = [header, ["---"] * len(header)]
    for method in ROWS:
        cells = []
        for epsilon in epsilons:
            if (method, epsilon) not in wide.index:
                cells.append("")
                continue
            value, error, _ = wide.loc[(method, epsilon)]
            cells.append(f"{value:.3g} ({float(f'{error:.2g}'):g})")
        cells += [f"{mean_part[method, 1.0]:.3g}", f"{ratio[method, 1.0]:.3f}"]
        lines.append([method, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=8, help="data sets (default 8)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--tune", action="store_true", help="print the candidates' KL instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if options.tune:
        tune()
        return
    path = ROOT / "benchmarks" / "results" / "methods.csv"
    table = report(repeat(options.methods, options.seeds, path))
    print(table)
    write_section("methods", table)


if __name__ == "__main__":
    main()
