"""Validation of settings. Every text names the argument."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pyro_dp.errors import ConfigurationError


def require_number(
    name: str,
    value: Any,
    *,
    above: float,
    below: float,
    closed: bool = False,
    or_equal: bool = False,
) -> float:
    """The value as a float if it is a number in (above, below).

    :param closed: ``below`` itself is allowed.
    :param or_equal: ``above`` itself is allowed.
    :raises ConfigurationError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ConfigurationError(f"{name} must be a number, not {type(value).__name__}.")
    ends = (closed and value == below) or (or_equal and value == above)
    if not (above < value < below or ends):  # also refuses NaN
        interval = f"{'[' if or_equal else '('}{above:g}, {below:g}{']' if closed else ')'}"
        raise ConfigurationError(f"{name} must lie in {interval}; it is {value!r}.")
    try:
        return float(value)
    except OverflowError:
        raise ConfigurationError(f"{name} is an integer too large for a float.") from None


def require_count(name: str, value: Any, *, least: int = 1) -> int:
    """:raises ConfigurationError: not an integer, or smaller than ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        kind = "a positive integer" if least == 1 else f"an integer >= {least}"
        raise ConfigurationError(f"{name} must be {kind}; it is {value!r}.")
    return int(value)


def require_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """:raises ConfigurationError: not one of the choices."""
    if value not in choices:
        raise ConfigurationError(
            f"{name} must be one of {', '.join(map(repr, choices))}; it is {value!r}."
        )
    return value
