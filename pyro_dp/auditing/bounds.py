"""Lower confidence bounds on epsilon from guesses: which runs, or which canaries, were included.

Canaries are included by fair coins. From the releases an attacker guesses some of the coins and
abstains from the others. Under (epsilon, delta)-differential privacy few guesses can be better than
those of randomised response. It is right with probability q = e^epsilon / (1 + e^epsilon). Both
bounds invert this relation. They hold for any attack; a weak attack makes them small. The proofs
are in docs/proofs/audits.md.

:func:`least_advantage` and :func:`canaries_contradict` test a whole trade-off curve, so they detect
noise that is slightly too small.
"""

import math
from collections.abc import Callable

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from pyro_dp.auditing.result import ErrorRates

Counts = int | np.ndarray
_RATE_SHARE = 0.05  # share of the error probability for the limit on how often a guess is made


def rate_interval(hits: ArrayLike, trials: ArrayLike, error: float) -> np.ndarray:
    """Clopper & Pearson's limits on a probability, each exceeded with probability at most error.

    :param hits: numbers of successes, (K,); ``trials`` > 0 has any shape that fits.
    :returns: (2, K): lower and upper limits.
    """
    hits, trials = np.broadcast_arrays(np.asarray(hits, float), np.asarray(trials, float))
    low, high = np.zeros(hits.shape), np.ones(hits.shape)
    some, missed = hits > 0, hits < trials
    low[some] = scipy.special.betaincinv(hits[some], trials[some] - hits[some] + 1, error)
    high[missed] = scipy.special.betaincinv(
        hits[missed] + 1, trials[missed] - hits[missed], 1 - error
    )
    return np.stack([low, high])


def runs_bound(
    trials: Counts, guesses: Counts, correct: Counts, delta: float, confidence: float
) -> np.ndarray:
    """Bounds from independent runs, each with one coin. The rule for guesses was fixed before.

    Clopper & Pearson's limits on how often a guess is made (a twentieth of the error) and how often
    it is right (the rest) hold together. The bound is the smallest epsilon that allows both.

    :param guesses: runs in which a guess was made; ``correct`` of these were right.
    :returns: bounds on epsilon in nats, >= 0.
    """
    return np.log(np.maximum(odds_limit(trials, guesses, correct, delta, confidence), 1.0))


def least_advantage(trials: int, correct: int, error: float) -> float:
    """A lower limit on the total variation of runs with and without the canary.

    The rule for guesses was fixed before. A limit above a trade-off curve's delta at epsilon zero
    contradicts the curve. The test is sharp, because half of all runs inform each error rate.

    :param error: probability that the limit is too high, at most.
    """
    return 2.0 * float(rate_interval(correct, trials, error)[0]) - 1.0


def odds_limit(
    trials: Counts, guesses: Counts, correct: Counts, delta: float, confidence: float
) -> np.ndarray:
    """The exponential of :func:`runs_bound`, without its floor: it may be below 1, or negative."""
    trials, guesses, correct = np.broadcast_arrays(trials, guesses, correct)
    error = 1.0 - confidence
    rate = rate_interval(guesses, trials, _RATE_SHARE * error)[0]
    accuracy = rate_interval(correct, np.maximum(guesses, 1), (1.0 - _RATE_SHARE) * error)[0]
    return (accuracy - delta / np.maximum(rate, 1e-100)) / (1.0 - accuracy)


