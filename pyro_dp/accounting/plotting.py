"""Pictures of a ledger: how epsilon grew, and what an attacker can make of it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyro_dp.accounting import composition
from pyro_dp.accounting.amounts import spent
from pyro_dp.accounting.events import NonPrivateLook
from pyro_dp.accounting.ledger import LedgerEntry
from pyro_dp.accounting.trade_off import FALSE_POSITIVES, PrivacyCurve, best_power, trade_off
from pyro_dp.utils.errors import ConfigurationError

_MOST_POINTS, _FEWEST_POINTS = 30, 8


def plot(accountant: PrivacyCurve) -> Any:
    """See :meth:`PrivacyAccountant.plot`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError(
            "accountant.plot() needs matplotlib, which is not installed: pip install matplotlib."
        ) from None
    figure = Figure(figsize=(10.0, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _plot_epsilon(left, accountant)
    _plot_trade_off(right, accountant)
    return figure


def growth(accountant: PrivacyCurve) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Epsilon of the first n releases in the order of the ledger, at about 30 values of n.

    What runs have reserved counts as released. No epsilon is above the accountant's own, which has
    them all.

    :returns: n, from 0, and epsilon in nats; inf once there is no guarantee.
    """
    entries = accountant.counted
    total = sum(count for _, count in entries)
    ends = np.cumsum([0, *(count for _, count in entries)])
    # Many kinds of sampled releases take seconds to compose.
    sampled = sum(getattr(event, "sample_rate", 1.0) < 1.0 for event, _ in entries)
    most = max(_FEWEST_POINTS, min(_MOST_POINTS, _MOST_POINTS * 4 // max(1, sampled)))
    numbers = np.linspace(0, total, min(most, total + 1)).round().astype(int)
    if len(ends) <= most:
        numbers = np.union1d(numbers, ends)
    found = [_epsilon_of_first(accountant, entries, int(n)) for n in numbers]
    return numbers, np.minimum(found, accountant.get_epsilon())


def _epsilon_of_first(
    accountant: PrivacyCurve, entries: Sequence[LedgerEntry], number: int
) -> float:
    counts = {}
    for event, count in entries:
        if number:
            counts[event] = min(count, number)
            number -= counts[event]
    return composition.epsilon(counts, accountant.delta, accountant.neighboring, accountant.engine)


def _plot_epsilon(axes: Any, accountant: PrivacyCurve) -> None:
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


def _plot_trade_off(axes: Any, accountant: PrivacyCurve) -> None:
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
