"""Pictures of the course, by notebook. Plain matplotlib: nothing here is about privacy.

Colours are Okabe and Ito's, and nothing is told by colour alone. Backgrounds stay white, so that
pictures can be read on dark pages.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np

BLACK, GREY, ORANGE, BLUE, GREEN = "#222222", "#777777", "#D55E00", "#0072B2", "#009E73"

plt.rcParams.update(
    {
        "figure.dpi": 80,
        "figure.facecolor": "white",
        "axes.facecolor": "white",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
    }
)


# 1. Swap SVI for DPSVI


def intervals(fits: Mapping[str, tuple], names: Sequence[str], xlabel: str, title: str) -> None:
    """A row for each coefficient, with an interval of each fit: mean and 1.96 sd.

    :param fits: mean and standard deviation, of shape (len(names),) each, by the fit's label. The
        first one is the reference, and is drawn in black.
    """
    fig, ax = plt.subplots(figsize=(9, 1.0 + 0.95 * len(names)), layout="constrained")
    rows = np.arange(len(names))
    looks = zip((BLACK, GREY, GREEN, BLUE, ORANGE), "oDv^s", strict=True)
    for k, ((label, (mean, sd)), (colour, marker)) in enumerate(zip(fits.items(), looks)):
        place = rows + 0.8 * ((k + 0.5) / len(fits) - 0.5)
        style = dict(fmt=marker, color=colour, ms=5, capsize=2.5, label=label)
        ax.errorbar(np.asarray(mean), place, xerr=1.96 * np.asarray(sd), **style)
    for row in rows[:-1]:
        ax.axhline(row + 0.5, color="#dddddd", lw=0.8)
    ax.axvline(0.0, color=BLACK, lw=0.8, ls=":")
    ax.set(title=title, xlabel=xlabel, yticks=rows, yticklabels=names)
    ax.invert_yaxis()
    fig.legend(loc="outside right center")
    plt.show()


# 0. What leaks


def two_worlds(without: Sequence[float], with_her: Sequence[float], xlabel: str) -> None:
    """Histograms of what could be released without a person, and with her."""
    fig, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
    without, with_her = np.asarray(without), np.asarray(with_her)
    bins = np.histogram_bin_edges(np.concatenate([without, with_her]), 60)
    style = dict(bins=bins, histtype="stepfilled", alpha=0.45)
    ax.hist(without, color=ORANGE, label="without Alice", **style)
    ax.hist(with_her, color=BLUE, label="with Alice", hatch="//", **style)
    for values, colour in ((without, ORANGE), (with_her, BLUE)):
        ax.axvline(values.mean(), color=colour, lw=2)
    ax.set(title="What could have been released, 5,000 times in each world", xlabel=xlabel)
    ax.set_yticks([])
    ax.legend()
    plt.show()


def roc(inside: Sequence[float], outside: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """False-positive and true-positive rates of "a member, since the score is high"."""
    cuts = np.concatenate([[np.inf], np.sort(np.concatenate([inside, outside]))[::-1]])
    above = [(np.mean(np.asarray(outside) >= c), np.mean(np.asarray(inside) >= c)) for c in cuts]
    false, true = np.array(above).T
    return false, true


def membership(inside: Sequence[float], outside: Sequence[float], curves: Mapping) -> None:
    """Scores of members and of others, and the attacker's two rates at every threshold.

    :param inside: scores of the members; ``outside`` those of the others.
    :param curves: scores of both for each further curve, by its label.
    """
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    inside, outside = np.asarray(inside), np.asarray(outside)
    low = min(np.quantile(inside, 0.01), np.quantile(outside, 0.05))
    bins = np.linspace(low, max(inside.max(), outside.max()), 26)
    style = dict(bins=bins, density=True, histtype="stepfilled", alpha=0.45)
    left.hist(np.clip(outside, low, None), color=ORANGE, label="others", **style)
    left.hist(np.clip(inside, low, None), color=BLUE, hatch="//", label="members", **style)
    left.set(title="How well the posterior knows them", xlabel="score: log density of the outcome")
    left.set_yticks([])
    left.legend(loc="upper left")
    looks = zip((BLUE, BLACK, GREEN), ("-", "--", "-."), strict=True)
    for (label, scores), (colour, dash) in zip(curves.items(), looks):
        right.plot(*roc(*scores), dash, color=colour, lw=2, label=label)
    right.plot([0, 1], [0, 1], ":", color=GREY, label="tossing a coin")
    right.set(title="Whom the attacker finds", ylabel="members found", xlabel="others accused")
    right.legend(loc="lower right")
    plt.show()


# 3. Clipping is a bias


def bias_and_noise(bounds: Sequence[float], panels: Mapping[str, tuple]) -> None:
    """A panel for each number of people: what clipping and noise do to a mean, over the bound.

    :param panels: bias and noise, of the shape of ``bounds``, by the panel's title.
    """
    fig, axes = plt.subplots(
        1, len(panels), figsize=(10, 3.8), layout="constrained", sharey=True, squeeze=False
    )
    for ax, (title, (bias, noise)) in zip(axes[0], panels.items(), strict=True):
        total = np.hypot(bias, noise)
        ax.loglog(bounds, np.abs(bias), "--", color=ORANGE, label="bias: what was cut off")
        ax.loglog(bounds, noise, "-.", color=BLUE, label="noise: what was added")
        ax.loglog(bounds, total, color=BLACK, lw=2, label="error: both")
        ax.plot(bounds[np.argmin(total)], total.min(), "o", color=BLACK, ms=8)
        ax.set(title=title, xlabel="bound C", ylim=(1e-3, 5))
    axes[0, 0].set_ylabel("error of the mean number of visits")
    axes[0, 0].legend(loc="lower left")
    plt.show()


def error_over_bound(
    bounds: Sequence[float],
    bias: Sequence[float],
    noise: Sequence[float],
    runs: Mapping[float, float],
    chosen: tuple[float, float],
) -> None:
    """Distance to the exact posterior's mean over the bound: expected, and of runs.

    :param runs: errors by bound.
    :param chosen: bound and error of the run that chose its bound itself.
    """
    fig, ax = plt.subplots(figsize=(8, 4.6), layout="constrained")
    ax.loglog(bounds, bias, "--", color=ORANGE, label="bias, exactly")
    ax.loglog(bounds, noise, "-.", color=BLUE, label="noise, expected")
    ax.loglog(bounds, np.hypot(bias, noise), color=BLACK, lw=2, label="both")
    style = dict(ls="", ms=9, mec="white")
    ax.plot(list(runs), list(runs.values()), marker="s", color=GREEN, label="a run each", **style)
    ax.plot(*chosen, marker="*", color=BLACK, label="a run with nothing set", **style | {"ms": 18})
    ax.set(
        title="A bias on the left, noise on the right",
        xlabel="bound C on the length of a gradient",
        ylabel="distance from the exact mean",
        ylim=(1e-3, 1),
    )
    ax.legend(loc="lower left")
    plt.show()
