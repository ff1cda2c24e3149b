"""Looks at a likelihood, and their combination: post-processing of released numbers.

A look at a point m has the score g of the log likelihood there and its curvature L. Both have noise
of public size. If L were exact and constant, g + L m would be one number plus noise wherever the
look was made. The likelihood is not quadratic far from the posterior. So a look is weighted by its
noise, by its bias, and by its distance. The curvature's noise enters the score as noise times
distance.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_dp.utils.linalg import Gaussian, cholesky, powers

_HALF, _STEEP = 0.67, 8  # a noisy curvature stops counting here: level in sd sqrt(d), exponent
_STANDS_OUT = 2.0  # negative curvature, in units of the noise's largest eigenvalue
_ESCAPE = 0.5  # distance from a saddle, in standard deviations of the prior
_NEGLIGIBLE = 1e-6  # curvature, relative to the first look's geometry


@dataclass(frozen=True, eq=False)
class Look:
    """The log likelihood of all records around a point, as it was released.

    :param point: m, (d,).
    :param score: the score with noise, (d,).
    :param curvature: minus the Hessian, with noise, (d, d).
    :param geometry: M; noise is isotropic in the coordinates M^1/2 z, (d, d).
    :param score_sd: sd of the noise in a coordinate of the score there. The score's noise has
        covariance score_sd^2 M.
    :param curvature_sd: sd of the noise in a diagonal element of the curvature there. Off the
        diagonal, the sd is smaller by a factor of sqrt(2).
    :param bound: C, the bound that the records' parts were clipped to.
    :param squared_bias: squared bias of a coordinate of the score there, by clipping.
    """

    point: Tensor
    score: Tensor
    curvature: Tensor
    geometry: Tensor
    score_sd: float
    curvature_sd: float
    bound: float = math.inf
    squared_bias: float = 0.0

    @property
    def score_noise(self) -> Tensor:
        """Covariance of the noise in the score, (d, d)."""
        return self.score_sd**2 * self.geometry

    @property
    def score_error(self) -> Tensor:
        """The score's noise and squared bias, (d, d)."""
        return (self.score_sd**2 + self.squared_bias) * self.geometry


