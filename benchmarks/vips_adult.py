"""VIPS beside DPVI and DPSEP on Adult at equal privacy: Figure 6 of VIPS.

The figure of Park, Foulds, Chaudhuri & Welling 2020 (JAIR 68; arXiv 1611.00340) has the AUC on test
rows of a logistic regression. It is after 100 steps with sampling rate 0.004,
for noise multipliers 0, 1, 6 and 12. Here these are multiples of a record's bound, add or remove
one record, delta=1e-5. All others spend the epsilon of VIPS's ledger at that noise. Data, splits
and scores are those of sep_adult.py. The prior is N(0, I) for all: VIPS's hyperprior is
concentrated on it.

As in the paper rows are scaled to norm at most 1, but by a public constant. All methods clip them
to norm 6, and VIPS divides by 6 (3.7% of the rows that --tune sees are longer).

Each method except DPSEP has two settings. Setting "same steps" has the figure's rate, steps and
noise multiplier. Setting "own steps" has others, with the noise that spends the same epsilon. DPSEP
has full batches only. DPVI is DPSVI with a diagonal Gaussian guide, releasing gradients of all
parameters, as in the paper, or of the latents. Without noise there is no clipping of gradients and
sites.

Settings were chosen once for all noise multipliers by --tune. The criterion was mean AUC on
held-out rows at noise multipliers 1, 6 and 12, two noise seeds. It saw only rows that are training
data in every split, half of all. The sampling rate (with own steps: epsilon) was doubled for it.

    python benchmarks/vips_adult.py
"""

import argparse
import itertools
import math
from functools import cache
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pyro
import torch
from common import ROOT, summarise, write_section
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal, init_to_value
from sep_adult import DELTA, data, fit_sep, model, scores, split
from torch import Tensor
from torch.distributions import MultivariateNormal
from tqdm.auto import tqdm

import pyro_dp.mechanism.releases
from pyro_dp import Clip, Noise, PaperDPSVI, PrivacyAccountant, SubsampledGaussian
from pyro_dp.vips import VIPS, LogisticRegression

NOISE = (0.0, 1.0, 6.0, 12.0)
STEPS, RATE = 100, 0.004
SVI_STEPS, SVI_RATE = 300, 0.05  # for DPVI's own steps
RADIUS = 6.0
KNOWN = 1e6  # concentration of the prior of VIPS's precision
METHODS = (
    "VIPS, same steps",
    "VIPS, own steps",
    "DPVI parameters, same steps",
    "DPVI parameters, own steps",
    "DPVI latents, same steps",
    "DPVI latents, own steps",
    "DPSEP",
)
# The candidates of --tune: kappa for VIPS, and steps on full batches and kappa for its own steps.
# For DPVI they are step size and C.
DPVI = list(itertools.product((0.03, 0.1, 0.3), (1.0, 3.0)))
CANDIDATES = {
    "VIPS, same steps": [(0.5,), (0.7,), (0.85,), (1.0,)],
    "VIPS, own steps": list(itertools.product((30, 60, 100), (0.7, 1.0))),
    "DPVI parameters, same steps": DPVI,
    "DPVI parameters, own steps": DPVI,
    "DPVI latents, same steps": [*DPVI, (0.3, 0.3), (1.0, 1.0), (1.0, 0.3)],
    "DPVI latents, own steps": [*DPVI, (0.1, 0.3), (0.3, 0.3)],
    "DPSEP": [(0.25,), (0.5,), (1.0,), (2.0,), (3.0,)],  # C
}
CHOSEN = {
    "VIPS, same steps": (1.0,),
    "VIPS, own steps": (60, 0.7),
    "DPVI parameters, same steps": (0.3, 1.0),
    "DPVI parameters, own steps": (0.1, 1.0),
    "DPVI latents, same steps": (0.3, 1.0),
    "DPVI latents, own steps": (0.1, 1.0),
    "DPSEP": (2.0,),
}
SCORES = ["accuracy", "auc", "ece", "loglik"]


@cache
def spent(sigma: float, rate: float) -> float:
    """Epsilon of the figure's steps."""
    accountant = PrivacyAccountant(delta=DELTA)
    accountant.record(SubsampledGaussian(sigma, rate), STEPS)
    return accountant.get_epsilon()


