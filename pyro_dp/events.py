"""What a ledger lists: records of releases, without behaviour."""

import math
from dataclasses import dataclass

from pyro_dp.errors import ConfigurationError
from pyro_dp.settings import require_choice, require_number

SAMPLING = ("poisson", "fixed", "full")


@dataclass(frozen=True)
class SubsampledGaussian:
    """One noisy sum of clipped per-record quantities. Inert: the engines say what it costs.

    :param noise_multiplier: noise standard deviation in units of the per-record bound C. Under
        ``add_or_remove_one`` (zero-out) the sum's sensitivity is C, under ``replace_one`` 2C. Zero
        is a non-private reference.
    :param sample_rate: the public probability, in (0, 1], that a record takes part.
    :param sampling: ``"poisson"`` (each record on its own), ``"fixed"`` (a fresh uniform subset
        without replacement, for ``replace_one``) or ``"full"`` (every record, rate 1).
    :raises ConfigurationError: if a setting is out of range.
    """

    noise_multiplier: float
    sample_rate: float = 1.0
    sampling: str = "poisson"

    def __post_init__(self) -> None:
        sigma = require_number(
            "noise_multiplier", self.noise_multiplier, above=0.0, below=math.inf, or_equal=True
        )
        rate = require_number("sample_rate", self.sample_rate, above=0.0, below=1.0, closed=True)
        require_choice("sampling", self.sampling, SAMPLING)
        if self.sampling == "full" and rate != 1.0:
            raise ConfigurationError(
                f"sample_rate={rate!r} contradicts sampling='full': use 1.0, or sampling='poisson'."
            )
        object.__setattr__(self, "noise_multiplier", sigma)
        object.__setattr__(self, "sample_rate", rate)
