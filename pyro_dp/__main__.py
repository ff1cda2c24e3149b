"""The demo: who sees a doctor? A private logistic regression on real data.

The RAND Health Insurance Experiment asked whether people who share the cost see a doctor less
often. ``statsmodels`` ships its 20,190 person-years. ``python -m pyro_dp`` fits a Pyro model by
``DPSVI`` and compares its posterior with the exact one. ``python -m pyro_dp synthesize`` is another
command (:mod:`pyro_dp.tabular.command_line`).
"""

import argparse
import math
import shutil
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path
from typing import Any, TextIO

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoMultivariateNormal
from torch import Tensor

from pyro_dp import DPSVI, Noise, Posterior, PrivacyAccountant, PrivacyError
from pyro_dp.accounting.second_opinion import second_opinion
from pyro_dp.infer.posterior.posterior import Status
from pyro_dp.utils.display import of_budget, spent_and_left, up
from pyro_dp.utils.files import read_file, value_of, writable

# The codebook implies these bounds: a percentage, logarithms of capped dollar amounts, flags, and
# an index of diseases. A value outside moves to the nearest bound.
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
REPORT = "pyro_dp_report.html"
WIDTH = 100  # columns of the printed text
Moments = tuple[Tensor, Tensor]  # mean (10,) and standard deviation (10,)


def load() -> tuple[Tensor, Tensor]:
    """Ones and features in [-1, 1], (20190, 10); and whether there was a visit, (20190,)."""
    from statsmodels.datasets import randhie

    table = randhie.load_pandas().data
    columns = []
    for name, (low, high, _) in BOUNDS.items():
        column = torch.tensor(table[name].to_numpy(), dtype=torch.float32).clamp(low, high)
        columns.append(2 * (column - low) / (high - low) - 1)
    x = torch.stack([torch.ones_like(column), *columns], dim=1)
    return x, torch.tensor((table["mdvis"] > 0).to_numpy(), dtype=torch.float32)


def model(x: Tensor, y: Tensor) -> None:
    """Bayesian logistic regression in plain Pyro."""
    weights = pyro.sample("weights", dist.Normal(0.0, PRIOR_SD).expand([x.shape[1]]).to_event(1))
    with pyro.plate("person-years", len(x)) as idx:
        pyro.sample("visit", dist.Bernoulli(logits=x[idx] @ weights), obs=y[idx])


