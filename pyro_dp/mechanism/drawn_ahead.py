"""Samples of coming steps, drawn at once, so that one pass over a file finds the rows of them all.

Who takes part in a step is drawn without the data, from a private stream that belongs to the step's
position in the ledger (:mod:`pyro_dp.mechanism.streams`) and to no other draw. So it does not
matter when it is drawn: the samples have the same joint distribution, independent of all data and
all releases, and with a seed they are the same records. Each is handed out once. None is part of a
state, or shown to anybody: whoever goes on from a state draws anew. A forked process cannot use
them either, for its accountant refuses it.

Not protected: who reads the memory of the process learns who takes part in steps to come. Secure
mode, which also stands up to copies of a machine, does not draw ahead.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from pyro_dp.mechanism.sampling import Indices

MOST = 4096  # steps: the first of them waits for all


class Held(Protocol):
    """Rows of some records, in memory."""

    def hold(self, indices: Tensor) -> None:
        """Read these and keep them, in place of those that were kept.

        :param indices: ascending.
        """

    def choose(self, indices: Tensor, places: Tensor) -> None:
        """Some of them are asked for next.

        :param places: where they are among those that are held.
        """


class DrawnAhead:
    """
    :param steps: of how many steps to draw the samples at a time, a public number; with 1 each is
        drawn when it is needed.
    :param held: told, before the first of these steps, who takes part in any of them.
    """

    def __init__(self, steps: int, held: Sequence[Held]):
        self._steps, self._held = min(steps, MOST), held
        # By position, of steps that have not begun: who takes part, and where their rows are.
        self._samples: dict[int, tuple[Tensor, Tensor]] = {}

    def sample(self, draw: Callable[[int], Indices], position: int, left: int | None) -> Indices:
        """Who takes part in the step at this position. A step that begins again draws again.

        :param draw: a sample, by position.
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
        """Keep no sample, and no rows."""
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
