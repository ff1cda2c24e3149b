r"""What the events of a ledger cost: epsilon(delta) and delta(epsilon) under a relation.

Four engines, each a valid upper bound on the cost of ``{event: count}``:

* ``pld``, privacy loss distributions: tight. Full batches merge into one Gaussian, whose closed
  form is Balle & Wang 2018, Theorem 8. A subsampled step is put on a grid of losses by
  Connect-the-Dots (Doroshenko et al. 2022, Algorithm 1: every rounding is upwards), the steps are
  convolved by FFT. The answer never exceeds the Rényi bound of the same distributions.
* ``rdp``: Rényi divergences from ``autodp``, converted as in Canonne, Kamath & Steinke 2020.
* ``advanced``, ``basic``: composition theorems (Kairouz, Oh & Viswanath 2015, Theorem 3.5; Dwork
  et al. 2006) applied to the exact (epsilon, delta) of single steps. For teaching.

``dp_accounting`` computes the same distributions and is what the tests compare with. Two things
differ here. Interval masses come from normal distribution functions, not from second differences
of delta, whose rounding error (1e-16 / grid each) adds up to a false mass over many fine steps.
And the distribution is tilted before the FFT (by exp(rate * loss), at the optimal Rényi order), so
that the region that decides epsilon holds the bulk: the window is a few standard deviations wide,
rounding is relative to delta, and the grid can be chosen from the error it will cause, once.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from scipy import fft, optimize, signal
from scipy.special import erfcx, log_ndtr, logsumexp, ndtr, ndtri_exp

from pyro_dp.errors import ConfigurationError

ENGINES = ("pld", "rdp", "advanced", "basic")
NEIGHBORING = ("add_or_remove_one", "replace_one")
SAMPLING = ("poisson", "fixed", "full")


def real(name: str, value: Any, advice: str) -> float:
    """
    :param name: the argument's name, for the error.
    :param value: what was passed; bools, strings, tensors and NaN are refused.
    :param advice: what to pass instead, for the error.
    :returns: the value as a Python float.
    :raises ConfigurationError: if it is not a real number.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise ConfigurationError(f"{name}={value!r} is not a number: {advice}.")
    return float(value)


@dataclass(frozen=True)
class SubsampledGaussian:
    """One noisy sum of clipped per-record quantities. Inert: the engines say what it costs.

    :param noise_multiplier: noise standard deviation in units of the per-record bound C. Under
        ``add_or_remove_one`` (zero-out) the sum's sensitivity is C, under ``replace_one`` 2C. Zero
        is a non-private reference.
    :param sample_rate: the public probability, in (0, 1], that a record takes part.
    :param sampling: ``"poisson"`` (each record on its own), ``"fixed"`` (a fresh uniform subset
        without replacement, for ``replace_one``) or ``"full"`` (every record, rate 1).
    :raises ConfigurationError: if a setting is out of range.
    """

    noise_multiplier: float
    sample_rate: float = 1.0
    sampling: str = "poisson"

    def __post_init__(self) -> None:
        advice = "pass a finite number >= 0 (noise std / per-record bound)"
        sigma = real("noise_multiplier", self.noise_multiplier, advice)
        if not 0.0 <= sigma < math.inf:
            raise ConfigurationError(f"noise_multiplier={sigma!r} is out of range: {advice}.")
        advice = "pass a probability in (0, 1]"
        rate = real("sample_rate", self.sample_rate, advice)
        if not 0.0 < rate <= 1.0:
            raise ConfigurationError(f"sample_rate={rate!r} is out of range: {advice}.")
        if self.sampling not in SAMPLING:
            raise ConfigurationError(
                f"sampling={self.sampling!r} is unknown: use one of {SAMPLING}."
            )
        if self.sampling == "full" and rate != 1.0:
            raise ConfigurationError(
                f"sample_rate={rate!r} contradicts sampling='full': use 1.0, or sampling='poisson'."
            )
        object.__setattr__(self, "noise_multiplier", sigma)
        object.__setattr__(self, "sample_rate", rate)


class Step(NamedTuple):
    """A dominating pair (P, Q), in units where the bound of one record's effect is 1.

    ``remove``: P = (1-q) N(0, s^2) + q N(1, s^2), Q = N(0, s^2); ``add`` is (Q, P); ``replace``:
    the same P against (1-q) N(0, s^2) + q N(-1, s^2); ``fixed``: ``remove`` for losses > 0 and
    ``add`` for losses < 0 (Zhu, Dong & Wang 2022: the profile for sampling without replacement).
    """

    kind: str
    noise: float  # s
    rate: float  # q