@dataclass(frozen=True, eq=False)
class PooledLooks:
    """A Gaussian approximation of the likelihood, from all looks.

    :param estimate: the maximum of the log likelihood, (d,).
    :param curvature: K, positive definite, (d, d).
    :param centre: mean of the looks' points, weighted as the scores are, (d,).
    :param score_noise: covariance of the noise in the score at the centre, (d, d).
    :param geometry: M of the last look, (d, d).
    :param curvature_sd: sd of the noise in a diagonal element of the curvature, in coordinates
        M^1/2 z.
    :param bend: how fast the curvature changes with distance, see :func:`with_last`.
    :param size: N, the number of records.
    """

    estimate: Tensor
    curvature: Tensor
    centre: Tensor
    score_noise: Tensor
    geometry: Tensor
    curvature_sd: float
    bend: float
    size: int

    @property
    def curvature_noise(self) -> Tensor:
        """About the largest eigenvalue of the curvature's noise, times M, (d, d)."""
        return self.curvature_sd * len(self.estimate) ** 0.5 * self.geometry

    @property
    def relative_noise(self) -> float:
        """The curvature's noise divided by its size, roughly."""
        root, _ = roots(self.geometry)
        level = (root @ self.curvature @ root).diagonal().mean().item()
        return self.curvature_sd * len(self.estimate) ** 0.5 / level

    def factor(self, precision: Tensor) -> Gaussian:
        """The evidence with this precision, (d, d), and this maximum."""
        return Gaussian(precision @ self.estimate, precision)

    def length(self, way: Tensor) -> float:
        """Length of a step (d,), in roots of nats per record."""
        return math.sqrt(max((way @ self.curvature @ way).item() / self.size, 0.0))

    def noise(self, mean: Tensor) -> Tensor:
        """Covariance of the noise in the score at a point, (d, d).

        Noise E in the curvature enters the score as E times the distance from the centre.
        """
        _, back = roots(self.geometry)
        way = back @ (mean - self.centre)
        carried = way.square().sum() * self.geometry + torch.outer(back @ way, back @ way)
        return self.score_noise + carried * self.curvature_sd**2 / 2

    def log_likelihood(self) -> Callable[[Tensor], Tensor]:
        """The log likelihood, a number, as a function of unconstrained coordinates (d,).

        The estimate has a normal distribution around them. Its covariance includes the noise that
        the curvature carries there. K + V is diagonal in the coordinates that this works in.
        """
        root, back = roots(self.geometry)
        values, vectors = torch.linalg.eigh(root @ (self.curvature + self.score_noise) @ root)
        turn = vectors.mT
        by_curvature, by_distance = turn @ root @ self.curvature, turn @ back
        unit = self.curvature_sd**2 / 2

        def log_likelihood(z: Tensor) -> Tensor:
            moved, way = by_curvature @ (z - self.estimate), by_distance @ (z - self.centre)
            spread = values + unit * way.square().sum()
            cross = unit * (way.square() / spread).sum()
            along = (moved * way / spread).sum()
            squared = (moved.square() / spread).sum() - unit * along**2 / (1 + cross)
            return -0.5 * (squared + spread.log().sum() + torch.log1p(cross))

        return log_likelihood

    def with_noise_here(self) -> "PooledLooks":
        """The noise in the score is everywhere what it is at the estimate."""
        return replace(self, score_noise=self.noise(self.estimate), curvature_sd=0.0)

    def bending(self, mean: Tensor) -> Tensor:
        """Squared error of the score at a point if the curvature changes, (d, d).

        Third derivatives are assumed to be b_i K_jk + b_j K_ik + b_k K_ij, with b normal of
        covariance bend^2 K / N.
        """
        way = mean - self.centre
        slope = self.curvature @ way
        length = way @ slope
        spread = 2 * length * torch.outer(slope, slope) + length**2 / 4 * self.curvature
        return self.bend**2 / self.size * spread

    def relative(self, error: Tensor, mean: Tensor) -> float:
        """A squared error of the score divided by its variance, on average over directions.

        Each direction has its own variance: one that noise hides does not hide the others' error.
        """
        variance = self.curvature + self.noise(mean)
        return torch.linalg.solve(variance, error).trace().item() / len(mean)

    def information(self, mean: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        """The precision that the noise leaves of K, (K^-1 + K^-1 V K^-1)^-1, (d, d).

        Finite data add K^-1 to the covariance of the estimate's error, and the noise V adds
        K^-1 V K^-1 to it. If the noise far exceeds the information, the precision goes to zero,
        and the prior remains.

        :param mean: the posterior's, (d,). V is the noise carried there.
        :param bias: squared bias of the score, (d, d).
        """
        noise = self.noise(mean) + bias
        whole = cholesky(self.curvature + noise)
        left = self.curvature @ torch.cholesky_solve(self.curvature, whole)
        return (left + left.mT) / 2


def pooled(looks: Sequence[Look], size: int, bend: float) -> PooledLooks:
    """All looks together, added one after the other. See :func:`with_last`."""
    found = None
    for count in range(1, len(looks) + 1):
        found = with_last(looks[:count], found, size, bend)
    assert found is not None
    return found


def with_last(
    looks: Sequence[Look], before: PooledLooks | None, size: int, bend: float
) -> PooledLooks:
    """All looks together.

    :param before: the result without the last look. Its curvature measures distances.
    :param bend: relative change of the curvature over a distance of one root of a nat per record.
    """
    last = looks[-1]
    dim, geometry = len(last.point), last.geometry
    root, back = roots(geometry)
    known = None if before is None else before.curvature
    least = _NEGLIGIBLE * looks[0].geometry.diagonal().mean().item()
    values, vectors, sd = _curvature(looks, known, root, size, bend, least)
    there, here = back @ vectors, root @ vectors
    curvature, inverse = (there * values) @ there.mT, (here / values) @ here.mT
    noises = [look.score_noise for look in looks]
    costs = torch.stack([(inverse * look.score_error).sum() for look in looks])
    points = [look.point for look in looks]
    distances = squared_distances(points, last.point, curvature, size)
    weights = 1 / (costs + bend**2 * size * distances**2).clamp(min=1e-9 / size)
    weights = weights / weights.sum()
    centre = _sum(weights, points)
    score = _sum(weights, [look.score for look in looks])
    # A curvature that may be noise itself is no information. Half of it counts at a level
    # proportional to the noise's largest eigenvalue.
    level = _HALF * sd * dim**0.5
    doubt = (there * (values * (level / values) ** _STEEP)) @ there.mT
    noise = _sum(weights**2, noises) + doubt
    return PooledLooks(centre + inverse @ score, curvature, centre, noise, geometry, sd, bend, size)


def next_step(pooled: PooledLooks, last: Look, prior: Tensor) -> Gaussian:
    """A concave model of the log likelihood, for a step to the next look.

    It is the pooled one plus the curvature of the noise and the size of the negative curvature in
    the last look. Newton's step there would lead to a saddle (Dauphin et al. 2014, arXiv
    1406.2572). A score that stands out of the noise moves the mean, however noisy the curvature is.

    On a saddle the score is too small to leave it, as between components that are alike. So where
    negative curvature stands out of the noise, the score is at least that at some distance. Noise
    may decide the direction (perturbed gradients, Jin et al. 2017, arXiv 1703.00887).

    :param prior: its precisions, (d,).
    """
    root, back = roots(last.geometry)
    values, vectors = torch.linalg.eigh(root @ last.curvature @ root)
    negative = -values.clamp(max=0.0)
    precision = pooled.curvature + pooled.curvature_noise
    precision = precision + back @ (vectors * negative) @ vectors.mT @ back
    score = vectors.mT @ root @ pooled.curvature @ (pooled.estimate - pooled.centre)
    sds = (prior.unsqueeze(1) * (root @ vectors).square()).sum(dim=0).rsqrt()
    level = _STANDS_OUT * last.curvature_sd * len(values) ** 0.5
    least = torch.where(negative > level, _ESCAPE * sds * negative, 0.0)
    score = torch.where(score < 0, -1.0, 1.0) * score.abs().maximum(least)
    return Gaussian(precision @ pooled.centre + back @ vectors @ score, precision)


def squared_distances(
    points: Sequence[Tensor], point: Tensor, curvature: Tensor, size: int
) -> Tensor:
    """Distances from each of the looks' points to another one, in nats per record, (looks,)."""
    ways = torch.stack(list(points)) - point
    return ((ways @ curvature) * ways).sum(dim=1) / size


@functools.lru_cache(maxsize=2)
def roots(geometry: Tensor) -> list[Tensor]:
    """M^-1/2 and M^1/2, (d, d) each, which every use of a look needs."""
    return powers(geometry, (-0.5, 0.5))


def _curvature(
    looks: Sequence[Look], known: Tensor | None, root: Tensor, size: int, bend: float, least: float
) -> tuple[Tensor, Tensor, float]:
    """The curvature in the coordinates of ``root``, without the effect of noise.

    :param known: the earlier K, which measures distances; None: there is none yet.
    :param root: M^-1/2, from the last look's geometry.
    :returns: positive eigenvalues (d,), eigenvectors (d, d), and the sd of the noise.
    """
    dim = len(root)
    sds = torch.tensor([look.curvature_sd for look in looks]).to(root)
    noise = sds.clone()
    for i, look in enumerate(looks[:-1]):  # the last one's geometry is 1 in these coordinates
        noise[i] *= torch.linalg.eigvalsh(root @ look.geometry @ root)[-1]
    bent = torch.zeros_like(noise)
    if known is not None:
        level = (root @ known @ root).trace() / dim
        points = [look.point for look in looks]
        distances = squared_distances(points, points[-1], known, size)
        bent = (bend * level) ** 2 * distances / dim
    weights = 1 / (noise**2 + bent).clamp(min=1e-30)
    weights = weights / weights.sum()
    mean = root @ _sum(weights, [look.curvature for look in looks]) @ root
    sd = (weights * noise).norm().item()
    values, vectors = torch.linalg.eigh((mean + mean.mT) / 2)
    return _denoised(values, sd**2 / 2, least), vectors, sd


def _denoised(values: Tensor, variance: float, least: float) -> Tensor:
    """Eigenvalues of a symmetric matrix without the effect of noise: positive, (d,).

    The noise has this variance off the diagonal, and twice that on it. It pushes eigenvalues
    apart, to first order by the sum of variance / (value - other). Without this push, pure noise
    leaves the eigenvalues' mean, and eigenvalues far apart stay (Bun, Bouchaud & Potters 2017,
    arXiv 1610.08104, section 6).

    :param values: the noisy eigenvalues, ascending, whose mean is at least ``least``.
    """
    apart = values.unsqueeze(1) - values
    pushed = 2 * variance * (apart / (apart.square() + variance).clamp(min=1e-300)).sum(dim=1)
    mean = max(values.mean().item(), (2 * variance / len(values)) ** 0.5, least)
    floor = min(mean, max(variance**0.5, 1e-9 * mean))
    left = values - pushed
    # In ascending order, without a preference for the larger ones.
    upper, lower = left.cummax(dim=0).values, left.flip(0).cummin(dim=0).values.flip(0)
    return ((upper + lower) / 2).clamp(min=floor)


def _sum(weights: Tensor, values: Sequence[Tensor]) -> Tensor:
    return torch.tensordot(weights, torch.stack(list(values)), dims=1)
