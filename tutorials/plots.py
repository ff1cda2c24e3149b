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
    for (label, scores), (colour, dash) in zip(curves.items(), looks, strict=False):
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
    for k, ((label, (mean, sd)), (colour, marker)) in enumerate(
        zip(fits.items(), looks, strict=False)
    ):
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
    for (label, values), (colour, dash) in zip(lines.items(), looks, strict=False):
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
    for (steps, sigmas), (colour, marker) in zip(noise.items(), looks, strict=False):
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
    for (label, widths), (colour, hatch) in zip(parts.items(), looks, strict=False):
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


def trade_offs(
    alpha: Sequence[float], curves: Mapping[str, Sequence[float]], dots: Mapping
) -> None:
    """The share that the best attacker finds over the share that he wrongly accuses.

    :param curves: bounds by label; ``dots`` closed forms at few places, as (alpha, power).
    """
    fig, ax = plt.subplots(figsize=(6, 5), layout="constrained")
    looks = zip((GREEN, BLUE, ORANGE), ("-.", "-", "--"), strict=True)
    for (label, power), (colour, dash) in zip(curves.items(), looks, strict=False):
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
    default: float,
) -> None:
    """Distance to the exact posterior's mean over the bound: expected, and of runs.

    :param runs: errors by bound.
    :param default: error of the run with nothing set.
    """
    fig, ax = plt.subplots(figsize=(8, 4.6), layout="constrained")
    ax.loglog(bounds, bias, "--", color=ORANGE, label="bias, exactly")
    ax.loglog(bounds, noise, "-.", color=BLUE, label="noise, expected")
    ax.loglog(bounds, np.hypot(bias, noise), color=BLACK, lw=2, label="both")
    style = dict(ls="", ms=9, mec="white")
    ax.plot(list(runs), list(runs.values()), marker="s", color=GREEN, label="a run each", **style)
    ax.axhline(default, ls=":", color=BLACK, label="a run with nothing set")
    ax.set(
        title="A bias on the left, noise on the right",
        xlabel="bound C on the length of a gradient",
        ylabel="distance from the exact mean",
        ylim=(1e-3, 1),
    )
    ax.legend(loc="lower left")
    plt.show()


# 4. From EP to DPSEP


def one_site_two_cavities(w, likelihood, cavities, site, normal) -> None:
    """A row for each cavity: cavity and likelihood, the tilted density and its Gaussian, the site.

    :param w: grid.
    :param cavities: mean and variance of each.
    :param site: natural parameters of the site, from a likelihood, a mean and a variance.
    :param normal: density on the grid, from a mean and a variance.
    """
    fig, axes = plt.subplots(
        len(cavities), 3, figsize=(10, 5), layout="constrained", sharex=True, sharey="col"
    )
    for row, (mean, variance) in zip(axes, cavities, strict=True):
        cavity, (eta, precision) = normal(mean, variance), site(likelihood, mean, variance)
        total = precision + 1 / variance
        middle, width = (eta + mean / variance) / total, 1 / total
        tilted = cavity * likelihood
        tilted = tilted / (tilted.sum() * (w[1] - w[0]))
        row[0].fill_between(w, cavity, color=GREY, alpha=0.3, lw=0, label="cavity: the others")
        row[0].plot(w, likelihood, color=BLACK, label="likelihood: this person")
        row[1].fill_between(w, tilted, color=ORANGE, alpha=0.3, lw=0, label="tilted: their product")
        row[1].plot(w, normal(middle, width), color=BLUE, label="Gaussian, same mean and sd")
        near = abs(w - mean) < 2 * variance**0.5
        here = abs(w - middle).argmin()
        curve = np.exp(eta * w - precision * w**2 / 2)
        row[2].plot(w, likelihood, color=GREY, lw=1, label="likelihood")
        scaled = curve / curve[here] * likelihood[here]
        row[2].plot(w[near], scaled[near], color=GREEN, lw=3, ls="--", label="site")
        row[0].set_ylabel(f"cavity N({mean:g}, {variance**0.5:g}²)")
    for ax, title in zip(
        axes[0], ("Before", "Multiply, and match", "Divide: the site"), strict=True
    ):
        ax.set_title(title)
        ax.legend(loc="upper left", fontsize=8)
    for ax in axes[0]:
        ax.set(xlim=(-4, 4))
    axes[0, 0].set_ylim(0, 1.55)
    axes[0, 1].set_ylim(0, 1.55)
    axes[0, 2].set_ylim(0, 1.7)
    for ax in axes[1]:
        ax.set_xlabel("coefficient w")
    plt.show()