@cache
def calibrated(epsilon: float, num_steps: int, rate: float) -> float:
    """Noise multiplier that spends this epsilon."""
    accountant = PrivacyAccountant(epsilon, DELTA)
    return accountant.noise_multiplier(num_steps=num_steps, sample_rate=rate)


def fit(
    method: str, settings: tuple, x: Tensor, y: Tensor, sigma: float, seed: int, rate: float
) -> MultivariateNormal:
    """The posterior of the weights.

    :param sigma: noise multiplier of the figure's steps.
    :param rate: their sampling rate.
    """
    epsilon = spent(sigma, rate)
    name, _, steps = method.partition(", ")
    if name == "DPSEP":
        return fit_sep(x, y, epsilon, seed, *settings).posterior()
    if name == "VIPS":
        if steps == "same steps":
            return fit_vips(x, y, {"multiplier": sigma}, STEPS, rate, *settings, seed)
        budget = {"epsilon": epsilon} if sigma else {"multiplier": 0}
        num_steps, kappa = settings
        return fit_vips(x, y, budget, num_steps, 1.0, kappa, seed)
    num_steps = STEPS
    if steps == "own steps":
        num_steps, rate = SVI_STEPS, SVI_RATE
        sigma = calibrated(epsilon, num_steps, rate) if sigma else 0.0
    return fit_dpvi(x, y, name.removeprefix("DPVI "), sigma, num_steps, rate, *settings, seed)


def fit_vips(x, y, budget, num_steps, rate, kappa, seed) -> MultivariateNormal:
    """
    :param budget: "epsilon" or "multiplier".
    """
    pyro.set_rng_seed(seed)
    dim = x.shape[1]
    inference = VIPS(
        LogisticRegression(dim, concentration=KNOWN, rate=KNOWN * RADIUS**2),
        accountant=PrivacyAccountant(budget.get("epsilon"), DELTA),
        num_steps=num_steps,
        noise=Noise(budget.get("multiplier"), source=seed),
        sampling=rate,
        step_size=(0.0, kappa),
    )
    inference.run(x / RADIUS, y, progress=False)
    q = inference.posterior(noise_aware=False)["weights"]
    return MultivariateNormal(q.mean / RADIUS, q.covariance_matrix / RADIUS**2)


def fit_dpvi(x, y, privatize, sigma, num_steps, rate, step_size, bound, seed):
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    start = init_to_value(values={"w": x.new_zeros(x.shape[1])})
    guide = AutoDiagonalNormal(model, init_loc_fn=start, init_scale=0.02)
    adam = {"lr": step_size, "lrd": 0.003 ** (1 / num_steps), "clip_norm": math.inf}
    inference = PaperDPSVI(
        model,
        guide,
        pyro.optim.ClippedAdam(adam | {"betas": (0.9, 0.99)}),
        Trace_ELBO(),
        accountant=PrivacyAccountant(delta=DELTA),
        num_steps=num_steps,
        noise=Noise(sigma, source=seed),
        sampling=rate,
        clip=Clip(bound if sigma else math.inf, of=privatize),
    )
    inference.run(x, y, progress=False)
    q = guide.get_posterior()
    return MultivariateNormal(q.mean.detach(), torch.diag(q.stddev.detach() ** 2))


