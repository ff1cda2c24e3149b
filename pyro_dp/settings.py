"""Validation of settings. Every text names the argument."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pyro_dp.errors import ConfigurationError


def require_number(
    name: str, value: Any, *, above: float, below: float, closed: bool = False
) -> float:
    """The value as a float if it is a number in (above, below), or (above, below] if ``closed``.

    :raises ConfigurationError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ConfigurationError(f"{name} must be a number, not {type(value).__name__}.")
    if not (above < value < below or (closed and value == below)):  # also refuses NaN
        raise ConfigurationError(
            f"{name} must lie in ({above:g}, {below:g}{']' if closed else ')'}; it is {value!r}."
        )
    return float(value)


def require_count(name: str, value: Any) -> int:
    """:raises ConfigurationError: not a positive integer."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ConfigurationError(f"{name} must be a positive integer; it is {value!r}.")
    return int(value)


def require_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """:raises ConfigurationError: not one of the choices."""
    if value not in choices:
        raise ConfigurationError(
            f"{name} must be one of {', '.join(map(repr, choices))}; it is {value!r}."
        )
    return value
