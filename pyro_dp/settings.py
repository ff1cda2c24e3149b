"""Validation of settings that the inferences have in common. Every text names the argument and says what to do."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyro

from pyro_dp.accounting import PrivacyAccountant
from pyro_dp.errors import ConfigurationError


def require_number(name: str, value: Any, *, above: float, below: float, closed: bool = False) -> float:
    """The value as a float if it is a number in (above, below), or (above, below] if ``closed``.

    :raises ConfigurationError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ConfigurationError(f"{name} must be a number, not {type(value).__name__}.")
    if not (above < value < below or (closed and value == below)):  # also refuses NaN
        raise ConfigurationError(f"{name} must lie in ({above:g}, {below:g}{']' if closed else ')'}; it is {value!r}.")
    return float(value)


def require_count(name: str, value: Any) -> int:
    """:raises ConfigurationError: not a positive integer."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ConfigurationError(f"{name} must be a positive integer; it is {value!r}.")
    return int(value)


def require_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """:raises ConfigurationError: not one of the choices."""
    if value not in choices:
        raise ConfigurationError(f"{name} must be one of {', '.join(map(repr, choices))}; it is {value!r}.")
    return value


def require_release(
    accountant: PrivacyAccountant,
    *,
    sampling: str,
    sample_rate: float | None,
    noise_multiplier: float | None,
    num_steps: int | None,
    bound: float,
) -> None:
    """Settings of a subsampled Gaussian release, and whether they fit the accountant.

    :raises ConfigurationError: one is out of range, or does not fit another.
    """
    if not isinstance(accountant, PrivacyAccountant):
        raise ConfigurationError(f"accountant must be a PrivacyAccountant, not {type(accountant).__name__}.")
    require_choice("sampling", sampling, ("poisson", "fixed", "full"))
    if sampling == "fixed" and accountant.neighboring != "replace_one":
        raise ConfigurationError(
            "sampling='fixed' hides no change of the number of records: use an accountant with "
            "neighboring='replace_one', or sampling='poisson'."
        )
    if sample_rate is not None:
        require_number("sample_rate", sample_rate, above=0.0, below=1.0, closed=True)
        if sampling == "full" and sample_rate != 1.0:
            raise ConfigurationError("sample_rate must be 1 (or None) with sampling='full'.")
    if num_steps is not None:
        require_count("num_steps", num_steps)
    if noise_multiplier is None:
        if accountant.epsilon is None:
            raise ConfigurationError("noise_multiplier=None is calibrated from a budget: PrivacyAccountant(epsilon=...).")
        if num_steps is None:
            raise ConfigurationError("noise_multiplier=None is calibrated for a number of steps: pass num_steps.")
    elif noise_multiplier != 0 or isinstance(noise_multiplier, bool):
        require_number("noise_multiplier", noise_multiplier, above=0.0, below=math.inf)
    if bound == math.inf and noise_multiplier != 0:
        raise ConfigurationError("max_grad_norm=inf bounds nothing: no noise is enough. It needs noise_multiplier=0.")
    if pyro.settings.get("module_local_params"):
        raise ConfigurationError("pyro.settings module_local_params=True is not supported: set it to False.")