def passes(w, exact, fits: Mapping[str, list], steps: Sequence[int], normal) -> None:
    """Small multiples: a row for each algorithm, a column for each number of steps."""
    shape = len(fits), len(steps)
    fig, axes = plt.subplots(
        *shape, figsize=(10, 4.2), layout="constrained", sharex=True, sharey=True
    )
    for row, (label, found) in zip(axes, fits.items(), strict=True):
        for ax, (mean, variance, *_), number in zip(row, found, steps, strict=True):
            ax.fill_between(w, exact, color=GREY, alpha=0.35, lw=0)
            ax.plot(w, normal(mean, variance), color=BLUE)
            passes = f"{number} pass" if label == "EP" else f"{number} step"
            ax.set_title(
                f"{label}, {passes}{'es' if label == 'EP' and number > 1 else ''}"
                f"{'s' if label != 'EP' and number > 1 else ''}",
                fontsize=10,
            )
    axes[0, 0].set(xlim=(-0.5, 3.0))
    axes[0, 0].annotate("grey: exact", (0.03, 0.9), xycoords="axes fraction", fontsize=9)
    fig.supxlabel("coefficient w")
    fig.supylabel("density")
    plt.show()


def one_release(w, points, clipped, released, bound, without, private, normal) -> None:
    """Points and their bound; their sum, exact and noisy; the posteriors of the noisy sums.

    :param points: direction and information of each person, (N, 2), and as ``clipped``.
    :param released: noisy sums, (draws, 2).
    :param without: mean and variance without noise.
    :param private: means and precisions of the draws.
    """
    fig, axes = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained")
    cut = np.asarray(points.norm(dim=1) > bound)
    axes[0].plot(*points[~cut].T, ".", color=GREY, ms=4, alpha=0.7, label="person")
    axes[0].plot(*points[cut].T, "x", color=ORANGE, ms=4, label="beyond C")
    axes[0].plot(*clipped[cut].T, ".", color=ORANGE, ms=4, label="after clipping")
    axes[0].add_patch(plt.Circle((0, 0), bound, fill=False, color=BLUE, lw=1.5))
    axes[0].set(title="1. Clip: one point a person", aspect="equal", ylabel="information: κ Λ")
    axes[0].legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, fontsize=8)
    axes[1].plot(*released.T, "v", color=ORANGE, label="released, 12 draws")
    axes[1].plot(*clipped.sum(0), "o", color=BLACK, ms=8, label="sum (not released)")
    axes[1].set(title="2, 3. Sum, and add noise")
    axes[1].legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize=8)
    for ax in axes[:2]:
        ax.set_xlabel("direction: η − Λ × mean")
    for k, (mean, precision) in enumerate(zip(*private, strict=True)):
        label = "12 private posteriors" if k == 0 else None
        axes[2].plot(w, normal(mean, 1 / precision), color=ORANGE, lw=1, label=label)
    axes[2].plot(w, normal(*without), color=BLACK, lw=2.5, label="no noise")
    axes[2].plot(w, normal(0.0, 1.0), color=GREY, ls=":", label="prior")
    axes[2].set(title="Posterior = prior × factor", xlabel="coefficient w", xlim=(-1.5, 3.0))
    axes[2].legend(loc="upper left", fontsize=8)
    plt.show()


