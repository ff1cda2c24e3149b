"""The result of an audit: the bound, the counts behind it, and the curve to draw."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import SubsampledGaussian
from pyro_dp.accounting.trade_off import TradeOff, trade_off

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDEST = 6.0  # powers of two: the shares tried lie between 1/64 and 64
_ALPHA = np.concatenate([[0.0], np.geomspace(1e-5, 0.01, 31), np.linspace(0.02, 1.0, 99)])


@dataclass(frozen=True)
class CurveTest:
    """The result of a test of the claimed curve: how much noise do the guesses allow?

    Each share of the claimed noise makes a hypothesis: the trade-off curve of the ledger with all
    its Gaussian noise multiplied by the share. More noise is post-processing, so curves rise with
    it. A test that rejects one share rejects all larger ones.

    :param noise_share: the largest share of the claimed noise that the guesses allow. The claim is
        refuted if it is below 1. inf: they allow any noise.
    :param epsilon: the cost of the ledger with that share of its noise; 0 if any noise is allowed.
    :param guesses: number of guesses; ``correct`` of these were right.
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
        share = largest_share(claim, rejected)
        allowed = with_noise(claim, min(max(share, 2.0**-_WIDEST), 2.0**_WIDEST))
        epsilon = allowed.get_epsilon(delta) if delta and share < math.inf else 0.0
        return CurveTest(share, epsilon, guesses, correct, drawn_curve(allowed))


def drawn_curve(claim: PrivacyAccountant) -> np.ndarray:
    """A ledger's trade-off curve: false-positive and false-negative rates, (2, P)."""
    return np.stack([_ALPHA, trade_off(claim, _ALPHA)])


def with_noise(claim: PrivacyAccountant, share: float) -> PrivacyAccountant:
    """An accountant of the same releases with this share of the noise."""
    other = PrivacyAccountant(delta=claim.delta, neighboring=claim.neighboring, engine=claim.engine)
    for event, count in claim.counted:
        if isinstance(event, SubsampledGaussian):
            event = replace(event, noise_multiplier=share * event.noise_multiplier)
        other.record(event, count)
    return other


def largest_share(claim: PrivacyAccountant, rejected: Callable[[TradeOff], bool]) -> float:
    """The largest share of the claimed noise that is not rejected, rounded up by at most 1/1000.

    :param rejected: whether a test rejects a curve, and so all curves above it.
    :returns: inf if no share is rejected, and 0 if all are.
    """

    def rejects(exponent: float) -> bool:
        return rejected(TradeOff.of(with_noise(claim, 2.0**exponent)))

    low, high = -_WIDEST, _WIDEST
    if not rejects(high):
        return math.inf
    if rejects(low):
        return 0.0
    for _ in range(14):
        middle = (low + high) / 2.0
        low, high = (low, middle) if rejects(middle) else (middle, high)
    return float(2.0**high)


_METHODS = {  # the setting, and the sources of both tests
    "repeated runs": (
        "Independent runs, with or without the canary by a fair coin, thresholds chosen on other "
        "runs",
        "Clopper-Pearson limits on how often a guess is made and how often it is right",
        "Clopper-Pearson limit on how often a guess is right, against the claimed curve",
    ),
    "one run": (
        "One run, each canary included by a fair coin",
        "Steinke, Nasr & Jagielski 2023, Theorem 5.2, with another term for delta",
        "Mahloujifar, Melis & Chaudhuri 2024, against the claimed curve",
    ),
}


@dataclass(frozen=True)
class ErrorRates:
    """Error rates of "score above a threshold means with the canary", one entry per threshold.

    :param thresholds: (K,), ascending.
    :param false_positive: (K,): share of the runs without the canary that are guessed "with".
    :param false_negative: (K,): share of the runs with it that are guessed "without".
    :param false_positive_limits: (2, K): Clopper-Pearson limits, as are ``false_negative_limits``;
        None for one run. All 4 K limits hold together with the audit's confidence.
    """

    thresholds: np.ndarray
    false_positive: np.ndarray
    false_negative: np.ndarray
    false_positive_limits: np.ndarray | None = None
    false_negative_limits: np.ndarray | None = None