def rows(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Clipped rows with an intercept, labels, and the order of sep_adult.py."""
    x, y, order = data(folder)
    return x * (RADIUS / x.norm(dim=1, keepdim=True)).clamp(max=1.0), y, order


def tune(folder: Path) -> None:
    """Print held-out AUCs by settings; only of rows that no test set holds."""
    x, y, order = rows(folder)
    order = order[: len(order) // 2]
    fifth = len(order) // 5
    held, train = order[:fifth], order[fifth:]
    print("method, settings: AUC at noise multipliers", *NOISE[1:], "mean")
    for method, candidates in CANDIDATES.items():
        for settings in candidates:
            areas = []
            for sigma in NOISE[1:]:
                found = []
                for seed in (1000, 1001):
                    q = fit(method, settings, x[train], y[train], sigma, seed, 2 * RATE)
                    found.append(scores(q, x[held], y[held])[1])
                areas.append(sum(found) / len(found))
            areas.append(sum(areas) / len(areas))
            print(method, settings, *(f"{area:.4f}" for area in areas), flush=True)


def repeat(folder: Path, seeds: int, path: Path) -> pd.DataFrame:
    """All runs, one row each."""
    x, y, order = rows(folder)
    found = []
    cases = list(itertools.product(range(seeds), NOISE, METHODS))
    for seed, sigma, method in tqdm(cases):
        train, test = split(order, seed)
        q = fit(method, CHOSEN[method], x[train], y[train], sigma, seed, RATE)
        epsilon = spent(sigma, RATE)
        found.append([method, sigma, epsilon, seed, *scores(q, x[test], y[test])])
    runs = pd.DataFrame(found, columns=["method", "noise", "epsilon", "seed", *SCORES])
    runs.to_csv(path, index=False, float_format="%.6g")
    return runs


def ablate(folder: Path, seeds: int) -> None:
    """Print VIPS's AUC where only one of its two statistics is noisy: no private runs."""
    x, y, order = rows(folder)
    method, noisy = METHODS[0], pyro_dp.mechanism.releases.release
    for sigma, exact in itertools.product((1.0, 6.0), ((), ("curvature",), ("labels",))):
        names = list(LogisticRegression(x.shape[1]).statistics)

        def release(clipped, exact=exact, names=names, **options):
            without = {"accountant": PrivacyAccountant(), "event": SubsampledGaussian(0.0)}
            released, sums = noisy(clipped, **options), noisy(clipped, **options | without)
            pairs = zip(names, released, sums, strict=True)
            return [total if name in exact else r for name, r, total in pairs]

        pyro_dp.mechanism.releases.release = release
        aucs = []
        for seed in range(seeds):
            train, test = split(order, seed)
            q = fit(method, CHOSEN[method], x[train], y[train], sigma, seed, RATE)
            aucs.append(scores(q, x[test], y[test])[1])
        found = pd.Series(aucs)
        print(sigma, "exact:", exact, f"{found.mean():.4f} ({found.sem():.4f})", flush=True)
    pyro_dp.mechanism.releases.release = noisy


def report(runs: pd.DataFrame) -> str:
    """A Markdown table of the AUC, mean (standard error)."""
    wide = summarise(runs, ["method", "noise"], "auc").set_index(["method", "noise"])
    epsilons = runs.groupby("noise")["epsilon"].first()
    header = [f"sigma = {s:g}, epsilon = {epsilons[s]:.2g}" for s in NOISE[1:]]
    lines = [["AUC", "sigma = 0, not private", *header], ["---"] * (len(NOISE) + 1)]
    for method in METHODS:
        cells = (wide.loc[(method, sigma)] for sigma in NOISE)
        lines.append([method, *(f"{c['mean']:.4f} ({c['sem']:.4f})" for c in cells)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(runs: pd.DataFrame, path: Path) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    titles = ("same rate, steps and noise (DPSEP: same epsilon)", "own steps, same epsilon")
    colors = {"VIPS": "#009E73", "DPVI parameters": "#D55E00", "DPVI latents": "#E69F00"}
    places = range(len(NOISE))
    for axes, steps, title in zip(panels, ("same steps", "own steps"), titles, strict=True):
        for name, color in {**colors, "DPSEP": "#0072B2"}.items():
            method = name if name == "DPSEP" else f"{name}, {steps}"
            line = summarise(runs[runs.method == method], ["noise"], "auc")
            axes.errorbar(
                places,
                line["mean"],
                line["sem"],
                marker="o",
                markersize=4,
                capsize=3,
                color=color,
                label=name,
            )
        epsilons = runs.groupby("noise")["epsilon"].first()
        axes.set_xticks(places, [rf"{s:g}" + f"\n{epsilons[s]:.2g}" for s in NOISE])
        axes.set_xlabel(r"noise multiplier of VIPS; $\epsilon$ ($\delta = 10^{-5}$)")
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("AUC, test rows")
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
    parser.add_argument("--tune", action="store_true", help="print the candidates' AUC instead")
    parser.add_argument("--ablate", action="store_true", help="print VIPS's with half of its noise")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if options.tune:
        tune(options.data)
        return
    if options.ablate:
        ablate(options.data, options.seeds)
        return
    folder = ROOT / "benchmarks"
    runs = repeat(options.data, options.seeds, folder / "results" / "vips_adult.csv")
    table = report(runs)
    print(table)
    write_section("vips_adult", table)
    draw(runs, folder / "figures" / "vips_adult.png")


if __name__ == "__main__":
    main()