def many_noises(runs, coverage, exact, names: Sequence[str], shown: int) -> None:
    """The intervals of one coefficient, a row a noise; and what share of the exact posterior they
    hold on average, for each coefficient.

    :param runs: by label a list of mean and standard deviation of all coefficients.
    :param coverage: by label the shares, of shape (len(names),).
    :param exact: mean and standard deviation of the exact posterior.
    """
    looks = dict(zip(runs, ((ORANGE, "v"), (BLUE, "^"), (GREEN, "s")), strict=True))
    fig, axes = plt.subplots(
        1, len(runs) + 1, figsize=(12, 4.4), layout="constrained", width_ratios=[1, 1, 1, 1.3]
    )
    middle, half = float(exact[0][shown]), 1.96 * float(exact[1][shown])
    for ax, (label, found) in zip(axes, runs.items(), strict=False):
        ax.axvspan(middle - half, middle + half, color=GREY, alpha=0.25, lw=0)
        for row, (mean, sd) in enumerate(found):
            colour, marker = looks[label]
            style = dict(fmt=marker, color=colour, ms=4, lw=1.5)
            ax.errorbar(float(mean[shown]), row, xerr=1.96 * float(sd[shown]), **style)
        ax.set(title=label, yticks=[], xlabel=names[shown])
        ax.sharex(axes[0])
    axes[0].set_ylabel(f"{len(found)} runs with other noise")
    rows = np.arange(len(names))
    for label, shares in coverage.items():
        colour, marker = looks[label]
        axes[-1].plot(shares, rows, marker, color=colour, ms=7, label=label)
    axes[-1].axvline(0.95, color=BLACK, lw=1, ls="--")
    axes[-1].set(title="held of the exact posterior", yticks=rows, yticklabels=names)
    axes[-1].set(xlim=(0.55, 1.02), xlabel=f"mean over {len(found)} runs (dashed: 95%)")
    axes[-1].invert_yaxis()
    plt.show()


def moved_by_noise(moved, noise, data, names: Sequence[str]) -> None:
    """How far noise moved two coefficients, and 95% ellipses of two covariances.

    :param moved: (runs, 2).
    :param noise: covariance of the noise, (2, 2).
    :param data: covariance of the exact posterior, (2, 2).
    """
    angle = np.linspace(0, 2 * np.pi, 200)
    circle = np.sqrt(-2 * np.log(0.05)) * np.stack([np.cos(angle), np.sin(angle)])
    fig, ax = plt.subplots(figsize=(5.6, 4.6), layout="constrained")
    for covariance, colour, style, label in (
        (noise, BLUE, "-", "v Σ²: the noise"),
        (data, ORANGE, "--", "Σ: what the data leave open"),
    ):
        ax.plot(*(np.linalg.cholesky(covariance) @ circle), color=colour, ls=style, label=label)
    ax.plot(
        *np.asarray(moved).T, "o", color=BLACK, ms=4, label=f"moved by the noise, {len(moved)} runs"
    )
    ax.set(xlabel=f"{names[0]}: private − exact mean", aspect="equal")
    ax.set_ylabel(f"{names[1]}: private − exact mean")
    ax.legend(loc="upper right", fontsize=8)
    plt.show()


# 5. Mixtures, persons and latents


def mixtures(found, x, malignant, reference, unit, names: Sequence[str]) -> None:
    """A panel for each fit: the patients, and ellipses of two standard deviations.

    :param found: weights, means and variances of the groups, in public units, by label.
    :param x: the patients, in public units, (N, 2).
    :param malignant: what the pathologist said, (N,).
    """
    fig, axes = plt.subplots(
        1, len(found), figsize=(11, 3.9), layout="constrained", sharex=True, sharey=True
    )
    angle = np.linspace(0, 2 * np.pi, 100)
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    reference, unit, rows = (np.asarray(each) for each in (reference, unit, x))
    shown = rows * unit + reference
    for ax, (label, (weights, means, variances)) in zip(axes, found.items(), strict=True):
        for which, marker, text in ((malignant, "x", "malignant"), (~malignant, ".", "benign")):
            ax.plot(*shown[np.asarray(which)].T, marker, color=GREY, ms=3, alpha=0.5, label=text)
        for weight, mean, variance, colour in zip(
            *(np.asarray(each) for each in (weights, means, variances)), (BLUE, ORANGE), strict=True
        ):
            ax.plot(*((mean + 2 * circle * variance**0.5) * unit + reference).T, color=colour, lw=2)
            place = mean * unit + reference
            style = dict(color=colour, weight="bold", ha="center", va="center", fontsize=12)
            ax.annotate(f"{weight:.0%}", place, **style)
        ax.set(title=label, xlabel=names[0])
    axes[0].set_ylabel(names[1])
    axes[0].legend(loc="lower right", fontsize=8)
    plt.show()


