"""The norm to which gradients are clipped, from a released histogram of their norms.

All of it is post-processing of :class:`~pyro_dp.mechanism.norm_histogram.Bins`.
"""

import math
from collections.abc import Mapping
from typing import Any
import numpy as np
import numpy.typing as npt
from scipy.stats import norm as normal

from pyro_dp.mechanism.norm_histogram import (
    EDGES,
    MIDDLES,
    SIZE,
    Norms,
    single_peak,
    within_noise,
)

Floats = npt.NDArray[np.float64]

_LEFT = (0.3, 0.6, 1.2, 2.0)  # widths of bells, in nats
_RIGHT = (0.15, 0.25, 0.4, 0.65, 1.0)
_USUAL_RIGHT = 0.35  # a bell twice as wide to the right is exp(-3/2) as likely before a look
_SPREAD = 2.0  # of the first guess of norms, in nats
_SPREAD_LATER = 1.0
_ALIGNED = 1 / 8  # square of how far parts cut off point to one side
_REFUTED = 5.0  # standard deviations of what a bell leaves
_CHANGING = ("_variance", "_steps", "_typical", "value")
_RECENT = 3  # the average is of about the last 2 / (2 + this) of all steps


def bound(norms: Norms, dim: int, noise: float) -> float:
    """C, at which noise and bias together are least.

    All T released gradients together have noise of size sqrt(d) C sigma / (q sqrt(T)); and the
    parts that are cut off, of norms (norm - C)+, lack in the sum as far as they point to one side.
    The posterior's mean moves in proportion to both. In logistic, probit and Poisson regressions
    and a hierarchy the squared sum of parts cut off was 1/20 to 1/4 of what it would be if all
    pointed to one side.

    :param dim: d, coordinates of a gradient.
    :param noise: sigma / (q sqrt(T)), in units of C.
    """
    log_norms = np.log(norms.norms)
    bounds = np.exp(np.arange(log_norms[0] - 1.0, log_norms[-1] + 0.3, 0.05))
    cost = dim * (bounds * noise) ** 2 + _ALIGNED * norms.excess(bounds) ** 2
    return float(bounds[cost.argmin()])


class GradientBound:
    """C, from all histograms released so far, of which the latest count most.

    Norms change while the posterior is on its way: the average is Shamir & Zhang's (2013),
    polynomial in the number of the step.

    :param dim: d, coordinates of a gradient.
    :param size: N.
    :param noise: of the whole run, as for :func:`bound`.
    :ivar value: C; None before the first histogram.
    :ivar norms: of the records, as far as known; None before the first histogram.
    """

    def __init__(self, dim: int, size: int, noise: float):
        self._dim, self._size, self._noise = dim, size, noise
        self._counts, self._variance, self._steps = np.zeros(SIZE), 0.0, 0
        self._typical: float | None = None
        self.norms: Norms | None = None
        self.value: float | None = None

    def first(self, counts: Floats, sd: float) -> None:
        """Read a histogram that was released alone; those of the steps replace it.

        :param counts: of all N records, as estimated, (SIZE,).
        :param sd: of the noise in a bin.
        """
        self._read(counts, sd, math.sqrt(self._dim), _SPREAD)
        assert self.norms is not None
        self._typical = self.norms.median

    def add(self, counts: Floats, sd: float) -> None:
        """Take in the histogram of one more step; C stays."""
        self._steps += 1
        weight = (1 + _RECENT) / (self._steps + _RECENT)
        self._counts = (1 - weight) * self._counts + weight * counts
        self._variance = (1 - weight) ** 2 * self._variance + (weight * sd) ** 2

    def update(self) -> None:
        """Read C anew from the histograms of the steps. Takes some milliseconds."""
        assert self._steps and self._typical is not None
        self._read(self._counts, math.sqrt(self._variance), self._typical, _SPREAD_LATER)

    def state(self) -> dict[str, Any]:
        """Everything that histograms change, as numbers and lists."""
        norms = self.norms and {n: each.tolist() for n, each in vars(self.norms).items()}
        own = {name: getattr(self, name) for name in _CHANGING}
        return own | {"counts": self._counts.tolist(), "norms": norms}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` gave."""
        for name in _CHANGING:
            setattr(self, name, state[name])
        self._counts, norms = np.array(state["counts"]), state["norms"]
        self.norms = norms and Norms(**{name: np.array(each) for name, each in norms.items()})

    def _read(self, counts: Floats, sd: float, typical: float, spread: float) -> None:
        self.norms = read(counts, sd, self._size, typical, spread)
        self.value = bound(self.norms, self._dim, self._noise)


def read(counts: Floats, sd: float, size: int, typical: float, spread: float) -> Norms:
    """Norms of gradients, as far as the noise lets see: with care for the largest.

    :meth:`Norms.read` with bells that may be steeper to the right than to the left, as residuals
    are often bounded: a symmetric bell would make up a tail, and with it a bound that is far too
    large. Where counts do not fit a bell but have a peak, the bell goes on where the peak ends in
    noise.

    :param counts: (SIZE,), released.
    :param sd: of the noise in a bin.
    :param size: N.
    :param typical: a guess of the norms.
    :param spread: standard deviation of its logarithm.
    """
    bells = size * _BELLS
    residual = np.square(bells).sum(axis=1) - 2 * bells @ counts + counts @ counts
    residual = residual / max(sd, 1e-9 * size) ** 2
    log_prior = -(((_PLACES - math.log(typical)) / spread) ** 2) / 2
    score = log_prior - (_RIGHTS / _USUAL_RIGHT) ** 2 / 2 - residual / 2
    weights = np.exp(score - score.max())
    fitted = weights @ bells / weights.sum()
    if residual[score.argmax()] > SIZE + _REFUTED * math.sqrt(2 * SIZE):
        peaked = within_noise(single_peak(counts), counts, sd)
        tail = fitted * ((peaked == 0) & (np.arange(SIZE) > peaked.argmax()))
        seen = (tail @ counts) / max(tail @ tail, 1e-300)  # a part of that tail, on average
        fitted = peaked + min(max(seen, 0.0), 1.0) * tail
    kept = fitted > 1e-6 * size
    return Norms(np.exp(MIDDLES[kept]), fitted[kept] * (size / fitted[kept].sum()))


def _bells() -> tuple[Floats, Floats, Floats]:
    """Where bells may stand and how wide they are to the right, (n,); their shares of the bins."""
    grid = np.meshgrid(EDGES[1:-1], _LEFT, _RIGHT)
    places, left, right = (each.reshape(-1, 1) for each in grid)
    below = 2 * left * normal.cdf((EDGES - places) / left)
    above = left + right * (2 * normal.cdf((EDGES - places) / right) - 1)
    cumulative = np.where(places > EDGES, below, above) / (left + right)
    cumulative[:, 0], cumulative[:, -1] = 0.0, 1.0
    return places.ravel(), right.ravel(), np.diff(cumulative, axis=1)


_PLACES, _RIGHTS, _BELLS = _bells()