def interpret(event: Any, neighboring: str) -> Step:
    """
    :param event: a :class:`SubsampledGaussian`.
    :param neighboring: the relation.
    :returns: the dominating pair of one release. Under ``add_or_remove_one`` that of a removal; its
        reverse is the one of an addition.
    :raises ConfigurationError: if the event is unknown or does not fit the relation.
    """
    if type(event) is not SubsampledGaussian:
        raise ConfigurationError(
            f"an event of type {type(event).__name__} is unknown: record a SubsampledGaussian."
        )
    sigma, rate = event.noise_multiplier, event.sample_rate
    # Rates this close to 1 are rounded up, which costs more privacy, to keep log(1 - q) accurate.
    rate = 1.0 if rate > 1.0 - 1e-9 else rate
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
    if not steps or steps[0] is None:
        return math.inf if steps else 0.0
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
    if not steps or steps[0] is None:
        return 1.0 if steps and epsilon < math.inf else 0.0
    if epsilon == math.inf:
        return 0.0
    if engine == "pld":
        return _pld_delta(steps, epsilon)
    if engine == "rdp":
        return _renyi_delta(*_autodp_moments(steps), epsilon)
    return _invert(lambda d: _EPSILON[engine](steps, d), epsilon)


def epsilon_bound(ledger: Mapping[Any, int], delta: float, neighboring: str, engine: str) -> float:
    """A bound that costs microseconds for events seen before; inf where the engine has none.

    Arguments as for :func:`epsilon`, whose result it bounds from above.
    """
    if engine != "pld":
        return math.inf
    steps = _steps(ledger, neighboring)
    if not steps or steps[0] is None:
        return math.inf if steps else 0.0
    return max(_quick_bound(side, delta) for side in _sides(steps))


Steps = tuple[tuple[Step, int], ...]


def _steps(ledger: Mapping[Any, int], neighboring: str) -> tuple:
    """Pairs and counts in a canonical order, full batches merged; ``(None,)`` if one is noiseless.

    n_k Gaussians of noise s_k are one Gaussian with s^-2 = sum n_k s_k^-2 (Dong, Roth & Su 2022).
    """
    counts: dict[Step, int] = {}
    for event, count in ledger.items():
        step = interpret(event, neighboring)
        if count:
            counts[step] = counts.get(step, 0) + count
    if any(step.noise < 1e-9 for step in counts):  # no privacy to speak of, and no overflow
        return (None,)
    full = sorted((s.noise, n) for s, n in counts.items() if s.rate == 1.0)
    merged = sorted((s, n) for s, n in counts.items() if s.rate < 1.0)
    if full:
        kind = "remove" if neighboring == "add_or_remove_one" else "fixed"
        root = math.hypot(*(math.sqrt(n) / s for s, n in full))
        merged.append((Step(kind, 1.0 / root if root else math.inf, 1.0), 1))
    return tuple(merged)


def _sides(steps: Steps) -> list[Steps]:
    """The pairs to be composed, one list per direction of the relation."""
    if any(step.kind == "remove" and step.rate < 1.0 for step, _ in steps):
        add = tuple((s._replace(kind="add"), n) for s, n in steps)
        return [steps, add]
    return [steps]  # symmetric


# ---------------------------------------------------------------- one Gaussian, in closed form


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


# ------------------------------------------------------ the privacy loss distribution of one step


def _losses(step: Step, x: np.ndarray) -> np.ndarray:
    """log(p/q) of the ``remove`` or ``replace`` pair, increasing in the outcome x."""
    q, s2 = step.rate, step.noise**2
    if q == 1.0:
        return (x - 0.5) / s2
    up = np.logaddexp(math.log1p(-q), math.log(q) + (x - 0.5) / s2)
    if step.kind == "replace":
        up -= np.logaddexp(math.log1p(-q), math.log(q) - (x + 0.5) / s2)
    return up