def epsilon_by_rows(rows: Sequence[int], epsilons: Sequence[float]) -> None:
    """What a promise of epsilon = 1 for a row is to a person with several."""
    fig, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
    ax.plot(rows, epsilons, "o-", color=ORANGE, label="all rows of the person")
    ax.plot(rows, rows, ":", color=GREY, label="epsilon = number of rows")
    ax.axhline(1.0, color=BLACK, lw=1, ls="--", label="what the ledger of rows says")
    ax.set(xlabel="rows of a person", ylabel="epsilon of the person", xticks=list(rows))
    ax.set_ylim(bottom=0)
    ax.legend()
    plt.show()


def shrinkage(average, fitted, formula, level, count, numbers, alice: int) -> None:
    """Fitted levels over averages, with the formula's lines; and errors by number of readings.

    :param numbers: typical level, sd between and sd within patients (mmHg).
    """
    typical, between, within = numbers
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    ends = np.array([100.0, 178.0])
    for n, colour, marker in ((1, ORANGE, "v"), (2, BLUE, "s"), (5, GREEN, ".")):
        share = between**2 / (between**2 + within**2 / n)
        label = f"{n} reading{'s' * (n > 1)}"
        left.plot(average[count == n], fitted[count == n], marker, ms=3, alpha=0.4, color=colour)
        left.plot(ends, typical + share * (ends - typical), color=colour, label=label)
    left.plot(ends, ends, color=BLACK, ls=":", lw=1, label="no shrinkage")
    left.plot(average[alice], fitted[alice], "*", color=BLACK, ms=14, label="Alice")
    left.set(title="Dots: rows of patients; lines: the formula", xlim=ends, ylim=ends)
    left.set(xlabel="average of the readings (mmHg)", ylabel="fitted level (mmHg)")
    left.legend(loc="upper left", fontsize=8)
    others = np.arange(len(level)) != alice  # her readings were written by hand
    steps = range(1, int(count.max()) + 1)
    for guess, colour, style, label in (
        (average, ORANGE, "o-", "average of the readings"),
        (fitted, BLUE, "s-", "row, behind the wall"),
        (formula, GREEN, "^--", "formula, from released numbers"),
    ):
        square = np.asarray((guess - level) ** 2)
        errors = [square[others & np.asarray(count == n)].mean() ** 0.5 for n in steps]
        right.plot(steps, errors, style, color=colour, label=label)
    right.set(title="Distance from the true level", xlabel="readings of a patient")
    right.set(ylabel="root mean square error (mmHg)", ylim=(0, 13), xticks=list(steps))
    right.legend(loc="lower left", fontsize=8)
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


# 8. Several hospitals


def hospitals_apart_and_together(
    results: Mapping[str, tuple], names: Sequence[str], shown: Sequence[int]
) -> None:
    """A panel for each coefficient that is shown, a row for each fit.

    :param results: mean and standard deviation of all coefficients, by the fit's label; the first
        is the reference.
    """
    fig, axes = plt.subplots(1, len(shown), figsize=(10, 3.4), layout="constrained", sharey=True)
    rows = np.arange(len(results))
    looks = {"hospital": (ORANGE, "v"), "federated": (BLUE, "s"), "all in": (GREEN, "D")}
    for ax, k in zip(axes, shown, strict=True):
        for row, (label, (mean, sd)) in zip(rows, results.items(), strict=True):
            look = [each for start, each in looks.items() if label.startswith(start)]
            colour, marker = look[0] if look else (BLACK, "o")
            style = dict(fmt=marker, color=colour, capsize=3, ms=6)
            ax.errorbar(float(mean[k]), row, xerr=1.96 * float(sd[k]), **style)
        mean, sd = (float(each[k]) for each in next(iter(results.values())))
        ax.axvspan(mean - 1.96 * sd, mean + 1.96 * sd, color=GREY, alpha=0.15, lw=0)
        ax.set(title=names[k], yticks=rows, yticklabels=results)
    axes[0].invert_yaxis()
    fig.supxlabel("effect on the log odds of a visit: mean and 95% interval, epsilon = 1")
    plt.show()


