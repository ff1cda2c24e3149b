"""Which records take part in a step, by Poisson or fixed-size sampling, or all of them.

Samples of several steps may be drawn ahead. A step's sample does not depend on the data: it comes
from the private stream of the step's position in the ledger (:mod:`pyro_dp.mechanism.streams`). So
the samples have the same joint distribution whenever they are drawn, independent of all data and
releases. With a seed, they are the same records. Each sample is used once. No sample is saved or
published: a run that continues from a state draws new ones. A forked process cannot use the samples
either, because its accountant refuses to record.

**Not protected.** Anyone who reads the process's memory learns the samples of coming steps. Secure
mode protects even against copies of a machine, so it does not draw ahead.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from pyro_dp.mechanism.system_random import Stream
from pyro_dp.utils.errors import ConfigurationError

BLOCK = 2**21  # records that are drawn from at a time: numpy may list all of them, in 16 MB
_RARE = 0.005  # a rate so low that numpy never lists all records, as it does above 1/50
MOST = 4096  # steps whose samples are drawn at a time, so the first step need not wait long


@dataclass(frozen=True)
class AllRecords:
    """The indices 0, ..., size - 1, without a tensor that lists them.

    It has those methods of a tensor of indices that the package uses.
    """

    size: int
    device: torch.device = torch.device("cpu")

    def __len__(self) -> int:
        return self.size

    def to(self, device: torch.device | str) -> "AllRecords":
        return replace(self, device=torch.device(device))

    def split(self, count: int | None) -> Iterator[Tensor]:
        """Consecutive indices, at most ``count`` at a time; None: all of them."""
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
    :param here: number of records that this process of a cluster has and draws from; None: N.
    :raises ConfigurationError: a fixed batch would be empty.
    """

    sampling: str
    size: int
    rate: float
    here: int | None = None

    def __post_init__(self) -> None:
        if self.sampling == "fixed" and self.batch_size < 1:
            raise ConfigurationError(
                f"sample_rate={self.rate:g} of {self.size} records is less than one record: raise "
                "it to at least 1/N."
            )

    @property
    def batch_size(self) -> int:
        """Size of a fixed batch. The tolerance keeps 0.29 * 100 from becoming 28."""
        return math.floor(self.rate * self.size * (1 + 1e-12))

    @property
    def sample_rate(self) -> float:
        """The exact probability that a record takes part. Events and estimates use this rate."""
        return self.batch_size / self.size if self.sampling == "fixed" else self.rate

    @property
    def usual_size(self) -> int:
        """A batch size that few steps exceed: two standard deviations above the mean."""
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

        Poisson sampling draws a binomial number of records from each block, as a uniform subset.
        This is exact: conditional on their number, records chosen by independent coins of one bias
        are a uniform subset. Coins of different blocks are independent, so the blocks may have any
        sizes. Memory is that of the batch and :data:`BLOCK` numbers. At a small rate all records
        are one block, so the time is also that of the batch. In secure mode it is not, because
        coins are counted.
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
    """A uniform subset of ``count`` of the numbers below ``size``, ascending."""
    return np.sort(stream.choice(size, size=count, replace=False, shuffle=False))


class Held(Protocol):
    """A cache of the rows of some records."""

    def hold(self, indices: Tensor) -> None:
        """Read the rows at these ascending indices, and forget all others."""

    def choose(self, indices: Tensor, places: Tensor) -> None:
        """Announce the next read: of these indices, at these positions in the cache."""


class DrawnAhead:
    """Draws the samples of several steps at once, and has the records read once for all of them.

    :param steps: number of steps whose samples are drawn at a time, which is public. With 1, each
        sample is drawn when it is needed.
    :param held: caches that read the records of all these steps before the first of them.
    """

    def __init__(self, steps: int, held: Sequence[Held]):
        self._steps, self._held = min(steps, MOST), held
        # For each coming step, by its position: the records, and their positions in the caches.
        self._samples: dict[int, tuple[Tensor, Tensor]] = {}

    def sample(self, draw: Callable[[int], Indices], position: int, left: int | None) -> Indices:
        """The records of the step at this position. If a step begins again, they are drawn again.

        :param draw: draws the sample of a position.
        :param left: the largest number of steps that can follow, including this one; None: any.
        """
        if self._steps < 2:
            return draw(position)
        if position not in self._samples:
            count = self._steps if left is None else max(1, min(self._steps, left))
            positions = range(position, position + count)
            self._draw({each: cast(Tensor, draw(each)) for each in positions})
        indices, places = self._samples.pop(position)
        for rows in self._held:
            rows.choose(indices, places)
        return indices

    def forget(self) -> None:
        """Forget all samples of coming steps and empty the caches. Later samples are new draws."""
        self._samples = {}
        for rows in self._held:
            rows.hold(torch.empty(0, dtype=torch.long))

    def _draw(self, samples: dict[int, Tensor]) -> None:
        self.forget()  # before new rows are read, to save memory
        distinct, places = torch.unique(torch.cat(list(samples.values())), return_inverse=True)
        for rows in self._held:
            rows.hold(distinct)
        sizes = [len(indices) for indices in samples.values()]
        by_step = zip(samples.values(), places.split(sizes), strict=True)
        self._samples = dict(zip(samples, by_step, strict=True))
