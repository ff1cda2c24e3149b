"""Looks at a likelihood, and how they are pooled: post-processing of released numbers.

A look releases the score g and the curvature L of the log likelihood at a public point m, with
noise of public size. If the log likelihood is quadratic, every look estimates the same g + L m.
Other likelihoods differ from a quadratic far from the posterior. So looks are weighted by their
noise, bias and distance. Noise in L adds noise to g + L m, in proportion to the distance.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_dp.utils.linalg import Gaussian, cholesky, powers

# An eigenvalue of the curvature counts half at this level, in sd sqrt(d). The weight of smaller
# ones falls with this power.
_HALF, _STEEP = 0.67, 8
_STANDS_OUT = 2.0  # significant negative curvature, in units of the noise's largest eigenvalue
_ESCAPE = 0.5  # least distance of a step from a saddle, in standard deviations of the prior
_NEGLIGIBLE = 1e-6  # least curvature, relative to the first look's geometry


@dataclass(frozen=True, eq=False)
class Look:
    """One private release of the score and curvature of the log likelihood of all records.

    :param point: m, (d,).
    :param score: the score with noise, (d,).
    :param curvature: minus the Hessian, with noise, (d, d).
    :param geometry: M, (d, d). The noise is isotropic in the coordinates M^1/2 z.
    :param score_sd: standard deviation of the score's noise in these coordinates. The noise of
        ``score`` has covariance score_sd^2 M.
    :param curvature_sd: standard deviation of the noise in a diagonal element of the curvature, in
        these coordinates. Off the diagonal it is smaller by a factor of sqrt(2).
    :param bound: C, the bound to which contributions of records were clipped.
    :param squared_bias: squared clipping bias of the score in one of these coordinates.
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
        """Covariance of the score's noise, plus its squared bias, (d, d)."""
        return (self.score_sd**2 + self.squared_bias) * self.geometry