def what_others_see(sent: Mapping[int, list], shares: Mapping[int, list], prime: int) -> None:
    """What a trusted server is sent in each look, and what secret sharing shows in its place.

    :param sent: what each hospital uploaded. The first look has the histogram of norms alone. In
        the others it comes last. Drawn is its fullest bin.
    :param shares: those that another hospital gets of one number, by that number.
    """
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    bins = min(len(uploads[0]) for uploads in sent.values())
    last = sum(uploads[-1][-bins:] for uploads in sent.values())
    place = int(last.argmax()) - bins
    for (index, uploads), colour, marker in zip(
        sent.items(), (ORANGE, GREEN, BLUE), "v^s", strict=True
    ):
        values = [each[place] for each in uploads]
        label = f"hospital {index}"
        left.plot(range(1, len(values) + 1), values, marker, color=colour, ms=4, label=label)
    left.set(title="A trusted server: sums under shares of the noise", xlabel="look")
    left.set_ylabel("patients counted in one bin")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)
    bins = np.linspace(0, 1, 21)
    looks = ((BLUE, "//"), (ORANGE, ""))
    for (number, found), (colour, hatch) in zip(shares.items(), looks, strict=True):
        values = np.array([one / prime for one, *_ in found])
        style = dict(histtype="step", color=colour, hatch=hatch, lw=2, density=True)
        right.hist(values, bins, label=f"a share of {number:,}", **style)
    right.set(title="Secret sharing: a share of a number", xlabel="share / prime", ylim=(0, 1.6))
    right.set_ylabel("density")
    right.legend(loc="upper right")
    plt.show()


def noise_left(left: Mapping[str, Mapping[str, float]]) -> None:
    """Bars of the noise that is left in a total (sigma), by rule and by what happened."""
    fig, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
    rows = np.arange(len(next(iter(left.values()))))
    for k, ((rule, bars), colour) in enumerate(zip(left.items(), (ORANGE, BLUE), strict=True)):
        drawn = ax.barh(rows + 0.36 * (k - 0.5), list(bars.values()), 0.32, color=colour)
        drawn.set_label(f"each adds {rule}")
        ax.bar_label(drawn, fmt="%.2f", padding=3)
    ax.axvline(1.0, color=BLACK, ls="--", lw=1)
    ax.annotate("what the ledger counts", (1.0, -0.62), (4, 0), textcoords="offset points")
    ax.set(xlabel="noise in the total (sigma)", xlim=(0, 2), yticks=rows, yticklabels=bars)
    ax.set_ylim(len(rows) - 0.4, -0.8)
    ax.legend(loc="lower right")
    plt.show()


# Elective: topics of documents


def document_norms(steps: Mapping, counts, vandal, alice: int, bound: float) -> None:
    """Norms of documents over their lengths, as written and after each step that bounds them.

    :param steps: by label, from counts (n, V) to what a document adds.
    """
    fig, axes = plt.subplots(1, len(steps), figsize=(10, 3.5), layout="constrained", sharey=True)
    lengths = counts.sum(1)
    for ax, (label, change) in zip(axes, steps.items(), strict=True):
        norms = change(counts).norm(dim=1)
        ax.plot(lengths, norms, ".", color=GREY, ms=3, alpha=0.4, label=f"{len(counts):,} answers")
        ax.plot(lengths[alice], norms[alice], "o", color=BLUE, ms=7, label="Alice")
        one = change(vandal[None]).norm()
        ax.plot(vandal.sum(), one, "X", color=ORANGE, ms=9, label="the vandal")
        ax.axhline(bound, color=BLACK, lw=1, ls="--")
        ax.set(title=label, xscale="log", yscale="log", xlabel="words in the answer")
    axes[0].set_ylabel("norm of the answer's counts")
    axes[-1].annotate("C", (1.0e4, bound), (0, 5), textcoords="offset points")
    handles = axes[0].get_legend_handles_labels()
    fig.legend(*handles, loc="outside lower center", ncols=3)
    plt.show()


