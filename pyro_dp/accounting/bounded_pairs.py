"""Dominating pairs whose privacy losses are bounded. The largest loss determines the pair.

An (epsilon, delta)-DP release has a pair with four outcomes (Kairouz, Oh & Viswanath 2015,
Theorem 3.2; Murtagh & Vadhan 2016). It is a mixture: with probability delta the loss is infinite,
and otherwise the pair is :class:`Response`. Any product of such pairs is such a mixture, too.
:mod:`pyro_dp.accounting.composition` therefore splits off the infinite losses of a whole ledger
first, and composes the rest.
"""

import abc
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pyro_dp.accounting.pld import (
    ORDERS,
    RATES,
    Distribution,
    Floats,
    onto_dots,
    renyi_delta,
    renyi_epsilon,
)

MOST_LOSS = 50.0  # if a pair's largest loss exceeds this, it is added to epsilon
_LEAST_LOSS = 1e-9
_MOST_KINDS = 64  # kinds of pairs that are composed at most
_FINEST = 1e-3  # log ratio of neighbouring losses on the first grid to which they are rounded


@dataclass(frozen=True)
class Bounded(abc.ABC):
    """A symmetric pair with losses from -most to most.

    Subclasses have the exact privacy profile: ``delta(eps)`` and ``epsilon(delta)``.
    """

    most: float

    kind: ClassVar[str] = "bounded"
    rate: ClassVar[float] = 1.0  # every record takes part

    @property
    def on_grids(self) -> bool:
        return self.most < math.inf

    @classmethod
    def together(cls, counts: Mapping[Any, int], neighboring: str) -> list[tuple[Any, int]]:
        losses: Counter[float] = Counter()
        for pair, n in counts.items():
            if 0.0 < pair.most <= MOST_LOSS:
                losses[max(pair.most, _LEAST_LOSS)] += n
        return [(cls(most), n) for most, n in sorted(_few(losses).items())]

    def reverse(self) -> "Bounded":
        return self

    def span(self, tail: float) -> tuple[float, float]:
        return -self.most, self.most

    def moments(self) -> tuple[Floats, float]:
        return self.log_moments(RATES), 0.0

    def renyi_moments(self) -> Floats:
        return self.log_moments(ORDERS - 1.0)

    def on_grid(self, least: float, most: float, gap: float) -> Distribution:
        """Connect-the-Dots: P and Q both keep their mass, so delta is never underestimated."""
        reach = math.floor(self.most / gap) + 1  # the grid goes beyond both extreme losses
        losses = np.arange(-reach, reach + 1, dtype=np.float64) * gap
        before, beyond = losses < -self.most, losses >= self.most
        up_to = np.where(before, 0.0, np.where(beyond, 1.0, self._up_to(losses)))
        above = np.where(before, 1.0, np.where(beyond, 0.0, self._up_to(-losses)))  # Q's
        return Distribution(losses, onto_dots(losses, np.diff(up_to), -np.diff(above)), 0.0)

    @abc.abstractmethod
    def _up_to(self, losses: Floats) -> Floats:
        """P's cumulative distribution function of the loss, for losses within [-most, most)."""

    @abc.abstractmethod
    def log_moments(self, rates: Floats) -> Floats:
        """log E_P exp(rate * loss) at these rates."""


class Response(Bounded):
    """Randomised response. It dominates every (``most``, 0)-DP mechanism."""

    def _up_to(self, losses: Floats) -> Floats:
        return np.full_like(losses, math.exp(-np.logaddexp(self.most, 0.0)))

    def log_moments(self, rates: Floats) -> Floats:
        rest = np.log1p(np.exp(-(1.0 + 2.0 * rates) * self.most))
        moments: Floats = rates * self.most + rest - math.log1p(math.exp(-self.most))
        return moments

    def delta(self, eps: float) -> float:
        return -math.expm1(min(0.0, eps - self.most)) / (1.0 + math.exp(-self.most))

    def epsilon(self, delta: float) -> float:
        rest = 1.0 - delta * (1.0 + math.exp(-self.most))
        return max(0.0, self.most + math.log(rest)) if rest > 0.0 else 0.0


class LaplacePair(Bounded):
    """Laplace noise around 0 and 1, which dominates any shift of L1 norm 1 (Zhu et al. 2022)."""

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


@dataclass(frozen=True)
class RenyiPair(Response):
    """A pair with bounds of its log moments, and perhaps of its losses.

    :param at_orders: bounds of log E_P exp(rate * loss), at the rates ``ORDERS - 1``.
    """

    at_orders: tuple[float, ...]

    @classmethod
    def together(cls, counts: Mapping[Any, int], neighboring: str) -> list[tuple[Any, int]]:
        """A single pair for all of them, with the sums of their bounds."""
        most, moments = 0.0, np.zeros(len(ORDERS))
        for pair, n in counts.items():
            most, moments = most + n * pair.most, moments + n * np.array(pair.at_orders)
        return [(cls(most if most <= MOST_LOSS else math.inf, tuple(moments)), 1)] if most else []

    def log_moments(self, rates: Floats) -> Floats:
        """Interpolated bounds. Log moments are convex and 0 at rate 0, so a chord is a bound."""
        knots = np.concatenate(([0.0], ORDERS - 1.0))
        found = np.interp(rates, knots, (0.0, *self.at_orders), right=math.inf)
        return np.minimum(found, super().log_moments(rates))

    def delta(self, eps: float) -> float:
        found = renyi_delta(ORDERS - 1.0, self.log_moments(ORDERS - 1.0), eps)
        return min(found, super().delta(eps))

    def epsilon(self, delta: float) -> float:
        found = renyi_epsilon(ORDERS - 1.0, self.log_moments(ORDERS - 1.0), delta)
        return min(found, super().epsilon(delta))


def _few(losses: Counter[float]) -> Counter[float]:
    """Round losses up to a common grid, until there are at most :data:`_MOST_KINDS` kinds.

    The time of a composition grows with the number of kinds.
    """
    rounded, ratio = losses, _FINEST
    while len(rounded) > _MOST_KINDS:
        rounded = Counter()
        for loss, n in losses.items():
            rounded[math.exp(ratio * math.ceil(math.log(loss) / ratio) + 1e-12)] += n
        ratio *= 2.0
    return rounded