@dataclass(frozen=True)
class AuditResult:
    """The result of :func:`audit` or :func:`audit_one_run`.

    :param point_bound: lower bound on epsilon in nats, at this delta. It measures the attack, not
        the true epsilon: zero means that the attack found nothing.
    :param delta: the delta at which the bound is stated.
    :param confidence: the bound of such an audit is true with at least this probability.
    :param method: "repeated runs" or "one run".
    :param coins: number of fair coins to guess: held-out runs, or canaries.
    :param guesses: number of coins guessed; ``correct`` guesses were right.
    :param rates: error rates at other thresholds, for :meth:`plot`.
    :param claimed_epsilon: the accountant's claim at this delta; None without one.
    :param claimed_curve: (2, P): false-positive rates and the lowest false-negative rates that the
        accountant's ledger allows; None without one.
    :param curve: the test of that curve; None without one.

    >>> accountant.record(SubsampledGaussian(5.0))  # the claim
    >>> noise = np.random.default_rng(1)
    >>> def a_tenth_of_the_noise(x):
    ...     return x.sum() + 0.5 * noise.standard_normal()
    >>> result = audit(a_tenth_of_the_noise, [np.zeros(10)], [1.0], num_trials=1000, score=float,
    ...                claim=accountant, seed=0, progress=False)
    >>> result.contradicts_claim
    True
    """

    point_bound: float
    delta: float
    confidence: float
    method: str
    coins: int
    guesses: int
    correct: int
    rates: ErrorRates
    claimed_epsilon: float | None = None
    claimed_curve: np.ndarray | None = None
    curve: CurveTest | None = None

    @property
    def bound(self) -> float:
        """Lower bound on epsilon in nats, with the stated confidence: the larger of both tests."""
        return max(self.point_bound, self.curve.epsilon if self.curve else 0.0)

    @property
    def contradicts_claim(self) -> bool:
        """Whether one of the tests refutes the claim; False without one."""
        if self.claimed_epsilon is None or self.curve is None:
            return False
        return self.point_bound > self.claimed_epsilon or self.curve.noise_share < 1.0

    @property
    def how(self) -> str:
        """How the bound was computed, in a sentence."""
        setting, source, curve = _METHODS[self.method]
        correct, guesses = self.correct, self.guesses
        if self.curve and self.curve.epsilon > self.point_bound:
            correct, guesses, source = self.curve.correct, self.curve.guesses, curve
        counts = f"{correct} of {guesses} guesses about {self.coins} coins were right"
        excluded = f"epsilon below {self.bound:.4g}" if self.bound else "no epsilon"
        allowed = ""
        if self.curve:
            share = f"noise of up to {self.curve.noise_share:.3g} times the claimed one"
            allowed = f" They allow {'any noise' if self.curve.noise_share == math.inf else share}."
        return (
            f"{setting}: {counts}, which excludes {excluded} at delta={self.delta:g} with "
            f"{self.confidence:.6g} confidence ({source}).{allowed}"
        )

    def __str__(self) -> str:
        claim = "" if self.claimed_epsilon is None else f", claimed {self.claimed_epsilon:.4g}"
        return f"epsilon >= {self.bound:.4g}{claim}. {self.how}"

    def plot(self, axes: "Axes | None" = None) -> "Axes":
        """Plot false-negative against false-positive rates, with the claimed curve.

        :param axes: to draw in; new ones if None.
        """
        import matplotlib.pyplot as plt

        if axes is None:
            _, axes = plt.subplots()
        alpha = np.linspace(0.0, 1.0, 201)
        axes.plot(alpha, 1.0 - alpha, color="0.6", linestyle=":", label="guessing")
        growth, kept = np.exp(self.point_bound), 1.0 - self.delta
        excluded = np.maximum(0.0, np.maximum(kept - growth * alpha, (kept - alpha) / growth))
        label = f"epsilon = {self.point_bound:.2f} (bound at this delta)"
        axes.plot(alpha, excluded, color="#D55E00", label=label)
        if self.curve is not None and self.curve.noise_share < math.inf:
            label = f"{self.curve.noise_share:.2f} x the claimed noise (bound of the curve)"
            axes.plot(*self.curve.allowed, color="#009E73", label=label)
        if self.claimed_curve is not None:
            axes.plot(*self.claimed_curve, color="#0072B2", label="least errors claimed")
        rates = self.rates
        x, y = rates.false_positive, rates.false_negative
        limits: dict[str, Any] = {}
        if rates.false_positive_limits is not None and rates.false_negative_limits is not None:
            limits["xerr"] = np.abs(rates.false_positive_limits - x)
            limits["yerr"] = np.abs(rates.false_negative_limits - y)
        axes.errorbar(
            x, y, fmt="o", markersize=3, linewidth=0.8, color="0.2", label="attack", **limits
        )
        axes.set(xlabel="false-positive rate", ylabel="false-negative rate")
        axes.legend()
        return axes
