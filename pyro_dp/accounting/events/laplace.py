"""Laplace noise: the entry of a ledger, and its dominating pair in closed form."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyro_dp.accounting.bounded_pairs import Bounded
from pyro_dp.accounting.events.event import Event, require_short_text
from pyro_dp.accounting.pld import Floats
from pyro_dp.utils.validation import require_scale


@dataclass(frozen=True)
class Laplace(Event):
    """Numbers that were released with Laplace noise.

    :param scale: the noise's, in units of the L1 sensitivity under the accountant's relation.
    :param name: a short text that describes the release. It is public.
    :raises ConfigurationError: if a setting is out of range.
    """

    kind = "laplace"
    delta = 0.0

    scale: float
    name: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", require_scale("scale", self.scale))
        require_short_text("name", self.name)

    @property
    def brief(self) -> str:
        return f"{self.name} (Laplace noise, scale = {self.scale:.6g} sensitivities)"

    def pair(self, neighboring: str) -> "LaplacePair":
        return LaplacePair(1.0 / self.scale)

    def dots(self, gap: float, relation: Any) -> Any:
        from dp_accounting.pld import privacy_loss_distribution

        return privacy_loss_distribution.from_laplace_mechanism(
            self.scale, value_discretization_interval=gap
        )


class LaplacePair(Bounded):
    """Laplace noise around 0 and 1. It dominates any shift in L1 (Zhu, Dong & Wang 2022)."""

    def _up_to(self, losses: Floats) -> Floats:
        found: Floats = 0.5 * np.exp(0.5 * np.minimum(losses - self.most, 0.0))
        return found

    def log_moments(self, rates: Floats) -> Floats:
        """Mironov 2017, Proposition 6, with order = 1 + rate."""
        twice = np.log1p(2.0 * rates)
        up = np.log1p(rates) - twice + rates * self.most
        moments: Floats = np.logaddexp(up, np.log(rates) - twice - (1.0 + rates) * self.most)
        return moments

    def delta(self, eps: float) -> float:
        return -math.expm1(0.5 * min(0.0, eps - self.most))

    def epsilon(self, delta: float) -> float:
        return max(0.0, self.most + 2.0 * math.log1p(-delta))