def fit(x: Tensor, y: Tensor, accountant: PrivacyAccountant, seed: int | None) -> Posterior:
    """Fit with default settings. The progress bar needs a terminal."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoMultivariateNormal(model)
    inference = DPSVI(model, guide, accountant=accountant, noise=Noise(source=seed))
    inference.run(x, y, progress=sys.stderr.isatty())
    return inference.posterior()


def exact(x: Tensor, y: Tensor) -> Moments:
    """The posterior without privacy, from its mode and curvature by Newton's method.

    The mode is within 0.04 sd of the posterior's mean. The standard deviations are within 1%
    (``benchmarks/demo.py``).
    """
    x, y = x.double(), y.double()
    mode, prior = x.new_zeros(x.shape[1]), PRIOR_SD**-2 * torch.eye(x.shape[1]).to(x)
    for _ in range(20):
        p = torch.sigmoid(x @ mode)
        gradient = x.T @ (y - p) - prior @ mode
        precision = x.T @ ((p * (1 - p))[:, None] * x) + prior
        mode = mode + torch.linalg.solve(precision, gradient)
    return mode, torch.linalg.inv(precision).diagonal().sqrt()


def say(text: str, file: TextIO | None = None) -> None:
    """Print, and wrap long lines."""
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines = textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False)
        print("\n".join(lines), file=file)


def introduction(records: int, epsilon: float, delta: float) -> str:
    """The question, the data and the guarantee."""
    factor = torch.tensor(epsilon, dtype=torch.float64).exp()  # infinite instead of an error
    return (
        "Who sees a doctor? A private logistic regression\n\n"
        "Question: do people see a doctor less often when they share the cost?\n"
        f"Data: {records:,} public person-years of the RAND Health Insurance Experiment.\n"
        f"Model: {len(BOUNDS)} covariates, scaled by declared bounds, and an intercept.\n"
        "Protected: one person-year. A person observed for several years has weaker protection.\n"
        f"Privacy: epsilon = {epsilon:g}. If an empty record replaces one person-year, the "
        f"probability of any result changes by at most a factor of {factor:.3g}, plus {delta:g}.\n"
    )


def spending(accountant: PrivacyAccountant, budget: float) -> str:
    """The spent and the remaining budget, in words."""
    spent, left = spent_and_left(accountant.get_epsilon(), budget)
    lines = [
        f"Spent: epsilon = {spent} of the budget of {of_budget(budget)}.",
        f"The fit published {accountant.num_releases:,} sums over the data, all with random noise.",
        f"Left for later analyses of the same data: {left}.",
    ]
    return "\n".join([*lines, *(f"Note: {note}" for note in accountant.notes)])


def covers(exact: Moments, private: Moments) -> Tensor:
    """Whether each private 95% interval contains the exact mean."""
    (mean, _), (private_mean, private_sd) = exact, private
    return (private_mean - mean).abs() <= 1.96 * private_sd


def table(exact: Moments, private: Moments) -> str:
    """One line per coefficient."""
    lines = [f"{'':<30}{'exact, not private':>18}{'private':>20}{'apart':>12}  private interval"]
    inside = covers(exact, private)
    for name, covered, *values in zip(NAMES, inside, *exact, *private, strict=True):
        mean, sd, private_mean, private_sd = map(float, values)
        lines.append(
            f"{name:<30}{mean:>9.3f} +- {sd:.3f}"
            f"{private_mean:>11.3f} +- {private_sd:.3f}{abs(private_mean - mean) / sd:>9.1f} sd  "
            f"{'covers' if covered else 'misses'}"
        )
    lines.append(
        "Each posterior: mean +- standard deviation (sd). Apart: distance in sd of the exact one.\n"
        "A coefficient is for half the declared range. Health is compared with excellent health.\n"
        f"{int(inside.sum())} of {len(NAMES)} private 95% intervals cover the exact mean."
    )
    return "\n".join(lines)


def answer(private: Moments) -> str:
    """Answer the opening question by the private interval of the coinsurance rate."""
    mean, sd = (float(each[NAMES.index("log coinsurance rate")]) for each in private)
    interval = "The private interval of the coinsurance rate"
    if abs(mean) <= 1.96 * sd:
        return f"Answer: unclear at this epsilon. {interval} contains zero."
    yes, side = ("yes", "below") if mean < 0 else ("no", "above")
    return f"Answer: {yes}. {interval} lies {side} zero."


def title(epsilon: float, delta: float, records: int) -> str:
    """Two lines above the picture."""
    budget = f"ε = {epsilon:g}, δ = {delta:g}"
    return f"Who sees a doctor?\n{records:,} person-years, DPSVI, {budget}"


def draw(
    exact: Moments, private: Moments, status: Status, heading: str, path: Path, dark: bool = False
) -> Any:
    """Draw both posteriors, one row per coefficient.

    :param status: the private markers are hollow if it is not ok.
    :param dark: light text on a dark ground.
    :returns: the ``matplotlib.figure.Figure``.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    rows, inside = torch.arange(len(NAMES)), covers(exact, private)
    # The colours are Okabe and Ito's. The markers suffice without them.
    colours = ("#BBBBBB", "#56B4E9", "#E69F00") if dark else ("#444444", "#0072B2", "#D55E00")
    grey, blue, orange = colours
    series = [(exact, inside | True, -0.17, grey, "o", False, "exact posterior (not private)")]
    hollow = not status.is_ok
    note = f" (hollow: {status.level})" if hollow else ""
    label = f"private posterior misses the exact mean{note}"
    series.append((private, inside, 0.17, blue, "s", hollow, f"private posterior{note}"))
    series.append((private, ~inside, 0.17, orange, "X", hollow, label))
    settings: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": "pyro_dp"}
    settings |= {"font.sans-serif": ["DejaVu Sans", "sans-serif"], "font.size": 10.5}
    if dark:
        settings |= dict.fromkeys(("figure.facecolor", "axes.facecolor"), "#131416")
    with style.context(["dark_background" if dark else "default", settings]):
        figure = Figure(figsize=(5.6, 5.2), layout="constrained")
        axes = figure.subplots()
        for (mean, sd), chosen, shift, colour, marker, hollow, label in series:
            if chosen.any():
                look: dict[str, Any] = dict(fmt=marker, color=colour, markersize=5, label=label)
                look["markerfacecolor"] = axes.get_facecolor() if hollow else colour
                at, xerr = rows[chosen] + shift, 1.96 * sd[chosen]
                axes.errorbar(mean[chosen], at, xerr=xerr, capsize=3, **look)
        axes.axvline(0.0, color=grey, linewidth=0.8)
        axes.set_yticks(rows, NAMES)
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("effect on the log odds: mean and 95% interval")
        figure.suptitle(heading, fontsize=11.5)
        figure.legend(loc="outside lower center", frameon=False)
        # An SVG without date and version is the same in each run.
        svg = path.suffix.lower() in (".svg", ".svgz")
        about = {"Title": heading.replace("\n", " "), "Date": None, "Creator": None}
        figure.savefig(path, dpi=200, metadata=about if svg else None)
    return figure


