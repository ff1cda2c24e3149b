"""Write docs/results.md and its figures from benchmarks/results.

Each number on the page that is no setting is computed here. The figures follow the dark mode of the
page: their colours are variables of their own style sheet.

    python benchmarks/summary.py
"""

import math
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
FIGURES = ROOT / "docs" / "figures" / "results"
PREVIEW = ROOT / "docs" / "_static" / "preview.png"
# Okabe and Ito's palette, in light and dark.
COLOURS = {
    "#333333": ("text", "#cfd0d0"),
    "#0072b2": ("blue", "#56b4e9"),
    "#d55e00": ("orange", "#e69f00"),
    "#009e73": ("green", "#2dc9a0"),
    "#a04f7c": ("purple", "#dd9cc0"),
}
TEXT, BLUE, ORANGE, GREEN, PURPLE = COLOURS
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pyro_dp",
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), TEXT),
    **dict.fromkeys(("xtick.color", "ytick.color"), TEXT),
}
_SETS = {  # names in evidence.py
    "correlated": "correlated features (simulated)",
    "fair": "extramarital affairs",
    "adult": "income (Adult)",
    "randhie": "any doctor's visit (RAND)",
    "heavy": "heavy-tailed features (simulated)",
    "rare": "rare outcome (simulated)",
    "cancer": "breast cancer, 569 records",
    "fair_counts": "number of affairs (Poisson)",
    "anes": "vote, 944 records",
}
TEMPLATE = """\
# Results

Six plots help you decide whether `pyro_dp` suits your analysis. Each is drawn from the numbers of all runs, which are
in `benchmarks/results`. The [archive](../benchmarks/RESULTS.md) has every table, with the command
that makes it again. All runs use delta = 1e-5 and protect one record, added or removed. "Nothing set" means that only
the budget is set.

## How close is a private posterior?

![KL to the exact posterior falls with epsilon. DPSVI and DPSEP are far below VIPS and DP-SGLD.](figures/results/methods.svg)

At epsilon = 1, `DPSVI` with nothing set is {dpsvi} nats from the exact posterior, and `DPSEP` {dpsep}. Below 1 nat, the
intervals look the same in a picture. DP-SGLD and `VIPS` are {sgld} and {vips} nats away, although their settings were
chosen by hand. The model is a logistic regression of 20,000 records with ten coefficients
([all methods](../benchmarks/RESULTS.md#which-method-kl-to-the-exact-posterior)).

## Do the intervals contain the truth?

![If their width includes the noise, about 95% of the intervals contain the truth. Otherwise, far fewer do.](figures/results/coverage.svg)

95% intervals of `posterior()` contain {least_covered} to {most_covered}% of the true coefficients, in {intervals} cases a
row. If their width leaves out the privacy noise, they contain as few as {least_plain}%
([simulations](../benchmarks/RESULTS.md#nothing-set-do-intervals-cover-the-truth)).

## What does privacy cost?

![Median width of the private intervals, divided by the exact width, for nine data sets and three epsilons.](figures/results/widths.svg)

At epsilon = 1, intervals are at most {wide} times as wide as the exact ones on six of nine data sets. For overdispersed counts
they are {counts} times as wide, and for the two small data sets, breast cancer and the vote, {cancer} and {anes} times. A marker is hollow if fewer than half of the {seeds} runs end with the status `ok`
([table](../benchmarks/RESULTS.md#evidence)).

## Can you swap SVI as it is?

![Seven choices of the optimizer lead to nearly the same distance on each of five data sets.](figures/results/swap.svg)

Yes, in regressions. We replaced `SVI` by `DPSVI` and kept the optimizer. On each data set, the median distances of
seven choices differ by a factor of at most {spread}. At epsilon = 1, {held}% of the intervals contain the exact mean
([all runs](../benchmarks/RESULTS.md#the-literal-swap)).

## What about hierarchies?

![Share of latents near NUTS for ten models, at epsilon = 1 and 4. Most lie near NUTS at epsilon = 4.](figures/results/hierarchies.svg)

A latent is near NUTS if its mean and its standard deviation are both within half a standard deviation of NUTS. Each model has
5,000 records. At epsilon = 4, at least 75% of the latents are near NUTS in {near} of ten models. At epsilon = 1, {far} models are below 75%
([table](../benchmarks/RESULTS.md#hierarchies-and-products-of-latents-beside-nuts)).

## How long does a private step take?

![Time of a private step, divided by that of SVI, for four networks: DPSVI and two modes of Opacus.](figures/results/speed.svg)

A step of `DPSVI` takes {fastest} to {slowest} times as long as one of `SVI`. Opacus takes {ghost_fastest} to
{ghost_slowest} times as long with ghost clipping, and {hooks_fastest} to {hooks_slowest} times with hooks. The first six
steps of `DPSVI` take {first} seconds, because the model is checked and traced
([networks](../benchmarks/RESULTS.md#networks-beside-opacus), [other models](../benchmarks/RESULTS.md#speed-of-dpsvi)).

## Shortfalls

* **Prior and data disagree.** On abalone at epsilon = 0.3, {abalone}% of the 95% intervals contain the exact mean, because
  the prior excludes two coefficients.
* **Columns nearly copy each other.** On naval, {naval} to {naval_most}% contain it. At epsilon = 1 or less, the status is not `ok` in
  {naval_warned}% of the runs.
* **Few records decide.** On protein, {protein} to {protein_most}% contain it, but the posterior is far from the exact one.
* **Small data.** With the 569 records of breast cancer, {cancer_ok}% of the runs are `ok` at epsilon = 1.
* **A missing covariate takes time.** A fit of {rows} rows takes {logistic} seconds. With one missing number it takes
  {missing} ([families](../benchmarks/RESULTS.md#regressions-from-a-frame-time-of-a-fit)).

The first three are [regressions with nothing set](../benchmarks/RESULTS.md#nothing-set-real-data).
[When not to trust a result](pitfalls.md) helps you to notice such cases.

```{{toctree}}
:hidden:

Archive <../benchmarks/RESULTS>
zoo
```
"""  # noqa: E501


