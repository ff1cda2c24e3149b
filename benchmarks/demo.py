"""How often the demo's private intervals cover the means of the exact posterior.

The demo (``python -m pyro_dp``, :mod:`pyro_dp.__main__`) runs as it is: its data and model, nothing
set, delta = 1e-5, seeds 0 to 99. For each epsilon the table counts 95% intervals that contain the
exact mean. It has the private mean's distance from the exact one and the private posterior's width,
both in sds of the exact posterior. The exact posterior is computed by importance
sampling around Newton's mode. That mode is the demo's reference; its distance from the exact mean
is printed first.

Intervals of a posterior whose status is not ok are counted separately.

    python benchmarks/demo.py
    python benchmarks/demo.py --figures   # only draw docs/figures/demo.svg and demo-dark.svg
"""

import sys
import warnings

import pandas as pd
import torch
from common import ROOT, write_section
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.nn.functional import softplus
from tqdm.auto import tqdm

from pyro_dp import PrivacyAccountant
from pyro_dp import __main__ as demo

EPSILONS = (0.3, 1.0, 4.0)
DELTA, SEEDS = 1e-5, range(100)
DRAWS, PART = 100_000, 500
RESULTS = ROOT / "benchmarks" / "results" / "demo.csv"


def sampled(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, float]:
    """Mean and sd of the exact posterior, and the effective share of the draws."""
    x, y = x.double(), y.double()
    mode, _ = demo.exact(x, y)
    p = torch.sigmoid(x @ mode)
    precision = x.T @ ((p * (1 - p))[:, None] * x) + demo.PRIOR_SD**-2 * torch.eye(len(mode)).to(x)
    proposal = MultivariateNormal(mode, precision_matrix=precision)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(DRAWS // 2, len(mode), generator=generator, dtype=x.dtype)
    weights = mode + torch.cat([noise, -noise]) @ proposal.scale_tril.T
    # Equal rows have equal terms: 4,086 of 20,190 differ.
    rows, counts = torch.cat([x, y[:, None]], dim=1).unique(dim=0, return_counts=True)
    features, visits = rows[:, :-1], rows[:, -1]
    log_ratio = -proposal.log_prob(weights) - weights.square().sum(1) / (2 * demo.PRIOR_SD**2)
    for part in torch.arange(DRAWS).split(PART):
        predictor = weights[part] @ features.T
        log_ratio[part] += (visits * predictor - softplus(predictor)) @ counts.to(x)
    share = torch.softmax(log_ratio, 0)
    mean = share @ weights
    return mean, (share @ (weights - mean).square()).sqrt(), 1 / (DRAWS * share @ share).item()


def private_runs(x: Tensor, y: Tensor, mean: Tensor, sd: Tensor) -> pd.DataFrame:
    """One row for each epsilon, seed and coefficient."""
    runs = []
    for epsilon in EPSILONS:
        for seed in tqdm(SEEDS, desc=f"epsilon = {epsilon:g}"):
            accountant = PrivacyAccountant(epsilon, DELTA)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                posterior = demo.fit(x, y, accountant, seed)
            private_mean, private_sd = private = posterior.mean, posterior.stddev
            run = {
                "epsilon": epsilon,
                "seed": seed,
                "coefficient": demo.NAMES,
                "marked": [not posterior.status.is_ok] * len(posterior.names),
                "covered": demo.covers((mean, sd), private).tolist(),
                "apart": ((private_mean - mean) / sd).tolist(),
                "width": (private_sd / sd).tolist(),
            }
            runs.append(pd.DataFrame(run))
    return pd.concat(runs)


def summary(runs: pd.DataFrame, keys: list[str]) -> str:
    """A Markdown table of coverage, mean and root mean square distance, and width."""
    header = ["covered", "share", "not ok", "mean apart (sd)", "rms apart (sd)", "width (sd)"]
    lines = [[*keys, *header]]
    lines.append(["---"] * len(lines[0]))
    for key, group in runs.groupby(keys, sort=False):
        apart = group.apart
        lines.append(
            [
                *(f"{part:g}" if isinstance(part, float) else part for part in key),
                f"{group.covered.sum()} of {len(group)}",
                f"{group.covered.mean():.3f}",
                f"{group.marked.sum()}",
                f"{apart.mean():.2f}",
                f"{(apart**2).mean() ** 0.5:.2f}",
                f"{group.width.mean():.2f}",
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figures(x: Tensor, y: Tensor, epsilon: float = 1.0) -> None:
    """Draw one run for light and for dark pages."""
    posterior = demo.fit(x, y, PrivacyAccountant(epsilon, DELTA), seed=0)
    private = posterior.mean, posterior.stddev
    heading = demo.title(epsilon, DELTA, len(x))
    for name, dark in (("demo.svg", False), ("demo-dark.svg", True)):
        path = ROOT / "docs" / "figures" / name
        demo.draw(demo.exact(x, y), private, posterior.status, heading, path, dark)


def main() -> None:
    torch.set_num_threads(1)
    x, y = demo.load()
    if "--figures" in sys.argv:
        return figures(x, y)
    mean, sd, effective = sampled(x, y)
    mode, newton_sd = demo.exact(x, y)
    reference = (
        f"Newton against {DRAWS:,} weighted draws (effective share {effective:.3f}): means at most "
        f"{((mode - mean) / sd).abs().max():.3f} sd or\n{(mode - mean).abs().max():.4f} apart, sds "
        f"at most {100 * (newton_sd / sd - 1).abs().max():.2f}% apart."
    )
    runs = private_runs(x, y, mean, sd)
    runs.to_csv(RESULTS, index=False, float_format="%.4f")
    by_epsilon = summary(runs, ["epsilon"])
    default = runs[runs.epsilon == 1]
    by_coefficient = summary(default, ["coefficient"])
    text = f"{reference}\n\n{by_epsilon}\n\nAt epsilon = 1:\n\n{by_coefficient}"
    print(text)
    write_section("demo", text)


if __name__ == "__main__":
    main()
