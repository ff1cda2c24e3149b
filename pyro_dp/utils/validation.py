"""Validation of settings. Every error names the argument."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from pyro_dp.utils.errors import ConfigurationError

LARGEST = 1e50  # fourth powers of such numbers, and their inverses, are finite


def require_number(
    name: str,
    value: Any,
    *,
    above: float,
    below: float = math.inf,
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


def require_scale(name: str, value: Any, *, infinite: bool = False) -> float:
    """A positive number in whose units something is measured, as a float.

    :raises ConfigurationError: not in [1e-50, 1e50], or infinity unless ``infinite``.
    """
    scale = require_number(name, value, above=0.0, closed=infinite)
    if not 1 / LARGEST <= scale <= LARGEST and scale != math.inf:
        raise ConfigurationError(
            f"{name}={scale:g} is out of the range of {1 / LARGEST:g} to {LARGEST:g}, in which "
            "powers can be taken: use other units."
        )
    return scale


def value_at(name: str, function: Callable[[int], Any], step: int) -> Any:
    """The setting's value at a step. :raises ConfigurationError: its function failed."""
    try:
        return function(step)
    except Exception as error:
        text = f"{name}({step}) raised {type(error).__name__}: {error}"
        raise ConfigurationError(text) from error


def same(found: Any, expected: float | str | None) -> bool:
    """Whether a loaded value, of whatever type, equals this plain value."""
    return isinstance(found, (int, float, str, type(None))) and found == expected


def require_count(name: str, value: Any, *, least: int = 1) -> int:
    """:raises ConfigurationError: not an integer, smaller than ``least``, or not exact as float."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        kind = "a positive integer" if least == 1 else f"an integer >= {least}"
        raise ConfigurationError(f"{name} must be {kind}; it is {value!r}.")
    if value > 2**53:
        raise ConfigurationError(f"{name} must be at most 2**53.")
    return int(value)


def require_flag(name: str, value: Any) -> bool:
    """:raises ConfigurationError: neither True nor False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ConfigurationError(f"{name} must be True or False, not {type(value).__name__}.")
    return bool(value)


def require_tensors(name: str, value: Any) -> dict[str, Tensor]:
    """:raises ConfigurationError: no dictionary of finite tensors by name."""
    if not isinstance(value, dict) or not all(
        isinstance(key, str) and isinstance(each, Tensor) and bool(each.isfinite().all())
        for key, each in value.items()
    ):
        raise ConfigurationError(f"{name} must be a dictionary of finite tensors.")
    return value


def require_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """:raises ConfigurationError: not one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigurationError(
            f"{name} must be one of {', '.join(map(repr, choices))}; it is {value!r}."
        )
    return value
