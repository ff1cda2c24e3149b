"""Dominating pairs of Gaussian sums: privacy losses, their distribution on grids, and moments.

The privacy profile of one release has a closed form. Rényi divergences are autodp's. Probabilities
on a grid come from normal distribution functions. (``dp_accounting`` takes second differences of
delta instead. Each has an error of 1e-16 / grid, which adds up over many fine steps.)
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import scipy

from pyro_dp.accounting.pld import ORDERS, RATES, Distribution, Floats, cumulant, onto_dots
from pyro_dp.utils.errors import PrivacyError
from pyro_dp.utils.validation import LARGEST

LARGEST_SAMPLED = 1e6  # for more noise, the losses of a sampled step are not accurate
_TAIL = math.log(1e-40)  # log probability of outcomes that moments leave out


@dataclass(frozen=True, order=True)
class DominatingPair:
    """A dominating pair (P, Q), in units where the bound of one record's effect is 1.

    It has the same methods as :class:`~pyro_dp.accounting.bounded_pairs.Bounded`.

    ``remove``: P = (1-q) N(0, s^2) + q N(1, s^2), Q = N(0, s^2); ``add`` is (Q, P).

    ``replace``: the same P against (1-q) N(0, s^2) + q N(-1, s^2), for Poisson sampling. It
    dominates any two values a, b of the replaced record in the unit ball. For the proof, let
    alpha >= 1; for alpha < 1, exchange both distributions. Then
    P - alpha Q = q N(a) - (alpha-1)(1-q) N(0) - alpha q N(b). Among the sets with the same N(a), a
    half-space has the smallest N(0) and N(b). Both fall with the distances of 0 and b from a, which
    are largest for a = -b of length 1.

    ``fixed``: ``remove`` for losses > 0, ``add`` for losses < 0, and the remaining probability at
    loss 0. This is the profile of sampling without replacement (Zhu, Dong & Wang 2022, Theorem 11).
    """

    kind: str
    noise: float  # s
    rate: float  # q

    most: ClassVar[float] = math.inf  # the largest loss
    on_grids: ClassVar[bool] = True  # False for a pair that has only moments

    @classmethod
    def together(
        cls, counts: Mapping["DominatingPair", int], neighboring: str
    ) -> list[tuple["DominatingPair", int]]:
        """The pairs to compose instead of these, in a canonical order.

        Full batches merge: n_k Gaussians of noise s_k are one Gaussian with s^-2 = sum n_k s_k^-2
        (Dong, Roth & Su 2022).

        :raises PrivacyError: a full batch has a kind that is not Gaussian.
        """
        merged = sorted((pair, n) for pair, n in counts.items() if pair.rate < 1.0)
        full = sorted((pair.noise, n) for pair, n in counts.items() if pair.rate == 1.0)
        if full:
            kind = "remove" if neighboring == "add_or_remove_one" else "fixed"
            if others := {pair.kind for pair in counts if pair.rate == 1.0} - {kind}:
                raise PrivacyError(f"pairs {sorted(others)} of rate 1 are not Gaussians.")
            noise = 1.0 / math.hypot(*(math.sqrt(n) / s for s, n in full), 1e-300)
            if merged:  # the limit of sampled pairs also applies here
                noise = min(noise, LARGEST_SAMPLED)
            merged.append((cls(kind, noise, 1.0), 1))
        return merged

    def reverse(self) -> "DominatingPair":
        """The pair of the other direction of the relation."""
        return replace(self, kind="add")

    def span(self, tail: float) -> Floats:
        """An interval of losses. On each side of it, P and Q have at most ``exp(tail)``."""
        return self.losses(self.outcomes_within(tail))

    def moments(self) -> tuple[Floats, float]:
        """Upper bounds of log E_P exp(rate * loss) at :data:`RATES`, for finite losses.

        The second result is the probability of infinite losses.
        """
        return _moments(self)

    def on_grid(self, least: float, most: float, gap: float) -> Distribution:
        """A distribution of losses on multiples of ``gap``, whose delta is never too small."""
        first = 0 if self.kind == "fixed" else math.floor(least / gap)
        losses = np.arange(first, math.ceil(most / gap) + 1, dtype=np.float64) * gap
        return connect_dots(self, losses, np.maximum.accumulate(self.outcomes(losses)))

    def losses(self, x: Floats) -> Floats:
        """log(p/q) of the ``remove`` or ``replace`` pair, increasing in the outcome x."""
        q, s2 = self.rate, self.noise**2
        if q == 1.0:
            return (2.0 * x if self.kind == "replace" else x - 0.5) / s2
        up = np.logaddexp(math.log1p(-q), math.log(q) + (x - 0.5) / s2)
        if self.kind == "replace":
            up -= np.logaddexp(math.log1p(-q), math.log(q) - (x + 0.5) / s2)
        return up

    def outcomes(self, losses: Floats) -> Floats:
        """The inverse of :meth:`losses`; -inf below the smallest loss, log(1-q) for ``remove``."""
        q, s2 = self.rate, self.noise**2
        if q == 1.0:
            return s2 * losses / 2.0 if self.kind == "replace" else s2 * losses + 0.5
        with np.errstate(divide="ignore"):  # log 0 at loss 0 and below the smallest loss
            if self.kind == "replace":
                # y = exp(x/s2) solves c y^2 + (1 - e^l) y - c e^l = 0, so
                # log y = l/2 + asinh(sinh(l/2)/c).
                half = np.abs(losses) / 2.0
                log_c = math.log(q) - math.log1p(-q) - 0.5 / s2
                ratio = half + np.log(-np.expm1(-2.0 * half)) - math.log(2.0) - log_c
                asinh = np.logaddexp(0.5 * np.logaddexp(0.0, 2.0 * ratio), ratio)
                return s2 * np.sign(losses) * (half + np.where(half == 0.0, 0.0, asinh))
            low, high = np.minimum(losses, 0.0), np.maximum(losses, 0.0)
            above = high + np.log(q * np.exp(-high) - np.expm1(-high))
            below = np.log(np.maximum(0.0, np.expm1(low) + q))
            return s2 * (np.where(losses > 0.0, above, below) - math.log(q)) + 0.5

    def masses(self, x: Floats) -> tuple[Floats, Floats]:
        """P and Q of (-inf, x_0], (x_0, x_1], ..., (x_n, inf), with small relative errors."""
        edges = np.concatenate(([-np.inf], x, [np.inf]))

        def normal(mean: float) -> Floats:
            z = (edges - mean) / self.noise
            masses: Floats = np.where(
                z[:-1] > 0.0, -np.diff(scipy.special.ndtr(-z)), np.diff(scipy.special.ndtr(z))
            )
            return masses

        centre, q = normal(0.0), self.rate
        p = (1.0 - q) * centre + q * normal(1.0)
        return p, (1.0 - q) * centre + q * normal(-1.0) if self.kind == "replace" else centre

    def outcomes_within(self, tail: float) -> Floats:
        """An interval of outcomes. On each side of it, P and Q have at most ``exp(tail)``."""
        reach = -float(scipy.special.ndtri_exp(tail)) * self.noise
        left = {"fixed": 0.5, "replace": -1.0 - reach}.get(self.kind, -reach)
        return np.array([left, 1.0 + reach])

    def delta(self, eps: float) -> float:
        """The exact privacy profile at eps >= 0, in the worse direction of the relation.

        For eps >= 0, ``remove`` is not below ``add``. Both are max_A w N_0(A) - v N_1(A) with
        v - w = e^eps - 1 >= 0. For ``remove``, w = q. For ``add``, w and v are smaller by
        t = (e^eps - 1)(1 - q). Raising both by t raises the maximum by t (N_0 - N_1)(A) >= 0.
        """
        q = self.rate
        if self.kind != "replace":
            # Two forms of log(1 + (e^eps - 1) / q), against cancellation and overflow.
            if eps < 1.0:
                inner = math.log1p(math.expm1(eps) / q)
            else:
                inner = eps - math.log(q) + math.log1p((q - 1.0) * math.exp(-eps))
            return q * gaussian_delta(1.0 / self.noise, inner)
        ours, theirs = self.masses(self.outcomes(np.array([eps])))
        return max(0.0, float(ours[1] - math.exp(min(eps, 700.0)) * theirs[1]))

    def epsilon(self, delta: float) -> float:
        if self.rate == 1.0:
            return gaussian_epsilon(1.0 / self.noise, delta)
        if self.delta(0.0) <= delta:
            return 0.0
        high = 1.0
        while self.delta(high) > delta:
            high *= 2.0
        root: float = scipy.optimize.brentq(lambda e: self.delta(e) - delta, 0.0, high, rtol=1e-12)
        return root * (1.0 + 1e-9) + 1e-11

    def renyi_moments(self) -> Floats:
        """Log moments at the rates :data:`ORDERS` - 1, by autodp."""
        return step_divergences(self) * (ORDERS - 1.0)


def connect_dots(step: DominatingPair, losses: Floats, x: Floats) -> Distribution:
    """Move the probability between neighbouring losses onto them. P and Q both keep their mass.

    Probability below the first loss is moved up to it, and above the last loss to infinity.

    :param losses: those of the ``remove`` or ``replace`` pair, ascending; from 0 for ``fixed``.
    :param x: the outcomes that have these losses, ascending.
    """
    p, q = step.masses(x)
    below, above = (p[0], q[0]), (p[-1], q[-1])
    p, q = p[1:-1], q[1:-1]
    atom = 0.0
    if step.kind == "add":
        losses, p, q = -losses[::-1], q[::-1], p[::-1]
        below, above = above[::-1], below[::-1]
    elif step.kind == "fixed":
        atom = max(0.0, below[0] - q.sum() - above[1])  # loss 0: 1 - P(loss > 0) - Q(loss > 0)
        losses = np.concatenate((-losses[:0:-1], losses))
        p, q = np.concatenate((q[::-1], p)), np.concatenate((p[::-1], q))
        below = above[::-1]
    probs = onto_dots(losses, p, q)
    probs[0] += below[0]
    probs[len(p) // 2] += atom
    return Distribution(losses, probs, float(above[0]))


@functools.lru_cache(maxsize=4096)
def _moments(step: DominatingPair) -> tuple[Floats, float]:
    """Moments of the distribution on a grid of outcomes s/40 apart, by Connect-the-Dots.

    Any grid gives an upper bound, because exp(rate * loss) is convex in Q's density over P's.
    """
    ends = step.outcomes_within(_TAIL)
    near = np.arange(-13.5, 13.5, 1 / 40) * step.noise
    means = (-1.0, 0.0, 1.0) if step.kind == "replace" else (0.0, 0.5, 1.0)
    x = np.unique(np.concatenate([ends, *(near + mean for mean in means)]))
    x = x[(x >= ends[0]) & (x <= ends[1])]
    losses = np.maximum.accumulate(step.losses(x))
    if step.kind == "fixed":
        losses[0] = 0.0
    keep = np.concatenate(([True], np.diff(losses) > 0.0))
    grid = connect_dots(step, losses[keep], x[keep])
    return cumulant(grid, RATES), grid.infinity


def gaussian_delta(mu: float, eps: float) -> float:
    """Delta of the Gaussian mechanism with ``mu`` = sensitivity / noise.

    It is Balle & Wang 2018, Theorem 8. Here exp(eps) = density(a) / density(b), so it is a
    difference of Mills ratios.
    """
    if mu == 0.0:
        return 0.0
    a, b = eps / mu - mu / 2.0, eps / mu + mu / 2.0
    if a < -5.0:
        return float(scipy.special.ndtr(-a) - math.exp(min(0.0, eps + scipy.special.log_ndtr(-b))))
    mills = scipy.special.erfcx(a / math.sqrt(2.0)) - scipy.special.erfcx(b / math.sqrt(2.0))
    return float(0.5 * math.exp(-0.5 * a * a) * mills)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The inverse of :func:`gaussian_delta` in eps, rounded up."""
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    high = mu * mu / 2.0 + mu * math.sqrt(2.0 * math.log(1.0 / delta))
    if not math.isfinite(high):
        return math.inf
    root: float = scipy.optimize.brentq(
        lambda e: gaussian_delta(mu, e) - delta, 0.0, high, rtol=1e-14
    )
    return min(high, root * (1.0 + 1e-12) + 4e-12)  # brentq may stop below the root


