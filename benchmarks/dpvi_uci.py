"""Private Bayesian logistic regression on Abalone and Adult: Figure 1 of DPVI.

It reproduces the test accuracy against epsilon of Jälkö, Dikmen & Honkela 2017 (arXiv 1610.08749).

Much is as in the paper:

* 8 columns of Abalone (sex coded I=-1, F=0, M=1), class rings >= 10; 14 integer-coded columns of
  Adult.
* Columns are standardised, and the first 80% of the rows are for training.
* Weights w ~ N(0, I) and no intercept; a diagonal Gaussian posterior; AdaGrad.
* q=0.05 and 1000 steps on Abalone, q=0.005 and 2000 steps on Adult.
* delta=1e-3, replace one record; 10 repeats.

Predictions use the posterior mean. For a linear predictor and the threshold 1/2 it decides as the
average over the Gaussian posterior does.

Some settings differ. The accountant is a tight one, so the same noise gives a smaller epsilon.
Batches are Poisson samples. Prior and entropy carry no data and are not clipped. The paper's
release is privatize="parameters"; beside it is privatize="latents". Step size and clipping norm are
ours: 1 and 1 for both data sets and releases (--tune prints a grid around them). The non-private
runs have the same step, no noise and no clipping.

The paper compares with DP-SGLD, private Langevin dynamics (Wang, Fienberg & Smola 2015). Here it
has the same release as "latents", and the same batches, steps and epsilon. It predicts by the mean
of the second half of its chain. Its step size and C are the best of --tune --seeds 1. Larger steps
than its privacy noise allows sample at a temperature above 1; the results state the temperature.

Some numbers are assumed to be public, as in the paper, and epsilon does not cover them. These are
the moments that standardise the columns (over all rows), N, and the choice of the settings. The
codes of the text columns are public too (alphabetical; "?" is a category of its own).
"""

import argparse
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from common import DELTA, Settings, draw_curves, fit, markdown, summarise
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal
from pyro.infer.autoguide.initialization import init_to_mean
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dp import Noise, PrivacyAccountant

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "methods"))

from dpsgld import DPSGLD  # noqa: E402

EPSILONS = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
PAPER = {
    "abalone": {"num_steps": 1000, "sample_rate": 0.05},
    "adult": {"num_steps": 2000, "sample_rate": 0.005},
}
RELEASES = ("parameters", "latents", "DP-SGLD")
COLUMNS = ["data", "release", "epsilon", "spent", "seed", "accuracy", "temperature"]
# Step size and clipping norm.
CHOSEN = {
    ("abalone", "non-private"): (1.0, 1.0),
    ("abalone", "parameters"): (1.0, 1.0),
    ("abalone", "latents"): (1.0, 1.0),
    ("abalone", "DP-SGLD"): (1e-3, 0.1),
    ("adult", "non-private"): (1.0, 1.0),
    ("adult", "parameters"): (1.0, 1.0),
    ("adult", "latents"): (1.0, 1.0),
    ("adult", "DP-SGLD"): (3e-4, 1.0),
}


