"""How amounts of epsilon are written: alike wherever they are shown, and never understated."""

import decimal
import math
from decimal import Decimal

_DIGITS = 4


def up(value: float) -> str:
    """Four digits, rounded up: a cost must not be understated."""
    if math.isinf(value):
        return "inf"
    digits = decimal.Context(prec=_DIGITS, rounding=decimal.ROUND_CEILING)
    return f"{float(digits.create_decimal(value * (1.0 - 1e-12))):.4g}"


def spent(epsilon: float, budget: float | None) -> str:
    """Rounded up, but not beyond a budget that holds it.

    :param epsilon: in nats.
    :param budget: in nats; ``None``: there is none.
    """
    return up(epsilon) if budget is None else spent_and_left(epsilon, budget)[0]


def spent_and_left(spent: float, budget: float) -> tuple[str, str]:
    """Two texts that add up to the budget as it is shown, :func:`of_budget`.

    :param spent: epsilon in nats.
    :param budget: in nats, > 0.
    """
    shown, whole = up(spent), Decimal(of_budget(budget))
    if shown == "inf":
        return shown, "0"
    if spent <= whole < Decimal(shown):  # rounding up must not seem to exceed it
        return of_budget(budget), "0"
    left = max(Decimal(0), whole - Decimal(shown))
    return shown, f"{left.normalize():g}" if left < Decimal("1e-9") else f"{left.normalize():f}"


def of_budget(budget: float) -> str:
    return f"{budget:.6g}"
