"""The trade-off curve of a ledger: lower bounds of the error rates of any attacker."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyro_dp.accounting.events import Event
from pyro_dp.accounting.ledger import Description, LedgerEntry
from pyro_dp.accounting.origins import Origin, Part
from pyro_dp.utils.errors import ConfigurationError

FALSE_POSITIVES = 0.05  # the false-positive rate at which power is stated

_SUPPORTS = 33  # values of epsilon, each with a line below the curve
_LARGEST = 700.0  # the largest epsilon whose exponential is finite
_LEAST_DELTA = 1e-6  # at the last epsilon; smaller false-positive rates count as zero


@runtime_checkable
class Accountant(Protocol):
    """The part of a :class:`PrivacyAccountant` that curves, pictures and reports use."""

    epsilon: float | None
    delta: float
    neighboring: str
    engine: str
    description: Description
    journal_digest: str | None

    @property
    def counted(self) -> Sequence[LedgerEntry]: ...
    @property
    def notes(self) -> Sequence[str]: ...
    @property
    def reserved(self) -> list[tuple[Origin, Mapping[Event, int]]]: ...
    def runs(self) -> list[tuple[Origin | None, Part]]: ...
    def get_epsilon(self, delta: float | None = None) -> float: ...
    def get_delta(self, epsilon: float) -> float: ...


@dataclass(frozen=True, eq=False)
class TradeOff:
    """A trade-off curve: the maximum of K straight lines and of their mirror images."""

    growth: NDArray[np.float64]  # e^epsilon of each line
    kept: NDArray[np.float64]  # 1 - delta of each line

    @staticmethod
    def of(accountant: Accountant) -> "TradeOff":
        """A lower bound of the ledger's curve, see :func:`trade_off`."""
        # If a release has a delta, epsilon is infinite at smaller ones.
        deltas = (_LEAST_DELTA, accountant.delta, 1e-3, 0.1)
        last = next((e for e in map(accountant.get_epsilon, deltas) if e < math.inf), None)
        if last is None:
            return TradeOff(np.ones(1), np.zeros(1))
        epsilons = np.linspace(0.0, min(last, _LARGEST), _SUPPORTS)
        kept = [1.0 - accountant.get_delta(epsilon) for epsilon in epsilons]
        return TradeOff(np.exp(epsilons), np.array(kept))

    @property
    def advantage(self) -> float:
        """The largest excess of power over the false-positive rate: the total variation.

        It is where both error rates are equal, because the curve is symmetric.
        """
        return 1.0 - 2.0 * float(np.max(self.kept / (1.0 + self.growth)))

    def __call__(self, alpha: NDArray[np.float64]) -> NDArray[np.float64]:
        """False-negative rates at these false-positive rates, in [0, 1]."""
        alpha = alpha[..., None]
        lines = np.maximum(self.kept - self.growth * alpha, (self.kept - alpha) / self.growth)
        least: NDArray[np.float64] = np.maximum(lines.max(axis=-1), 0.0)
        return least


def trade_off(accountant: Accountant, alpha: ArrayLike) -> NDArray[np.float64]:
    """The lowest false-negative rate of any attacker whose false-positive rate is alpha.

    The attacker sees all releases that the ledger counts, knows all records except one, and tests
    "without this record" against "with it". A false positive takes an absent record for present,
    and a false negative the reverse. For every epsilon with its delta (Dong, Roth & Su 2022,
    "Gaussian differential privacy", Proposition 3)::

        f(alpha) >= max(0, 1 - delta - e^epsilon alpha, e^-epsilon (1 - delta - alpha))

    The result is the largest of these over 33 values of epsilon, from 0 to that at delta = 1e-6. It
    is a valid lower bound for both directions of the relation. It is at most 0.002 below a
    Gaussian's curve if that last epsilon is 5, and 0.006 if it is 20.

    :param accountant: its ledger is read; nothing is spent.
    :param alpha: false-positive rates in [0, 1], of any shape.
    :returns: false-negative rates of the shape of ``alpha``: 1 - alpha if nothing was released, 0
        after a noiseless release.
    :raises ConfigurationError: an argument has the wrong type, or alpha is out of range.
    """
    if not isinstance(accountant, Accountant):
        raise ConfigurationError("accountant must be a PrivacyAccountant.")
    try:
        alpha = np.asarray(alpha, dtype=np.float64)
    except (TypeError, ValueError):
        alpha = np.array(math.nan)
    if not np.all((alpha >= 0.0) & (alpha <= 1.0)):
        raise ConfigurationError("alpha must be numbers in [0, 1].")
    return TradeOff.of(accountant)(alpha)


def best_power(accountant: Accountant) -> str:
    """The largest power of an attacker at the rate :data:`FALSE_POSITIVES`, in percent."""
    power = 1.0 - float(trade_off(accountant, FALSE_POSITIVES))
    return f"{math.ceil(1000.0 * power - 1e-9) / 10.0:.1f}%"
