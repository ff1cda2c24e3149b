"""The demo: who sees a doctor? A private logistic regression on real data.

The RAND Health Insurance Experiment (20,190 person-years, shipped with statsmodels) asked whether
people who share the cost see a doctor less often. ``python -m pyro_dp`` fits the same Pyro model
twice, without privacy and with it, and shows both posteriors: by ``SVI`` and ``DPSVI``, or with
``--method dpsep`` by expectation propagation.
"""

import argparse
import math
import sys
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal
from torch import Tensor
from tqdm.auto import trange

from pyro_dp import DPSEP, DPSVI, PrivacyAccountant, PrivacyError

# Declared bounds, known without the data: a percentage, logarithms of capped dollar amounts, flags,
# and an index of diseases. Values beyond them are moved to the bound, record by record.
BOUNDS = {
    "lncoins": (0.0, math.log(101), "log coinsurance rate"),
    "idp": (0.0, 1.0, "individual deductible"),
    "lpi": (0.0, 7.5, "log participation incentive"),
    "fmde": (0.0, 8.5, "log maximum expenditure"),
    "physlm": (0.0, 1.0, "physical limitation"),
    "disea": (0.0, 60.0, "chronic diseases"),
    "hlthg": (0.0, 1.0, "health good"),
    "hlthf": (0.0, 1.0, "health fair"),
    "hlthp": (0.0, 1.0, "health poor"),
}
NAMES = ["intercept", *(label for *_, label in BOUNDS.values())]
STEPS, RATE, BOUND = 1000, 0.05, 3.0
STEPS_SEP, BOUND_SEP = 30, 3.0
HONESTY = {
    "dpsvi": "The private intervals do not include the uncertainty that the noise adds. Both fits\n"
    "stop short of the posterior where intercept and chronic diseases make up for each other;\n"
    "with --method dpsep they get there.",
    "dpsep": "The private intervals include the uncertainty that the noise adds.",
}


def load() -> tuple[Tensor, Tensor]:
    """Features in [-1, 1] by the declared bounds and a one, (20190, 10); any visit, (20190,)."""
    from statsmodels.datasets import randhie

    table = randhie.load_pandas().data
    columns = []
    for name, (low, high, _) in BOUNDS.items():
        column = torch.tensor(table[name].to_numpy(), dtype=torch.float32).clamp(low, high)
        columns.append(2 * (column - low) / (high - low) - 1)
    x = torch.stack([torch.ones(len(table)), *columns], dim=1)
    return x, torch.tensor((table["mdvis"] > 0).to_numpy(), dtype=torch.float32)


def model(x: Tensor, y: Tensor) -> None:
    """Bayesian logistic regression, as anyone writes it in Pyro."""
    weights = pyro.sample("weights", dist.Normal(0.0, 2.0).expand([x.shape[1]]).to_event(1))
    with pyro.plate("person-years", len(x)) as idx:
        pyro.sample("visit", dist.Bernoulli(logits=x[idx] @ weights), obs=y[idx])


def new_guide() -> AutoMultivariateNormal:
    """A fresh guide, at public initial values."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    return AutoMultivariateNormal(model, init_scale=0.05)


def optimizer(steps: int) -> pyro.optim.PyroOptim:
    """Adam whose step falls from 0.03 to a hundredth of it."""
    return pyro.optim.ClippedAdam({"lr": 0.03, "lrd": 0.01 ** (1 / steps), "clip_norm": math.inf})


def posterior(guide: AutoMultivariateNormal) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the weights."""
    fitted = guide.get_posterior()
    return fitted.mean.detach(), fitted.stddev.detach()


