"""Which records take part in a step: Poisson, fixed-size or all."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pyro_dp.mechanism.system_random import Stream
from pyro_dp.utils.errors import ConfigurationError


@dataclass(frozen=True)
class RecordSampler:
    """Draws the records of one step.

    :param sampling: "poisson" (each record independently with probability ``rate``), "fixed" (a
        fresh uniform subset of floor(rate size) records, without replacement) or "full" (all).
    :param size: number of records N, a public constant.
    :param rate: the requested sample rate, in (0, 1].
    :raises ConfigurationError: a fixed batch would be empty.
    """

    sampling: str
    size: int
    rate: float

    def __post_init__(self) -> None:
        if self.sampling == "fixed" and self.batch_size < 1:
            raise ConfigurationError(
                f"sample_rate={self.rate:g} of {self.size} records is no record at all: raise it "
                "to at least 1/N."
            )

    @property
    def batch_size(self) -> int:
        """Size of a fixed batch. The tolerance keeps 0.29 * 100 from becoming 28."""
        return math.floor(self.rate * self.size * (1 + 1e-12))

    @property
    def sample_rate(self) -> float:
        """Probability with which a record really takes part: the event and the divisor use it."""
        return self.batch_size / self.size if self.sampling == "fixed" else self.rate

    @property
    def usual_size(self) -> int:
        """Number of records that few steps exceed: two standard deviations above the mean."""
        if self.sampling == "fixed":
            return self.batch_size
        mean = self.rate * self.size
        return min(self.size, math.ceil(mean + 2 * math.sqrt(mean * (1 - self.rate))))

    def draw(self, stream: Stream) -> Tensor:
        """Indices of the sampled records, ascending. Takes O(expected batch), not O(N).

        :param stream: the private stream of this step.
        """
        if self.sampling == "full" or self.sample_rate == 1.0:
            return torch.arange(self.size)
        count = self.batch_size
        if self.sampling != "fixed":  # Poisson: a binomial number of distinct uniform records
            count = stream.binomial(self.size, self.rate)
        indices = stream.choice(self.size, size=count, replace=False, shuffle=False)
        return torch.from_numpy(np.sort(indices))
