"""Do intervals cover, if nobody sets anything? DPSVI, 95% intervals.

The logistic regressions are those of sep_regression.py, with nine standard normal features and an
intercept. N is 20,000 and 5,000. The prior is N(0, I), and labels come from the model. delta=1e-5,
add or remove one record, AutoMultivariateNormal, no setting. Each data set has ten coefficients,
drawn from the prior, and its own noise. So honest intervals cover 95% of the true coefficients. A
cell has --seeds data sets.

    python benchmarks/coverage.py
"""

import argparse
import csv
import itertools
import warnings
from pathlib import Path

import pandas as pd
import pyro
import torch
from common import write_section
from pyro.infer.autoguide import AutoMultivariateNormal
from sep_regression import DIM, model_of
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dp import DPSVI, Noise, PrivacyAccountant

RESULTS = Path(__file__).parent / "results" / "coverage.csv"
CELLS = list(itertools.product((20_000, 5_000), (1.0, 0.3)))
FIELDS = ("size", "epsilon", "seed", "coefficient", "plain", "covered", "doubtful")


def simulate(size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features (N, 10), labels (N,), and the coefficients (10,)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, DIM - 1, generator=generator)
    x = torch.cat([x, torch.ones(size, 1)], dim=1)
    w = torch.randn(DIM, generator=generator)
    return x, torch.bernoulli(torch.sigmoid(x @ w), generator=generator), w


def measured(size: int, epsilon: float, seed: int) -> list[tuple[int, int, int]]:
    """Whether each coefficient is in the plain and noise-aware intervals, and status is not ok."""
    x, y, w = simulate(size, seed)
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    model = model_of("logistic")
    accountant = PrivacyAccountant(epsilon=epsilon, delta=1e-5)
    svi = DPSVI(
        model, AutoMultivariateNormal(model), accountant=accountant, noise=Noise(source=seed)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        svi.run(x, y, progress=False)
        posteriors = [svi.posterior(noise_aware=aware) for aware in (False, True)]
    inside = []
    for posterior in posteriors:
        lower, upper = posterior.intervals(0.95)["w"]
        inside.append((lower < w) & (w < upper))
    to_check = [not posterior.status.is_ok] * len(w)
    return [tuple(map(int, row)) for row in zip(*inside, to_check, strict=True)]


def run(seeds: int, path: Path) -> None:
    """Append what is missing."""
    if not path.exists():
        path.write_text(",".join(FIELDS) + "\n")
    done = set(pd.read_csv(path)[list(FIELDS[:3])].itertuples(index=False, name=None))
    cells = [(*cell, seed) for seed in range(seeds) for cell in CELLS]
    for cell in tqdm([cell for cell in cells if cell not in done]):
        rows = measured(*cell)
        with path.open("a") as file:
            csv.writer(file).writerows([*cell, j, *row] for j, row in enumerate(rows))


def report(path: Path) -> str:
    header = ["N", "epsilon", "intervals", "plain", "noise-aware"]
    header += ["status ok", "not ok", "share not ok"]
    lines = [header, ["---"] * len(header)]
    for (size, epsilon), cell in pd.read_csv(path).groupby(["size", "epsilon"]):
        marked = cell.doubtful == 1
        parts = [cell.plain, cell.covered, cell.covered[~marked], cell.covered[marked]]
        shares = [f"{part.mean():.3f}" if len(part) else "" for part in parts]
        line = [f"{size:,}", f"{epsilon:g}", f"{len(cell):,}", *shares]
        lines.append([*line, f"{marked.mean():.2f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=200, help="data sets of a cell (default 200)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="make the table of what there is")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if not options.report:
        run(options.seeds, options.out)
    table = report(options.out)
    print(table)
    if options.out == RESULTS:
        write_section("coverage", table)


if __name__ == "__main__":
    main()