def fit_svi(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Without privacy."""
    guide = new_guide()
    svi = SVI(model, guide, optimizer(STEPS), Trace_ELBO())
    for _ in trange(STEPS, desc="SVI (not private)"):
        svi.step(x, y)
    return posterior(guide)


def fit_dpsvi(
    x: Tensor, y: Tensor, accountant: PrivacyAccountant, seed: int | None
) -> tuple[Tensor, Tensor]:
    """The same with DPSVI: one accountant more, and the sampling that hides who took part."""
    guide = new_guide()
    svi = DPSVI(
        model,
        guide,
        optimizer(STEPS),
        Trace_ELBO(),
        accountant=accountant,
        num_steps=STEPS,
        sample_rate=RATE,
        max_grad_norm=BOUND,
        generator=seed,
    )
    svi.run(x, y)
    return posterior(guide)


def fit_dpsep(
    x: Tensor, y: Tensor, accountant: PrivacyAccountant, seed: int | None
) -> tuple[Tensor, Tensor]:
    """With DPSEP: few steps on all records, no optimizer, and the noise in the intervals."""
    guide = new_guide()
    sep = DPSEP(
        model,
        guide,
        accountant=accountant,
        num_steps=STEPS_SEP,
        max_factor_norm=BOUND_SEP,
        generator=seed,
    )
    sep.run(x, y)
    return posterior(guide)


def fit_sep(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """DPSEP without noise and clipping: stochastic expectation propagation, not private."""
    guide = new_guide()
    sep = DPSEP(
        model,
        guide,
        accountant=PrivacyAccountant(),
        num_steps=STEPS_SEP,
        noise_multiplier=0,
        max_factor_norm=math.inf,
    )
    sep.run(x, y)
    return posterior(guide)


def table(exact: tuple[Tensor, Tensor], private: tuple[Tensor, Tensor]) -> str:
    """One line per coefficient."""
    lines = [f"{'':<28}{'not private':>18}{'private':>20}{'apart':>12}"]
    for name, *values in zip(NAMES, *exact, *private, strict=True):
        mean, sd, private_mean, private_sd = map(float, values)
        apart = abs(private_mean - mean) / sd
        lines.append(
            f"{name:<28}{mean:>9.3f} +- {sd:.3f}{private_mean:>11.3f} +- {private_sd:.3f}"
            f"{apart:>9.1f} sd"
        )
    return "\n".join(lines)


def draw(
    exact: tuple[Tensor, Tensor], private: tuple[Tensor, Tensor], title: str, path: Path
) -> None:
    """Both posteriors, one row per coefficient."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    rows = torch.arange(len(NAMES))
    for (mean, sd), shift, colour, marker, label in (
        (exact, -0.15, "tab:gray", "o", "not private"),
        (private, 0.15, "tab:blue", "s", "private"),
    ):
        axes.errorbar(
            mean, rows + shift, xerr=1.96 * sd, fmt=marker, color=colour, capsize=3, label=label
        )
    axes.axvline(0.0, color="black", linewidth=0.5)
    axes.set_yticks(rows, NAMES)
    axes.invert_yaxis()
    axes.set_xlabel("effect on the log odds of seeing a doctor, mean and 95% interval")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=150)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pyro_dp",
        description="Private Bayesian logistic regression on the RAND Health Insurance Experiment.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--method", choices=("dpsvi", "dpsep"), default="dpsvi", help="private inference"
    )
    parser.add_argument("--epsilon", type=float, default=1.0, help="privacy budget")
    parser.add_argument(
        "--delta", type=float, default=1e-5, help="probability with which the budget may not hold"
    )
    parser.add_argument(
        "--seed", type=int, help="repeat a run; no privacy against those who guess the seed"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("pyro_dp_demo.png"), help="picture to write"
    )
    options = parser.parse_args(arguments)
    if options.seed is not None and options.seed < 0:
        parser.error("--seed must not be negative.")
    if not options.output.parent.is_dir():
        parser.error(f"--output: there is no folder {options.output.parent}.")
    try:
        options.accountant = PrivacyAccountant(options.epsilon, options.delta)
    except PrivacyError as error:
        parser.error(str(error))
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        x, y = load()
    except ImportError:
        print("The demo needs its extra packages: pip install 'pyro-dp[demo]'", file=sys.stderr)
        return 1
    print(
        f"{len(x):,} person-years, {len(BOUNDS)} covariates scaled by declared bounds.\n"
        "The protected unit is one person-year: somebody who was observed for several years\n"
        "is covered several times.\n"
    )
    fit, fit_privately = {"dpsvi": (fit_svi, fit_dpsvi), "dpsep": (fit_sep, fit_dpsep)}[
        options.method
    ]
    exact = fit(x, y)
    private = fit_privately(x, y, options.accountant, options.seed)
    print(f"\n{table(exact, private)}\n\n{options.accountant}\n\n{HONESTY[options.method]}")
    spent = options.accountant.get_epsilon()
    title = (
        f"RAND HIE, {options.method.upper()}, (epsilon, delta) = ({spent:.3g}, {options.delta:g})"
    )
    draw(exact, private, title, options.output)
    print(f"Picture: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