def canaries_error(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """The largest probability of so many correct guesses in one run with many canaries.

    Let the coins S of m canaries be fair and independent. Let the run be (epsilon, delta)-private
    with respect to each. Let T be a function of its releases that guesses r of them, r fixed. Then
    the number W of correct guesses has ::

        P(W >= v) <= P(Bin(r, q) >= v) + m delta / (1 + e^epsilon) * mean over j < r of top_j

    Here top_j is the largest probability of Bin(j, q). Without delta this is Theorem 5.2 of
    Steinke, Nasr & Jagielski 2023 ("Privacy auditing with one (1) training run", arXiv 2305.08846).

    :param canaries: m. ``guesses`` is r, and ``correct`` is v.
    :returns: the right-hand side, which may exceed 1.
    """
    q = scipy.special.expit(epsilon)
    left = np.arange(guesses)
    top = scipy.stats.binom.pmf(np.minimum(np.floor((left + 1) * q), left), left, q)
    excess = canaries * delta * (1.0 - q) * float(top.mean())
    return float(scipy.stats.binom.sf(correct - 1, guesses, q)) + excess


def canaries_bound(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float
) -> float:
    """The largest epsilon for which :func:`canaries_error` is at most 1 - confidence; 0 if none is.

    The number of guesses was fixed before the run.
    """
    error = 1.0 - confidence
    accuracy = float(rate_interval(correct, guesses, error)[0])
    if accuracy <= 0.5:
        return 0.0

    def rejected(epsilon: float) -> bool:
        return canaries_error(canaries, guesses, correct, epsilon, delta) <= error

    high = float(scipy.special.logit(accuracy))  # here the binomial term alone is the whole error
    grid = np.linspace(0.0, high, 60)
    low = max((float(epsilon) for epsilon in grid if rejected(epsilon)), default=0.0)
    high = min(high, low + high / 59)
    for _ in range(20):
        middle = (low + high) / 2.0
        low, high = (middle, high) if rejected(middle) else (low, middle)
    return low if rejected(low) else 0.0


def canaries_contradict(
    curve: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    canaries: int,
    guesses: int,
    correct: int,
    error: float,
) -> bool:
    """Whether so many correct guesses in one run refute a trade-off curve.

    This is the inequality of Mahloujifar, Melis & Chaudhuri 2024 ("Auditing f-differential privacy
    in one run", arXiv 2410.22235) for coins. Proof and recursion are our own.

    :param curve: f, convex, falling and its own inverse.
    :param canaries: m. ``guesses`` is r, fixed before the run, and ``correct`` is c.
    """
    tail = total = error
    for v in range(correct, 0, -1):
        power = ((v - 1) * tail + total) / canaries
        if power > 1.0:
            return True
        wrong = canaries * float(curve(np.array(1.0 - power)))
        tail = max(tail, (total + wrong) / (guesses - v + 1))
        if tail > 1.0:
            return True
        total += tail
    return False


_FAR = np.geomspace(0.002, 0.05, 5)
_DRAWN = np.concatenate([_FAR, np.linspace(0.08, 0.92, 15), 1.0 - _FAR])  # ranks that are reported


def chosen_thresholds(
    scores: np.ndarray, included: np.ndarray, delta: float, confidence: float
) -> tuple[float, float]:
    """The thresholds (low, high) that would give the best bound on these scores."""
    tails = np.geomspace(1e-4, 0.5, 100)
    quantiles = np.quantile(scores, np.concatenate([tails, 1.0 - tails]), method="lower")
    tried = np.unique(np.concatenate([[-math.inf, math.inf], quantiles]))
    low, high = (each.ravel() for each in np.meshgrid(tried, tried))
    low, high = low[low <= high], high[low <= high]
    guesses, correct = count_guesses(scores, included, low, high)
    odds = odds_limit(len(scores), guesses, correct, delta, confidence)
    best = int(np.argmax(odds))
    return float(low[best]), float(high[best])


def middle_threshold(scores: np.ndarray, included: np.ndarray) -> float:
    """The threshold at which guesses ("with" above it) are right most often on these scores.

    Many thresholds are equally good up to chance. This is the middle of those within a standard
    deviation of the best.
    """
    with_, without = np.sort(scores[included]), np.sort(scores[~included])
    right = np.searchsorted(without, scores, "right") - np.searchsorted(with_, scores, "right")
    good = scores[right >= right.max() - math.sqrt(len(scores)) / 2.0]
    return float((good.min() + good.max()) / 2.0)


def count_guesses(
    scores: np.ndarray, included: np.ndarray, low: ArrayLike, high: ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
    """The number of guesses (scores at most ``low`` or above ``high``), and of correct ones."""
    with_, without = np.sort(scores[included]), np.sort(scores[~included])

    def up_to(sample: np.ndarray, threshold: ArrayLike) -> np.ndarray:
        return np.searchsorted(sample, threshold, side="right")

    correct = up_to(without, low) + len(with_) - up_to(with_, high)
    wrong = up_to(with_, low) + len(without) - up_to(without, high)
    return correct + wrong, correct


def error_rates(
    chosen_from: np.ndarray, scores: np.ndarray, included: np.ndarray, error: float | None
) -> ErrorRates:
    """Error rates at the quantiles of ``chosen_from``.

    :param error: error probability of all limits together; None to omit the limits.
    """
    thresholds = np.unique(np.quantile(chosen_from, _DRAWN))
    above, below = (
        np.searchsorted(np.sort(sample), thresholds, side="right")
        for sample in (scores[~included], scores[included])
    )
    absent, present = int((~included).sum()), int(included.sum())
    wrong = (absent - above, absent), (below, present)
    limits: list[np.ndarray] = []
    if error is not None:
        each = error / (4 * len(thresholds))
        limits = [rate_interval(count, trials, each) for count, trials in wrong]
    return ErrorRates(thresholds, *(count / max(1, trials) for count, trials in wrong), *limits)