def topics(panels: Mapping[str, object], themes: Sequence[str], first: Sequence[int]) -> None:
    """Tables of topics by words, as shades.

    :param panels: (topics, V) by title, topics in the order of the themes.
    :param first: the column of each theme's first word.
    """
    fig, axes = plt.subplots(
        len(panels),
        1,
        figsize=(10, 6.4),
        layout="constrained",
        sharex=True,
        height_ratios=[len(each) for each in panels.values()],
    )
    for ax, (title, table) in zip(axes, panels.items(), strict=True):
        image = ax.imshow(table, aspect="auto", cmap="Blues", vmax=0.12, interpolation="nearest")
        names = [*themes, *["spare"] * (len(table) - len(themes))]
        ax.set(title=title, yticks=range(len(table)), yticklabels=names)
        ax.tick_params(axis="y", labelsize=7, length=0)
    axes[-1].set_xticks(
        list(first), [f"{name}: first word" for name in themes], ha="left", fontsize=8
    )
    axes[-1].set_xlabel("words of the vocabulary, theme by theme")
    fig.colorbar(image, ax=axes, label="probability of the word", shrink=0.5)
    plt.show()


def perplexities(epsilons, private, frequencies: float, no_noise: float, best: float) -> None:
    """Perplexity over epsilon, a dot for each start, between yardsticks."""
    fig, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
    private = np.asarray(private)
    ax.plot(epsilons, private.mean(1), color=BLUE, lw=2, label="private, mean of two starts")
    ax.plot(epsilons, private, "o", color=BLUE, ms=5)
    for value, colour, style, label in (
        (frequencies, GREY, "--", "word frequencies, no noise"),
        (no_noise, ORANGE, "-", "no noise"),
        (best, BLACK, ":", "the true themes"),
    ):
        ax.axhline(value, color=colour, ls=style, lw=1.5, label=label)
    ax.set(xlabel="epsilon, at delta = 1e-5", ylabel="perplexity (lower is better)", xscale="log")
    ax.set_xticks(epsilons, [f"{e:g}" for e in epsilons])
    ax.minorticks_off()
    ax.legend(loc="center right")
    plt.show()


# Elective: auditing


def with_or_without(without, with_, alpha, curve) -> None:
    """Released weights in both worlds, and error rates of all thresholds under the curve."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    bins = np.linspace(-2.2, 2.7, 40)
    for values, colour, hatch, label in (
        (without, GREY, "", "without the canary"),
        (with_, BLUE, "//", "with the canary"),
    ):
        style = dict(histtype="stepfilled", alpha=0.45, color=colour, hatch=hatch)
        left.hist(values, bins, label=label, **style)
    left.set(xlabel="released weight of the rare disease, after one step", ylabel="runs")
    left.legend(loc="upper left", fontsize=8)
    thresholds = np.linspace(-2, 2.5, 200)
    positive = [(without > t).mean() for t in thresholds]
    negative = [(with_ <= t).mean() for t in thresholds]
    right.fill_between(alpha, curve, color=BLUE, alpha=0.15, lw=0)
    right.plot(alpha, curve, color=BLUE, label="least errors, by the accountant")
    right.plot(positive, negative, color=BLACK, lw=1, ls="--", label="our attack")
    right.plot(alpha, 1 - alpha, ":", color=GREY, label="guessing")
    right.set(xlabel="false-positive rate", ylabel="false-negative rate", aspect="equal")
    right.legend(loc="upper right", fontsize=8)
    plt.show()


def audited(result) -> None:
    """Error rates of an audit, on a plain axis and on a logarithmic one that shows the tail."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    result.plot(left)
    left.legend(fontsize=8)
    result.plot(right)
    right.set(xscale="log", xlim=(1e-3, 1), ylabel="")
    right.legend().remove()
    plt.show()


