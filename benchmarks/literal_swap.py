"""Is the posterior right when a user changes SVI to DPSVI and nothing else?

    accountant = PrivacyAccountant(epsilon, 1e-5)
    DPSVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO(), accountant=accountant)

The models are logistic regressions with prior N(0, 2^2) and AutoMultivariateNormal. Two of the five
data sets are simulated: "rare" (1.6% of 10,000 have the outcome) and "correlated" (condition number
700). The others are Adult and two of statsmodels: extramarital affairs ("fair") and visits to a
doctor ("randhie", any or none). Six optimizers, with step sizes from too small to absurd, stand
beside nothing set. The rows "before" are nothing set in version 0.1, frozen before the swap was
mended.

A row has KL(posterior || exact) in nats, of ``posterior()`` with and without the noise in its width
and of the guide. It also has the number of 95% intervals that miss the exact mean, and of marked
ones: all if the status is not ok. The exact posterior is Laplace's at the mode, by Newton's method.

The moments that standardise the columns are assumed to be public, and epsilon does not cover them.

The step sizes of the plan (``StepPlan``) were chosen on all five data sets, with other seeds.

    python benchmarks/literal_swap.py            # all that is not yet in results/literal_swap.csv
    python benchmarks/literal_swap.py --only adult,fair
    python benchmarks/literal_swap.py --report
"""

import argparse
import csv
import itertools
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from common import ROOT, write_section
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal
from pyro.optim import SGD, Adam, ClippedAdam
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence
from tqdm.auto import tqdm

from pyro_dp import DPSVI, PrivacyAccountant

RESULTS = Path(__file__).parent / "results" / "literal_swap.csv"
DATA = ("adult", "rare", "fair", "correlated", "randhie")
EPSILONS = (0.3, 1.0, 4.0)
SEEDS = range(10)
OPTIMIZERS = {
    "nothing set": lambda: None,
    "Adam .003": lambda: Adam({"lr": 0.003}),
    "Adam .01": lambda: Adam({"lr": 0.01}),
    "Adam .05": lambda: Adam({"lr": 0.05}),
    "Adam .3": lambda: Adam({"lr": 0.3}),
    "ClippedAdam .02": lambda: ClippedAdam({"lr": 0.02, "lrd": 0.1 ** (1 / 1000)}),
    "SGD 1e-5": lambda: SGD({"lr": 1e-5}),
}
BEFORE = "before"
NUMBERS = ("epsilon", "seed", "plain", "aware", "guide", "width", "seconds")
COUNTS = ("dim", "missed", "marked", "unmarked_missed")
FIELDS = ("data", "optim", *NUMBERS, *COUNTS)


def scaled(x: np.ndarray) -> np.ndarray:
    sd = x.std(axis=0)
    return (x - x.mean(axis=0)) / np.where(sd > 0, sd, 1.0)


