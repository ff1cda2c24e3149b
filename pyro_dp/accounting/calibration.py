"""The least noise that fits a budget."""

import math
from collections.abc import Callable

from scipy import optimize

_LEAST, _MOST = math.log(1e-4), math.log(1e9)
_AIM = 2e-4  # below the budget, relative: room for the root finder


def least_noise(cost: Callable[[float], float], budget: float) -> float | None:
    """
    :param cost: epsilon of the plan as a function of the noise multiplier, decreasing.
    :param budget: epsilon that it may reach.
    :returns: a noise multiplier whose cost is at most the budget and within 0.1% of it, 1e-4 if
        that fits already, ``None`` if not even 1e9 does.
    """

    def excess(log_noise: float) -> float:
        ratio = max(cost(math.exp(log_noise)), 1e-300) / budget
        return min(700.0, math.log(ratio) + _AIM)

    low, high, factor = 0.0, 0.0, math.log(2.0)
    while excess(high) > 0.0:
        low, high, factor = high, high + factor, 1.5 * factor
        if high > _MOST:
            return None
    while low == high or excess(low) <= 0.0:
        if low == _LEAST:
            return math.exp(_LEAST)
        low, high, factor = max(_LEAST, low - factor), low, 1.5 * factor
    root = optimize.brentq(excess, low, high, xtol=1e-5, rtol=1e-7)
    while cost(math.exp(root)) > budget:
        root += 2e-5
    return math.exp(root)
