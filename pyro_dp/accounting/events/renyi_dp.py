"""A release with bounds of its Rényi divergences: the entry of a ledger, and its cost.

If its loss is bounded, randomised response dominates it. Otherwise it has no dominating pair.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyro_dp.accounting.bounded_pairs import MOST_LOSS, Response
from pyro_dp.accounting.events.event import Event, require_short_text
from pyro_dp.accounting.pld import ORDERS, Floats, renyi_delta, renyi_epsilon
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_number

_ROUNDING = 1e-6


@dataclass(frozen=True)
class RenyiDP(Event):
    """A release with bounds of its Rényi divergences, in both directions of the relation.

    :param divergences: (87,) in nats, at ``ORDERS`` of :mod:`pyro_dp.accounting.pld`.
        They are finite, and none is below the one before it.
    :param epsilon: the release is (epsilon, 0)-DP as well; None: no such epsilon is stated.
    :param name: a short text that describes the release. It is public.
    :raises ConfigurationError: if a setting is out of range.
    """

    kind = "renyi_dp"
    delta = 0.0

    divergences: tuple[float, ...]
    epsilon: float | None
    name: str

    def __post_init__(self) -> None:
        given = self.divergences
        if not isinstance(given, tuple | list) or len(given) != len(ORDERS):
            raise ConfigurationError(f"divergences must be {len(ORDERS)} numbers.")
        found = [
            require_number("divergences", each, above=0.0, below=math.inf, or_equal=True)
            for each in given
        ]
        steps = np.diff(found)
        if np.any(steps < -_ROUNDING * np.array(found[:-1])):
            raise ConfigurationError(
                "divergences must not fall with the order. Those of no release do, so this is a "
                "bound that is not tight, or wrong. State an epsilon and a delta: ApproximateDP."
            )
        object.__setattr__(self, "divergences", tuple(found))
        if self.epsilon is not None:
            most = require_number("epsilon", self.epsilon, above=0.0, below=math.inf, or_equal=True)
            object.__setattr__(self, "epsilon", most)
        require_short_text("name", self.name)

    @property
    def brief(self) -> str:
        return f"{self.name} (Rényi divergence {self.divergences[0]:.4g} at order 2)"

    def pair(self, neighboring: str) -> "RenyiPair":
        most = math.inf if self.epsilon is None else self.epsilon
        moments = tuple((ORDERS - 1.0) * self.divergences)
        return RenyiPair(most if most <= MOST_LOSS else math.inf, moments)


@dataclass(frozen=True)
class RenyiPair(Response):
    """It has at most these log moments, at ``ORDERS - 1``."""

    at_orders: tuple[float, ...]

    @classmethod
    def together(cls, counts: Mapping[Any, int], neighboring: str) -> list[tuple[Any, int]]:
        """One for all."""
        most, moments = 0.0, np.zeros(len(ORDERS))
        for pair, n in counts.items():
            most, moments = most + n * pair.most, moments + n * np.array(pair.at_orders)
        return [(cls(most if most <= MOST_LOSS else math.inf, tuple(moments)), 1)] if most else []

    def log_moments(self, rates: Floats) -> Floats:
        """They are convex, and 0 at rate 0: a chord is a bound."""
        knots = np.concatenate(([0.0], ORDERS - 1.0))
        found = np.interp(rates, knots, (0.0, *self.at_orders), right=math.inf)
        return np.minimum(found, super().log_moments(rates))

    def delta(self, eps: float) -> float:
        found = renyi_delta(ORDERS - 1.0, self.log_moments(ORDERS - 1.0), eps)
        return min(found, super().delta(eps))

    def epsilon(self, delta: float) -> float:
        found = renyi_epsilon(ORDERS - 1.0, self.log_moments(ORDERS - 1.0), delta)
        return min(found, super().epsilon(delta))