def picture(text: str) -> Path:
    """Check that the path can hold a picture, before the fit spends time and budget."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    path, formats = writable(text), FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise argparse.ArgumentTypeError(
            f"{path.name} does not end in a format of pictures: use one of {', '.join(formats)}."
        )
    return path


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pyro_dp",
        description="Fit a private logistic regression on public data about visits to a doctor. "
        "Compare it with the exact posterior, in a table and in a picture.",
        epilog="Two more commands: python -m pyro_dp synthesize --help makes synthetic rows. "
        "python -m pyro_dp check FILE computes the epsilon of a ledger or journal again.",
    )
    add, default = parser.add_argument, "(default: %(default)s)"
    text = f"privacy budget, where less is more private {default}"
    add("--epsilon", type=float, default=1.0, help=text)
    text = f"how much a probability may exceed epsilon's limit {default}"
    add("--delta", type=float, default=1e-5, help=text)
    add("--seed", type=int, help="repeat a run; anyone who guesses the seed can undo the privacy")
    text = f"the picture, in any format of matplotlib {default}; {REPORT} goes to the same folder"
    add("--output", type=picture, default="pyro_dp_demo.png", metavar="FILE", help=text)
    options = parser.parse_args(arguments)
    if options.seed is not None and options.seed < 0:
        parser.error("--seed must not be negative.")
    try:
        options.accountant = PrivacyAccountant(options.epsilon, options.delta)
    except PrivacyError as error:
        parser.error(str(error))
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the command that the first argument names, or the demo.

    :returns: an exit code.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["synthesize"]:
        return _synthesize(arguments[1:])
    if arguments[:1] == ["check"] and len(arguments) == 2:
        return check(arguments[1])
    if arguments[:1] == ["demo"]:
        arguments = arguments[1:]
    return run_demo(arguments)


def check(path: str) -> int:
    """Recompute the epsilon of a saved ledger or a journal with two accountants.

    :returns: an exit code.
    """
    try:
        accountant = _accountant_of(path)
    except (OSError, LookupError, TypeError, PrivacyError) as error:
        print(f"check: {path} is no saved ledger or journal ({error}).", file=sys.stderr)
        return 1
    ledger = dict(accountant.counted)
    found, source = second_opinion(ledger, accountant.delta, accountant.neighboring)
    print(accountant)
    if accountant.journal_digest:
        print(f"journal: its last line has the digest {accountant.journal_digest}.")
    print(f"dp_accounting: {source if found is None else f'epsilon = {up(found)} ({source})'}.")
    return 0


def _accountant_of(path: str) -> PrivacyAccountant:
    """An accountant with the ledger of a :meth:`PrivacyAccountant.save` file or a journal."""
    with open(path, "rb") as file:
        header = file.readline()
    try:
        (state, _), is_journal = value_of(header.rstrip(b"\n"), ""), True
    except ValueError:
        state, is_journal = read_file(path), False
    names = ("epsilon", "delta", "neighboring", "engine")
    accountant = PrivacyAccountant(**{name: state[name] for name in names})
    if is_journal:  # a copy, because a run may have the journal open
        with tempfile.TemporaryDirectory() as folder:
            accountant.journal(shutil.copy(path, folder)).close()
    else:
        accountant.load_state_dict(state)
    return accountant


def _synthesize(arguments: list[str]) -> int:
    try:
        from pyro_dp.tabular.command_line import main
    except PrivacyError as error:  # an extra is not installed
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
    say(introduction(len(x), options.epsilon, options.delta))
    options.accountant.describe(
        title="Who sees a doctor?",
        dataset="RAND Health Insurance Experiment, as statsmodels ships it",
        purpose="a demonstration on public research data",
        unit="a person-year",
        units=len(x),
    )
    with warnings.catch_warnings(record=True) as raised:
        posterior = fit(x, y, options.accountant, options.seed)
    for warning in raised:
        say(f"Warning: {warning.message}", sys.stderr)
    private, status = (posterior.mean, posterior.stddev), posterior.status
    say(f"{spending(options.accountant, options.epsilon)}\n")
    say(
        "Comparison: Newton's method finds the exact posterior. It reads the data without privacy, "
        "so a private analysis leaves this step out. The data of this demo are public.\n"
    )
    reference = exact(x, y)
    say(f"{table(reference, private)}\nStatus: {status}.\n{answer(private)}\n")
    heading = title(options.epsilon, options.delta, len(x))
    page = options.output.with_name(REPORT)
    try:
        draw(reference, private, status, heading, options.output)
        page.write_text(options.accountant.report("html"), encoding="utf-8")
    except (OSError, RuntimeError) as error:  # a full disk, or a format that needs other programs
        message = f"--output: {options.output} or {page} was not written ({error})."
        print(message, file=sys.stderr)
        return 1
    print(f"Picture of both posteriors: {options.output}")
    print(f"Privacy report for the data owner: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
