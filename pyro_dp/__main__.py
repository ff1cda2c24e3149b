"""The demo: who sees a doctor? A private logistic regression on real data.

The RAND Health Insurance Experiment (20,190 person-years, shipped with statsmodels) asked whether
people who share the cost see a doctor less often. ``python -m pyro_dp`` fits a Pyro model
privately, by ``DPSEP`` or with ``--method dpsvi`` by ``DPSVI``, and shows its posterior beside the
exact one, and the report that goes with it. ``python -m pyro_dp synthesize`` is another command
(:mod:`pyro_dp.tabular.command_line`).
"""

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoMultivariateNormal
from torch import Tensor

from pyro_dp import DPSEP, DPSVI, Posterior, PrivacyAccountant, PrivacyError

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
PRIOR_SD = 2.0
METHODS = {"dpsep": DPSEP, "dpsvi": DPSVI}
REPORT = "pyro_dp_report.html"
Moments = tuple[Tensor, Tensor]  # mean (10,) and standard deviation (10,)


def load() -> tuple[Tensor, Tensor]:
    """Features in [-1, 1] by the declared bounds and a one, (20190, 10); any visit, (20190,)."""
    from statsmodels.datasets import randhie

    table = randhie.load_pandas().data
    columns = []
    for name, (low, high, _) in BOUNDS.items():
        column = torch.tensor(table[name].to_numpy(), dtype=torch.float32).clamp(low, high)
        columns.append(2 * (column - low) / (high - low) - 1)
    x = torch.stack([torch.ones_like(column), *columns], dim=1)
    return x, torch.tensor((table["mdvis"] > 0).to_numpy(), dtype=torch.float32)


def model(x: Tensor, y: Tensor) -> None:
    """Bayesian logistic regression, as anyone writes it in Pyro."""
    weights = pyro.sample("weights", dist.Normal(0.0, PRIOR_SD).expand([x.shape[1]]).to_event(1))
    with pyro.plate("person-years", len(x)) as idx:
        pyro.sample("visit", dist.Bernoulli(logits=x[idx] @ weights), obs=y[idx])


def fit(
    method: str, x: Tensor, y: Tensor, accountant: PrivacyAccountant, seed: int | None
) -> Posterior:
    """As anyone calls it: nothing is set."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoMultivariateNormal(model)
    inference = METHODS[method](model, guide, accountant=accountant, generator=seed)
    inference.run(x, y)
    return inference.posterior()


def exact(x: Tensor, y: Tensor) -> Moments:
    """The model's own posterior, without privacy: Newton's method to convergence.

    Mode and curvature. Here they are within 0.04 sd of the posterior's mean and within 1% of its
    standard deviations (``benchmarks/demo.py``).
    """
    x, y = x.double(), y.double()
    mode, prior = x.new_zeros(x.shape[1]), PRIOR_SD**-2 * torch.eye(x.shape[1]).to(x)
    for _ in range(20):
        p = torch.sigmoid(x @ mode)
        gradient = x.T @ (y - p) - prior @ mode
        precision = x.T @ ((p * (1 - p))[:, None] * x) + prior
        mode = mode + torch.linalg.solve(precision, gradient)
    return mode, torch.linalg.inv(precision).diagonal().sqrt()


def doubts(posterior: Posterior) -> list[str]:
    """What the library itself says of the intervals, and an empty line."""
    coefficients = dict(zip(posterior.names, NAMES, strict=True))
    by_reason: dict[str, list[str]] = {}
    for name, reason in posterior.doubtful.items():
        by_reason.setdefault(reason, []).append(coefficients[name])
    found = [
        f"Not to be relied on: {', '.join(names)}: {reason}." for reason, names in by_reason.items()
    ]
    return [*found, ""] if found else ["The library doubts none of the private intervals.", ""]


def covers(exact: Moments, private: Moments) -> Tensor:
    """Whether the private 95% interval has the exact mean in it, for each coefficient."""
    (mean, _), (private_mean, private_sd) = exact, private
    return (private_mean - mean).abs() <= 1.96 * private_sd


def table(exact: Moments, private: Moments) -> str:
    """One line per coefficient; "apart" counts standard deviations of the exact posterior."""
    lines = [f"{'':<28}{'exact, not private':>18}{'private':>20}{'apart':>12}  95% interval"]
    inside = covers(exact, private)
    for name, covered, *values in zip(NAMES, inside, *exact, *private, strict=True):
        mean, sd, private_mean, private_sd = map(float, values)
        apart = abs(private_mean - mean) / sd
        lines.append(
            f"{name:<28}{mean:>9.3f} +- {sd:.3f}{private_mean:>11.3f} +- {private_sd:.3f}"
            f"{apart:>9.1f} sd  {'covers' if covered else 'misses'}"
        )
    lines.append(
        f"The private 95% interval covers the exact mean of {int(inside.sum())} of {len(NAMES)} "
        "coefficients."
    )
    return "\n".join(lines)


def draw(exact: Moments, private: Moments, title: str, path: Path) -> None:
    """Both posteriors, one row per coefficient."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    rows, inside = torch.arange(len(NAMES)), covers(exact, private)
    everything = torch.ones_like(inside)
    # Okabe and Ito's colours, and a marker of its own for each: neither is needed to tell them.
    for (mean, sd), shown, shift, colour, marker, label in (
        (exact, everything, -0.16, "#444444", "o", "exact posterior (not private)"),
        (private, inside, 0.16, "#0072B2", "s", "private"),
        (private, ~inside, 0.16, "#D55E00", "X", "private: misses"),
    ):
        if shown.any():
            style: dict[str, Any] = dict(fmt=marker, color=colour, capsize=3, label=label)
            axes.errorbar(mean[shown], rows[shown] + shift, xerr=1.96 * sd[shown], **style)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_yticks(rows, NAMES)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("effect on the log odds of seeing a doctor: mean and 95% interval")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=150)


