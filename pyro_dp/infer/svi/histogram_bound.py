"""The bound of a record's gradient, from released histograms of norms.

All of it is post-processing of :class:`~pyro_dp.mechanism.norm_histogram.Bins`.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pyro_dp.mechanism.clipped_fraction import ClippedFraction
from pyro_dp.mechanism.contributions import LEAST_BOUND
from pyro_dp.mechanism.norm_histogram import EDGES, MIDDLES, SIZE, Norms
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_count, require_number

Floats = npt.NDArray[np.float64]

_LEFT = (0.3, 0.6, 1.2, 2.0)  # scales of the bells, in nats
_RIGHT = (0.15, 0.25, 0.4, 0.65, 1.0)
_SHAPE = (len(_LEFT), SIZE - 1, len(_RIGHT))
_USUAL_RIGHT = 0.35  # prior scale of the right scales
_ALIGNED = 1 / 8  # squared fraction of the clipped-off parts that adds up in one direction
_REFUTED = 5.0  # standard deviations of the residual at which the bell is rejected
_STANDS_OUT = 4.0  # significance of four bins, in standard deviations, beside significant ones
_STANDS_OUT_ALONE = 6.0  # and alone: a run tests 160 bins some 15 times
_GAP = 8  # bins between groups of significant bins
_SPREAD, _SPREAD_LATER = 2.0, 1.0  # prior standard deviation of the log norm, in nats
_LONGER = 1.5  # ratio of the numbers of histograms at successive choices of C
_DAMAGED = "load_state_dict: histogram is damaged."


def bound(norms: Norms, dim: int, noise: float) -> float:
    """The bound C that minimises the mean squared error of noise and bias.

    The mean of all T released gradients has noise of size sqrt(d) C sigma / (q sqrt(T)). Its bias
    is the sum of the clipped-off parts, of norms (norm - C)+, as far as they point in one
    direction. If all pointed in one direction, their squared sum would be 4 to 20 times larger than
    it is in regressions and in a hierarchy.

    :param dim: d, the number of coordinates of a gradient.
    :param noise: sigma / (q sqrt(T)), in units of C.
    """
    log_norms = np.log(norms.norms)
    bounds = np.exp(np.arange(log_norms[0] - 1.0, log_norms[-1] + 0.3, 0.05))
    cost = dim * (bounds * noise) ** 2 + _ALIGNED * norms.excess(bounds) ** 2
    return float(bounds[cost.argmin()])


def bias(norms: Norms, bounds: Floats, dim: int) -> Floats:
    """The bias of a coordinate of the sum of gradients, as in :func:`bound`, for each bound."""
    return math.sqrt(_ALIGNED / dim) * norms.excess(bounds)


def read(counts: Floats, sd: float, size: int, typical: float, spread: float) -> Norms:
    """Estimate the norms of gradients from a noisy histogram.

    It is :meth:`Norms.read` with asymmetric bells, which may be steeper on the right. Residuals are
    often bounded, and a symmetric bell would add a tail that raises the bound. If no bell fits,
    significant counts are used directly, and the bell only beyond them, scaled to the counts there.

    :param counts: released, (SIZE,).
    :param sd: standard deviation of the noise in a bin.
    :param typical: prior guess of a norm. Its logarithm has standard deviation ``spread``.
    """
    shares, sd = counts / size, max(sd / size, 1e-9)
    modes, rights, bells = _bells()
    squares = np.square(bells).sum(axis=1)
    residual = (squares - 2 * (bells @ shares) + shares @ shares) / sd**2
    log_prior = -(((modes - math.log(typical)) / spread) ** 2 + (rights / _USUAL_RIGHT) ** 2) / 2
    score = log_prior - residual / 2
    weights = np.exp(score - score.max()).reshape(_SHAPE)
    weights = weights / weights.sum()
    # Put all bells at the mean of the modes. A mixture of modes would have a tail.
    mode = np.abs(EDGES[1:-1] - weights.sum(axis=(0, 2)) @ EDGES[1:-1]).argmin()
    bell = np.tensordot(weights.sum(axis=1), bells.reshape(*_SHAPE, SIZE)[:, mode], 2)
    fitted = bell
    if residual[score.argmax()] > SIZE + _REFUTED * math.sqrt(2 * SIZE):
        significant = _significant(shares, sd)
        if significant.any():
            tail = bell * (np.arange(SIZE) > significant.nonzero()[0][-1])
            part = (tail @ shares) / max(tail @ tail, 1e-300)  # least squares
            fitted = significant + min(max(part, 0.0), 1.0) * tail
    kept = fitted > 1e-6 * fitted.max()
    return Norms.of(np.exp(MIDDLES[kept]), fitted[kept] * (size / fitted[kept].sum()))


def _significant(shares: Floats, sd: float) -> Floats:
    """Shares that are significant together with their neighbours, and zero elsewhere."""
    height = np.convolve(shares, np.ones(4), "valid") / (2.0 * sd)  # four bins each
    candidates = np.flatnonzero(height > _STANDS_OUT)
    groups = np.split(candidates, np.flatnonzero(np.diff(candidates) > _GAP) + 1)
    sure = [each for each in groups if (height[each] > _STANDS_OUT_ALONE).any()]
    bins = np.concatenate([np.arange(SIZE)[:0], *sure])
    significant = np.zeros(SIZE)
    for offset in range(4):
        significant[bins + offset] = np.maximum(shares[bins + offset], 0.0)
    return significant


def _normal_cdf(x: Floats) -> Floats:
    """torch's, because the import of scipy.special would take longer than the computation."""
    return torch.special.ndtr(torch.from_numpy(x)).numpy()


