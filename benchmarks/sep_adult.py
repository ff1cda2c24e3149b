"""Private Bayesian logistic regression on Adult: DPSEP, DPSVI and no privacy.

Scores are accuracy, area under the ROC curve, expected calibration error (15 bins of equal mass)
and mean log-likelihood of a test record in nats. They are against epsilon; delta=1e-5, add or
remove one record. The data are the 14 integer-coded columns of dpvi_uci.py and an intercept, with
prior N(0, I). A seed sets the split into 80% training and 20% test rows, and the noise.

Predictions are averaged over the Gaussian posterior. The linear predictor of a test record is then
Gaussian in one dimension. So the average over draws is a Gauss-Hermite sum and has no Monte Carlo
error.

DPSEP takes 30 steps on full batches. DPSVI takes 1000 steps on Poisson batches of 5%, with an Adam
whose step size falls to 0.003 of its start. Both have a full Gaussian guide. C of DPSEP and step
size and C of DPSVI were chosen once for all epsilons. The criterion was the held-out log-likelihood
of nine candidates each (--tune). Half of the rows is training data in every split, and the choice
saw only these. Row "exact" is the Laplace posterior by Newton's method. Row "non-private" is DPSEP
without noise and clipping, which is EP.

Some numbers are assumed to be public, as in dpvi_uci.py, and epsilon does not cover them. These are
the moments that standardise the columns (over all rows), the codes of the text columns, N, and the
choice of the settings.

    python benchmarks/sep_adult.py
"""

import argparse
import math
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from common import summarise
from dpvi_uci import ROOT, load
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, init_to_value
from torch import Tensor
from torch.distributions import MultivariateNormal
from tqdm.auto import tqdm

from pyro_dp import Noise, PaperDPSEP, PaperDPSVI, PrivacyAccountant

DELTA = 1e-5
EPSILONS = (0.1, 0.3, 1.0)
BOUND = 3.0  # C of DPSEP
SVI = (0.03, 5.0)  # step size and C of DPSVI
SVI_STEPS = 1000
BINS = 15
METRICS = {
    "accuracy": "accuracy",
    "auc": "AUC",
    "ece": "calibration error",
    "loglik": "log-likelihood (nats)",
    "kl": "KL to exact (nats)",
}
COLORS = {"DPSEP": "#0072B2", "DPSEP, plain": "#56B4E9", "DPSVI": "#D55E00"}


def model(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(x)) as i:
        pyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def fit_sep(x: Tensor, y: Tensor, epsilon: float, seed: int, bound: float = BOUND) -> PaperDPSEP:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    private = epsilon < math.inf
    inference = PaperDPSEP(
        model,
        AutoMultivariateNormal(model),
        accountant=PrivacyAccountant(epsilon=epsilon if private else None, delta=DELTA),
        num_steps=30,
        noise=Noise(None if private else 0, source=seed),
        clip=bound if private else math.inf,
    )
    inference.run(x, y, progress=False)
    return inference


def fit_svi(
    x: Tensor, y: Tensor, epsilon: float, seed: int, settings=SVI, model=model
) -> MultivariateNormal:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    step_size, bound = settings
    start = init_to_value(values={"w": x.new_zeros(x.shape[1])})
    guide = AutoMultivariateNormal(model, init_loc_fn=start, init_scale=0.02)
    adam = {"lr": step_size, "lrd": 0.003 ** (1 / SVI_STEPS), "clip_norm": math.inf}
    inference = PaperDPSVI(
        model,
        guide,
        pyro.optim.ClippedAdam(adam | {"betas": (0.9, 0.99)}),
        Trace_ELBO(),
        accountant=PrivacyAccountant(epsilon=epsilon, delta=DELTA),
        num_steps=SVI_STEPS,
        sampling=0.05,
        clip=bound,
        noise=Noise(source=seed),
    )
    inference.run(x, y, progress=False)
    q = guide.get_posterior()
    return MultivariateNormal(q.mean.detach(), scale_tril=q.scale_tril.detach())


