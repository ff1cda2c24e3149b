"""delta(epsilon) of a single step in closed form, and its inverse."""

import functools
import math
from typing import Any

import numpy as np
import scipy

from pyro_dp.accounting.pld import DominatingPair, masses_between, outcomes_at


def gaussian_delta(mu: float, eps: float) -> float:
    """Balle & Wang 2018, Theorem 8, with ``mu`` = sensitivity / noise.

    exp(eps) * ndtr(-b) = density(a) / density(b) * ndtr(-b), so that only Mills ratios differ.
    """
    if mu == 0.0:
        return 0.0
    a, b = eps / mu - mu / 2.0, eps / mu + mu / 2.0
    if a < -5.0:
        return float(scipy.special.ndtr(-a) - math.exp(min(0.0, eps + scipy.special.log_ndtr(-b))))
    mills = scipy.special.erfcx(a / math.sqrt(2.0)) - scipy.special.erfcx(b / math.sqrt(2.0))
    return float(0.5 * math.exp(-0.5 * a * a) * mills)


def gaussian_epsilon(mu: float, delta: float) -> float:
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    high = mu * mu / 2.0 + mu * math.sqrt(2.0 * math.log(1.0 / delta))
    if not math.isfinite(high):
        return math.inf
    root: float = scipy.optimize.brentq(
        lambda e: gaussian_delta(mu, e) - delta, 0.0, high, rtol=1e-14
    )
    return min(high, root * (1.0 + 1e-12) + 4e-12)  # at or above the root, whatever brentq left


def step_delta(step: Any, eps: float) -> float:
    """The exact profile of one step at eps >= 0, where ``remove`` is not below ``add``.

    With v - w = e^eps - 1 >= 0 both are max_A w N_0(A) - v N_1(A): w = q for ``remove``, and less
    by t = (e^eps - 1)(1 - q) for ``add``; raising w and v by t raises it by t (N_0 - N_1)(A) >= 0.
    """
    if not isinstance(step, DominatingPair):
        return float(step.delta(eps))
    q = step.rate
    if step.kind != "replace":
        if eps < 1.0:  # two forms of log(1 + (e^eps - 1) / q), against cancellation and overflow
            inner = math.log1p(math.expm1(eps) / q)
        else:
            inner = eps - math.log(q) + math.log1p((q - 1.0) * math.exp(-eps))
        return q * gaussian_delta(1.0 / step.noise, inner)
    ours, theirs = masses_between(step, outcomes_at(step, np.array([eps])))
    return max(0.0, float(ours[1] - math.exp(min(eps, 700.0)) * theirs[1]))


@functools.lru_cache(maxsize=4096)
def step_epsilon(step: Any, delta: float) -> float:
    if not isinstance(step, DominatingPair):
        return float(step.epsilon(delta))
    if step.rate == 1.0:
        return gaussian_epsilon(1.0 / step.noise, delta)
    if step_delta(step, 0.0) <= delta:
        return 0.0
    high = 1.0
    while step_delta(step, high) > delta:
        high *= 2.0
    root: float = scipy.optimize.brentq(
        lambda e: step_delta(step, e) - delta, 0.0, high, rtol=1e-12
    )
    return root * (1.0 + 1e-9) + 1e-11