def read(name: str) -> pd.DataFrame:
    return pd.read_csv(RESULTS / f"{name}.csv")


def down(percent: float, digits: int = 0) -> str:
    """Never rounded up."""
    return f"{math.floor(percent * 10**digits + 1e-9) / 10**digits:.{digits}f}"


def methods(axes: Axes) -> dict[str, str]:
    runs = read("methods")
    means = runs[runs.epsilon < 10].groupby(["method", "epsilon"]).kl.mean()
    series = {
        "VIPS": ("VIPS", ORANGE, "^"),
        "DP-SGLD": ("DP-SGLD", GREEN, "D"),
        "DPSEP, plain": ("DPSEP", PURPLE, "s"),
        "DPSVI, nothing set, plain": ("DPSVI", BLUE, "o"),
    }
    for method, (label, colour, marker) in series.items():
        means[method].plot(ax=axes, color=colour, marker=marker, label=label, loglog=True)
    axes.set_xticks([0.3, 1, 4], ["0.3", "1", "4"])
    axes.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axes.minorticks_off()
    axes.set(xlabel="epsilon", ylabel="KL to the exact posterior (nats)")
    names = ["dpsvi", "dpsep", "sgld", "vips"]
    at_one = [means[method, 1.0] for method in reversed(series)]
    return {name: f"{kl:.2g}" for name, kl in zip(names, at_one, strict=True)}


def coverage(axes: Axes) -> dict[str, str]:
    cells = read("coverage").groupby(["size", "epsilon"])
    shares = 100 * cells[["plain", "covered"]].mean()
    rows = range(len(shares))
    labels = [f"N = {size:,}, epsilon = {epsilon:g}" for size, epsilon in shares.index]
    axes.axvline(95, color=TEXT, linewidth=0.8)
    axes.plot(shares.plain, rows, "D", color=ORANGE, label="without the noise")
    axes.plot(shares.covered, rows, "o", color=BLUE, label="posterior()")
    axes.set_yticks(rows, labels)
    axes.set(xlim=(50, 100), xlabel="95% intervals that hold the truth (%)")
    (intervals,) = set(cells.size())
    return {
        "least_covered": down(shares.covered.min(), 1),
        "most_covered": down(shares.covered.max(), 1),
        "least_plain": down(shares.plain.min(), 1),
        "intervals": f"{intervals:,}",
    }


