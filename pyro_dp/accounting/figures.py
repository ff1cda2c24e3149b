"""Two pictures of a ledger: how epsilon grew, and the best attacker. By matplotlib, and as SVG."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyro_dp.accounting import composition
from pyro_dp.accounting.events import NonPrivateLook
from pyro_dp.accounting.markup import Pictures
from pyro_dp.accounting.trade_off import FALSE_POSITIVES, Accountant, best_power, trade_off
from pyro_dp.utils.display import figure, of_budget, spent

_MOST_POINTS, _FEWEST_POINTS = 30, 8


def plot(accountant: Accountant) -> Any:
    """Two panels: epsilon against the number of releases, and the trade-off curve.

    Epsilon is that of the first n releases in the order of the ledger. It lists equal ones
    together. Any attacker who tests "without this record" against "with it" has error rates on or
    above the trade-off curve (:func:`~pyro_dp.accounting.trade_off.trade_off`). If a look or a
    release without noise leaves no guarantee, the curves end there. Nothing is spent.

    :returns: a ``matplotlib.figure.Figure``, which belongs to no window.
    :raises ConfigurationError: matplotlib is not installed.
    """
    found = figure("accountant.plot()", width=10.0)
    left, right = found.subplots(1, 2)
    _plot_epsilon(left, accountant)
    _plot_trade_off(right, accountant)
    return found


def growth(accountant: Accountant) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Epsilon of the first n releases in the order of the ledger, at about 30 values of n.

    Reserved releases count as made. No epsilon is above the accountant's own, of them all.

    :returns: n, from 0, and epsilon in nats; inf once there is no guarantee.
    """
    entries = accountant.counted
    total = sum(count for _, count in entries)
    ends = np.cumsum([0, *(count for _, count in entries)])
    # Many kinds of sampled releases take seconds to compose.
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
    shown = "no guarantee"
    if finite[-1]:
        shown = f"epsilon = {spent(float(epsilons[-1]), accountant.epsilon)}"
    if not finite.all():
        looked = any(isinstance(event, NonPrivateLook) for event, _ in accountant.counted)
        end = "a look without noise" if looked else "no guarantee from here on"
        axes.axvline(numbers[np.argmin(finite)], color="black", linestyle=":", label=end)
    axes.set(title=f"Privacy loss: {shown}", xlabel="number of releases")
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


_WIDTH, _HEIGHT = 440, 310
_LEFT, _TOP, _RIGHT, _BOTTOM = 58, 14, 430, 254
_MOST_TICKS = 6


def pictures(accountant: Accountant) -> list[Pictures]:
    """Epsilon against releases and the trade-off curve; none where no guarantee is left."""
    if accountant.get_epsilon() == math.inf or not accountant.counted:
        return []
    return [Pictures([_epsilon(accountant), _trade_off(accountant)])]


class _Axes:
    """A frame with ticks, and its contents."""

    def __init__(
        self, x_end: float, y_end: float, x_label: str, y_label: str, *, whole: bool = False
    ):
        """:param whole: x counts something."""
        self._ends = x_end, y_end
        middle, height = (_LEFT + _RIGHT) / 2, (_TOP + _BOTTOM) / 2
        self._parts = [
            *self._ticks(whole),
            f'<path class="axis" d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}"/>',
            _text(middle, _HEIGHT - 14, x_label, "middle"),
            f'<g transform="rotate(-90 14 {height:g})">{_text(14, height, y_label, "middle")}</g>',
        ]

    def line(self, kind: str, x: ArrayLike, y: ArrayLike, end: str = "") -> None:
        """
        :param kind: a class of the style sheet.
        :param end: "Z" closes it.
        """
        points = np.column_stack(self._at(np.asarray(x), np.asarray(y)))
        path = "L".join(f"{left:.1f} {top:.1f}" for left, top in points)
        self._parts.append(f'<path class="{kind}" d="M{path}{end}"/>')

    def mark(self, x: float, y: float) -> None:
        left, top = self._at(x, y)
        self._parts.append(f'<circle class="mark" cx="{left:.1f}" cy="{top:.1f}" r="5"/>')

    def legend(self, left: float, top: float, entries: Sequence[tuple[str, str]]) -> None:
        """:param entries: class and text of each; of "mark" a dot, of "shade" a box."""
        width, height = _RIGHT - left + 6, 19 * len(entries)
        ground = f'<rect class="ground" x="{left - 6}" y="{top - 10}" width="{width}"'
        self._parts.append(f'{ground} height="{height}"/>')
        for place, (kind, text) in enumerate(entries):
            y = top + 19 * place
            signs = {
                "mark": f'<circle class="mark" cx="{left + 14}" cy="{y}" r="5"/>',
                "shade": f'<rect class="shade" x="{left}" y="{y - 6}" width="28" height="12"/>',
            }
            sign = signs.get(kind, f'<path class="{kind}" d="M{left} {y}h28"/>')
            self._parts += [sign, _text(left + 36, y + 4.5, text, "start")]

    def svg(self, name: str, title: str) -> str:
        return (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="{name}">'
            f'<title id="{name}">{title}</title>{"".join(self._parts)}</svg>'
        )

    def _at(self, x: Any, y: Any) -> tuple[Any, Any]:
        x_end, y_end = self._ends
        return _LEFT + (_RIGHT - _LEFT) * x / x_end, _BOTTOM - (_BOTTOM - _TOP) * y / y_end

    def _ticks(self, whole: bool) -> Iterator[str]:
        x_end, y_end = self._ends
        for value in _round_numbers(x_end, whole):
            left, _ = self._at(value, 0.0)
            yield _text(left, _BOTTOM + 18, f"{value:.6g}", "middle")
            yield f'<path class="axis" d="M{left:.1f} {_BOTTOM}v5"/>'
        for value in _round_numbers(y_end):
            _, top = self._at(0.0, value)
            yield f'<path class="grid" d="M{_LEFT} {top:.1f}H{_RIGHT}"/>'
            yield _text(_LEFT - 8, top + 4.5, f"{value:.3g}", "end")


