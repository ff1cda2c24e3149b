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


# 2. What adds up


def adding_up(counts: Sequence[int], lines: Mapping[str, Sequence[float]], dots: Sequence) -> None:
    """Epsilon of n releases together, by the rule that adds them up; dots: the closed form."""
    fig, ax = plt.subplots(figsize=(8, 4.4), layout="constrained")
    looks = zip((ORANGE, GREEN, BLUE), ("--", "-.", "-"), strict=True)
    for (label, values), (colour, dash) in zip(lines.items(), looks):
        ax.loglog(counts, values, dash, color=colour, lw=2, label=label)
    ax.plot(counts, dots, "o", color=BLACK, mfc="white", label="closed form")
    ax.axhline(1.0, color=GREY, lw=1, ls=":")
    ax.annotate("epsilon = 1", (counts[0], 1.0), (0, 4), textcoords="offset points", color=GREY)
    ax.set(title="Releases of one kind, and what they cost together", xlabel="number of releases")
    ax.set_ylabel("epsilon, at delta = 1e-5")
    ax.legend()
    plt.show()


def sampling(rates: Sequence[float], noise: Mapping[int, Sequence[float]]) -> None:
    """Noise of a step over the sample rate, and what is left of it after all steps.

    :param noise: noise multipliers that fit the budget, by the number of steps.
    """
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    looks = zip((ORANGE, BLUE), "sv", strict=True)
    for (steps, sigmas), (colour, marker) in zip(noise.items(), looks):
        style = dict(color=colour, marker=marker, label=f"{steps:,} steps")
        left.loglog(rates, sigmas, **style)
        whole = np.asarray(sigmas) / (np.asarray(rates) * np.sqrt(steps))
        right.loglog(rates, whole, **style)
    left.set(title="Noise of a step", xlabel="sample rate q", ylabel="noise multiplier")
    right.set(title="Noise of the whole run", xlabel="sample rate q", ylabel="noise / (q √steps)")
    right.minorticks_off()
    right.set_yticks([4, 5, 6, 8], ["4", "5", "6", "8"])
    right.legend()
    plt.show()


def budget(parts: Mapping[str, tuple[float, float]], limit: float) -> None:
    """Two bars of the same releases: epsilons added up, and epsilon as it is counted.

    :param parts: epsilon alone, and what it adds to those before it, by the release's name.
    """
    fig, ax = plt.subplots(figsize=(9, 2.8), layout="constrained")
    ends = [0.0, 0.0]
    looks = zip((ORANGE, GREEN, BLUE), ("", "//", ".."), strict=True)
    for (label, widths), (colour, hatch) in zip(parts.items(), looks):
        style = dict(color=colour, alpha=0.6, hatch=hatch, edgecolor="white")
        ax.barh([0, 1], widths, left=ends, label=label, **style)
        for row, (end, width) in enumerate(zip(ends, widths, strict=True)):
            ax.text(end + width / 2, row, f"{width:.2f}", ha="center", va="center")
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    ax.axvline(limit, color=BLACK, lw=2)
    ax.annotate("budget", (limit, -0.55), (4, 0), textcoords="offset points")
    ax.set(title="One budget, three analyses", xlabel="epsilon", ylim=(1.5, -0.65))
    ax.set_yticks([0, 1], ["each alone, added", "together, as counted"])
    fig.legend(loc="outside lower center", ncols=3)
    plt.show()


def trade_offs(alpha: Sequence[float], curves: Mapping[str, Sequence[float]], dots: Mapping) -> None:
    """The share that the best attacker finds over the share that he wrongly accuses.

    :param curves: bounds by label; ``dots`` closed forms at few places, as (alpha, power).
    """
    fig, ax = plt.subplots(figsize=(6, 5), layout="constrained")
    looks = zip((GREEN, BLUE, ORANGE), ("-.", "-", "--"), strict=True)
    for (label, power), (colour, dash) in zip(curves.items(), looks):
        ax.plot(alpha, power, dash, color=colour, lw=2, label=label)
    ax.plot(*dots, "o", color=BLACK, mfc="white", label="closed form")
    ax.plot([0, 1], [0, 1], ":", color=GREY, label="tossing a coin")
    ax.set(title="The best attack there can be", xlabel="others accused", ylabel="members found")
    ax.legend(loc="lower right")
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
