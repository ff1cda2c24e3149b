"""The norm to which gradients are clipped, from a released histogram of their norms.

All of it is post-processing of :class:`~pyro_dp.mechanism.norm_histogram.Bins`.
"""

import functools
import math

import numpy as np
import numpy.typing as npt
import scipy

from pyro_dp.mechanism.norm_histogram import EDGES, MIDDLES, SIZE, Norms

Floats = npt.NDArray[np.float64]

_LEFT = (0.3, 0.6, 1.2, 2.0)  # widths of bells, in nats
_RIGHT = (0.15, 0.25, 0.4, 0.65, 1.0)
_SHAPE = (len(_LEFT), SIZE - 1, len(_RIGHT))
_USUAL_RIGHT = 0.35  # a bell twice as wide to the right is exp(-3/2) as likely before a look
_ALIGNED = 1 / 8  # square of how far parts cut off point to one side
_REFUTED = 5.0  # standard deviations of what a bell leaves
_STANDS_OUT = 4.0  # standard deviations of four bins, next to others that do
_STANDS_OUT_ALONE = 6.0  # and anywhere: a run looks at 160 places some 15 times
_NEAR = 8  # bins from four to four


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


def bias(norms: Norms, bounds: Floats, dim: int) -> Floats:
    """Size of a coordinate of what clipping takes from the gradients' sum, as :func:`bound` has it.

    :param bounds: some C.
    :param dim: d.
    :returns: for each bound.
    """
    return math.sqrt(_ALIGNED / dim) * norms.excess(bounds)


def read(counts: Floats, sd: float, size: int, typical: float, spread: float) -> Norms:
    """Norms of gradients, as far as the noise lets see: with care for the largest.

    :meth:`Norms.read` with bells that may be steeper to the right than to the left, as residuals
    are often bounded: a symmetric bell would make up a tail, and with it a bound that is far too
    large. Where counts do not fit a bell, those that stand out of the noise are taken as they are,
    and beyond them the bell, as high as the counts are there on average.

    :param counts: (SIZE,), released.
    :param sd: of the noise in a bin.
    :param size: N.
    :param typical: a guess of the norms.
    :param spread: standard deviation of its logarithm.
    """
    shares, sd = counts / size, max(sd / size, 1e-9)
    places, rights, bells = _bells()
    squares = np.square(bells).sum(axis=1)
    residual = (squares - 2 * (bells @ shares) + shares @ shares) / sd**2
    log_prior = -(((places - math.log(typical)) / spread) ** 2 + (rights / _USUAL_RIGHT) ** 2) / 2
    score = log_prior - residual / 2
    weights = np.exp(score - score.max()).reshape(_SHAPE)
    weights = weights / weights.sum()
    # All at the mean place: a mean over places would be a tail.
    place = np.abs(EDGES[1:-1] - weights.sum(axis=(0, 2)) @ EDGES[1:-1]).argmin()
    bell = np.tensordot(weights.sum(axis=1), bells.reshape(*_SHAPE, SIZE)[:, place], 2)
    fitted = bell
    if residual[score.argmax()] > SIZE + _REFUTED * math.sqrt(2 * SIZE):
        seen = _seen(shares, sd)
        if seen.any():
            tail = bell * (np.arange(SIZE) > seen.nonzero()[0][-1])
            part = (tail @ shares) / max(tail @ tail, 1e-300)  # of that tail is there, on average
            fitted = seen + min(max(part, 0.0), 1.0) * tail
    kept = fitted > 1e-6 * fitted.max()
    return Norms(np.exp(MIDDLES[kept]), fitted[kept] * (size / fitted[kept].sum()))


def _seen(shares: Floats, sd: float) -> Floats:
    """What stands out of the noise together with its neighbours, and zero elsewhere."""
    height = np.convolve(shares, np.ones(4), "valid") / (2.0 * sd)  # of four bins each
    candidates = np.flatnonzero(height > _STANDS_OUT)
    groups = np.split(candidates, np.flatnonzero(np.diff(candidates) > _NEAR) + 1)
    sure = [each for each in groups if (height[each] > _STANDS_OUT_ALONE).any()]
    places = np.concatenate([np.arange(SIZE)[:0], *sure])
    seen = np.zeros(SIZE)
    for offset in range(4):
        seen[places + offset] = np.maximum(shares[places + offset], 0.0)
    return seen


@functools.cache
def _bells() -> tuple[Floats, Floats, Floats]:
    """Where bells may stand and how wide they are to the right, (n,); their shares of the bins."""
    grid = np.meshgrid(EDGES[1:-1], _LEFT, _RIGHT)
    places, left, right = (each.reshape(-1, 1) for each in grid)
    below = 2 * left * scipy.special.ndtr((EDGES - places) / left)
    above = left + right * (2 * scipy.special.ndtr((EDGES - places) / right) - 1)
    cumulative = np.where(places > EDGES, below, above) / (left + right)
    cumulative[:, 0], cumulative[:, -1] = 0.0, 1.0
    return places.ravel(), right.ravel(), np.diff(cumulative, axis=1)