def laplace(x: Tensor, y: Tensor) -> MultivariateNormal:
    """Newton's method from zero, the step halved until the posterior density rises."""

    def log_joint(w):
        return dist.Bernoulli(logits=x @ w).log_prob(y).sum() - 0.5 * w @ w

    mean = x.new_zeros(x.shape[1])
    for _ in range(30):
        p = torch.sigmoid(x @ mean)
        precision = (x * (p * (1 - p))[:, None]).T @ x + torch.eye(len(mean))
        step = torch.linalg.solve(precision, x.T @ (y - p) - mean)
        if step.abs().max() < 1e-10:
            break
        while log_joint(mean + step) < log_joint(mean):
            step = step / 2
        mean = mean + step
    return MultivariateNormal(mean, precision_matrix=precision)


def probabilities(q: MultivariateNormal, x: Tensor) -> Tensor:
    """Mean of sigmoid(x @ w) over w ~ q."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    weights = torch.tensor(weights / weights.sum())
    centre, spread = x @ q.mean, (x @ q.scale_tril).norm(dim=1)
    return torch.sigmoid(centre[:, None] + spread[:, None] * torch.tensor(nodes)) @ weights


def scores(q: MultivariateNormal, x: Tensor, y: Tensor) -> list[float]:
    """Accuracy, AUC, calibration error and mean log-likelihood on the test rows."""
    p = probabilities(q, x)
    ranks = torch.tensor(pd.Series(p.numpy()).rank().to_numpy())  # ties get the mean rank
    positive = y.sum()
    area = ranks[y == 1].sum() - positive * (positive + 1) / 2
    auc = area / (positive * (len(y) - positive))
    order = p.argsort()
    bins = zip(p[order].tensor_split(BINS), y[order].tensor_split(BINS), strict=True)
    ece = sum((a.sum() - b.sum()).abs() for a, b in bins) / len(y)
    accuracy = ((p > 0.5) == (y == 1)).double().mean()
    loglik = dist.Bernoulli(p).log_prob(y).mean()
    return [value.item() for value in (accuracy, auc, ece, loglik)]


def data(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Rows with an intercept, labels, and a fixed order: its first half is always training data."""
    x, y = load("adult", folder)
    x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
    return x, y, torch.randperm(len(x), generator=torch.Generator().manual_seed(1000))