def model(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(x.new_zeros(x.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(x)) as i:
        pyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def accuracy(x: Tensor, y: Tensor, test: tuple[Tensor, Tensor], settings, epsilon, seed):
    """Test accuracy of the posterior mean, the epsilon that was spent, and the temperature."""
    temperature = 1.0
    if settings.release == "DP-SGLD":
        w, accountant, temperature = langevin(x, y, settings, epsilon, seed)
    else:
        guide = AutoDiagonalNormal(model, init_loc_fn=init_to_mean, init_scale=0.1)
        accountant = fit(model, guide, Trace_ELBO(), (x, y), settings, epsilon, seed)
        w = guide.median()["w"]
    inputs, labels = test
    correct = ((inputs @ w > 0) == (labels == 1)).double().mean().item()
    return correct, accountant.get_epsilon(), temperature


def langevin(x: Tensor, y: Tensor, settings: Settings, epsilon: float, seed: int):
    """Mean of the chain's second half, the ledger, and the temperature of the chain."""
    pyro.set_rng_seed(seed)
    accountant = PrivacyAccountant(epsilon=epsilon, delta=DELTA, neighboring="replace_one")
    inference = DPSGLD(
        model,
        accountant=accountant,
        num_steps=settings.num_steps,
        step_size=settings.step_size,
        clip=settings.bound,
        init_loc_fn=init_to_mean,
        sampling=settings.sample_rate,
        noise=Noise(source=seed),
    )
    temperatures = inference.run(x, y, progress=False)
    return inference.get_samples()["w"].mean(dim=0), accountant, temperatures[-1]


def load(name: str, folder: Path) -> tuple[Tensor, Tensor]:
    """Standardised columns (N, d) and labels 0 or 1 (N,)."""
    path = folder / f"{name}.csv.gz"
    table = pd.read_csv(path) if path.exists() else download(name)
    labels = (table.pop("rings") >= 10) if name == "abalone" else table.pop("income_gt_50K")
    if name == "abalone":
        table["sex"] = table["sex"].astype(str).map({"I": -1, "F": 0, "M": 1})
    for column in table.columns:
        if not pd.api.types.is_numeric_dtype(table[column]):
            table[column] = table[column].astype("category").cat.codes
    table = (table - table.mean()) / table.std(ddof=0)
    return torch.tensor(table.to_numpy(dtype=float)), torch.tensor(labels.to_numpy(dtype=float))


def download(name: str) -> pd.DataFrame:
    """The same tables from OpenML, brought to the columns and the row order of the UCI files."""
    from sklearn.datasets import fetch_openml

    bunch = fetch_openml(name, version={"abalone": 1, "adult": 2}[name], as_frame=True)
    table, target = bunch.data.copy(), bunch.target.astype(str).str.strip()
    if name == "abalone":
        return table.rename(columns={"Sex": "sex"}).assign(rings=target.astype(float))
    for column in table.columns:
        if not pd.api.types.is_numeric_dtype(table[column]):
            table[column] = table[column].astype(object).fillna("?").astype(str).str.strip()
    table["income_gt_50K"] = target.str.startswith(">50K").astype(int)
    # OpenML may put adult.test first, and the split is by row: start with adult.data's first row.
    start = int(table["fnlwgt"].eq(77516).to_numpy().argmax())
    return pd.concat([table[start:], table[:start]], ignore_index=True)


def split(x: Tensor, y: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    n = int(0.8 * len(x))
    return (x[:n], y[:n]), (x[n:], y[n:])


def tune(folder: Path, seeds: int) -> pd.DataFrame:
    """Accuracy on the last fifth of the training rows; the test rows take no part.

    One pair of step size and C serves all epsilons: a strong and a weak one are averaged.
    """
    rows = []
    bounds = (0.3, 1.0, 3.0)
    grid = [(s, c) for s in (0.1, 0.3, 1.0) for c in bounds]
    cases = [(n, r, g) for n in PAPER for r in ("parameters", "latents") for g in grid]
    grid = [(s, c) for s in (1e-4, 3e-4, 1e-3, 3e-3) for c in (0.1, *bounds)]
    cases += [(n, "DP-SGLD", g) for n in PAPER for g in grid]
    cases += [(n, "non-private", (s, 1.0)) for n in PAPER for s in (0.1, 0.3, 1.0)]
    for name, release, (step_size, bound) in tqdm(cases):
        train, validation = split(*split(*load(name, folder))[0])
        settings = Settings(release, step_size, bound, **PAPER[name])
        for epsilon in (0.2, 1.0):
            for seed in range(1000, 1000 + seeds):
                score, *_ = accuracy(*train, validation, settings, epsilon, seed)
                rows.append([name, release, step_size, bound, score])
    runs = pd.DataFrame(rows, columns=["data", "release", "step_size", "bound", "accuracy"])
    return summarise(runs, ["data", "release", "step_size", "bound"], "accuracy")


def repeat(folder: Path, seeds: int, path: Path, keep: bool) -> pd.DataFrame:
    """All runs, one row each; those of the finished repeats are in the file at any time.

    :param keep: runs that the file holds already are not made again.
    """
    cases = [(n, r, e) for n in PAPER for r in RELEASES for e in EPSILONS]
    cases = [(n, "non-private", torch.inf) for n in PAPER] + cases
    data = {name: split(*load(name, folder)) for name in PAPER}
    rows, done = [], set()
    if keep:
        runs = pd.read_csv(path).reindex(columns=COLUMNS).fillna({"temperature": 1.0})
        rows = runs.to_numpy(dtype=object).tolist()
        done = set(runs[["data", "release", "epsilon", "seed"]].itertuples(index=False, name=None))
    with tqdm(total=len(cases) * seeds - len(done)) as bar:
        for seed in range(seeds):
            for name, release, epsilon in cases:
                if (name, release, epsilon, seed) in done:
                    continue
                bar.set_description(f"{name}, {release}, epsilon={epsilon:g}")
                train, test = data[name]
                settings = Settings(release, *CHOSEN[name, release], **PAPER[name])
                score, spent, temperature = accuracy(*train, test, settings, epsilon, seed)
                rows.append([name, release, epsilon, spent, seed, score, temperature])
                bar.update()
            runs = pd.DataFrame(rows, columns=COLUMNS)
            runs.to_csv(path, index=False)
    return runs


def report(table: pd.DataFrame) -> None:
    for name, part in table.groupby("data", sort=False):
        print(f"\n{name}: test accuracy, mean (standard error) of {part['count'].min()} repeats")
        for release in ("non-private", *RELEASES):
            step_size, bound = CHOSEN[name, release]
            clip = "no clipping" if release == "non-private" else f"C={bound:g}"
            print(f"  {release}: step size {step_size:g}, {clip}")
        reference = part[part.release == "non-private"].iloc[0]
        print(f"  non-private: {reference['mean']:.4f} ({reference['sem']:.4f})\n")
        private = part[part.release != "non-private"]
        print(markdown(private, "epsilon", list(RELEASES), 4))


def draw(table: pd.DataFrame, path: Path) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes, (name, part) in zip(panels, table.groupby("data", sort=False), strict=True):
        draw_curves(axes, part, "test accuracy")
        axes.set_title(name.capitalize())
    panels[1].legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10, help="repeats of every run (default 10)")
    parser.add_argument(
        "--data",
        type=Path,
        default=ROOT.parent / "shared" / "data",
        help="folder with abalone.csv.gz and adult.csv.gz; without them OpenML is asked "
        "(default ../shared/data, seen from the repository)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "benchmarks",
        help="folder for results/ and figures/ (default benchmarks)",
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the runs that results/ holds, and add the others"
    )
    parser.add_argument(
        "--tune", action="store_true", help="print the grid of settings instead of the benchmark"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if options.tune:
        print(tune(options.data, options.seeds).to_string(index=False))
        return
    for folder in ("results", "figures"):
        (options.output / folder).mkdir(parents=True, exist_ok=True)
    path = options.output / "results" / "dpvi_uci.csv"
    runs = repeat(options.data, options.seeds, path, options.keep)
    table = summarise(runs, ["data", "release", "epsilon"], "accuracy")
    print(f"delta={DELTA:g}, replace one record")
    report(table)
    print("\nTemperature of the Langevin chains")
    chains = runs[runs.release == "DP-SGLD"]
    print(chains.pivot_table("temperature", "epsilon", "data", sort=False).round(1).to_string())
    draw(table, options.output / "figures" / "dpvi_uci.png")


if __name__ == "__main__":
    main()
