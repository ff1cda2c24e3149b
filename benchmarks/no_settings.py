"""How far is the posterior from the exact one, if nobody sets anything? On real data.

    DPSEP(model, AutoMultivariateNormal(model), accountant=PrivacyAccountant(epsilon, 1e-5))

The same for DPSVI. A row has KL(q || exact posterior) in nats, beside the floor of :mod:`evidence`.
The prior of the coefficients is N(0, I). Neighbours differ by one record, added or removed.

* Logistic regression: Adult, Abalone (rings >= 10), breast cancer (scikit-learn), extramarital
  affairs (statsmodels).
* Poisson: visits to a doctor of the RAND health insurance experiment (statsmodels).
* Linear: power, kin8nm, protein, wine_red, naval, concrete (UCI).
* Simulated: logistic and probit regressions (N = 20,000, d = 10).

Text columns are integer codes; an intercept joins.

Some numbers are assumed to be public, and epsilon does not cover them. These are the moments that
standardise the columns, the standard deviation of the noise in linear models, and N.

A run has a split (80% of the rows; of simulated data another data set) and a seed of the noise.
The exact posterior is Laplace's, by Newton's method, and --check compares it with importance
sampling. The constants of the looks were chosen on most of these data sets, mostly on splits 0 and
1, with other seeds of the noise. Affairs, naval and concrete were taken last. One constant came
later: how far the geometry follows the curvature. It was chosen on the demo's data with adult,
abalone, power, naval and concrete in view. Another, the alignment of clipped parts, was last
changed on the five data sets of literal_swap.py. How it falls with the dimension was chosen in
many_coefficients.py, and on splits 1 to 3 of power, kin8nm, wine_red, randhie and concrete. How
extreme records raise the bound was chosen on protein, randhie, wine_red and concrete, with seeds 0
to 7 of those here. The data of long_tail.py served, too.

    python benchmarks/no_settings.py           # all that is not yet in results/no_settings.csv
    python benchmarks/no_settings.py --report
    python benchmarks/no_settings.py --check
"""

import argparse
import csv
import itertools
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from common import ROOT, write_section
from evidence import one_release
from pyro.infer.autoguide import AutoMultivariateNormal
from torch import Tensor
from torch.distributions import MultivariateNormal
from tqdm.auto import tqdm

from pyro_dp import DPSEP, DPSVI, Noise, PrivacyAccountant

RESULTS = Path(__file__).parent / "results" / "no_settings.csv"
DELTA = 1e-5
EPSILONS = (0.3, 1.0, 4.0)
SPLITS = range(4)
FIELDS = (
    "data",
    "method",
    "epsilon",
    "split",
    "seed",
    "kl",
    "aware",
    "mean",
    "covered",
    "doubtful",
)
LINEAR = ("power", "kin8nm", "protein", "wine_red", "naval", "concrete")
TUNED = ("simulated", "probit", "power", "kin8nm", "abalone", "wine_red", "cancer", "adult")
TUNED = (*TUNED, "randhie", "protein")
FRESH = ("affairs", "naval", "concrete")
METHODS = {"DPSEP": DPSEP, "DPSVI": DPSVI}
SIZE, DIM = 20_000, 10  # for simulated data


