"""The records of a step: Poisson, fixed-size or all; samples of coming steps, drawn at once.

A step's sample is drawn without the data, from the private stream of the step's position in the
ledger (:mod:`pyro_dp.mechanism.streams`). So the time of the draw does not matter: the samples have
the same joint distribution, independent of all data and all releases. With a seed they are the same
records. Each is handed out once. None is part of a state or visible: a run that continues from a
state draws anew. A forked process cannot use them either, for its accountant refuses it.

Not protected: a reader of the process's memory learns the samples of steps to come. Secure
mode, which also stands up to copies of a machine, does not draw ahead.
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

BLOCK = 2**21  # records that are drawn from at a time: numpy may list them, in 16 MB
_RARE = 0.005  # rate up to which it never does: it lists where more than a fiftieth is chosen
MOST = 4096  # steps: the first of them waits for all


@dataclass(frozen=True)
class AllRecords:
    """The indices 0, ..., size - 1, never all written down.

    It has the methods of a tensor of indices that are used here.
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
        block by block: in each, a binomial number of distinct uniform records. Let n independent
        coins of one bias choose records: conditional on their number, they are a uniform subset.
        Coins of different records are independent, so this is Poisson sampling for any blocks. At a
        small rate all records are one block, and time is that of the batch, too; but not in secure
        mode, which counts coins.
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


class Held(Protocol):
    """Rows of some records, in memory."""

    def hold(self, indices: Tensor) -> None:
        """Read these, which ascend, and keep them instead of those that were kept."""

    def choose(self, indices: Tensor, places: Tensor) -> None:
        """Some of them are asked for next, at these positions among those that are held."""


class DrawnAhead:
    """
    :param steps: the number of steps whose samples are drawn at a time, a public number; with 1
        each is drawn when it is needed.
    :param held: gets the records of all these steps before the first of them.
    """

    def __init__(self, steps: int, held: Sequence[Held]):
        self._steps, self._held = min(steps, MOST), held
        # By position, for steps that have not begun: their records and the rows of these.
        self._samples: dict[int, tuple[Tensor, Tensor]] = {}

    def sample(self, draw: Callable[[int], Indices], position: int, left: int | None) -> Indices:
        """The records of the step at this position. A step that begins again draws again.

        :param left: how many steps there can be, this one included; None: any number.
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
        """Keep no sample of steps to come, and no rows: they are drawn again."""
        self._samples = {}
        for rows in self._held:
            rows.hold(torch.empty(0, dtype=torch.long))

    def _draw(self, samples: dict[int, Tensor]) -> None:
        self.forget()  # first: both would take twice the memory
        everybody, places = torch.unique(torch.cat(list(samples.values())), return_inverse=True)
        for rows in self._held:
            rows.hold(everybody)
        sizes = [len(indices) for indices in samples.values()]
        by_step = zip(samples.values(), places.split(sizes), strict=True)
        self._samples = dict(zip(samples, by_step, strict=True))