def widths(axes: Axes) -> dict[str, str]:
    runs = read("evidence")
    cells = runs[(runs.start == "prior") & runs.data.isin(_SETS)].groupby(["epsilon", "data"])
    median = cells.width.median()
    ok = cells.status.agg(lambda status: (status == "ok").mean())
    rows = range(len(_SETS))
    for epsilon, colour, marker in ((0.3, ORANGE, "^"), (1.0, BLUE, "o"), (4.0, GREEN, "D")):
        width, few = median[epsilon].loc[[*_SETS]], ok[epsilon].loc[[*_SETS]] < 0.5
        axes.plot([], [], marker, color=colour, label=f"epsilon = {epsilon:g}")
        for row, at, hollow in zip(rows, width, few, strict=True):
            axes.plot(at, row, marker, color=colour, fillstyle="none" if hollow else "full")
    axes.set_xscale("log")
    axes.set_xticks([1, 1.5, 2, 3, 5, 10], ["1", "1.5", "2", "3", "5", "10"])
    axes.minorticks_off()
    axes.set_yticks(rows, _SETS.values())
    axes.set_xlabel("median width / exact width")
    small, large = median[1.0].sort_values().iloc[:6], ["cancer", "fair_counts", "anes"]
    names = ["cancer", "counts", "anes"]
    assert not set(small.index) & set(large)
    return {
        "wide": f"{small.max():.1f}",
        **{name: f"{median[1.0][each]:.1f}" for name, each in zip(names, large, strict=True)},
        "seeds": f"{cells.size().iloc[0]}",
        "cancer_ok": down(100 * ok[1.0]["cancer"]),
    }


def swap(axes: Axes) -> dict[str, str]:
    runs = read("literal_swap")
    runs = runs[(runs.epsilon == 1) & (runs.optim != "before")]
    medians = runs.groupby(["data", "optim"]).guide.median().unstack()
    medians = medians.loc[medians["nothing set"].sort_values().index]
    rows = range(len(medians))
    others = medians.drop(columns="nothing set")
    for n, name in enumerate(others):
        axes.plot(
            others[name], rows, "D", color=ORANGE, alpha=0.7, label="" if n else "an optimizer"
        )
    axes.plot(medians["nothing set"], rows, "o", color=BLUE, label="nothing set")
    axes.set_xscale("log")
    axes.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
    axes.minorticks_off()
    axes.set_yticks(rows, [_SETS[name].replace(" (simulated)", "") for name in medians.index])
    axes.set_xlabel("median KL (nats), epsilon = 1")
    return {
        "spread": f"{(medians.max(axis=1) / medians.min(axis=1)).max():.1f}",
        "held": down(100 * (1 - runs.missed.sum() / runs.dim.sum()), 1),
    }


def hierarchies(axes: Axes) -> dict[str, str]:
    runs = read("hierarchies")
    near = (runs.away.abs() <= 0.5) & (runs.width - 1).abs().le(0.5)
    shares = 100 * near.groupby([runs.model, runs.epsilon]).mean().unstack().sort_values(4.0)
    rows = range(len(shares))
    axes.plot(shares[1.0], rows, "o", color=BLUE, label="epsilon = 1")
    axes.plot(shares[4.0], rows, "D", color=GREEN, label="epsilon = 4")
    axes.set_yticks(rows, shares.index)
    axes.set(xlim=(0, 102), xlabel="latents near NUTS (%)")
    words = "no one two three four five six seven eight nine ten".split()
    return {"near": words[(shares[4.0] >= 75).sum()], "far": words[(shares[1.0] < 75).sum()]}


