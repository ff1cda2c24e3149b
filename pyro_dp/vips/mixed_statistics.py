"""Released estimates of a model's statistics, mixed over the steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_number
from pyro_dp.vips.conjugate_model import Statistic


@dataclass(frozen=True)
class MixedStatistics:
    """Estimates of the sums over all records, and how noisy they are; all of it public.

    :param values: by name.
    :param noise: standard deviation of the noise in each coordinate, by name.
    """

    values: dict[str, Tensor]
    noise: dict[str, float]

    def joined(self, other: "MixedStatistics") -> "MixedStatistics":
        return MixedStatistics(self.values | other.values, self.noise | other.noise)

    def mixed(
        self, estimates: "MixedStatistics", weight: float, static: Sequence[str]
    ) -> "MixedStatistics":
        """(1 - weight) of this, weight of the estimates.

        :param static: names of estimates that are the same in every step, noise included.
        """
        values, noise = {}, {}
        for name, new in estimates.values.items():
            values[name] = (1 - weight) * self.values[name] + weight * new
            old, added = (1 - weight) * self.noise[name], weight * estimates.noise[name]
            noise[name] = old + added if name in static else math.hypot(old, added)
        return MixedStatistics(values, noise)

    def change(self, before: "MixedStatistics", declared: Mapping[str, Statistic]) -> float:
        """Euclidean norm of the change since, each statistic in units of its bound."""
        moved = [
            torch.linalg.vector_norm(value - before.values[name]) / declared[name].bound
            for name, value in self.values.items()
        ]
        return torch.stack(moved).norm().item()

    def state(self) -> dict[str, Any]:
        """As tensors, numbers and dictionaries."""
        values = {name: value.clone() for name, value in self.values.items()}
        return {"values": values, "noise": dict(self.noise)}

    @staticmethod
    def from_state(state: Any, declared: Mapping[str, Statistic]) -> "MixedStatistics":
        """:raises ConfigurationError: not the state of such statistics."""
        try:
            values, noise = dict(state["values"]), dict(state["noise"])
            shapes = {name: tuple(value.shape) for name, value in values.items()}
            fits = all(isinstance(noise[name], float) for name in values)
        except (TypeError, KeyError, ValueError, AttributeError):
            fits = False
        if not fits or shapes != {name: each.shape for name, each in declared.items()}:
            raise ConfigurationError("load_state_dict: the statistics are not those of this model.")
        return MixedStatistics(values, noise)

    def to(self, device: torch.device) -> "MixedStatistics":
        return MixedStatistics({name: x.to(device) for name, x in self.values.items()}, self.noise)


def require_step_size(value: Any) -> tuple[float, float]:
    """:raises ConfigurationError: not (tau0, kappa) with tau0 >= 0 and kappa in [0, 1]."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ConfigurationError("step_size must be a pair (tau0, kappa) of numbers.")
    tau0, kappa = value
    return (
        require_number("step_size: tau0", tau0, above=0.0, below=math.inf, or_equal=True),
        require_number("step_size: kappa", kappa, above=0.0, below=1.0, or_equal=True, closed=True),
    )
