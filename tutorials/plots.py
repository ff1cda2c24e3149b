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


# 6. From a table to a report


def coefficients(
    fits: Mapping[str, tuple], names: Sequence[str], truth: Sequence[float], title: str
) -> None:
    """A panel for each coefficient, a row for each fit: mean and 95% interval; a line is the truth.

    :param fits: means, lower and upper ends, each of shape (len(names),), by the fit's label.
    """
    fig, axes = plt.subplots(1, len(names), figsize=(10, 2.6), layout="constrained", sharey=True)
    for k, (ax, name) in enumerate(zip(axes, names, strict=True)):
        ax.axvline(truth[k], color=BLACK, lw=1.2, ls="--", label="true value")
        for row, (colour, marker, (mean, low, high)) in enumerate(
            zip((BLACK, ORANGE, BLUE), "oDs", fits.values(), strict=True)
        ):
            ends = [[mean[k] - low[k]], [high[k] - mean[k]]]
            ax.errorbar(mean[k], row, xerr=ends, fmt=marker, color=colour, ms=6, capsize=3, lw=2)
        ax.set(title=name, yticks=range(len(fits)), yticklabels=list(fits), ylim=(2.6, -0.6))
        ax.locator_params(axis="x", nbins=4)
    axes[0].legend(loc="lower left", bbox_to_anchor=(-0.8, -0.45))
    fig.suptitle(title)
    plt.show()


def counts_predicted(checks: Mapping[str, tuple], most: int = 9) -> None:
    """A panel for each check: shares of rows with 0, 1, .. visits, as predicted and as seen.

    :param checks: draws of all outcomes, (draws, rows), and outcomes, (rows,), by title.
    """
    fig, axes = plt.subplots(
        1, len(checks), figsize=(10, 3.4), layout="constrained", sharex=True, sharey=True
    )
    numbers = np.arange(most + 1)
    for ax, (title, (drawn, seen)) in zip(axes, checks.items(), strict=True):
        shares = np.stack([(np.minimum(drawn, most) == k).mean(axis=1) for k in numbers], axis=1)
        low, high = np.quantile(shares, [0.025, 0.975], axis=0)
        ax.bar(numbers, high - low, bottom=low, color=BLUE, alpha=0.5, label="95% of predictions")
        found = [(np.minimum(seen, most) == k).mean() for k in numbers]
        ax.plot(numbers, found, "o", color=BLACK, ms=6, label="the pilot's people")
        ax.set(title=title, xlabel="visits in a year", xticks=numbers)
        ax.set_xticklabels([*map(str, numbers[:-1]), f"{most}+"])
    axes[0].set_ylabel("share of rows")
    axes[-1].legend(loc="upper right")
    plt.show()


# 7. Synthetic data


def pair_of_columns(tables: Mapping[str, np.ndarray], names: Sequence[str], ticks: tuple) -> None:
    """A panel for each table: shares of a pair of columns, area by share; orange squares are what
    the first table has not.

    :param tables: shares, (levels of the first column, levels of the second), by title.
    :param names: of both columns.
    :param ticks: levels of both.
    """
    fig, axes = plt.subplots(
        1, len(tables), figsize=(10, 3.6), layout="constrained", sharex=True, sharey=True
    )
    known = next(iter(tables.values())) > 0
    first, second = np.indices(known.shape)
    for ax, (title, shares) in zip(axes, tables.items(), strict=True):
        for there, colour, marker in ((known, BLUE, "o"), (~known, ORANGE, "s")):
            area = 4000 * np.clip(shares[there], 0, None)
            ax.scatter(second[there], first[there], s=area, color=colour, marker=marker)
        ax.set(title=title, xlabel=names[1], yticks=range(len(ticks[0])), yticklabels=ticks[0])
        ax.set(xticks=range(len(ticks[1])), xticklabels=ticks[1])
        ax.margins(0.12)
    axes[0].set_ylabel(names[0])
    plt.show()


def coverage(shares: Mapping[str, np.ndarray], names: Sequence[str], title: str) -> None:
    """How often 95% intervals held the truth: a group for each coefficient, a marker a method."""
    fig, ax = plt.subplots(figsize=(10, 3.6), layout="constrained")
    ax.axhline(0.95, color=BLACK, lw=1, ls="--")
    ax.annotate("claimed", (-0.48, 0.95), (0, -13), textcoords="offset points")
    looks = zip((ORANGE, GREY, GREEN), "vDo", strict=True)
    for k, ((label, share), (colour, marker)) in enumerate(zip(shares.items(), looks, strict=True)):
        places = np.arange(len(names)) + 0.16 * (k - (len(shares) - 1) / 2)
        ax.vlines(places, 0, share, color=colour, lw=2)
        ax.plot(places, share, marker, color=colour, ms=9, label=label, clip_on=False)
    ax.set(title=title, xticks=range(len(names)), xticklabels=names, ylim=(0, 1.04))
    ax.set(xlim=(-0.5, len(names) - 0.5), ylabel="share of intervals that hold")
    fig.legend(loc="outside right center")
    plt.show()