def table(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Columns (N, d) and outcomes (N,)."""
    if name in ("rare", "correlated"):
        rng = np.random.default_rng({"rare": 2, "correlated": 3}[name])
        if name == "rare":
            x = rng.normal(size=(10_000, 4))
            logits = x @ [1, 0.5, 0, 0] - 4.6
        else:
            x = rng.normal(size=(20_000, 1)) + 0.1 * rng.normal(size=(20_000, 6))
            logits = x @ [1, -1, 0.5, 0, 0, -0.3]
        return x, rng.random(len(x)) < 1 / (1 + np.exp(-logits))
    if name == "adult":
        frame = pd.read_csv(ROOT.parent / "shared" / "data" / "adult.csv.gz")
        y = frame.pop("income_gt_50K").to_numpy()
        for column in frame.select_dtypes(exclude="number"):
            frame[column] = frame[column].astype("category").cat.codes
    else:
        import statsmodels.api as sm

        frame = getattr(sm.datasets, name).load_pandas().data
        y = frame.pop({"fair": "affairs", "randhie": "mdvis"}[name]).to_numpy() > 0
    return scaled(frame.to_numpy(float)), y


class Problem:
    """A data set, the model, and the exact posterior."""

    def __init__(self, name: str):
        x, y = table(name)
        self.x = torch.tensor(np.c_[x, np.ones(len(x))])
        self.y = torch.tensor(y.astype(float))
        self.exact = self._laplace()

    def model(self, x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[1]), 2.0).to_event(1))
        with pyro.plate("people", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    def _laplace(self) -> MultivariateNormal:
        dim = self.x.shape[1]
        w = torch.zeros(dim)
        for _ in range(100):
            mean = torch.sigmoid(self.x @ w)
            weights = (mean * (1 - mean)).unsqueeze(1)
            precision = (self.x * weights).mT @ self.x + torch.eye(dim) / 4
            step = torch.linalg.solve(precision, self.x.mT @ (self.y - mean) - w / 4)
            w = w + step * min(1.0, 2.0 / step.norm().item())
        return MultivariateNormal(w, precision_matrix=precision)


def measured(problem: Problem, optim: str, epsilon: float, seed: int) -> dict[str, float]:
    """One run, with what a user would type."""
    model, chosen = _without_data(problem), OPTIMIZERS[optim]()
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide, accountant = AutoMultivariateNormal(model), PrivacyAccountant(epsilon, 1e-5)
    start = time.perf_counter()
    svi = DPSVI(model, guide, chosen, chosen and Trace_ELBO(), accountant=accountant)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        svi.run(problem.x, problem.y, progress=False)
    seconds = time.perf_counter() - start
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        aware, plain = svi.posterior(), svi.posterior(noise_aware=False)
    exact, own = problem.exact, guide.get_posterior()
    missed = ((aware.mean - exact.mean) / aware.stddev).abs() > 1.96
    marked = torch.full_like(missed, not aware.status.is_ok)
    return {
        "plain": kl_divergence(plain, exact).item(),
        "aware": kl_divergence(aware, exact).item(),
        "guide": kl_divergence(own, exact).item(),
        "width": (aware.stddev / exact.stddev).median().item(),
        "seconds": seconds,
        "dim": len(missed),
        "missed": int(missed.sum()),
        "marked": int(marked.sum()),
        "unmarked_missed": int((missed & ~marked).sum()),
    }


def _without_data(problem: Problem):
    def model(x, y):
        Problem.model(None, x, y)  # type: ignore[arg-type]

    return model


def fill(names: list[str]) -> None:
    done = set()
    if RESULTS.exists():
        frame = pd.read_csv(RESULTS)
        done = set(zip(frame.data, frame.optim, frame.epsilon, frame.seed, strict=True))
    cells = itertools.product(SEEDS, names, OPTIMIZERS, EPSILONS)
    todo = [(n, o, e, s) for s, n, o, e in cells if (n, o, e, s) not in done]
    problems: dict[str, Problem] = {}
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if not done:
            writer.writeheader()
        for name, optim, epsilon, seed in tqdm(todo):
            problem = problems.setdefault(name, Problem(name))
            found = measured(problem, optim, epsilon, seed)
            row = {"data": name, "optim": optim, "epsilon": epsilon, "seed": seed, **found}
            writer.writerow({k: f"{v:.5g}" if k in NUMBERS else v for k, v in row.items()})
            file.flush()


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a cell: medians of KLs, and shares of intervals."""
    cells = frame.groupby(["data", "epsilon", "optim"], sort=False)
    found = cells[["plain", "aware", "guide", "width"]].median()
    found["worst"] = cells["guide"].max()
    sums = cells[["dim", "missed", "marked"]].sum()
    found["hold"] = 1 - sums.missed / sums.dim
    found["marked"] = sums.marked / sums.dim
    return found.reset_index()


def promises(frame: pd.DataFrame) -> list[str]:
    """The aims of the literal swap, and the measurements."""
    cells = summary(frame)
    before = cells[cells.optim == BEFORE].set_index(["data", "epsilon"])
    swapped = frame[~frame.optim.isin([BEFORE, "nothing set"])]
    literal = cells[~cells.optim.isin([BEFORE, "nothing set"])]
    at = literal.set_index(["data", "epsilon"])
    lines = []
    for kind, label in (("plain", "posterior()"), ("guide", "guide")):
        ratio = at[kind] / before[kind].reindex(at.index)
        lines.append(
            f"KL of {label} beside nothing set before: <= 1.3 x in {(ratio <= 1.3).mean():.0%} of "
            f"{len(ratio)} cells, at most {ratio.max():.2f} x."
        )
    large = swapped[swapped.epsilon >= 1]
    for kind in ("plain", "guide"):
        top = large.loc[large[kind].idxmax()]
        over = (large[kind] > 25).mean()
        lines.append(
            f"Largest KL ({kind}) at epsilon >= 1: {top[kind]:.1f} ({top.data}, {top.optim}, "
            f"{top.epsilon:g}); above 25 in {over:.1%} of runs."
        )
    less = (at["hold"] - before["hold"].reindex(at.index)).min()
    lines.append(f"Intervals hold at least as often as before plus {less:.2f} in every cell.")
    for name, own in swapped.groupby("data"):
        plain = own.dim.sum() - own.marked.sum()
        share = own.unmarked_missed.sum() / max(plain, 1)
        lines.append(f"{name}: {share:.1%} of {plain} unmarked intervals miss.")
    good = large[large.missed == 0]
    flagged = (good.marked > 0).mean()
    lines.append(f"At epsilon >= 1 {flagged:.0%} of {len(good)} runs that hold are marked.")
    return lines


def report() -> None:
    frame = pd.read_csv(RESULTS)
    cells = summary(frame)
    order = [BEFORE, *OPTIMIZERS]
    rows = [
        "| data, epsilon | " + " | ".join(order) + " |",
        "|---|" + "---|" * len(order),
    ]
    for (name, epsilon), own in cells.groupby(["data", "epsilon"], sort=False):
        own = own.set_index("optim").reindex(order)
        shown = [f"{each.guide:.2g} ({each.hold:.2f})" for each in own.itertuples()]
        rows.append(f"| {name}, {epsilon:g} | " + " | ".join(shown) + " |")
    text = [
        "`python benchmarks/literal_swap.py`: a user changes `SVI` to `DPSVI` and keeps the "
        "optimizer. Cells have the median KL of the guide to the exact posterior in nats. In "
        "brackets is the share of 95% intervals that hold its mean. Each cell has "
        f'{len(SEEDS)} seeds. Column "before" is `DPSVI` with nothing set in version 0.1.',
        "\n".join(rows),
        "\n".join(f"* {line}" for line in promises(frame)),
    ]
    write_section("The literal swap", "\n\n".join(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(DATA), help="data sets, by commas")
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    if given.report:
        report()
    else:
        fill(given.only.split(","))


if __name__ == "__main__":
    main()