@dataclass(frozen=True, eq=False)
class PooledLooks:
    """A Gaussian approximation of the likelihood, from all looks.

    :param estimate: the maximum of the log likelihood, (d,).
    :param curvature: K, positive definite, (d, d).
    :param centre: mean of the looks' points, with the weights of their scores, (d,).
    :param score_noise: V at the centre: covariance of the noise in the score, (d, d).
    :param geometry: M of the last look, (d, d).
    :param curvature_sd: standard deviation of the noise in a diagonal element of K, in coordinates
        M^1/2 z.
    :param bend: rate at which the curvature changes with distance, see :func:`with_last`.
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
        """The curvature's noise relative to its average eigenvalue, roughly."""
        root, _ = roots(self.geometry)
        level = (root @ self.curvature @ root).diagonal().mean().item()
        return self.curvature_sd * len(self.estimate) ** 0.5 / level

    def factor(self, precision: Tensor) -> Gaussian:
        """The likelihood with this precision (d, d) and the same maximum."""
        return Gaussian(precision @ self.estimate, precision)

    def length(self, step: Tensor) -> float:
        """Length of a step (d,), in roots of nats per record."""
        return math.sqrt(max((step @ self.curvature @ step).item() / self.size, 0.0))

    def noise(self, mean: Tensor) -> Tensor:
        """V at a point (d,): covariance of the noise in the score, (d, d).

        Noise E in the curvature adds E times the distance from the centre to the score.
        """
        _, back = roots(self.geometry)
        offset = back @ (mean - self.centre)
        carried = offset.square().sum() * self.geometry + torch.outer(back @ offset, back @ offset)
        return self.score_noise + carried * self.curvature_sd**2 / 2

    def log_likelihood(self) -> Callable[[Tensor], Tensor]:
        """The log likelihood as a function of unconstrained coordinates (d,).

        It is the normal log density of the estimate. Its covariance includes the noise V at these
        coordinates. The code works in coordinates in which K + V is diagonal at the centre.
        """
        root, back = roots(self.geometry)
        values, vectors = torch.linalg.eigh(root @ (self.curvature + self.score_noise) @ root)
        turn = vectors.mT
        by_curvature, by_distance = turn @ root @ self.curvature, turn @ back
        unit = self.curvature_sd**2 / 2

        def log_likelihood(z: Tensor) -> Tensor:
            moved, offset = by_curvature @ (z - self.estimate), by_distance @ (z - self.centre)
            spread = values + unit * offset.square().sum()
            cross = unit * (offset.square() / spread).sum()
            along = (moved * offset / spread).sum()
            squared = (moved.square() / spread).sum() - unit * along**2 / (1 + cross)
            return -0.5 * (squared + spread.log().sum() + torch.log1p(cross))

        return log_likelihood

    def with_constant_noise(self) -> "PooledLooks":
        """The same looks, with the score's noise at the estimate used at every point."""
        return replace(self, score_noise=self.noise(self.estimate), curvature_sd=0.0)

    def nonquadratic_error(self, mean: Tensor) -> Tensor:
        """Expected squared error of the score at a point (d,) if the curvature changes, (d, d).

        Third derivatives are modelled as b_i K_jk + b_j K_ik + b_k K_ij, with b normal of
        covariance bend^2 K / N.
        """
        offset = mean - self.centre
        slope = self.curvature @ offset
        length = offset @ slope
        spread = 2 * length * torch.outer(slope, slope) + length**2 / 4 * self.curvature
        return self.bend**2 / self.size * spread

    def relative(self, error: Tensor, mean: Tensor) -> float:
        """A squared error (d, d) of the score over its variance, on average over directions.

        The ratio is taken in each direction, so noise in one does not mask an error in another.
        """
        variance = self.curvature + self.noise(mean)
        return torch.linalg.solve(variance, error).trace().item() / len(mean)

    def information(self, mean: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        """The precision of the estimate in spite of the noise, (K^-1 + K^-1 V K^-1)^-1, (d, d).

        Finite data give the estimate's error the covariance K^-1, and the noise V adds K^-1 V K^-1.
        If V far exceeds K, then the precision goes to zero, and the prior remains.

        :param mean: the posterior mean, at which V is taken, (d,).
        :param bias: squared bias of the score, (d, d).
        """
        noise = self.noise(mean) + bias
        whole = cholesky(self.curvature + noise)
        left = self.curvature @ torch.cholesky_solve(self.curvature, whole)
        return (left + left.mT) / 2


def pooled(looks: Sequence[Look], size: int, bend: float) -> PooledLooks:
    """Pool the looks, one after the other, by :func:`with_last`."""
    found = None
    for count in range(1, len(looks) + 1):
        found = with_last(looks[:count], found, size, bend)
    assert found is not None
    return found


def with_last(
    looks: Sequence[Look], before: PooledLooks | None, size: int, bend: float
) -> PooledLooks:
    """Pool all looks, after the last one was added.

    :param before: the result without the last look. Its curvature measures distances.
    :param bend: relative change of the curvature over a distance of one root of a nat per record.
    """
    last = looks[-1]
    dim, geometry = len(last.point), last.geometry
    root, back = roots(geometry)
    metric = None if before is None else before.curvature
    least = _NEGLIGIBLE * looks[0].geometry.diagonal().mean().item()
    values, vectors, sd = _curvature(looks, metric, root, size, bend, least)
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
    # A curvature that may be noise carries no information, so extra noise discounts it.
    level = _HALF * sd * dim**0.5
    doubt = (there * (values * (level / values) ** _STEEP)) @ there.mT
    noise = _sum(weights**2, noises) + doubt
    return PooledLooks(centre + inverse @ score, curvature, centre, noise, geometry, sd, bend, size)


def next_step(pooled: PooledLooks, last: Look, prior: Tensor) -> Gaussian:
    """A concave model of the log likelihood, for the step to the next look.

    To the pooled precision it adds a bound of the curvature's noise, and the absolute value of
    negative curvature in the last look. A Newton step would lead to a saddle (Dauphin et al. 2014,
    arXiv 1406.2572).

    At a saddle the score is too small to leave it. So if negative curvature is significant, the
    score is raised to its value at some distance. Noise may decide the direction (perturbed
    gradients, Jin et al. 2017, arXiv 1703.00887).

    :param prior: the prior's precisions, (d,).
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
    """Squared distance of each of these points from another one, in nats per record, (looks,)."""
    offsets = torch.stack(list(points)) - point
    return ((offsets @ curvature) * offsets).sum(dim=1) / size


@functools.lru_cache(maxsize=2)
def roots(geometry: Tensor) -> list[Tensor]:
    """M^-1/2 and M^1/2, (d, d) each."""
    return powers(geometry, (-0.5, 0.5))


def _curvature(
    looks: Sequence[Look], metric: Tensor | None, root: Tensor, size: int, bend: float, least: float
) -> tuple[Tensor, Tensor, float]:
    """The mean curvature in coordinates M^1/2 z, corrected for the effect of noise.

    :param metric: the earlier K, which measures distances; None for the first look.
    :param root: M^-1/2, with the last look's M.
    :returns: positive eigenvalues (d,), eigenvectors (d, d), and the noise's standard deviation.
    """
    dim = len(root)
    noise = torch.tensor([look.curvature_sd for look in looks]).to(root)
    for i, look in enumerate(looks[:-1]):  # the last one's geometry is 1 in these coordinates
        noise[i] *= torch.linalg.eigvalsh(root @ look.geometry @ root)[-1]
    change = torch.zeros_like(noise)
    if metric is not None:
        level = (root @ metric @ root).trace() / dim
        points = [look.point for look in looks]
        distances = squared_distances(points, points[-1], metric, size)
        change = (bend * level) ** 2 * distances / dim
    weights = 1 / (noise**2 + change).clamp(min=1e-30)
    weights = weights / weights.sum()
    mean = root @ _sum(weights, [look.curvature for look in looks]) @ root
    sd = (weights * noise).norm().item()
    values, vectors = torch.linalg.eigh((mean + mean.mT) / 2)
    return _denoised(values, sd**2 / 2, least), vectors, sd


def _denoised(values: Tensor, variance: float, least: float) -> Tensor:
    """Positive eigenvalues (d,) of a symmetric matrix, corrected for the effect of noise.

    The noise has this variance off the diagonal, and twice this variance on it. It pushes
    eigenvalues apart, to first order by the sum of variance / (value - other). The correction
    removes this push (Bun, Bouchaud & Potters 2017, arXiv 1610.08104, section 6). It turns pure
    noise into its mean, and hardly changes eigenvalues that are far apart.

    :param values: the noisy eigenvalues, ascending.
    :param least: lower bound of their mean.
    """
    apart = values.unsqueeze(1) - values
    pushed = 2 * variance * (apart / (apart.square() + variance).clamp(min=1e-300)).sum(dim=1)
    mean = max(values.mean().item(), (2 * variance / len(values)) ** 0.5, least)
    floor = min(mean, max(variance**0.5, 1e-9 * mean))
    left = values - pushed
    # Put them in ascending order, without favouring the larger ones.
    upper, lower = left.cummax(dim=0).values, left.flip(0).cummin(dim=0).values.flip(0)
    return ((upper + lower) / 2).clamp(min=floor)


def _sum(weights: Tensor, values: Sequence[Tensor]) -> Tensor:
    return torch.tensordot(weights, torch.stack(list(values)), dims=1)
