"""Means of a run's parameters over its last half."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_count, require_tensors

_PARTS = 4  # of the last half
_DAMAGED = "load_state_dict: averages are damaged."


class IterateAverages:
    """Sums of the unconstrained parameters over the last four eighths of a run: public.

    A parameter that has arrived spreads around one place: means a, b, c, d of the eighths are equal
    up to chance, and those of the quarters, (a + b) / 2 and (c + d) / 2, have a squared distance of
    about a quarter of |a - b|^2 + |c - d|^2. It is as large as this sum for a random walk, and
    twice as large on a straight way: there the last iterate is nearer than any mean.

    :param num_steps: T.
    :param counts: iterates in each eighth so far.
    :param sums: of each parameter over them, (4, *shape).
    """

    def __init__(
        self,
        num_steps: int,
        counts: Sequence[int] = (0,) * _PARTS,
        sums: Mapping[str, Tensor] | None = None,
    ):
        self._num_steps = num_steps
        self._counts = list(counts)
        self._sums = {name: each.clone() for name, each in (sums or {}).items()}

    @torch.no_grad()
    def add(self, step: int, parameters: Mapping[str, Tensor]) -> None:
        """The iterate after this step, from 1."""
        part = 2 * _PARTS * (step - 1) // self._num_steps - _PARTS
        if not 0 <= part < _PARTS:
            return
        self._counts[part] += 1
        for name, leaf in parameters.items():
            if name not in self._sums:
                self._sums[name] = leaf.new_zeros(_PARTS, *leaf.shape)
            self._sums[name][part] += leaf

    @torch.no_grad()
    def means(self) -> dict[str, Tensor]:
        """Over the last half so far, of all parameters; empty before it begins."""
        count = sum(self._counts)
        return {name: sums.sum(dim=0) / count for name, sums in self._sums.items()}

    @torch.no_grad()
    def agreed(self) -> dict[str, Tensor]:
        """Means over the last half, of the parameters that have arrived."""
        if min(self._counts) == 0:
            return {}
        found = set()
        for name, sums in self._sums.items():
            means = sums / torch.tensor(self._counts).to(sums).view(-1, *[1] * (sums.dim() - 1))
            a, b, c, d = means
            apart = ((a + b - c - d) / 2).square().sum()
            within = (a - b).square().sum() + (c - d).square().sum()
            if 2 * apart <= within:
                found.add(name)
        return {name: mean for name, mean in self.means().items() if name in found}

    def state(self) -> dict[str, Any]:
        """Tensors and numbers."""
        sums = {name: each.clone() for name, each in self._sums.items()}
        return {"num_steps": self._num_steps, "counts": list(self._counts), "sums": sums}

    @staticmethod
    def resumed(state: Any) -> "IterateAverages":
        """What :meth:`state` was taken of.

        :raises ConfigurationError: it is no such state.
        """
        names = {"num_steps", "counts", "sums"}
        if not isinstance(state, Mapping) or state.keys() != names:
            raise ConfigurationError(_DAMAGED)
        sums, counts = require_tensors("averages", state["sums"]), state["counts"]
        if not isinstance(counts, list) or len(counts) != _PARTS:
            raise ConfigurationError(_DAMAGED)
        if not all(each.dim() and len(each) == _PARTS for each in sums.values()):
            raise ConfigurationError(_DAMAGED)
        counts = [require_count("averages", count, least=0) for count in counts]
        return IterateAverages(require_count("averages", state["num_steps"]), counts, sums)