@functools.cache
def _bells() -> tuple[Floats, Floats, Floats]:
    """Modes and right scales of the bells, (n,), and their mass in each bin, (n, SIZE)."""
    grid = np.meshgrid(EDGES[1:-1], _LEFT, _RIGHT)
    modes, left, right = (each.reshape(-1, 1) for each in grid)
    below = 2 * left * _normal_cdf((EDGES - modes) / left)
    above = left + right * (2 * _normal_cdf((EDGES - modes) / right) - 1)
    cumulative = np.where(modes > EDGES, below, above) / (left + right)
    cumulative[:, 0], cumulative[:, -1] = 0.0, 1.0
    return modes.ravel(), right.ravel(), np.diff(cumulative, axis=1)


@dataclass(frozen=True, eq=False)
class HistogramBound:
    """The bound C, and the mean of the released histograms from which it is chosen.

    The weight of a histogram is its number, because norms change with the posterior, over its
    variance.

    :param dim: number of coordinates of a record's gradient.
    :param noise: noise of the mean of all gradients of a run, in units of C.
    :param of_many: whether there are few steps for each latent. Then C is the median norm: a higher
        bound would add noise in many directions for the gradients of few records.
    :param counts: the mean histogram, (SIZE,).
    :param variance: mean variance of a bin, by noise and sampling.
    :param weight: total weight of the histograms so far.
    :param steps: their number.
    :param next_reading: the number of histograms at which C is chosen again.
    :param typical: the median norm of the first histogram. (Under large noise, updates of this
        prior guess would drift.)
    """

    size: int
    dim: int
    noise: float
    of_many: bool = False
    counts: Tensor = field(default_factory=lambda: torch.zeros(SIZE, dtype=torch.float64))
    variance: float = 0.0
    weight: float = 0.0
    steps: int = 0
    next_reading: int = 1
    bound: float = math.inf
    typical: float | None = None

    def updated(self, counts: Tensor, sd: float, rate: float) -> "HistogramBound":
        """Add a histogram: a released estimate of the counts of all records, (SIZE,).

        :param sd: standard deviation of its noise in a bin.
        :param rate: the sample rate.
        """
        steps = self.steps + 1
        # Sampling adds N (1 - rate) / rate to the squared distance of all bins together.
        variance = sd**2 + self.size * (1 - rate) / (rate * SIZE)
        weight = self.weight + steps / variance
        share = steps / variance / weight
        new = replace(
            self,
            counts=self.counts.to(counts.device).lerp(counts, share),
            variance=(1 - share) ** 2 * self.variance + share**2 * variance,
            weight=weight,
            steps=steps,
        )
        if steps < self.next_reading:
            return new
        norms = new._norms()
        chosen = norms.median if self.of_many else bound(norms, self.dim, self.noise)
        return replace(
            new,
            bound=max(LEAST_BOUND, chosen),
            typical=self.typical or norms.median,
            next_reading=max(steps + 1, math.ceil(_LONGER * steps)),
        )

    def clipped(self, bound: float) -> ClippedFraction:
        """The fraction of all N records that a bound clips."""
        norms = self._norms()
        above = max(1, int((norms.norms > bound).sum()))
        error = math.sqrt(above * self.variance) / self.size
        return ClippedFraction(norms.share_above(bound), error)

    def lost(self, bound: float) -> float:
        """The bias of a coordinate of all records' gradient at a bound, roughly."""
        return bias(self._norms(), np.array([bound]), self.dim).item()

    def _norms(self) -> Norms:
        counts, sd = self.counts.cpu().numpy(), math.sqrt(self.variance)
        if self.typical is None:
            return read(counts, sd, self.size, math.sqrt(self.dim), _SPREAD)
        return read(counts, sd, self.size, self.typical, _SPREAD_LATER)

    def state(self) -> dict[str, Any]:
        return dict(vars(self))

    @staticmethod
    def resumed(state: Any) -> "HistogramBound":
        """From a result of :meth:`state`.

        :raises ConfigurationError: the state is damaged.
        """
        items = state.items() if isinstance(state, Mapping) else ()
        state = {k: v for k, v in items if k != "information"}  # a number in version 0.2.0
        if state.keys() != {each.name for each in fields(HistogramBound)}:
            raise ConfigurationError(_DAMAGED)
        for name in ("size", "dim", "steps", "next_reading"):
            require_count(f"histogram.{name}", state[name])
        for name in ("noise", "variance", "weight", "bound", "typical"):
            require_number(f"histogram.{name}", state[name], above=0.0, below=math.inf)
        counts = state["counts"]
        typed = isinstance(state["of_many"], bool) and isinstance(counts, Tensor)
        if not (typed and counts.shape == (SIZE,) and counts.isfinite().all()):
            raise ConfigurationError(_DAMAGED)
        return HistogramBound(**state)