def speed(axes: Axes) -> dict[str, str]:
    runs = read("networks").set_index(["network", "method"])
    steps = runs.step.unstack()
    ratios = steps.div(steps.SVI, axis=0).sort_values("DPSVI")
    rows = range(len(ratios))
    series = {
        "hooks": ("Opacus, hooks", ORANGE, "^"),
        "ghost": ("Opacus, ghost", GREEN, "D"),
        "DPSVI": ("DPSVI", BLUE, "o"),
    }
    for method, (label, colour, marker) in series.items():
        axes.plot(ratios[method], rows, marker, color=colour, label=label)
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    axes.set_yticks(rows, ratios.index)
    axes.set_xlabel("time of a step / that of SVI")
    first = runs["first"].unstack().DPSVI
    found = {"first": f"{first.min():.0f} to {first.max():.0f}"}
    for method, prefix in (("DPSVI", ""), ("ghost", "ghost_"), ("hooks", "hooks_")):
        found[f"{prefix}fastest"] = f"{ratios[method].min():.2g}"
        found[f"{prefix}slowest"] = f"{ratios[method].max():.2g}"
    return found


def shortfalls() -> dict[str, str]:
    runs = read("no_settings")
    runs = runs[runs.method == "DPSEP"]
    held = 100 * runs.groupby(["data", "epsilon"]).covered.mean()
    naval = runs[(runs.data == "naval") & (runs.epsilon <= 1)].groupby("epsilon")
    families = read("families").set_index("model")
    return {
        "abalone": down(held["abalone", 0.3]),
        "naval": down(held["naval"].min()),
        "naval_most": down(held["naval"].max()),
        "naval_warned": down(100 * naval.doubtful.mean().min()),
        "protein": down(held["protein"].min()),
        "protein_most": down(held["protein"].max()),
        "rows": f"{families.rows['logistic']:,}",
        "logistic": f"{families.seconds['logistic']:.1f}",
        "missing": f"{families.seconds['logistic, missing Number']:.0f}",
    }


PLOTS: dict[str, tuple[Callable[[Axes], dict[str, str]], float]] = {
    "methods": (methods, 3.2),
    "coverage": (coverage, 2.2),
    "widths": (widths, 3.6),
    "swap": (swap, 2.5),
    "hierarchies": (hierarchies, 3.8),
    "speed": (speed, 2.4),
}


def made() -> tuple[str, dict[str, str]]:
    """The page, and each figure as SVG."""
    values, figures = shortfalls(), {}
    for name, (draw, height) in PLOTS.items():
        with rc_context(STYLE):
            figure = Figure(figsize=(5.0, height), layout="constrained")
            axes = figure.subplots()
            values |= draw(axes)
            axes.grid(axis="both" if name == "methods" else "x", alpha=0.25, color=TEXT)
            if name != "methods":
                axes.margins(y=0.12)
            drawn = axes.get_legend_handles_labels()
            columns = 2 if name == "methods" else 3
            figure.legend(*drawn, loc="outside upper center", ncols=columns, frameon=False)
            figures[name] = svg(figure)
    return TEMPLATE.format_map(values), figures


def svg(figure: Figure) -> str:
    """With colours that follow the page's mode, without a ground, date and version."""
    file = StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = re.sub(r"[ \t]+$", "", file.getvalue(), flags=re.MULTILINE)
    light = "".join(f"--{name}:{colour};" for colour, (name, _) in COLOURS.items())
    dark = "".join(f"--{name}:{colour};" for name, colour in COLOURS.values())
    for colour, (name, _) in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    style = f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return text.replace("<defs>", f"<style>{style}</style>\n <defs>", 1)


def preview() -> Figure:
    """The picture that other sites show beside a link to this one."""
    with rc_context(STYLE | {"font.size": 17}):
        figure = Figure(figsize=(12, 6.3), dpi=100, facecolor="white")
        figure.text(0.05, 0.78, "pyro_dp", fontsize=60, color=BLUE)
        promise = "Private Bayesian inference\nfor Pyro models and tables"
        figure.text(0.05, 0.5, promise, fontsize=26, linespacing=1.5)
        axes = figure.add_axes((0.62, 0.17, 0.34, 0.7))
        methods(axes)
        axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    page, figures = made()
    PAGE.write_text(page)
    FIGURES.mkdir(exist_ok=True)
    for name, text in figures.items():
        (FIGURES / f"{name}.svg").write_text(text)
    preview().savefig(PREVIEW)
    print(f"{PAGE.relative_to(ROOT)} and {len(figures)} figures")