def table(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Columns (N, d) and outcomes (N,)."""
    if name in ("randhie", "affairs"):
        import statsmodels.api as sm

        source, target = {"randhie": ("randhie", "mdvis"), "affairs": ("fair", "affairs")}[name]
        data = getattr(sm.datasets, source).load_pandas().data
        y = data.pop(target).to_numpy(float)
        return data.to_numpy(float), y if name == "randhie" else y > 0
    if name == "cancer":
        from sklearn.datasets import load_breast_cancer

        bunch = load_breast_cancer()
        return bunch.data, bunch.target
    data = pd.read_csv(ROOT.parent / "shared" / "data" / f"{name}.csv.gz")
    if name == "abalone":
        y = data.pop("rings") >= 10
        data["sex"] = data["sex"].astype(str).map({"I": -1, "F": 0, "M": 1})
    elif name == "adult":
        y = data.pop("income_gt_50K")
        for column in data.select_dtypes(exclude="number"):
            data[column] = data[column].astype("category").cat.codes
    else:
        y = data.pop(data.columns[-1])
        y = (y - y.mean()) / y.std(ddof=0)
    return data.to_numpy(float), y.to_numpy(float)


def simulated(name: str, split: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(split)
    x = np.c_[rng.standard_normal((SIZE, DIM - 1)), np.ones(SIZE)]
    predictor = torch.as_tensor(x @ (0.7 * rng.standard_normal(DIM)))
    mean = torch.sigmoid(predictor) if name == "simulated" else torch.special.ndtr(predictor)
    return x, rng.random(SIZE) < mean.numpy()


def observation(name: str, sd: float, predictor: Tensor) -> dist.Distribution:
    if name in LINEAR:
        return dist.Normal(predictor, sd)
    if name == "randhie":
        return dist.Poisson(predictor.clamp(max=20.0).exp())
    if name == "probit":
        return dist.Bernoulli(probs=torch.special.ndtr(predictor).clamp(1e-12, 1 - 1e-12))
    return dist.Bernoulli(logits=predictor)


def model_of(name: str, sd: float) -> Callable:
    """Which must not hold the data."""

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
        with pyro.plate("data", len(x)) as i:
            pyro.sample("y", observation(name, sd, x[i] @ w), obs=y[i])

    return model


class Problem:
    """A regression of public design: training rows of a split, and the exact posterior.

    :ivar mean: the Laplace posterior's mean, (d,).
    :ivar precision: its precision, (d, d).
    """

    def __init__(self, name: str, split: int):
        self.name = name
        if name in ("simulated", "probit"):
            x, y = simulated(name, split)
        else:
            x, y = table(name)
            scale = x.std(0)
            x = np.c_[(x - x.mean(0))[:, scale > 1e-12] / scale[scale > 1e-12], np.ones(len(x))]
            rows = np.random.default_rng(split).permutation(len(x))[: int(0.8 * len(x))]
            x, y = x[rows], y[rows]
        self.x, self.y = torch.as_tensor(x), torch.as_tensor(np.asarray(y, dtype=float))
        self.sd = 1.0
        if name in LINEAR:
            left = self.y - self.x @ torch.linalg.lstsq(self.x, self.y, driver="gelsd").solution
            self.sd = left.std(correction=0).item()
        self.model = model_of(name, self.sd)
        self.mean, self.precision = self._laplace()

    def log_joint(self, w: Tensor) -> Tensor:
        fn = observation(self.name, self.sd, self.x @ w)
        log_prob = fn.log_prob(self.y).sum()
        return log_prob - 0.5 * w.square().sum()

    def residuals(self) -> Tensor:
        """Derivatives of the log densities in the predictors at the exact mean, (N,)."""
        predictor = (self.x @ self.mean).requires_grad_()
        log_prob = observation(self.name, self.sd, predictor).log_prob(self.y).sum()
        return torch.autograd.grad(log_prob, predictor)[0]

    def distances(self, mean: Tensor, covariance: Tensor) -> tuple[float, float]:
        """KL from the exact posterior, and the mean's part of it."""
        product, shift = self.precision @ covariance, mean - self.mean
        far = 0.5 * (shift @ self.precision @ shift).item()
        wide = 0.5 * (product.trace() - len(mean) - torch.linalg.slogdet(product)[1]).item()
        return far + wide, far

    def check(self, draws: int = 20_000) -> float:
        """KL of the Laplace posterior from one with the moments of an importance sample."""
        rng = torch.Generator().manual_seed(0)
        root = torch.linalg.cholesky(torch.linalg.inv(self.precision))
        tail = torch.distributions.Chi2(torch.tensor(8.0))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            scale = (8.0 / tail.sample((draws, 1))).sqrt()
        noise = torch.randn(draws, len(root), generator=rng) * scale
        points = self.mean + noise @ root.T
        values = torch.stack([self.log_joint(w) for w in points])
        proposal = -(8 + len(root)) / 2 * (1 + noise.square().sum(1) / 8).log()
        weights = torch.softmax(values - proposal, 0)
        mean = weights @ points
        covariance = (weights * (points - mean).T) @ (points - mean)
        exact = MultivariateNormal(mean, covariance_matrix=covariance)
        laplace = MultivariateNormal(self.mean, precision_matrix=self.precision)
        return torch.distributions.kl_divergence(laplace, exact).item()

    def _laplace(self) -> tuple[Tensor, Tensor]:
        w = self.x.new_zeros(self.x.shape[1])
        for _ in range(100):
            gradient = torch.func.grad(self.log_joint)(w)
            precision = -torch.func.hessian(self.log_joint)(w)
            step = torch.linalg.solve(precision, gradient)
            while self.log_joint(w + step) < self.log_joint(w) - 1e-9:
                step = step / 2
            w = w + step
            if step.abs().max() < 1e-9:
                break
        return w, -torch.func.hessian(self.log_joint)(w)


def measured(problem: Problem, method: str, epsilon: float, seed: int) -> list[float]:
    """KL, that of the noise-aware posterior, the mean's part, coverage, status not ok."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    accountant = PrivacyAccountant(epsilon=epsilon, delta=DELTA)
    guide = AutoMultivariateNormal(problem.model)
    inference = METHODS[method](
        problem.model, guide, accountant=accountant, noise=Noise(source=seed)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inference.run(problem.x, problem.y, progress=False)
        plain, aware = inference.posterior(noise_aware=False), inference.posterior()
    kl, far = problem.distances(plain.mean, plain.covariance_matrix)
    wide, _ = problem.distances(aware.mean, aware.covariance_matrix)
    covered = ((aware.mean - problem.mean).abs() < 1.96 * aware.stddev).double().mean().item()
    return [kl, wide, far, covered, float(not aware.status.is_ok)]


def run(
    names: list[str], methods: list[str], epsilons: list[float], seeds: int, path: Path
) -> None:
    """Append what is missing, cell by cell, split by split."""
    done = set()
    if path.exists():
        old = pd.read_csv(path)
        done = set(old[["data", "method", "epsilon", "split", "seed"]].itertuples(index=False))
    else:
        path.write_text(",".join(FIELDS) + "\n")
    for name, split in itertools.product(names, SPLITS):
        mine = range(split, seeds, len(SPLITS))
        cells = itertools.product(methods, epsilons, mine)
        cells = [cell for cell in cells if (name, *cell[:2], split, cell[2]) not in done]
        if not cells:
            continue
        problem = Problem(name, split)
        for method, epsilon, seed in tqdm(cells, desc=f"{name} {split}"):
            values = measured(problem, method, epsilon, seed)
            with path.open("a") as file:
                row = [name, method, epsilon, split, seed, *(f"{value:.6g}" for value in values)]
                csv.writer(file).writerow(row)


def references(name: str) -> tuple[float, list[float]]:
    """KL of the prior from the exact posterior, and the floors at EPSILONS: means of the splits."""
    priors, floors = [], []
    for split in SPLITS:
        problem = Problem(name, split)
        eye = torch.eye(len(problem.mean))
        priors.append(problem.distances(torch.zeros(len(eye)), eye)[0])
        scores = problem.residuals()[:, None] * problem.x
        root = torch.linalg.cholesky(torch.linalg.inv(problem.precision))
        floors.append([one_release((scores @ root).numpy(), epsilon) for epsilon in EPSILONS])
    return float(np.mean(priors)), np.mean(floors, axis=0).tolist()


def report(path: Path) -> str:
    """The table, and in how many cells the KL is near the floor."""
    groups = pd.read_csv(path).groupby(["data", "epsilon", "method"])
    kls = groups.kl.agg(["median", "max"])
    shares = groups[["covered", "doubtful"]].mean()
    header = ["data", "epsilon", "floor", "KL: median (x floor; largest)", "prior", "covered"]
    lines = [[*header, "status not ok"], ["---"] * (len(header) + 1)]
    ratios, pairs, above = [], [], 0
    for name in [*TUNED, *FRESH]:
        prior, floors = references(name)
        for epsilon, floor in zip(EPSILONS, floors, strict=True):
            median, largest = kls.loc[name, epsilon, "DPSEP"]
            covered, not_ok = shares.loc[name, epsilon, "DPSEP"]
            cells = [name if epsilon == EPSILONS[0] else "", f"{epsilon:g}", f"{floor:.2g}"]
            cells += [f"{median:.3g} ({median / floor:.1f} x; {largest:.3g})", f"{prior:.3g}"]
            lines.append([*cells, f"{covered:.2f}", f"{not_ok:.2f}"])
            ratios.append(median / floor)
            pairs.append(kls.loc[name, epsilon, "DPSVI"]["median"] / median)
            above += median > prior
    near = [sum(r <= most for r in ratios) for most in (3, 6)]
    text = (
        f"`DPSEP` is within 3 x the floor in {near[0]} of {len(ratios)} cells, within 6 x in "
        f"{near[1]}, and above the prior in {above}. The medians of `DPSVI` are at "
        f"most {max(pairs):.2f} times those of `DPSEP`."
    )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{text}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", nargs="+", default=[*TUNED, *FRESH])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help="Laplace against importance sampling")
    parser.add_argument("--report", action="store_true", help="make the table of what there is")
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    if options.check:
        for name in options.data:
            problem = Problem(name, 0)
            print(name, tuple(problem.x.shape), f"{problem.check():.3g}", flush=True)
        return
    if options.report:
        table = report(options.out)
        print(table)
        if options.out == RESULTS:
            write_section("no settings", table)
        return
    began = time.process_time()
    run(options.data, options.methods, options.epsilons, options.seeds, options.out)
    print(f"{time.process_time() - began:.0f} s of processor time")


if __name__ == "__main__":
    main()
