"""The numbers of docs/play.md, whose figures react to the reader.

"slider": the demo (``python -m pyro_dp``) at twelve budgets, with twenty seeds of the noise each.

"people": simulated logistic regressions by DPSVI with nothing set. Features are uniform in [-1, 1],
and coefficients are drawn from the prior, which is N(0, 1). A row has the median width of the 95%
intervals, divided by the width without privacy, and whether the status is ok. Five seeds a cell.

    python benchmarks/play.py          # what is not yet in results
    python benchmarks/play.py --page   # only docs/_static/play_data.js, from the results
"""

import csv
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import NormalDist

import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoMultivariateNormal
from tqdm.auto import tqdm

from pyro_dp import DPSVI, Noise, PrivacyAccountant
from pyro_dp import __main__ as demo

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SLIDER, PEOPLE = RESULTS / "slider.csv", RESULTS / "people.csv"
DATA = ROOT / "docs" / "_static" / "play_data.js"
DELTA = 1e-5
EPSILONS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
SIZES = (500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
BUDGETS, COEFFICIENTS = (0.1, 0.3, 1.0, 3.0), (3, 6, 12)
SLIDER_KEYS, PEOPLE_KEYS = ("epsilon", "seed"), ("coefficients", "epsilon", "records", "seed")


def slider_rows(epsilon: float, seed: int) -> Iterator[tuple]:
    """One for each coefficient."""
    posterior = demo.fit(*demo.load(), PrivacyAccountant(epsilon, DELTA), seed)
    for moments in zip(demo.NAMES, posterior.mean, posterior.stddev, strict=True):
        name, mean, sd = moments
        yield name, f"{mean:.4f}", f"{sd:.4f}", posterior.status.level


def people_rows(coefficients: int, epsilon: float, records: int, seed: int) -> Iterator[tuple]:
    """One: the ratio of widths, and the status."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    x = torch.cat([torch.rand(records, coefficients - 1) * 2 - 1, torch.ones(records, 1)], dim=1)
    w = torch.randn(coefficients)
    y = torch.bernoulli(torch.sigmoid(x @ w))

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([coefficients]).to_event(1))
        with pyro.plate("people", len(x)) as idx:
            pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])

    svi = DPSVI(
        model,
        AutoMultivariateNormal(model),
        accountant=PrivacyAccountant(epsilon, DELTA),
        noise=Noise(source=seed),
    )
    svi.run(x, y, progress=False)
    posterior = svi.posterior()
    ratio = (posterior.stddev / without_privacy(x.double(), y.double())).median()
    yield f"{ratio:.4f}", posterior.status.level


def without_privacy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Standard deviations of Laplace's approximation."""
    mode, prior = x.new_zeros(x.shape[1]), torch.eye(x.shape[1]).to(x)
    for _ in range(30):
        p = torch.sigmoid(x @ mode)
        precision = x.T @ ((p * (1 - p))[:, None] * x) + prior
        mode = mode + torch.linalg.solve(precision, x.T @ (y - p) - mode)
    return torch.linalg.inv(precision).diagonal().sqrt()


def fill(path: Path, header: tuple[str, ...], cells: list[tuple], rows: Callable) -> None:
    """Add the cells that the file lacks."""
    keys = len(cells[0])
    if not path.exists():
        path.write_text(",".join(header) + "\n")
    with path.open(newline="") as file:
        done = {tuple(row[:keys]) for row in csv.reader(file)}
    for cell in tqdm(cells, desc=path.stem):
        if tuple(map(str, cell)) not in done:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = [[*cell, *row] for row in rows(*cell)]
            with path.open("a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows(found)


def page() -> str:
    """The data of docs/_static/play.js."""
    mean, sd = demo.exact(*demo.load())
    fits = [
        [
            {
                "mean": fit["mean"].tolist(),
                "sd": fit["sd"].tolist(),
                "status": fit.status.iloc[0],
            }
            for _, fit in runs.groupby("seed")
        ]
        for _, runs in pd.read_csv(SLIDER).groupby("epsilon")
    ]
    people = pd.read_csv(PEOPLE)
    cells = people.groupby(["coefficients", "epsilon", "records"])
    ratios = cells.ratio.median()
    ok = cells.status.agg(lambda status: (status == "ok").mean())
    data = {
        "epsilons": EPSILONS,
        "names": demo.NAMES,
        "exact": {"mean": rounded(mean), "sd": rounded(sd)},
        "fits": fits,
        "game": [game(epsilon) for epsilon in EPSILONS],
        "sizes": SIZES,
        "people": [
            {
                "coefficients": coefficients,
                "epsilon": epsilon,
                "ratio": rounded(ratios[coefficients, epsilon]),
                "ok": rounded(ok[coefficients, epsilon]),
            }
            for coefficients, epsilon in itertools.product(COEFFICIENTS, BUDGETS)
        ],
    }
    return f"window.PLAY = {json.dumps(data, separators=(',', ':'))}\n"


def rounded(numbers) -> list[float]:
    return [round(float(each), 4) for each in numbers]


def game(epsilon: float) -> dict[str, float]:
    """The noise in one sum, if a record changes it by 1, and how often the best guess is right."""
    noise = PrivacyAccountant(epsilon, DELTA).noise_multiplier(num_steps=1)
    return {"noise": round(noise, 4), "best": round(NormalDist().cdf(0.5 / noise), 4)}


def main() -> None:
    torch.set_num_threads(1)
    if "--page" not in sys.argv:
        cells = list(itertools.product(EPSILONS, range(20)))
        fill(SLIDER, (*SLIDER_KEYS, "coefficient", "mean", "sd", "status"), cells, slider_rows)
        cells = list(itertools.product(COEFFICIENTS, BUDGETS, SIZES, range(5)))
        fill(PEOPLE, (*PEOPLE_KEYS, "ratio", "status"), cells, people_rows)
    DATA.write_text(page())


if __name__ == "__main__":
    main()
