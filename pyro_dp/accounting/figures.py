"""Two pictures of a ledger, by matplotlib or as SVG: epsilon by release, and the best attacker."""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyro_dp.accounting import composition
from pyro_dp.accounting.events import NonPrivateLook
from pyro_dp.accounting.trade_off import FALSE_POSITIVES, Accountant, best_power, trade_off
from pyro_dp.utils.display import Picture, Pictures, Ticks, figure, of_budget, spent

_MOST_POINTS, _FEWEST_POINTS = 30, 8


def plot(accountant: Accountant) -> Any:
    """Plot epsilon against the number of releases, and the trade-off curve.

    Epsilon is the cost of the first n releases in the order of the ledger, which lists equal
    releases together. Any attacker who tests "without this record" against "with it" has error
    rates on or above the trade-off curve (:func:`~pyro_dp.accounting.trade_off.trade_off`). If a
    look or a release without noise leaves no guarantee, the curves end there. Nothing is spent.

    :returns: a ``matplotlib.figure.Figure`` without a window.
    :raises ConfigurationError: matplotlib is not installed.
    """
    found = figure("accountant.plot()", width=10.0)
    left, right = found.subplots(1, 2)
    _plot_epsilon(left, accountant)
    _plot_trade_off(right, accountant)
    return found


def growth(accountant: Accountant) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Epsilon of the first n releases in the order of the ledger, at about 30 values of n.

    Reserved releases count as made. No value exceeds the accountant's epsilon.

    :returns: the values of n, from 0, and of epsilon in nats; inf if there is no guarantee.
    """
    entries = accountant.counted
    total = sum(count for _, count in entries)
    ends = np.cumsum([0, *(count for _, count in entries)])
    # Many kinds of sampled releases take seconds to compose, so there are fewer points.
    sampled = sum(event.sample_rate < 1.0 for event, _ in entries)
    most = max(_FEWEST_POINTS, min(_MOST_POINTS, _MOST_POINTS * 4 // max(1, sampled)))
    numbers = np.linspace(0, total, min(most, total + 1)).round().astype(int)
    if len(ends) <= most:
        numbers = np.union1d(numbers, ends)
    how, found = (accountant.delta, accountant.neighboring, accountant.engine), []
    for number in numbers:
        parts = np.clip(number - ends[:-1], 0, np.diff(ends)).tolist()
        counts = {event: n for (event, _), n in zip(entries, parts, strict=True) if n}
        found.append(composition.epsilon(counts, *how))
    return numbers, np.minimum(found, accountant.get_epsilon())


def _plot_epsilon(axes: Any, accountant: Accountant) -> None:
    numbers, epsilons = growth(accountant)
    finite = np.isfinite(epsilons)
    axes.plot(numbers[finite], epsilons[finite], color="C0", marker=".", label="spent")
    if accountant.epsilon is not None:
        axes.axhline(accountant.epsilon, color="C3", linestyle="--", label="budget")
    total = "no guarantee"
    if finite[-1]:
        total = f"epsilon = {spent(float(epsilons[-1]), accountant.epsilon)}"
    if not finite.all():
        looked = any(isinstance(event, NonPrivateLook) for event, _ in accountant.counted)
        end = "a look without noise" if looked else "no guarantee from here on"
        axes.axvline(numbers[np.argmin(finite)], color="black", linestyle=":", label=end)
    axes.set(title=f"Privacy loss: {total}", xlabel="number of releases")
    axes.set_ylabel(f"epsilon (nats) at delta = {accountant.delta:.3g}")
    axes.set_xlim(-0.03 * max(numbers[-1], 1), 1.03 * max(numbers[-1], 1))
    highest = max(np.max(epsilons[finite]), accountant.epsilon or 0.0)
    axes.set_ylim(0.0, 1.1 * highest if highest > 0.0 else 1.0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="best")


def _plot_trade_off(axes: Any, accountant: Accountant) -> None:
    alpha = np.unique(np.concatenate([np.geomspace(1e-5, 1.0, 150), np.linspace(0.0, 1.0, 150)]))
    curve = trade_off(accountant, alpha)
    axes.plot([0.0, 1.0], [1.0, 0.0], color="0.5", linestyle="--", label="perfect privacy")
    axes.fill_between(alpha, curve, color="C3", alpha=0.12, linewidth=0, label="impossible")
    axes.plot(alpha, curve, color="C0", label="least errors of an attacker")
    missed = float(trade_off(accountant, FALSE_POSITIVES))
    at = f"{FALSE_POSITIVES:.0%} false positives"
    axes.plot([FALSE_POSITIVES], [missed], color="C0", marker="o", linestyle="none", label=at)
    axes.set_title(f"Best attacker: power at most {best_power(accountant)}\nat {at}")
    axes.set_xlabel("false-positive rate (type I error)")
    axes.set_ylabel("false-negative rate (type II error)")
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.05), aspect="equal")
    axes.legend(loc="upper right", fontsize="small")


_LEFT, _TOP, _RIGHT, _BOTTOM = 58, 14, 430, 254  # edges of the axes in picture.svg
_MOST_TICKS = 6


def pictures(accountant: Accountant) -> list[Pictures]:
    """The same two pictures as SVG; none if nothing was released or no guarantee is left."""
    if accountant.get_epsilon() == math.inf or not accountant.counted:
        return []
    return [Pictures([_epsilon(accountant), _trade_off(accountant)])]


class _Axes:
    """Maps numbers to coordinates of the SVG.

    :param x_end: the largest value on the axis, which begins at 0; likewise y_end.
    """

    def __init__(self, x_end: float, y_end: float):
        self._ends = x_end, y_end

    def at(self, x: Any, y: Any) -> tuple[Any, Any]:
        x_end, y_end = self._ends
        return _LEFT + (_RIGHT - _LEFT) * x / x_end, _BOTTOM - (_BOTTOM - _TOP) * y / y_end

    def path(self, x: ArrayLike, y: ArrayLike) -> str:
        points = np.column_stack(self.at(np.asarray(x), np.asarray(y)))
        return "M" + "L".join(f"{left:.1f} {top:.1f}" for left, top in points)

    def ticks(self, *, whole: bool = False) -> tuple[Ticks, Ticks]:
        """:param whole: whether x must be integers."""
        x_end, y_end = self._ends
        x = [(self.at(value, 0.0)[0], f"{value:.6g}") for value in _round_numbers(x_end, whole)]
        y = [(self.at(0.0, value)[1], f"{value:.3g}") for value in _round_numbers(y_end)]
        return x, y


def _round_numbers(end: float, whole: bool = False) -> list[float]:
    """Numbers from 0 to the end, in steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(end))
    steps = (each * power for each in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0))
    step = next(each for each in steps if end / each < _MOST_TICKS)
    step = max(step, 1.0) if whole else step
    return [round(number * step, 12) for number in range(int(end / step * (1 + 1e-9)) + 1)]


