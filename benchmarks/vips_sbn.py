"""A private sigmoid belief network of scikit-learn's 8x8 digits, binarised: VIPS, pixel accuracy.

The score is the fraction of hidden pixels of test images that are predicted correctly. Each tenth
of the pixels is predicted from the other nine. delta=1e-5, add or remove one image. A pixel is on
from brightness 8 of 16. A seed sets the split into 80% training and 20% test images, the start and
the noise. This follows the last experiment of Park et al. 2020 (VIPS, arXiv 1611.00340), which has
MNIST.

Batches are full. Number of hidden units, steps and step size are the same for every epsilon. Option
--tune prints their grid. Half of the training images of the first split are its data, and the other
half is held out. Epsilon does not cover this choice. Row "majority" predicts each pixel's value in
most training images, and is not private.

    python benchmarks/vips_sbn.py
"""

import argparse
import math
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pyro
import torch
from common import ROOT, summarise, write_section
from sklearn.datasets import load_digits
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dp import FullBatch, Noise, NotPrivateWarning, PrivacyAccountant
from pyro_dp.vips import VIPS, SigmoidBeliefNetwork

DELTA = 1e-5
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
UNITS, STEPS, STEP_SIZE = 10, 7, (0.0, 1.0)
REFERENCE_STEPS = 60


def images() -> Tensor:
    return torch.tensor(load_digits().data >= 8).double()  # (1797, 64)


def split(x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test = round(0.2 * len(x))
    return x[order[test:]], x[order[:test]]


def accuracy(
    train: Tensor,
    test: Tensor,
    epsilon: float,
    seed: int,
    *,
    units: int = UNITS,
    num_steps: int = STEPS,
    step_size: tuple[float, float] = STEP_SIZE,
) -> float:
    """The accuracy of a network learned under epsilon; infinite for plain variational Bayes."""
    model = SigmoidBeliefNetwork(train.shape[1], units)
    pyro.set_rng_seed(seed)
    private = epsilon < math.inf
    vips = VIPS(
        model,
        accountant=PrivacyAccountant(epsilon if private else None, DELTA),
        num_steps=num_steps if private else REFERENCE_STEPS,
        noise=Noise(None if private else 0, source=seed),
        sampling=FullBatch(),
        step_size=step_size if private else (0.0, 0.0),
    )
    vips.run(train, progress=False)
    return model.pixel_accuracy(vips.posterior(noise_aware=False), test)


def majority(train: Tensor, test: Tensor) -> float:
    return ((train.mean(dim=0) > 0.5) == (test > 0.5)).double().mean().item()


def tune() -> None:
    """Print held-out accuracies at epsilon 2 and 8, doubled for half of the images."""
    both, _ = split(images(), 0)
    train, held = both[::2], both[1::2]
    print("units, steps, step size: epsilon 2, 8")
    for units in (5, 10, 20):
        for num_steps in (4, 7, 14):
            for step_size in ((0.0, 0.5), (0.0, 0.7), (0.0, 1.0)):
                found = []
                for epsilon in (4.0, 16.0):
                    each = [
                        accuracy(
                            train,
                            held,
                            epsilon,
                            seed,
                            units=units,
                            num_steps=num_steps,
                            step_size=step_size,
                        )
                        for seed in (100, 101, 102)
                    ]
                    found.append(sum(each) / len(each))
                print(units, num_steps, step_size, *(f"{v:.4f}" for v in found), flush=True)


def repeat(seeds: int) -> pd.DataFrame:
    """All runs, one row each."""
    x, rows = images(), []
    for seed in tqdm(range(seeds)):
        train, test = split(x, seed)
        rows.append(["majority", math.inf, seed, majority(train, test)])
        rows.append(["non-private", math.inf, seed, accuracy(train, test, math.inf, seed)])
        for epsilon in EPSILONS:
            rows.append(["VIPS", epsilon, seed, accuracy(train, test, epsilon, seed)])
    return pd.DataFrame(rows, columns=["method", "epsilon", "seed", "accuracy"])


def report(table: pd.DataFrame) -> str:
    """Markdown, mean (standard error)."""
    lines = [["epsilon", "pixel accuracy"], ["---", "---"]]
    for row in table.sort_values("epsilon", kind="stable").itertuples():
        label = row.method if row.epsilon == math.inf else f"{row.epsilon:g}"
        lines.append([label, f"{row.mean:.4f} ({row.sem:.4f})"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(table: pd.DataFrame, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(5, 3.6), layout="constrained")
    line = table[table.method == "VIPS"]
    axes.errorbar(line.epsilon, line["mean"], line["sem"], marker="o", capsize=3, label="VIPS")
    for method, style in (("non-private", "--"), ("majority", ":")):
        mean = table[table.method == method]["mean"].item()
        axes.axhline(mean, color="#444444", linestyle=style, label=method)
    axes.set_xscale("log")
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axes.minorticks_off()
    axes.set_xlabel(r"$\epsilon$  (add or remove one image, $\delta = 10^{-5}$)")
    axes.set_ylabel("accuracy of hidden pixels")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160)


def main() -> None:
    warnings.simplefilter("ignore", NotPrivateWarning)  # images are public
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10, help="repeats of every run (default 10)")
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "benchmarks",
        help="folder for results/ and figures/ (default benchmarks); RESULTS.md is written only "
        "with the default",
    )
    parser.add_argument("--tune", action="store_true", help="print the settings' scores instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if options.tune:
        tune()
        return
    for folder in ("results", "figures"):
        (options.output / folder).mkdir(parents=True, exist_ok=True)
    runs = repeat(options.seeds)
    path = options.output / "results" / "vips_sbn.csv"
    runs.to_csv(path, index=False, float_format="%.6g")
    table = summarise(runs, ["method", "epsilon"], "accuracy")
    print(report(table))
    draw(table, options.output / "figures" / "vips_sbn.png")
    if options.output == parser.get_default("output"):
        write_section("vips_sbn", report(table))


if __name__ == "__main__":
    main()
