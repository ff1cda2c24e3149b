"""The dominating pair of what is (epsilon, delta)-DP by itself.

It has four outcomes (Kairouz, Oh & Viswanath 2015, Theorem 3.2; Murtagh & Vadhan 2016). The pair is
a mixture. With probability delta the loss is infinite, and otherwise the pair is :class:`Response`.
So is any product of such pairs. :mod:`pyro_dp.accounting.composition` splits the infinite part of a
whole ledger off before anything else is composed.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pyro_dp.accounting.pld import RATES, Distribution, Floats


@dataclass(frozen=True, order=True)
class Response:
    """Randomised response, which dominates whatever is (``most``, 0)-DP."""

    most: float  # epsilon: the losses are -most and most

    kind: ClassVar[str] = "bounded"  # no removal: it is symmetric

    def reverse(self) -> "Response":
        return self

    def span(self, tail: float) -> tuple[float, float]:
        return -self.most, self.most

    def log_moments(self, rates: Floats) -> Floats:
        up, down = (1.0 + rates) * self.most, -rates * self.most
        moments: Floats = np.logaddexp(up, down) - np.logaddexp(self.most, 0.0)
        return moments

    def moments(self) -> tuple[Floats, float]:
        return self.log_moments(RATES), 0.0

    def delta(self, eps: float) -> float:
        """The exact profile, at eps >= 0."""
        return -math.expm1(min(0.0, eps - self.most)) / (1.0 + math.exp(-self.most))

    def epsilon(self, delta: float) -> float:
        rest = 1.0 - delta * (1.0 + math.exp(-self.most))
        return max(0.0, self.most + math.log(rest)) if rest > 0.0 else 0.0

    def on_grid(self, least: float, most: float, gap: float) -> Distribution:
        """Connect-the-Dots: P and Q both keep their mass, so delta is nowhere below."""
        reach = math.floor(self.most / gap) + 1  # points beyond both losses
        losses = np.arange(-reach, reach + 1, dtype=np.float64) * gap
        probs = np.zeros_like(losses)
        for loss in (-self.most, self.most):
            mass = math.exp(-np.logaddexp(-loss, 0.0))
            i = int(np.searchsorted(losses, loss, side="right")) - 1
            lower = math.expm1(losses[i + 1] - loss) / math.expm1(gap)
            lower = min(1.0, max(0.0, lower))
            probs[i] += mass * lower
            probs[i + 1] += mass * (1.0 - lower)
        return Distribution(losses, probs, 0.0)