def _outcomes(step: Step, losses: np.ndarray) -> np.ndarray:
    """The inverse of :func:`_losses`; -inf below the smallest loss, log(1-q) for ``remove``."""
    q, s2 = step.rate, step.noise**2
    if q == 1.0:
        return s2 * losses + 0.5
    if step.kind == "replace":
        # y = exp(x/s2) solves c y^2 + (1 - e^l) y - c e^l = 0: log y = l/2 + asinh(sinh(l/2)/c).
        half = np.abs(losses) / 2.0
        log_c = math.log(q) - math.log1p(-q) - 0.5 / s2
        with np.errstate(divide="ignore"):  # loss 0
            ratio = half + np.log(-np.expm1(-2.0 * half)) - math.log(2.0) - log_c
        asinh = np.logaddexp(0.5 * np.logaddexp(0.0, 2.0 * ratio), ratio)
        return s2 * np.sign(losses) * (half + np.where(half == 0.0, 0.0, asinh))
    low = np.minimum(losses, 0.0)
    above = (
        losses - low + np.log(np.maximum(0.0, q * np.exp(low - losses) - np.expm1(low - losses)))
    )
    below = np.log(np.maximum(0.0, np.expm1(low) + q))
    return s2 * (np.where(losses > 0.0, above, below) - math.log(q)) + 0.5


