"""The claimed mechanism with more or less noise: which of these do the attacker's guesses allow?

Each share s of the claimed noise makes a hypothesis. The mechanism then has the trade-off curve
of the ledger with all its Gaussian noise multiplied by s. The claim itself is the share 1.

More noise is post-processing, so curves rise with s. A test that rejects one share therefore
rejects all larger shares.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import SubsampledGaussian
from pyro_dp.accounting.trade_off import TradeOff, trade_off

_WIDEST = 6.0  # powers of two: shares from 1/64 to 64 are tried
_HALVINGS = 14  # halvings of the range of exponents
_ALPHA = np.concatenate([[0.0], np.geomspace(1e-5, 0.01, 31), np.linspace(0.02, 1.0, 99)])


@dataclass(frozen=True)
class CurveTest:
    """The result of a test of the claimed curve.

    :param noise_share: the largest share of the claimed noise that the guesses allow. The claim is
        refuted if it is below 1. inf: they allow any noise.
    :param epsilon: the cost of the ledger with that share of its noise; 0 if any noise is allowed.
    :param guesses: how many were made.
    :param correct: how many were right.
    :param allowed: (2, P): the trade-off curve of that share, as in :class:`AuditResult`.
    """

    noise_share: float
    epsilon: float
    guesses: int
    correct: int
    allowed: np.ndarray

    @staticmethod
    def of(
        claim: PrivacyAccountant,
        delta: float,
        guesses: int,
        correct: int,
        rejected: Callable[[TradeOff], bool],
    ) -> "CurveTest":
        """By :func:`largest_share`."""
        share = largest_share(claim, rejected)
        allowed = with_noise(claim, min(max(share, 2.0**-_WIDEST), 2.0**_WIDEST))
        epsilon = allowed.get_epsilon(delta) if delta and share < math.inf else 0.0
        return CurveTest(share, epsilon, guesses, correct, drawn_curve(allowed))


def drawn_curve(claim: PrivacyAccountant) -> np.ndarray:
    """A ledger's trade-off curve: false-positive and false-negative rates, (2, P)."""
    return np.stack([_ALPHA, trade_off(claim, _ALPHA)])


def with_noise(claim: PrivacyAccountant, share: float) -> PrivacyAccountant:
    """An accountant of the same releases, with this share of their noise."""
    other = PrivacyAccountant(delta=claim.delta, neighboring=claim.neighboring, engine=claim.engine)
    for event, count in claim.counted:
        if isinstance(event, SubsampledGaussian):
            event = replace(event, noise_multiplier=share * event.noise_multiplier)
        other.record(event, count)
    return other


def largest_share(claim: PrivacyAccountant, rejected: Callable[[TradeOff], bool]) -> float:
    """The largest share of the claimed noise that is not rejected.

    :param rejected: whether a test rejects a curve, and so all curves above it.
    :returns: at or above that share by less than a thousandth; inf if none is rejected, and 0 if
        all are.
    """

    def rejects(exponent: float) -> bool:
        return rejected(TradeOff.of(with_noise(claim, 2.0**exponent)))

    low, high = -_WIDEST, _WIDEST
    if not rejects(high):
        return math.inf
    if rejects(low):
        return 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if rejects(middle) else (middle, high)
    return float(2.0**high)
