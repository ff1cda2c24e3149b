"""Amounts of epsilon, columns of numbers, and empty figures."""

import decimal
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from pyro_dp.utils.errors import ConfigurationError


def up(value: float) -> str:
    """Four digits, rounded up: a cost must not be understated."""
    if math.isinf(value):
        return "inf"
    digits = decimal.Context(prec=4, rounding=decimal.ROUND_CEILING)
    return f"{float(digits.create_decimal(value * (1.0 - 1e-12))):.4g}"


def spent(epsilon: float, budget: float | None) -> str:
    """Rounded up, but not beyond a budget that holds it."""
    return up(epsilon) if budget is None else spent_and_left(epsilon, budget)[0]


def spent_and_left(spent: float, budget: float) -> tuple[str, str]:
    """Two texts that add up to the budget as printed, :func:`of_budget`."""
    shown, whole = up(spent), Decimal(of_budget(budget))
    if shown == "inf":
        return shown, "0"
    if spent <= whole < Decimal(shown):  # rounding up must not seem to exceed it
        return of_budget(budget), "0"
    left = max(Decimal(0), whole - Decimal(shown))
    return shown, f"{left.normalize():g}" if left < Decimal("1e-9") else f"{left.normalize():f}"


def of_budget(budget: float) -> str:
    return f"{budget:.6g}"


_SMALLEST, _LARGEST, _SPAN = -6, 6, 5  # powers of ten that a column shows without exponents


def numbers(values: Sequence[float]) -> list[str]:
    """The texts of a column, all with the same number of decimals.

    Every number other than zero has three significant digits, or the largest has six. If the
    magnitudes differ too much for that, each number has three significant digits of its own.
    """
    powers = [math.floor(math.log10(abs(each))) for each in values if each and math.isfinite(each)]
    least, most = min(powers, default=0), max(powers, default=0)
    if _SMALLEST <= least and most <= _LARGEST and most - least <= _SPAN:
        decimals = max(0, min(2 - least, 5 - most))
        return [f"{each + 0.0:.{decimals}f}" for each in values]  # + 0.0: zero has no sign
    return [f"{each:#.3g}".rstrip(".") for each in values]


MOST_ROWS = 60


def figure(call: str, height: float = 4.5, width: float = 7.0) -> Any:
    """A ``matplotlib.figure.Figure`` for the user's call.

    :raises ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError(
            f"{call} needs matplotlib, which is not installed: pip install matplotlib."
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def with_rows(call: str, rows: int) -> Any:
    """A figure as high as so many rows need."""
    return figure(call, 1.2 + 0.25 * rows)


def first_of(count: int) -> str:
    """A title that says if rows are left out."""
    return f"The first {MOST_ROWS} of {count}" if count > MOST_ROWS else ""