def _masses(step: Step, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """P and Q of the intervals (-inf, x_0], (x_0, x_1], ..., (x_n, inf), to relative accuracy."""
    edges = np.concatenate(([-np.inf], x, [np.inf]))

    def normal(mean: float) -> np.ndarray:
        z = (edges - mean) / step.noise
        return np.where(z[:-1] > 0.0, -np.diff(ndtr(-z)), np.diff(ndtr(z)))

    centre, q = normal(0.0), step.rate
    p = (1.0 - q) * centre + q * normal(1.0)
    return p, (1.0 - q) * centre + q * normal(-1.0) if step.kind == "replace" else centre


class Distribution(NamedTuple):
    """Losses (ascending), their probabilities under P, and P's mass at infinity."""

    losses: np.ndarray
    probs: np.ndarray
    infinity: float


def _connect_dots(step: Step, losses: np.ndarray, x: np.ndarray) -> Distribution:
    """Move the mass between neighbouring losses onto them so that P and Q both keep theirs.

    :param losses: of the ``remove`` or ``replace`` pair, ascending; from 0 for ``fixed``.
    :param x: the outcomes that have these losses.
    """
    p, q = _masses(step, x)
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
    gap = np.diff(losses)
    with np.errstate(all="ignore"):
        lower = (q * np.exp(losses[:-1]) - p * np.exp(-gap)) / -np.expm1(-gap)
    # Where exp overflows, rounding all of the mass up is the safe side.
    lower = np.clip(np.nan_to_num(lower, nan=0.0, posinf=0.0, neginf=0.0), 0.0, p)
    probs = np.zeros_like(losses)
    probs[:-1] += lower
    probs[1:] += p - lower
    probs[0] += below[0]
    probs[len(p) // 2] += atom
    return Distribution(losses, probs, float(above[0]))


def _range(step: Step, tail: float) -> tuple[float, float]:
    """Outcomes between which all but ``exp(tail)`` of P and Q lies, on either side."""
    reach = -float(ndtri_exp(tail)) * step.noise
    left = {"fixed": 0.5, "replace": -1.0 - reach}.get(step.kind, -reach)
    return left, 1.0 + reach


_TAIL = math.log(1e-40)
_RATES = np.geomspace(1e-2, 1e5, 72)  # Rényi order - 1


@functools.lru_cache(maxsize=512)
def _moments(step: Step) -> tuple[np.ndarray, float]:
    """Upper bounds on log E_P exp(rate * loss) at :data:`_RATES`, and the mass left out.

    Connect-the-Dots on outcomes s/40 apart: any grid gives an upper bound, as exp(rate * loss) is
    convex in Q's density over P's.
    """
    left, right = _range(step, _TAIL)
    near = np.arange(-13.5, 13.5, 1 / 40) * step.noise
    means = (-1.0, 0.0, 1.0) if step.kind == "replace" else (0.0, 0.5, 1.0)
    x = np.unique(np.concatenate([near + mean for mean in means] + [[left, right]]))
    x = x[(x >= left) & (x <= right)]
    losses = _losses(step, x)
    if step.kind == "fixed":
        losses[0] = 0.0
    keep = np.concatenate(([True], np.diff(losses) > 0.0))
    grid = _connect_dots(step, losses[keep], x[keep])
    return _cumulant(grid, _RATES), grid.infinity


def _cumulant(grid: Distribution, rates: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        logs = np.log(grid.probs)
    some = np.isfinite(logs)
    return logsumexp(np.multiply.outer(rates, grid.losses[some]) + logs[some], axis=-1)


def _total_moments(side: Steps) -> tuple[np.ndarray, float]:
    parts = [(_moments(step), count) for step, count in side]
    return sum(n * k for (k, _), n in parts), sum(n * lost for (_, lost), n in parts)


def _renyi_epsilon(rates: np.ndarray, moments: np.ndarray, delta: float) -> float:
    """Canonne, Kamath & Steinke 2020, Proposition 12, with order = 1 + rate."""
    if delta <= 0.0:
        return math.inf
    order = 1.0 + rates
    bounds = (moments - math.log(delta) - np.log(order)) / rates + np.log(rates / order)
    return max(0.0, float(np.min(bounds)))


def _renyi_delta(rates: np.ndarray, moments: np.ndarray, eps: float) -> float:
    order = 1.0 + rates
    logs = moments - rates * eps - np.log(order) + rates * np.log(rates / order)
    return float(np.exp(min(0.0, np.min(logs))))


def _quick_bound(side: Steps, delta: float) -> float:
    moments, lost = _total_moments(side)
    return _renyi_epsilon(_RATES, moments, delta - lost)


# -------------------------------------------------- composition: tilt, wrap, FFT, read off epsilon

_LARGEST = 1 << 22  # grid points: about 0.2 GiB at the peak
_SLACK = 0.016  # relative error of delta that the first grid may cause
_NEGLIGIBLE = 1e-7  # of delta, for what is cut off and put at infinity


class _Composition:
    """The composed loss distribution around the losses that decide epsilon at some delta.

    :param side: pairs and counts of one direction.
    :param rate: of the tilt, Rényi order - 1.
    :param target: the delta, to order of magnitude: what may be cut off is relative to it.
    :param shrink: factor by which the grid is finer than the first guess.
    """

    def __init__(self, side: Steps, rate: float, target: float, shrink: float) -> None:
        total = sum(count for _, count in side)
        tail = math.log(target * _NEGLIGIBLE / total)
        spans = [np.ptp(_losses(step, np.array(_range(step, tail)))) for step, _ in side]
        # Connect-the-Dots spreads a loss over a grid cell, a variance of gap^2/6 on average; that
        # raises the log moment, hence log(delta), by rate (rate + 1) / 2 times as much per step.
        gap = min(1.0, math.sqrt(12.0 * _SLACK / (total * rate * (rate + 1.0)))) / shrink
        self.finest = gap <= 2.0 * max(spans) / _LARGEST
        gap = max(gap, 2.0 * max(spans) / _LARGEST)
        while True:
            grids = [self._grid(step, gap, tail) for step, _ in side]
            low, high, cut = self._window(grids, [n for _, n in side], rate, target)
            if high - low < gap * _LARGEST:
                break
            gap, self.finest = 1.01 * (high - low) / _LARGEST, True
        self.gap, self.low = gap, math.floor(low / gap)
        size = fft.next_fast_len(math.ceil(high / gap) - self.low + 1, real=True)
        spectrum, offset, log_scale, log_finite = 1.0, 0, 0.0, 0.0
        for (first, grid), (_, count) in zip(grids, side, strict=True):
            scale = float(_cumulant(grid, np.array(rate)))
            tilted = grid.probs * np.exp(rate * grid.losses - scale)
            wrapped = np.bincount(np.arange(len(tilted)) % size, tilted, minlength=size)
            spectrum = spectrum * fft.rfft(wrapped) ** count
            offset += first * count
            log_scale += scale * count
            log_finite += count * math.log1p(-grid.infinity)
        # The FFT is circular. What lay below the window appears above, which is pessimistic; what
        # lay above is counted at infinity.
        probs = np.roll(fft.irfft(spectrum, size), offset - self.low)
        self.probs = np.maximum(probs, 0.0) * np.exp(-rate * gap * np.arange(size))
        self.log_scale = log_scale - rate * gap * self.low  # of probs
        self.infinity = cut - math.expm1(log_finite)
        decay = math.exp(-gap)
        self.above = np.cumsum(self.probs[::-1])[::-1]
        # sum over j >= i of probs_j exp(loss_i - loss_j)
        self.dual = signal.lfilter([1.0], [1.0, -decay], self.probs[::-1])[::-1]

    @staticmethod
    def _grid(step: Step, gap: float, tail: float) -> tuple[int, Distribution]:
        ends = _losses(step, np.array(_range(step, tail)))
        first, last = math.floor(ends[0] / gap), math.ceil(ends[1] / gap)
        if step.kind == "fixed":
            first = 0
        losses = np.arange(first, last + 1) * gap
        with np.errstate(divide="ignore"):
            grid = _connect_dots(step, losses, _outcomes(step, losses))
        return round(grid.losses[0] / gap), grid

    @staticmethod
    def _window(grids: list, counts: list, rate: float, target: float) -> tuple[float, ...]:
        """Chernoff bounds: losses above ``high`` hold ``cut`` of P, few tilted ones are below."""
        rates = rate * np.array([-1.0, 0.0, 0.5, 0.8, 1.0, 1.25, 1.6, 2.5])
        moments = sum(
            n * _cumulant(grid, rates) for (_, grid), n in zip(grids, counts, strict=True)
        )
        cut = target * _NEGLIGIBLE
        high = np.min((moments[5:] - math.log(cut)) / rates[5:])
        low = np.max((moments[4] - moments[:4] + math.log(_NEGLIGIBLE)) / (rate - rates[:4]))
        ends = [
            (n * g.losses[0], n * g.losses[-1]) for (_, g), n in zip(grids, counts, strict=True)
        ]
        low, high = max(low, sum(e[0] for e in ends)), min(high, sum(e[1] for e in ends))
        return float(low), float(max(high, low)), cut

    def epsilon(self, delta: float) -> float:
        """An upper bound, exact on the grid, never below the window's lower end."""
        if delta <= self.infinity:
            return math.inf
        wanted = math.exp(min(700.0, math.log(delta - self.infinity) - self.log_scale))
        curve = self.above - self.dual  # delta at each grid point, scaled
        i = int(np.searchsorted(-curve, -wanted))  # the first with curve <= wanted
        if i == 0:
            return max(0.0, self.low * self.gap)
        # Between grid points delta is linear in exp(epsilon).
        i = min(i, len(curve) - 1)
        inner = self.above[i] - wanted
        dual = self.dual[i]
        eps = self.gap * (self.low + i) + (math.log(inner / dual) if inner > 0 < dual else 0.0)
        return max(0.0, float(eps))

    def delta(self, eps: float) -> float:
        """An upper bound; 1 for epsilons below the window, whose losses are not all in it."""
        i = math.ceil(eps / self.gap - 1e-9) - self.low
        if i < 0:
            return 1.0
        if i >= len(self.probs):
            return self.infinity
        shift = min(0.0, eps - self.gap * (self.low + i))
        value = self.above[i] - math.exp(shift) * self.dual[i]
        if value <= 0.0:
            return self.infinity
        return min(1.0, self.infinity + math.exp(min(0.0, math.log(value) + self.log_scale)))


def _gaussian_only(steps: Steps) -> bool:
    return len(steps) == 1 and steps[0][0].rate == 1.0


def _refine(evaluate: Callable[[float], tuple[float, bool]], tolerance: float) -> float:
    """The value on ever finer grids, until it moves by less than ``tolerance``, relative.

    The error falls with the square of the grid: what is left is a fifteenth of the last move.
    """
    value, shrink = math.inf, 1.0
    while True:
        finer, finest = evaluate(shrink)
        done = finest or value <= finer * (1.0 + tolerance) + 1e-9 * tolerance
        value, shrink = min(value, finer), 4.0 * shrink
        if done:
            return value


@functools.lru_cache(maxsize=256)
def _pld_epsilon(steps: Steps, delta: float) -> float:
    if _gaussian_only(steps):
        return _gaussian_epsilon(1.0 / steps[0][0].noise, delta)
    if sum(count for _, count in steps) == 1:
        return _single_epsilon(steps[0][0], delta)
    worst = 0.0
    for side in _sides(steps):
        moments, lost = _total_moments(side)
        bound = _renyi_epsilon(_RATES, moments, delta - lost)
        if bound <= worst:
            continue
        best = float(_RATES[np.argmin((moments - math.log(delta)) / _RATES)])

        def evaluate(shrink: float, side: Steps = side, rate: float = best) -> tuple[float, bool]:
            while True:
                composed = _Composition(side, rate, delta, shrink)
                value = composed.epsilon(delta)
                if value > composed.low * composed.gap or value == 0.0 or rate < _RATES[0]:
                    return value, composed.finest
                rate /= 2.0  # epsilon is below the window: tilt less

        worst = max(worst, min(bound, _refine(evaluate, 1e-3)))
    return worst


@functools.lru_cache(maxsize=256)
def _pld_delta(steps: Steps, eps: float) -> float:
    if _gaussian_only(steps):
        return _gaussian_delta(1.0 / steps[0][0].noise, eps)
    if sum(count for _, count in steps) == 1:
        return _single_delta(steps[0][0], eps)
    worst = 0.0
    for side in _sides(steps):
        moments, lost = _total_moments(side)
        bound = min(1.0, _renyi_delta(_RATES, moments, eps) + lost)
        if bound > worst and bound > 1e-30:
            rate = float(_RATES[np.argmin(moments - _RATES * eps)])

            def evaluate(
                shrink: float, side: Steps = side, rate: float = rate, bound: float = bound
            ):
                while True:
                    composed = _Composition(side, rate, bound * 1e-3, shrink)
                    if eps > composed.low * composed.gap or rate < _RATES[0]:
                        return composed.delta(eps), composed.finest
                    rate /= 2.0  # epsilon is below the window: tilt less

            bound = min(bound, _refine(evaluate, 0.02))
        worst = max(worst, bound)
    return worst


# ------------------------------------------------------------------------- Rényi, through autodp

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
    integrand = centre + upper + (order - 1.0) * _losses(step, x)
    return max(0.0, float(logsumexp(integrand) + math.log(spacing))) / (order - 1.0)


def _autodp_moments(steps: Steps) -> tuple[np.ndarray, np.ndarray]:
    renyi = sum(count * _autodp_step(step) for step, count in steps)
    return _ORDERS - 1.0, renyi * (_ORDERS - 1.0)


def _rdp_epsilon(steps: Steps, delta: float) -> float:
    return _renyi_epsilon(*_autodp_moments(steps), delta)


# ------------------------------------------------------------------------- composition theorems


def _single_delta(step: Step, eps: float) -> float:
    """The exact profile of one step at eps >= 0, where ``remove`` is not below ``add``."""
    if step.kind != "replace":
        inner = math.log1p(math.expm1(eps) / step.rate) if eps < 700 else eps - math.log(step.rate)
        return step.rate * _gaussian_delta(1.0 / step.noise, inner)
    p, q = _masses(step, _outcomes(step, np.array([eps])))
    return max(0.0, float(p[1] - math.exp(min(eps, 700.0)) * q[1]))


def _invert(function: Callable[[float], float], value: float) -> float:
    """The smallest delta, to 1e-6 relative, with function(delta) <= value; 1.0 if there is none."""
    low, high = math.log(1e-300), 0.0
    if function(1e-300) <= value:
        return 1e-300
    while high - low > 1e-6:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if function(math.exp(middle)) <= value else (middle, high)
    return math.exp(high)


@functools.lru_cache(maxsize=4096)
def _single_epsilon(step: Step, delta: float) -> float:
    if _single_delta(step, 0.0) <= delta:
        return 0.0
    high = 1.0
    while _single_delta(step, high) > delta:
        high *= 2.0
    root = optimize.brentq(lambda e: _single_delta(step, e) - delta, 0.0, high, rtol=1e-12)
    return root * (1.0 + 1e-9) + 1e-11


def _basic_epsilon(steps: Steps, delta: float) -> float:
    share = delta / sum(count for _, count in steps)
    return sum(count * _single_epsilon(step, share) for step, count in steps)


def _advanced_epsilon(steps: Steps, delta: float) -> float:
    """Half of delta is the theorem's slack, half is shared out among the steps."""
    share, slack = delta / 2.0 / sum(count for _, count in steps), delta / 2.0
    eps = np.array([_single_epsilon(step, share) for step, _ in steps])
    counts = np.array([float(count) for _, count in steps])
    square = counts @ eps**2
    drift = counts @ (eps * np.tanh(eps / 2.0))
    log = min(math.log(1.0 / slack), math.log(math.e + math.sqrt(square) / slack))
    return float(min(counts @ eps, drift + math.sqrt(2.0 * square * log)))


_EPSILON: dict[str, Callable[[Steps, float], float]] = {
    "pld": _pld_epsilon,
    "rdp": _rdp_epsilon,
    "advanced": _advanced_epsilon,
    "basic": _basic_epsilon,
}
