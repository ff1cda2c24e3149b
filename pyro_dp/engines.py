"""What the events of a ledger cost: epsilon(delta) and delta(epsilon) under a relation.

Four engines, each a valid upper bound on the cost of ``{event: count}``:

* ``pld``, privacy loss distributions: tight, see :mod:`pyro_dp.privacy_loss`. Full batches merge
  into one Gaussian, whose closed form is Balle & Wang 2018, Theorem 8. The answer never exceeds
  the Rényi bound of the same distributions.
* ``rdp``: Rényi divergences from ``autodp``, converted as in Canonne, Kamath & Steinke 2020.
* ``advanced``, ``basic``: composition theorems (Kairouz, Oh & Viswanath 2015, Theorem 3.5; Dwork
  et al. 2006) applied to the exact (epsilon, delta) of single steps. For teaching.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scipy import optimize
from scipy.special import erfcx, log_ndtr, logsumexp, ndtr

from pyro_dp.errors import ConfigurationError
from pyro_dp.events import SubsampledGaussian
from pyro_dp.privacy_loss import (
    RATES,
    Curve,
    Side,
    Step,
    compose,
    log_moments,
    losses_at,
    masses_between,
    outcomes_at,
)

ENGINES = ("pld", "rdp", "advanced", "basic")
NEIGHBORING = ("add_or_remove_one", "replace_one")

_TOLERANCE = 1e-3  # relative move of the answer that ends the refinement of grids
_LEAST = 1e-30  # delta below which only Rényi bounds are used: masses come close to underflow


def interpret(event: Any, neighboring: str) -> Step:
    """
    :param event: a :class:`SubsampledGaussian`.
    :param neighboring: the relation, see :data:`NEIGHBORING`.
    :returns: the dominating pair of one release. Under ``add_or_remove_one`` that of a removal; its
        reverse is the one of an addition.
    :raises ConfigurationError: if the event is unknown or does not fit the relation.
    """
    if type(event) is not SubsampledGaussian:
        raise ConfigurationError(
            f"an event of type {type(event).__name__} is unknown: record a SubsampledGaussian."
        )
    sigma, rate = event.noise_multiplier, event.sample_rate
    # Rates this close to 1 are rounded up and noise beyond a million is rounded down, which costs
    # more privacy, to keep log(1 - q) and the losses of a step accurate.
    rate = 1.0 if rate > 1.0 - 1e-9 else rate
    sigma = sigma if rate == 1.0 else min(sigma, 1e6)
    if neighboring == "add_or_remove_one":
        if event.sampling == "fixed":
            raise ConfigurationError(
                "sampling='fixed' has a fixed batch size, which add_or_remove_one cannot have: "
                "use neighboring='replace_one', or sampling='poisson'."
            )
        return Step("remove", sigma, rate)
    if event.sampling == "fixed" or rate == 1.0:
        return Step("fixed", sigma / 2.0, rate)  # the bound of one record's effect is 2C
    return Step("replace", sigma, rate)


def epsilon(ledger: Mapping[Any, int], delta: float, neighboring: str, engine: str) -> float:
    """
    :param ledger: count of each event.
    :param delta: in (0, 1).
    :param neighboring: the relation, see :data:`NEIGHBORING`.
    :param engine: see :data:`ENGINES`.
    :returns: an epsilon (nats) such that the ledger is (epsilon, delta)-DP; inf without noise.
    :raises ConfigurationError: if an event is unknown or does not fit the relation.
    """
    steps = _steps(ledger, neighboring)
    if steps is None or not steps:
        return 0.0 if steps == () else math.inf
    return _EPSILON[engine](steps, delta)


def delta(ledger: Mapping[Any, int], epsilon: float, neighboring: str, engine: str) -> float:
    """
    :param ledger: count of each event.
    :param epsilon: in nats, >= 0.
    :param neighboring: the relation, see :data:`NEIGHBORING`.
    :param engine: see :data:`ENGINES`.
    :returns: a delta such that the ledger is (epsilon, delta)-DP.
    :raises ConfigurationError: if an event is unknown or does not fit the relation.
    """
    steps = _steps(ledger, neighboring)
    if epsilon == math.inf or steps == ():
        return 0.0
    if steps is None:
        return 1.0
    if engine == "pld":
        return _pld_delta(steps, epsilon)
    if engine == "rdp":
        return _renyi_delta(*_autodp_moments(steps), epsilon)
    return _invert(lambda d: _EPSILON[engine](steps, d), epsilon)


def epsilon_bound(ledger: Mapping[Any, int], delta: float, neighboring: str, engine: str) -> float:
    """A bound that costs microseconds for events seen before; inf where the engine has none.

    Arguments as for :func:`epsilon`, whose result it bounds from above.
    """
    steps = _steps(ledger, neighboring)
    if steps == ():
        return 0.0
    if steps is None or engine != "pld":
        return math.inf
    return max(_moments_epsilon(side, delta) for side in _sides(steps))


def _steps(ledger: Mapping[Any, int], neighboring: str) -> Side | None:
    """Pairs and counts in a canonical order, full batches merged; None if one is noiseless.

    n_k Gaussians of noise s_k are one Gaussian with s^-2 = sum n_k s_k^-2 (Dong, Roth & Su 2022).
    """
    counts: dict[Step, int] = {}
    for event, count in ledger.items():
        step = interpret(event, neighboring)
        if count:
            counts[step] = counts.get(step, 0) + count
    if any(step.noise < 1e-9 for step in counts):  # no privacy to speak of, and no overflow
        return None
    full = sorted((s.noise, n) for s, n in counts.items() if s.rate == 1.0)
    merged = sorted((s, n) for s, n in counts.items() if s.rate < 1.0)
    if full:
        kind = "remove" if neighboring == "add_or_remove_one" else "fixed"
        noise = 1.0 / math.hypot(*(math.sqrt(n) / s for s, n in full), 1e-300)
        if merged:  # rounded down, as in ``interpret``
            noise = min(noise, 1e6)
        merged.append((Step(kind, noise, 1.0), 1))
    return tuple(merged)


def _sides(steps: Side) -> list[Side]:
    """The pairs to be composed, one list per direction of the relation."""
    if any(step.kind == "remove" and step.rate < 1.0 for step, _ in steps):
        add = tuple((s._replace(kind="add"), n) for s, n in steps)
        return [steps, add]
    return [steps]  # symmetric


@functools.lru_cache(maxsize=256)
def _pld_epsilon(steps: Side, delta: float) -> float:
    if len(steps) == 1 and steps[0][1] == 1:
        return _single_epsilon(steps[0][0], delta)
    if delta < _LEAST:
        return _rdp_epsilon(steps, delta)
    worst = 0.0
    for side in _sides(steps):
        bound = _moments_epsilon(side, delta)
        if bound > worst:
            moments, log_delta = log_moments(side)[0], math.log(delta)
            rate = float(RATES[np.argmin((moments - log_delta) / RATES)])
            tight = _refine(side, rate, log_delta, lambda curve: curve.epsilon(delta))
            worst = max(worst, min(bound, tight))
    return worst


@functools.lru_cache(maxsize=256)
def _pld_delta(steps: Side, eps: float) -> float:
    if len(steps) == 1 and steps[0][1] == 1:
        return _single_delta(steps[0][0], eps)
    worst = 0.0
    for side in _sides(steps):
        moments, lost = log_moments(side)
        bound = min(1.0, _renyi_delta(RATES, moments, eps) + lost)
        rate = float(RATES[np.argmin(moments - RATES * eps)])
        target = math.inf
        while bound < 1e-3 * target and bound > max(worst, _LEAST):
            target = bound  # up to 1e-7 of it is cut off: the answer must not be much smaller
            tight = _refine(side, rate, math.log(target), lambda curve: curve.delta(eps))
            bound = min(bound, tight)
        worst = max(worst, bound)
    return worst


def _refine(
    side: Side, rate: float, log_delta: float, read: Callable[[Curve], float | None]
) -> float:
    """What ``read`` finds, on ever finer grids, until it moves by less than the tolerance.

    Every grid gives an upper bound, and the least is returned. The error falls at least in
    proportion to the grid (with its square, unless losses bunch up between two points), so that
    what is left is about a third of the last move, and mostly a fifteenth.
    """
    best, refined = math.inf, 1.0
    while True:
        curve = compose(side, rate, log_delta, 0.75 * _TOLERANCE / refined)
        value = read(curve)
        if value is None:  # below the window: tilt less
            rate /= 4.0
            if rate < 1e-4:
                return best
            continue
        done = curve.finest or best <= value * (1.0 + _TOLERANCE)
        best, refined = min(best, value), 16.0 * refined
        if done:
            return best


def _moments_epsilon(side: Side, delta: float) -> float:
    moments, lost = log_moments(side)
    return _renyi_epsilon(RATES, moments, delta - lost)


def _renyi_epsilon(rates: np.ndarray, moments: np.ndarray, delta: float) -> float:
    """Canonne, Kamath & Steinke 2020, Proposition 12, with order = 1 + rate.

    :param rates: (k,), > 0.
    :param moments: (k,) upper bounds of log E exp(rate * loss).
    """
    if delta <= 0.0:
        return math.inf
    order = 1.0 + rates
    bounds = (moments - math.log(delta) - np.log(order)) / rates - np.log1p(1.0 / rates)
    return max(0.0, float(np.min(bounds)))


def _renyi_delta(rates: np.ndarray, moments: np.ndarray, eps: float) -> float:
    order = 1.0 + rates
    logs = moments - rates * eps - np.log(order) - rates * np.log1p(1.0 / rates)
    return float(np.exp(min(0.0, np.min(logs))))


def _gaussian_delta(mu: float, eps: float) -> float:
    """Balle & Wang 2018, Theorem 8, with ``mu`` = sensitivity / noise.

    exp(eps) * ndtr(-b) = density(a) / density(b) * ndtr(-b), so that only Mills ratios differ.
    """
    if mu == 0.0:
        return 0.0
    a, b = eps / mu - mu / 2.0, eps / mu + mu / 2.0
    if a < -5.0:
        return float(ndtr(-a) - math.exp(min(0.0, eps + log_ndtr(-b))))
    mills = erfcx(a / math.sqrt(2.0)) - erfcx(b / math.sqrt(2.0))
    return float(0.5 * math.exp(-0.5 * a * a) * mills)


def _gaussian_epsilon(mu: float, delta: float) -> float:
    if _gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    high = mu * mu / 2.0 + mu * math.sqrt(2.0 * math.log(1.0 / delta))
    if not math.isfinite(high):
        return math.inf
    root = optimize.brentq(lambda e: _gaussian_delta(mu, e) - delta, 0.0, high, rtol=1e-14)
    return min(high, root * (1.0 + 1e-12) + 4e-12)  # at or above the root, whatever brentq left


def _single_delta(step: Step, eps: float) -> float:
    """The exact profile of one step at eps >= 0, where ``remove`` is not below ``add``.

    With v - w = e^eps - 1 >= 0 both are max_A w N_0(A) - v N_1(A): w = q for ``remove``, and less
    by t = (e^eps - 1)(1 - q) for ``add``; raising w and v by t raises it by t (N_0 - N_1)(A) >= 0.
    """
    q = step.rate
    if step.kind != "replace":
        if eps < 1.0:  # two forms of log(1 + (e^eps - 1) / q), against cancellation and overflow
            inner = math.log1p(math.expm1(eps) / q)
        else:
            inner = eps - math.log(q) + math.log1p((q - 1.0) * math.exp(-eps))
        return q * _gaussian_delta(1.0 / step.noise, inner)
    p, q = masses_between(step, outcomes_at(step, np.array([eps])))
    return max(0.0, float(p[1] - math.exp(min(eps, 700.0)) * q[1]))


@functools.lru_cache(maxsize=4096)
def _single_epsilon(step: Step, delta: float) -> float:
    if step.rate == 1.0:
        return _gaussian_epsilon(1.0 / step.noise, delta)
    if _single_delta(step, 0.0) <= delta:
        return 0.0
    high = 1.0
    while _single_delta(step, high) > delta:
        high *= 2.0
    root = optimize.brentq(lambda e: _single_delta(step, e) - delta, 0.0, high, rtol=1e-12)
    return root * (1.0 + 1e-9) + 1e-11


_ORDERS = np.array([*range(2, 65), *(round(64 * 1.15**k) for k in range(1, 25))], float)


@functools.lru_cache(maxsize=512)
def _autodp_step(step: Step) -> np.ndarray:
    """Rényi divergences of one step at :data:`_ORDERS`.

    A fresh transformer for every step: autodp's accountant caches on (function, rate) only.
    """
    from autodp import mechanism_zoo, transformer_zoo
    from autodp.autodp_core import Mechanism

    with np.errstate(all="ignore"):
        if step.kind == "replace":
            mechanism = Mechanism()
            mechanism.neighboring = "replace_one"
            mechanism.propagate_updates(functools.partial(_replace_renyi, step), "RDP")
        else:
            mechanism = mechanism_zoo.GaussianMechanism(step.noise, approxDP_off=True)
            if step.rate < 1.0:
                poisson = step.kind == "remove"
                mechanism.neighboring = "add_remove" if poisson else "replace_one"
                amplify = transformer_zoo.AmplificationBySampling(PoissonSampling=poisson)
                # A Gaussian meets the conditions of both sharper theorems: Zhu & Wang 2019,
                # Theorem 8, and Wang, Balle & Kasiviswanathan 2019, Theorem 27.
                mechanism = amplify(mechanism, step.rate, improved_bound_flag=True)
        return np.array([float(mechanism.get_RDP(order)) for order in _ORDERS])


def _replace_renyi(step: Step, order: float) -> float:
    """Rényi divergence of the Poisson replace-one pair (-C, +C), by the trapezoidal rule.

    The integrand is a bump of width s between -1 and its peak for q = 1, and analytic in a strip of
    width pi s^2, so nodes a fraction of s and s^2 apart leave no error to speak of.
    """
    s, reach = step.noise, 1.0 + 12.0 * step.noise
    spacing = min(s, s * s) / 16.0
    if (2.0 * reach + 2.0 * order) / spacing > 4e5:
        return 2.0 * order / s**2  # of the full batch: sampling never costs more
    x = np.arange(-reach, reach + 2.0 * order, spacing)
    centre = -0.5 * (x / s) ** 2 - math.log(s * math.sqrt(2.0 * math.pi))
    upper = np.logaddexp(math.log1p(-step.rate), math.log(step.rate) + (x - 0.5) / s**2)
    integrand = centre + upper + (order - 1.0) * losses_at(step, x)
    return max(0.0, float(logsumexp(integrand) + math.log(spacing))) / (order - 1.0)


def _autodp_moments(steps: Side) -> tuple[np.ndarray, np.ndarray]:
    renyi = sum(count * _autodp_step(step) for step, count in steps)
    return _ORDERS - 1.0, renyi * (_ORDERS - 1.0)


def _rdp_epsilon(steps: Side, delta: float) -> float:
    return _renyi_epsilon(*_autodp_moments(steps), delta)


def _invert(function: Callable[[float], float], value: float) -> float:
    """The smallest delta, to 1e-6 relative, with function(delta) <= value; 1.0 if there is none."""
    low, high = math.log(1e-300), 0.0
    if function(1e-300) <= value:
        return 1e-300
    while high - low > 1e-6:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if function(math.exp(middle)) <= value else (middle, high)
    return math.exp(high)


def _basic_epsilon(steps: Side, delta: float) -> float:
    share = delta / sum(count for _, count in steps)
    return sum(count * _single_epsilon(step, share) for step, count in steps)


def _advanced_epsilon(steps: Side, delta: float) -> float:
    """Half of delta is the theorem's slack, half is shared out among the steps."""
    share, slack = delta / 2.0 / sum(count for _, count in steps), delta / 2.0
    eps = np.array([_single_epsilon(step, share) for step, _ in steps])
    counts = np.array([float(count) for _, count in steps])
    square = counts @ eps**2
    drift = counts @ (eps * np.tanh(eps / 2.0))
    log = min(math.log(1.0 / slack), math.log(math.e + math.sqrt(square) / slack))
    return float(min(counts @ eps, drift + math.sqrt(2.0 * square * log)))


_EPSILON: dict[str, Callable[[Side, float], float]] = {
    "pld": _pld_epsilon,
    "rdp": _rdp_epsilon,
    "advanced": _advanced_epsilon,
    "basic": _basic_epsilon,
}