@functools.lru_cache(maxsize=4096)
def step_divergences(step: DominatingPair) -> Floats:
    """Rényi divergences of one step at :data:`ORDERS`."""
    from autodp import mechanism_zoo, transformer_zoo

    noise = min(step.noise, LARGEST)  # its square must be a number
    with np.errstate(all="ignore"):
        if step.kind == "replace":
            return np.array([replacement_divergence(step, order) for order in ORDERS])
        mechanism = mechanism_zoo.GaussianMechanism(noise, approxDP_off=True)
        if step.rate < 1.0:
            poisson = step.kind == "remove"
            mechanism.neighboring = "add_remove" if poisson else "replace_one"
            # A new object for every step, because autodp's cache ignores the mechanism.
            amplify = transformer_zoo.AmplificationBySampling(PoissonSampling=poisson)
            # A Gaussian meets the conditions of both sharper theorems: Zhu & Wang 2019,
            # Theorem 8, and Wang, Balle & Kasiviswanathan 2019, Theorem 27.
            mechanism = amplify(mechanism, step.rate, improved_bound_flag=True)
        found = np.array([float(mechanism.get_RDP(order)) for order in ORDERS])
    # The theorem for subsets is not tight near rate 1. A sample never costs more than all records,
    # because the divergence of mixtures is at most that of the worst component (quasi-convexity).
    bounded: Floats = np.minimum(found, ORDERS / (2.0 * noise**2))
    return bounded


def replacement_divergence(step: DominatingPair, order: float) -> float:
    """Rényi divergence of the Poisson replace-one pair (-C, +C), by the trapezoidal rule.

    The integrand is a bump of width s, between -1 and its peak for q = 1. It is analytic in a strip
    of width pi s^2. So nodes a fraction of s and s^2 apart leave a negligible error.
    """
    s, reach = step.noise, 1.0 + 12.0 * step.noise
    spacing = min(s, s * s) / 16.0
    if (2.0 * reach + 2.0 * order) / spacing > 4e5:
        return 2.0 * order / s**2  # the cost of a full batch, which is an upper bound
    x = np.arange(-reach, reach + 2.0 * order, spacing)
    centre = -0.5 * (x / s) ** 2 - math.log(s * math.sqrt(2.0 * math.pi))
    upper = np.logaddexp(math.log1p(-step.rate), math.log(step.rate) + (x - 0.5) / s**2)
    integrand = centre + upper + (order - 1.0) * step.losses(x)
    return max(0.0, float(scipy.special.logsumexp(integrand) + math.log(spacing))) / (order - 1.0)