def split(order: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Training and test rows: 80% and 20%."""
    half = len(order) // 2
    generator = torch.Generator().manual_seed(seed)
    rest = order[half:][torch.randperm(len(order) - half, generator=generator)]
    test = round(0.2 * len(order))
    return torch.cat([order[:half], rest[test:]]), rest[:test]


def tune(folder: Path) -> None:
    """Print held-out log-likelihoods in nats, by settings; only of rows that no test set holds.

    They are half of all training rows, and epsilon is doubled: 0.2 and 2 for 0.1 and 1.
    """
    x, y, order = data(folder)
    order = order[: len(order) // 2]
    fifth = len(order) // 5
    held, train = order[:fifth], order[fifth:]
    cases = [("DPSEP", c) for c in (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 7.0)]
    cases += [("DPSVI", (s, c)) for s in (0.01, 0.03, 0.1) for c in (1.0, 3.0, 5.0)]
    print("method  C or (step size, C)  epsilon 0.1, 1, mean")
    for method, setting in cases:
        logliks = []
        for epsilon in (0.2, 2.0):
            if method == "DPSEP":
                q = fit_sep(x[train], y[train], epsilon, 1000, setting).posterior()
            else:
                q = fit_svi(x[train], y[train], epsilon, 1000, setting)
            logliks.append(scores(q, x[held], y[held])[3])
        mean = sum(logliks) / len(logliks)
        print(method, setting, *(f"{v:.5f}" for v in [*logliks, mean]), flush=True)


def repeat(folder: Path, seeds: int, path: Path) -> pd.DataFrame:
    """All runs, one row each."""
    x, y, order = data(folder)
    rows = []
    for seed in tqdm(range(seeds)):
        train, test = split(order, seed)
        exact = laplace(x[train], y[train])

        def add(method, epsilon, q, seed=seed, test=test, exact=exact):
            kl = torch.distributions.kl_divergence(q, exact).item()
            rows.append([method, epsilon, seed, *scores(q, x[test], y[test]), kl])

        add("exact", math.inf, exact)
        inference = fit_sep(x[train], y[train], math.inf, seed)
        add("non-private", math.inf, inference.posterior(False))
        for epsilon in EPSILONS:
            inference = fit_sep(x[train], y[train], epsilon, seed)
            add("DPSEP", epsilon, inference.posterior(True))
            add("DPSEP, plain", epsilon, inference.posterior(False))
            add("DPSVI", epsilon, fit_svi(x[train], y[train], epsilon, seed))
        runs = pd.DataFrame(rows, columns=["method", "epsilon", "seed", *METRICS])
        runs.to_csv(path, index=False, float_format="%.6g")
    return runs


def report(runs: pd.DataFrame) -> str:
    """A Markdown table of mean (standard error)."""
    lines = [["epsilon", "method", *METRICS.values()]]
    lines.append(["---"] * len(lines[0]))
    tables = {m: summarise(runs, ["epsilon", "method"], m) for m in METRICS}
    first = tables["accuracy"].sort_values("epsilon", kind="stable")
    for i, row in first.iterrows():
        cells = [f"{row.epsilon:g}".replace("inf", "none"), row.method]
        for metric, table in tables.items():
            digits = 2 if metric == "kl" else 4
            mean, sem = table.loc[i, "mean"], table.loc[i, "sem"]
            cells.append(f"{mean:.{digits}f} ({sem:.{digits}f})")
        lines.append(cells)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(runs: pd.DataFrame, path: Path) -> None:
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.5), layout="constrained")
    for axes, metric in zip(panels, ("accuracy", "auc", "ece"), strict=True):
        table = summarise(runs, ["method", "epsilon"], metric)
        for shift, (method, color) in zip((0.97, 1.0, 1.03), COLORS.items(), strict=True):
            line = table[table.method == method]
            axes.errorbar(
                shift * line.epsilon,
                line["mean"],
                line["sem"],
                marker="o",
                markersize=4,
                capsize=3,
                color=color,
                linestyle=":" if method == "DPSEP, plain" else "-",
                label=method,
            )
        reference = table[table.method == "non-private"].iloc[0]
        low, high = reference["mean"] - reference["sem"], reference["mean"] + reference["sem"]
        axes.axhline(reference["mean"], color="#444444", linestyle="--", label="non-private")
        axes.axhspan(low, high, color="#444444", alpha=0.15, linewidth=0)
        axes.set_xscale("log")
        axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        axes.minorticks_off()
        axes.set_xlabel(r"$\epsilon$  (add or remove one record, $\delta = 10^{-5}$)")
        axes.set_ylabel(METRICS[metric])
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="repeats of every run (default 5)")
    parser.add_argument(
        "--data",
        type=Path,
        default=ROOT.parent / "shared" / "data",
        help="folder with adult.csv.gz; without it OpenML is asked (default ../shared/data)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "benchmarks",
        help="folder for results/ and figures/ (default benchmarks)",
    )
    parser.add_argument("--tune", action="store_true", help="print the settings' scores instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if options.tune:
        tune(options.data)
        return
    for folder in ("results", "figures"):
        (options.output / folder).mkdir(parents=True, exist_ok=True)
    runs = repeat(options.data, options.seeds, options.output / "results" / "sep_adult.csv")
    print(report(runs))
    draw(runs, options.output / "figures" / "sep_adult.png")


if __name__ == "__main__":
    main()
