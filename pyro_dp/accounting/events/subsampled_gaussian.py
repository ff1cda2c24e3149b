"""A noisy sum: the entry of a ledger, and the dominating pair of one release."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyro_dp.accounting.events.event import Event
from pyro_dp.accounting.gaussian_pairs import LARGEST_SAMPLED, DominatingPair
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import LARGEST, require_choice, require_number

SAMPLING = ("poisson", "fixed", "full")
_LEAST_NOISE = 1e-9  # below it there is practically no privacy, and there would be an overflow


@dataclass(frozen=True)
class SubsampledGaussian(Event):
    """One noisy sum of clipped per-record quantities. The engines compute its cost.

    :param noise_multiplier: noise standard deviation in units of the per-record bound C. Under
        ``add_or_remove_one`` (zero-out) the sum's sensitivity is C, under ``replace_one`` 2C. Zero
        is a non-private reference.
    :param sample_rate: the public probability, in (0, 1], that a record takes part.
    :param sampling: ``"poisson"`` (each record on its own), ``"fixed"`` (a fresh uniform subset
        without replacement, for ``replace_one``) or ``"full"`` (every record, rate 1).
    :raises ConfigurationError: if a setting is out of range.

    >>> from pyro_dp import PrivacyAccountant, SubsampledGaussian
    >>> for rate in (0.01, 0.1):
    ...     accountant = PrivacyAccountant(delta=1e-5)
    ...     accountant.record(SubsampledGaussian(2.0, sample_rate=rate), count=100)
    ...     print(f"rate {rate}: epsilon = {accountant.get_epsilon():.2f}")
    rate 0.01: epsilon = 0.19
    rate 0.1: epsilon = 2.34
    """

    kind = "subsampled_gaussian"
    delta = 0.0

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

    @property
    def brief(self) -> str:
        return (
            f"(noise_multiplier={self.noise_multiplier:.6g}, sample_rate={self.sample_rate:.6g}, "
            f"sampling={self.sampling!r})"
        )

    def pair(self, neighboring: str) -> DominatingPair | None:
        sigma, rate = self.noise_multiplier, self.sample_rate
        # Rates this close to 0 or 1 are rounded up and noise beyond a million is rounded down. That
        # costs more privacy, and keeps log(1 - q) and the losses of a step accurate. If all records
        # take part, noise is rounded down to a number with a square.
        rate = 1.0 if rate > 1.0 - 1e-9 else max(rate, 1e-12)
        sigma = min(sigma, LARGEST if rate == 1.0 else LARGEST_SAMPLED)
        if neighboring == "add_or_remove_one":
            if self.sampling == "fixed":
                raise ConfigurationError(
                    "sampling='fixed' has a fixed batch size, which add_or_remove_one cannot have: "
                    "use neighboring='replace_one', or sampling='poisson'."
                )
            pair = DominatingPair("remove", sigma, rate)
        elif self.sampling == "fixed" or rate == 1.0:
            pair = DominatingPair("fixed", sigma / 2.0, rate)  # one record's effect is at most 2C
        else:
            pair = DominatingPair("replace", sigma, rate)
        return None if pair.noise < _LEAST_NOISE else pair

    def dots(self, gap: float, relation: Any) -> Any:
        from dp_accounting.pld import privacy_loss_distribution

        return privacy_loss_distribution.from_gaussian_mechanism(
            self.noise_multiplier,
            value_discretization_interval=gap,
            sampling_prob=self.sample_rate,
            neighboring_relation=relation,
        )


def is_whole(event: Event) -> bool:
    """Whether it is a sum over all records with normal noise."""
    if not isinstance(event, SubsampledGaussian):
        return False
    return event.sample_rate == 1.0 and event.noise_multiplier > 0


def together(counts: Mapping[Any, int]) -> SubsampledGaussian:
    """The one sum over all records that costs as much as these: Gaussians compose to a Gaussian.

    :param counts: counts of events. Each event is :func:`is_whole`.
    """
    precision = math.fsum(n / event.noise_multiplier**2 for event, n in counts.items())
    return SubsampledGaussian(1 / math.sqrt(precision), 1.0, "full")