def bounds_to_expect(runs, bounds: Mapping[float, Sequence[float]]) -> None:
    """The bound that the best attack may expect, over the number of runs; dotted: epsilon."""
    fig, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for (epsilon, values), colour, style in zip(
        bounds.items(), (GREEN, BLUE, ORANGE), ("--", "-", "-."), strict=True
    ):
        ax.plot(runs, values, style, color=colour, label=f"epsilon = {epsilon:g}")
        ax.axhline(epsilon, color=colour, ls=":", lw=1)
    ax.set(xscale="log", xlabel="runs", ylabel="bound to be expected")
    ax.legend(loc="upper left")
    plt.show()


# Elective: effects of groups


def clinics(panels: Mapping[str, Mapping], names: Sequence[str]) -> None:
    """Intervals of each row, mean and 1.96 sd, a panel for each way to write the model.

    :param panels: by title, mean, sd and marks, (len(names),) each, by the fit's label. The first
        fit of a panel is drawn in black. Of a posterior that is not ok markers are hollow.
    """
    fig, axes = plt.subplots(1, len(panels), figsize=(10, 6), layout="constrained", sharey=True)
    rows = np.arange(len(names))
    for ax, (title, fits) in zip(axes, panels.items(), strict=True):
        for k, (label, (mean, sd, marked)) in enumerate(fits.items()):
            colour, shape = (BLACK, BLUE, ORANGE)[k], "oDv"[k]
            place = rows + 0.28 * (k - 1)
            mean, marked = np.asarray(mean), np.asarray(marked)
            ax.errorbar(mean, place, xerr=1.96 * np.asarray(sd), fmt="none", color=colour, lw=1.5)
            for some, face in ((~marked, colour), (marked, "white")):
                ax.plot(mean[some], place[some], shape, color=colour, mfc=face, ms=5)
            ax.plot([], [], shape + "-", color=colour, label=label)
        for row in rows[:-1]:
            ax.axhline(row + 0.5, color="#dddddd", lw=0.8)
        ax.set(title=title, xlabel="log odds", yticks=rows, yticklabels=names)
    axes[0].invert_yaxis()
    handles = axes[0].get_legend_handles_labels()
    fig.legend(*handles, loc="outside lower center", ncols=3, title="hollow: the status is not ok")
    plt.show()


def own_weight(sizes: Sequence[float], curves: Mapping[str, Sequence[float]], at: int) -> None:
    """How much of a clinic's estimate is its own people's, over its size."""
    fig, ax = plt.subplots(figsize=(7, 3.8), layout="constrained")
    looks = zip((BLACK, GREEN, BLUE, ORANGE), ("-", "-.", "--", ":"), strict=True)
    for (label, weights), (colour, dash) in zip(curves.items(), looks, strict=False):
        ax.plot(sizes, weights, dash, color=colour, lw=2, label=label)
    ax.axvline(at, color=GREY, lw=1)
    ax.annotate(f"{at} people", (at, 0.02), (4, 0), textcoords="offset points", color=GREY)
    ax.set(xscale="log", ylim=(0, 1), xlabel="people in the clinic")
    ax.set_ylabel("weight of its own people")
    ax.legend(loc="lower right")
    plt.show()


# Elective: five faults of others


def right_guesses(results: Mapping[str, tuple]) -> None:
    """Shares of right guesses about a canary, and the largest that the claim allows.

    :param results: (share, allowed) of the faulty program and of the mended one, by the fault.
    """
    fig, ax = plt.subplots(figsize=(9, 3.2), layout="constrained")
    rows = np.arange(len(results))
    faulty, mended = (np.array([pair[k] for pair in results.values()]) for k in (0, 1))
    ax.hlines(rows, mended[:, 0], faulty[:, 0], color=GREY, lw=1)
    style = dict(ls="none", clip_on=False)
    ax.plot(faulty[:, 1], rows, "|", color=BLACK, ms=22, mew=2, label="most allowed", **style)
    ax.plot(faulty[:, 0], rows, "X", color=ORANGE, ms=9, label="with the fault", **style)
    ax.plot(mended[:, 0], rows, "o", color=BLUE, ms=7, label="mended", **style)
    ax.set(yticks=rows, yticklabels=results, xlabel="share of right guesses; a coin has 0.5")
    ax.set(xlim=(0.48, 1.0), ylim=(len(rows) - 0.5, -0.5))
    fig.legend(loc="outside right center")
    plt.show()