def _epsilon(accountant: Accountant) -> Picture:
    numbers, epsilons = growth(accountant)
    budget, total, last = accountant.epsilon, int(numbers[-1]), float(epsilons[-1])
    axes = _Axes(1.02 * total, 1.08 * (max(last, budget or 0.0) or 1.0))
    paths, legend = [("curve", axes.path(numbers, epsilons))], [("curve", "spent")]
    after = "the only one" if total == 1 else f"all {total:,}"
    caption = f"Epsilon after each release: {spent(last, budget)} after {after}"
    if budget is not None:
        paths.insert(0, ("limit", axes.path([0, 1.02 * total], [budget, budget])))
        legend.append(("limit", "budget"))
        caption += f", of a budget of {of_budget(budget)}"
    return Picture(
        "picture-epsilon",
        "Epsilon against the number of releases",
        f"{caption}. Releases of one kind are put together.",
        labels=("number of releases", f"epsilon (nats) at delta = {accountant.delta:.3g}"),
        ticks=axes.ticks(whole=True),
        paths=paths,
        mark=axes.at(total, last),
        legend=(330, _BOTTOM - 14 - 19 * (len(legend) - 1), legend),
    )


def _trade_off(accountant: Accountant) -> Picture:
    alpha = np.unique(np.concatenate([np.geomspace(1e-4, 1.0, 50), np.linspace(0.0, 1.0, 51)]))
    curve = trade_off(accountant, alpha)
    axes = _Axes(1.0, 1.06)
    legend = [
        ("chance", "guessing"),
        ("curve", "best attacker"),
        ("mark", f"at {FALSE_POSITIVES:.0%} false accusations"),
        ("shade", "out of reach"),
    ]
    return Picture(
        "picture-errors",
        "Errors of the best attacker",
        f"How often the best attacker must err. With false accusations in {FALSE_POSITIVES:.0%} "
        f"of cases, the attacker detects at most {best_power(accountant)} of the others. Without "
        "the releases every attacker is on the dotted line.",
        labels=("false accusations", "cases that are missed"),
        ticks=axes.ticks(),
        paths=[
            ("shade", axes.path([*alpha, 1.0, 0.0], [*curve, 0.0, 0.0]) + "Z"),
            ("chance", axes.path([0.0, 1.0], [1.0, 0.0])),
            ("curve", axes.path(alpha, curve)),
        ],
        mark=axes.at(FALSE_POSITIVES, float(trade_off(accountant, FALSE_POSITIVES))),
        legend=(215, _TOP + 18, legend),
    )
