"""An attacker's guesses from scores: "with" above a threshold, "without" up to another."""

import math

import numpy as np
from numpy.typing import ArrayLike

from pyro_dp.auditing.bounds import odds_limit, rate_interval
from pyro_dp.auditing.result import ErrorRates

_TAILS = np.geomspace(1e-4, 0.5, 100)  # of the scores, where thresholds are tried
_FAR = np.geomspace(0.002, 0.05, 5)
_DRAWN = np.concatenate([_FAR, np.linspace(0.08, 0.92, 15), 1.0 - _FAR])  # to be reported


def chosen_thresholds(
    scores: np.ndarray, included: np.ndarray, delta: float, confidence: float
) -> tuple[float, float]:
    """Those (low, high) that would give the best bound on these scores."""
    levels = np.concatenate([_TAILS, 1.0 - _TAILS])
    quantiles = np.quantile(scores, levels, method="lower")
    tried = np.unique(np.concatenate([[-math.inf, math.inf], quantiles]))
    low, high = (each.ravel() for each in np.meshgrid(tried, tried))
    low, high = low[low <= high], high[low <= high]
    guesses, correct = count_guesses(scores, included, low, high)
    odds = odds_limit(len(scores), guesses, correct, delta, confidence)
    best = int(np.argmax(odds))
    return float(low[best]), float(high[best])


def middle_threshold(scores: np.ndarray, included: np.ndarray) -> float:
    """Guesses "with" above it, and "without" up to it, are right most often on these scores.

    Many thresholds are as good up to chance. This is the middle of those within a standard
    deviation of the best.
    """
    with_, without = np.sort(scores[included]), np.sort(scores[~included])
    right = np.searchsorted(without, scores, "right") - np.searchsorted(with_, scores, "right")
    good = scores[right >= right.max() - math.sqrt(len(scores)) / 2.0]
    return float((good.min() + good.max()) / 2.0)


def count_guesses(
    scores: np.ndarray, included: np.ndarray, low: ArrayLike, high: ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
    """How many scores are at most ``low`` or above ``high``, and how many of them rightly so."""
    with_, without = np.sort(scores[included]), np.sort(scores[~included])

    def up_to(sample: np.ndarray, threshold: ArrayLike) -> np.ndarray:
        return np.searchsorted(sample, threshold, side="right")

    correct = up_to(without, low) + len(with_) - up_to(with_, high)
    wrong = up_to(with_, low) + len(without) - up_to(without, high)
    return correct + wrong, correct


def error_rates(
    chosen_from: np.ndarray, scores: np.ndarray, included: np.ndarray, error: float | None
) -> ErrorRates:
    """
    :param chosen_from: scores whose quantiles are the thresholds.
    :param error: of all limits together; None for no limits.
    """
    thresholds = np.unique(np.quantile(chosen_from, _DRAWN))
    above, below = (
        np.searchsorted(np.sort(sample), thresholds, side="right")
        for sample in (scores[~included], scores[included])
    )
    absent, present = int((~included).sum()), int(included.sum())
    false_positives, false_negatives = absent - above, below
    limits: tuple[np.ndarray, ...] = ()
    if error is not None:
        each = error / (4 * len(thresholds))
        limits = (
            rate_interval(false_positives, absent, each),
            rate_interval(false_negatives, present, each),
        )
    return ErrorRates(
        thresholds, false_positives / max(1, absent), false_negatives / max(1, present), *limits
    )