def picture(text: str) -> Path:
    """A path that a picture can be written to, known before time and budget are spent."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    path = Path(text)
    formats = FigureCanvasAgg.get_supported_filetypes()
    if os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file in it.")
    if not os.path.isdir(path.parent):
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}.")
    if path.suffix[1:].lower() not in formats:
        raise argparse.ArgumentTypeError(
            f"{path.name} does not end in a format of pictures: use one of {', '.join(formats)}."
        )
    if not os.access(path if os.path.exists(path) else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"no permission to write {path}.")
    return path


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pyro_dp",
        description="Private Bayesian logistic regression on the RAND Health Insurance Experiment.",
        epilog="python -m pyro_dp synthesize --help: synthetic rows of a CSV file.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--method", choices=("dpsep", "dpsvi"), default="dpsep", help="private inference"
    )
    parser.add_argument("--epsilon", type=float, default=1.0, help="privacy budget")
    parser.add_argument(
        "--delta", type=float, default=1e-5, help="probability with which the budget may not hold"
    )
    parser.add_argument(
        "--seed", type=int, help="repeat a run; no privacy against those who guess the seed"
    )
    parser.add_argument(
        "--output",
        type=picture,
        default="pyro_dp_demo.png",
        help=f"picture to write; {REPORT} is written beside it",
    )
    options = parser.parse_args(arguments)
    if options.seed is not None and options.seed < 0:
        parser.error("--seed must not be negative.")
    try:
        options.accountant = PrivacyAccountant(options.epsilon, options.delta)
    except PrivacyError as error:
        parser.error(str(error))
    return options


def main(arguments: list[str] | None = None) -> int:
    """The demo, or the command that is named first.

    :returns: an exit code.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["synthesize"]:
        return _synthesize(arguments[1:])
    if arguments[:1] == ["demo"]:
        arguments = arguments[1:]
    return run_demo(arguments)


def _synthesize(arguments: list[str]) -> int:
    try:
        from pyro_dp.tabular.command_line import main
    except PrivacyError as error:  # of an extra that is not installed
        print(f"synthesize: {error}", file=sys.stderr)
        return 1
    return main(arguments)


def run_demo(arguments: list[str]) -> int:
    """:returns: an exit code."""
    try:
        options = parse(arguments)
        x, y = load()
    except ImportError:
        print("The demo needs its extra packages: pip install 'pyro-dp[demo]'", file=sys.stderr)
        return 1
    print(
        f"{len(x):,} person-years, {len(BOUNDS)} covariates scaled by declared bounds.\n"
        "The protected unit is one person-year: somebody who was observed for several years\n"
        "is covered several times.\n"
    )
    options.accountant.describe(
        title="Who sees a doctor?",
        dataset="RAND Health Insurance Experiment, as statsmodels ships it",
        purpose="a demonstration on public research data",
        unit="a person-year",
        units=len(x),
    )
    posterior = fit(options.method, x, y, options.accountant, options.seed)
    private = posterior.mean.to(x.dtype), posterior.stddev.to(x.dtype)
    print(f"\n{options.accountant}\n")
    for text in doubts(posterior):
        print(text)
    print(
        "For comparison only: the exact posterior, by Newton's method. It reads the data without\n"
        "privacy, and so does what is computed from it. That is fine here, where the data are\n"
        "public research data; it is not part of a private analysis.\n"
    )
    reference = exact(x, y)
    print(table(reference, private))
    title = (
        f"Who sees a doctor? RAND Health Insurance Experiment, {len(x):,} person-years\n"
        f"{options.method.upper()}, "
        rf"$\varepsilon \leq {options.epsilon:g}$, $\delta$ = {options.delta:g}"
    )
    page = options.output.with_name(REPORT)
    try:
        draw(reference, private, title, options.output)
        page.write_text(options.accountant.report("html"), encoding="utf-8")
    except (OSError, RuntimeError) as error:  # of the disk; of a format that needs other programs
        print(f"--output: {options.output} or {page} was not written: {error}", file=sys.stderr)
        return 1
    print(f"Picture: {options.output}\nReport, for whoever answers for the data: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
