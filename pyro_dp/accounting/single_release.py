"""The cost of a single release: privacy profiles in closed form, Rényi divergences by autodp.

Sums of Rényi divergences become epsilon here, too.
"""

import functools
import math
from typing import Any

import numpy as np
import scipy

from pyro_dp.accounting.pld import (
    DominatingPair,
    Floats,
    Side,
    losses_at,
    masses_between,
    outcomes_at,
)
from pyro_dp.utils.validation import LARGEST


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

    Both are max_A w N_0(A) - v N_1(A) with v - w = e^eps - 1 >= 0. For ``remove``, w = q. For
    ``add``, w and v are less by t = (e^eps - 1)(1 - q). Raising both by t raises the maximum by
    t (N_0 - N_1)(A) >= 0.
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


ORDERS = np.array([*range(2, 65), *(round(64 * 1.15**k) for k in range(1, 25))], float)


def renyi_epsilon(rates: Floats, moments: Floats, delta: float) -> float:
    """Canonne, Kamath & Steinke 2020, Proposition 12, with order = 1 + rate.

    :param rates: (k,), > 0.
    :param moments: (k,) upper bounds of log E exp(rate * loss).
    """
    if delta <= 0.0:
        return math.inf
    order = 1.0 + rates
    bounds = (moments - math.log(delta) - np.log(order)) / rates - np.log1p(1.0 / rates)
    return max(0.0, float(np.min(bounds)))


def renyi_delta(rates: Floats, moments: Floats, eps: float) -> float:
    order = 1.0 + rates
    logs = moments - rates * eps - np.log(order) - rates * np.log1p(1.0 / rates)
    return float(np.exp(min(0.0, np.min(logs))))


@functools.lru_cache(maxsize=4096)
def step_divergences(step: DominatingPair) -> Floats:
    """Rényi divergences of one step at :data:`ORDERS`.

    A fresh transformer for every step: autodp's accountant caches on (function, rate) only.
    """
    from autodp import mechanism_zoo, transformer_zoo
    from autodp.autodp_core import Mechanism

    noise = min(step.noise, LARGEST)  # its square must be a number
    with np.errstate(all="ignore"):
        if step.kind == "replace":
            mechanism = Mechanism()
            mechanism.neighboring = "replace_one"
            mechanism.propagate_updates(functools.partial(replacement_divergence, step), "RDP")
        else:
            mechanism = mechanism_zoo.GaussianMechanism(noise, approxDP_off=True)
            if step.rate < 1.0:
                poisson = step.kind == "remove"
                mechanism.neighboring = "add_remove" if poisson else "replace_one"
                amplify = transformer_zoo.AmplificationBySampling(PoissonSampling=poisson)
                # A Gaussian meets the conditions of both sharper theorems: Zhu & Wang 2019,
                # Theorem 8, and Wang, Balle & Kasiviswanathan 2019, Theorem 27.
                mechanism = amplify(mechanism, step.rate, improved_bound_flag=True)
        found = np.array([float(mechanism.get_RDP(order)) for order in ORDERS])
    if step.kind == "replace":
        return found
    # The theorem for subsets is not tight near rate 1. Sampling never costs more than all records
    # do, as the divergence of mixtures is at most the largest of its parts (quasi-convexity).
    bounded: Floats = np.minimum(found, ORDERS / (2.0 * noise**2))
    return bounded


def replacement_divergence(step: DominatingPair, order: float) -> float:
    """Rényi divergence of the Poisson replace-one pair (-C, +C), by the trapezoidal rule.

    The integrand is a bump of width s between -1 and its peak for q = 1. It is analytic in a strip
    of width pi s^2. So nodes a fraction of s and s^2 apart leave a negligible error.
    """
    s, reach = step.noise, 1.0 + 12.0 * step.noise
    spacing = min(s, s * s) / 16.0
    if (2.0 * reach + 2.0 * order) / spacing > 4e5:
        return 2.0 * order / s**2  # the full batch's cost: sampling never costs more
    x = np.arange(-reach, reach + 2.0 * order, spacing)
    centre = -0.5 * (x / s) ** 2 - math.log(s * math.sqrt(2.0 * math.pi))
    upper = np.logaddexp(math.log1p(-step.rate), math.log(step.rate) + (x - 0.5) / s**2)
    integrand = centre + upper + (order - 1.0) * losses_at(step, x)
    return max(0.0, float(scipy.special.logsumexp(integrand) + math.log(spacing))) / (order - 1.0)


def autodp_moments(steps: Side) -> tuple[Floats, Floats]:
    """Log moments of the steps together at :data:`ORDERS` - 1."""
    return ORDERS - 1.0, sum((n * _moments(step) for step, n in steps), np.zeros_like(ORDERS))


def _moments(step: Any) -> Floats:
    if isinstance(step, DominatingPair):
        return step_divergences(step) * (ORDERS - 1.0)
    moments: Floats = step.log_moments(ORDERS - 1.0)
    return moments
