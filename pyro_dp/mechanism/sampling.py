"""Which records take part in a step: Poisson, fixed-size or all."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pyro_dp.mechanism.system_random import Stream
from pyro_dp.utils.errors import ConfigurationError

BLOCK = 2**21  # records that are drawn from at a time: numpy may list them, in 16 MB
_RARE = 0.005  # rate up to which it never does: it lists where more than a fiftieth is chosen


@dataclass(frozen=True)
class AllRecords:
    """The indices 0, ..., size - 1, of which only a part is ever written down.

    It has what a tensor of indices is asked for.
    """

    size: int
    device: torch.device = torch.device("cpu")

    def __len__(self) -> int:
        return self.size

    def to(self, device: torch.device | str) -> "AllRecords":
        return replace(self, device=torch.device(device))

    def split(self, count: int | None) -> Iterator[Tensor]:
        """Consecutive indices, at most so many at a time; None: all of them."""
        count = count or max(self.size, 1)
        for start in range(0, self.size, count):
            yield torch.arange(start, min(start + count, self.size), device=self.device)


Indices = Tensor | AllRecords


@dataclass(frozen=True)
class RecordSampler:
    """Draws the records of one step.

    :param sampling: "poisson" (each record independently with probability ``rate``), "fixed" (a
        fresh uniform subset of floor(rate size) records, without replacement) or "full" (all).
    :param size: number of records N, a public constant.
    :param rate: the requested sample rate, in (0, 1].
    :param here: number of those records that this process has and draws from; None: all.
    :raises ConfigurationError: a fixed batch would be empty.
    """

    sampling: str
    size: int
    rate: float
    here: int | None = None

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
        mean = self.rate * self._count
        most = math.ceil(mean + 2 * math.sqrt(mean * (1 - self.rate)))
        return max(1, min(self._count, most))

    @property
    def _count(self) -> int:
        return self.size if self.here is None else self.here

    def draw(self, stream: Stream) -> Indices:
        """Indices of the sampled records, ascending.

        Poisson sampling takes memory for the batch and :data:`BLOCK` numbers, at any rate. It goes
        block by block: in each, a binomial number of distinct uniform records. Given their number,
        those that n independent coins of one bias choose are a uniform subset, and coins of
        different records are independent: so this is Poisson sampling, whatever the blocks are. At
        a small rate all records are one block, and time is that of the batch, too; but not in
        secure mode, which counts coins.

        :param stream: the private stream of this step.
        """
        if self.sampling == "full" or self.sample_rate == 1.0:
            return AllRecords(self._count)
        if self.sampling == "fixed":
            return torch.from_numpy(_subset(stream, self._count, self.batch_size))
        rare = self.rate <= _RARE and isinstance(stream, np.random.Generator)
        length = max(self._count, 1) if rare else BLOCK
        blocks = [
            start + _subset(stream, size, stream.binomial(size, self.rate))
            for start in range(0, max(self._count, 1), length)
            for size in [min(length, self._count - start)]
        ]
        return torch.from_numpy(np.concatenate(blocks))


def _subset(stream: Stream, size: int, count: int) -> np.ndarray:
    """So many distinct uniform numbers below ``size``, ascending."""
    return np.sort(stream.choice(size, size=count, replace=False, shuffle=False))