def _text(left: float, top: float, text: str, anchor: str) -> str:
    """A label of this module's own words and numbers."""
    return f'<text x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}">{text}</text>'


def _round_numbers(end: float, whole: bool = False) -> list[float]:
    """Numbers from 0 to the end, in steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(end))
    steps = (each * power for each in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0))
    step = next(each for each in steps if end / each < _MOST_TICKS)
    step = max(step, 1.0) if whole else step
    return [round(place * step, 12) for place in range(int(end / step * (1 + 1e-9)) + 1)]


def _epsilon(accountant: Accountant) -> tuple[str, str]:
    numbers, epsilons = growth(accountant)
    budget, total = accountant.epsilon, int(numbers[-1])
    highest = max(float(epsilons[-1]), budget or 0.0) or 1.0
    label = f"epsilon (nats) at delta = {accountant.delta:.3g}"
    axes = _Axes(1.02 * total, 1.08 * highest, "number of releases", label, whole=True)
    entries = [("curve", "spent")]
    if budget is not None:
        axes.line("limit", [0, 1.02 * total], [budget, budget])
        entries.append(("limit", "budget"))
    axes.line("curve", numbers, epsilons)
    axes.mark(total, float(epsilons[-1]))
    axes.legend(330, _BOTTOM - 14 - 19 * (len(entries) - 1), entries)
    after = "the only one" if total == 1 else f"all {total:,}"
    shown = f"Epsilon after each release: {spent(float(epsilons[-1]), budget)} after {after}"
    of = "" if budget is None else f", of a budget of {of_budget(budget)}"
    svg = axes.svg("picture-epsilon", "Epsilon against the number of releases")
    return svg, f"{shown}{of}. Releases of one kind are put together."


def _trade_off(accountant: Accountant) -> tuple[str, str]:
    alpha = np.unique(np.concatenate([np.geomspace(1e-4, 1.0, 50), np.linspace(0.0, 1.0, 51)]))
    curve = trade_off(accountant, alpha)
    axes = _Axes(1.0, 1.06, "false accusations", "cases that are missed")
    axes.line("shade", [*alpha, 1.0, 0.0], [*curve, 0.0, 0.0], end="Z")
    axes.line("chance", [0.0, 1.0], [1.0, 0.0])
    axes.line("curve", alpha, curve)
    axes.mark(FALSE_POSITIVES, float(trade_off(accountant, FALSE_POSITIVES)))
    entries = [
        ("chance", "guessing"),
        ("curve", "best attacker"),
        ("mark", f"at {FALSE_POSITIVES:.0%} false accusations"),
        ("shade", "out of reach"),
    ]
    axes.legend(215, _TOP + 18, entries)
    return (
        axes.svg("picture-errors", "Errors of the best attacker"),
        f"How often the best attacker must err. With false accusations in {FALSE_POSITIVES:.0%} "
        f"of cases, the attacker detects at most {best_power(accountant)} of the others. Without "
        "the releases every attacker is on the dotted line.",
    )
