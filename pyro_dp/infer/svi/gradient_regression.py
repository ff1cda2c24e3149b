"""The posterior from a regression of released gradients on the draws at which they were made.

With m where the likelihood is greatest and H its curvature there, the gradient at a draw z is

    g = H (m - z) + noise,    of covariance v I + a H,

v the variance of the privacy noise in a coordinate, a = (1 - q) / q that of records sampled at rate
q. Draws are public, and the noise of a release is independent of its draw: m and H are those of a
linear regression, whatever optimizer made the draws and at whatever step size. It is
post-processing. The mean of a tail of iterates (Polyak & Juditsky 1992) is the case of a run that
has arrived, and of no interest in H.

The posterior that knows of the noise is, as in noise-aware inference (arXiv 2410.19371), the one
given the estimate of m, which is N(z, H^-1 + H^-1 R H^-1) for latents z, with R the noise in the
mean gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_dp.infer.posterior.gaussian import Gaussian
from pyro_dp.infer.svi.noisy_curvature import NoisyCurvature
from pyro_dp.infer.svi.released_gradients import ReleasedGradients
from pyro_dp.utils.linalg import cholesky, inverse

FEWEST = 4  # releases for each latent
_ROUNDS, _LAST_ROUNDS = 10, 4
_FAR = 3.0  # root of a draw's mean squared distance in a direction, at which it counts half
_WIDER = 4.0  # how often the noise enters the scale of distances
_LONGEST_MOVE = 1.0  # in a round, in that scale
_SIGNIFICANT = 8.0  # standard deviations
_RELEVANT = 1.0  # squared standard deviations of the posterior
_CURVED = (
    "the gradients of the last half of the run do not fit a line (log likelihood far from "
    "quadratic, or run not converged)"
)
_REACH = 4.0  # standard deviations
_FAR_LESS = 2.0  # certain: of variances
_WIDEST = 6.0  # times the width that the curvature as it was found gives
_FAR_OFF = "the regression leads far away from all draws of the last half of the run"

Prior = Callable[[Tensor, Tensor], Gaussian]


class TooFew(Exception):
    """There are fewer releases than a regression needs; the text is a clause that says so."""


@dataclass(frozen=True, eq=False)
class Regressed:
    """A Gaussian posterior of d latents, from released numbers alone.

    :param mean: of both, (d,).
    :param covariance: as if there had been no noise, (d, d).
    :param aware: with the uncertainty that the noise adds, (d, d).
    :param information: of each latent, what the noise leaves of the records' information about it,
        in [0, 1], (d,). Below a half, noise says more than the records.
    :param unseen: latents that would be far less certain if the curvature were zero wherever it
        does not stand out of the noise, (d,).
    :param reason: why the gradients do not fit a line, or None.
    """

    mean: Tensor
    covariance: Tensor
    aware: Tensor
    information: Tensor
    unseen: Tensor
    reason: str | None

    @property
    def is_doubtful(self) -> bool:
        """Whether the mean of the iterates is likely to be nearer than the regression's."""
        return self.reason is not None or bool(self.unseen.any())


@dataclass(frozen=True, eq=False)
class Line:
    """The log likelihood's gradient as a linear function of the latents.

    :param centre: weighted mean of the draws, (d,).
    :param gradient: of the gradients, (d,).
    :param slopes: H, and how it is known.
    :param noise: covariance of the noise in one gradient, (d, d).
    :param error: of the slopes, in units of ``noise``, (d, d): H x is off by noise (x' error x).
    :param steps: how many gradients the mean is worth.
    :param free: directions along which the records are taken to say nothing, in columns, (d, k).
    """

    centre: Tensor
    gradient: Tensor
    slopes: NoisyCurvature
    noise: Tensor
    error: Tensor
    steps: float
    free: Tensor

    @property
    def curvature(self) -> Tensor:
        """H, positive definite, (d, d)."""
        return self.slopes.mean

    def evidence(self, noise: Tensor) -> Gaussian:
        """What the records say, (d,) and (d, d).

        :param noise: R, in the mean gradient, (d, d).
        """
        known = torch.linalg.solve(self.curvature + noise, self.curvature).mT  # H (H + R)^-1
        precision = known @ self.curvature
        precision = _without((precision + precision.mT) / 2, self.free)
        best = self.centre + torch.linalg.solve(self.curvature, self.gradient)
        return Gaussian(precision @ best, precision)

    def slope_noise(self, mean: Tensor) -> Tensor:
        """What the slope's error adds to R on the way from the centre to this mean, (d, d).

        At most as much again: where slopes are that uncertain, so is their error. But in free
        directions the prior may lead far away, and slopes beside them count in full.
        """
        way, along = mean - self.centre, self.curvature @ self.free
        own = self.free @ torch.linalg.pinv(self.free.mT @ along) @ along.mT @ way
        rest = way - own
        most = (rest @ self.error @ rest).clamp(max=1 / self.steps)
        return (most + own @ self.error @ own) * self.noise

    def curvature_noise(self, noise: Tensor) -> Tensor:
        """What must be added to R for an H that is not known, (d, d).

        H^-1 and H^-1 R H^-1 are convex in H: their means, to second order in its error, are larger
        than they are at its mean.

        :param noise: R, in the mean gradient, (d, d).
        """
        exact = inverse(self.curvature)
        own = self.slopes.squared(exact)
        cross = own @ exact @ noise
        return own + cross + cross.mT + self.slopes.squared(exact @ noise @ exact)


def regressed(history: ReleasedGradients, prior: Prior, bias: float = 0.0) -> Regressed:
    """The posterior, by a regression in which draws count that are near it.

    Far away the log likelihood is not quadratic. A draw counts by its distance to the posterior, in
    the scale of the posterior that knows of the noise; both are found in turns.

    :param history: two releases or more.
    :param prior: its Gaussian factor at a posterior of this mean and covariance; called in each
        round.
    :param bias: size of what clipping does to a coordinate of the gradient of all records
        (:func:`~pyro_dp.infer.svi.gradient_bound.bias`).
    :raises TooFew: for so many latents.
    """
    count, dim = history.draws.shape
    if count < FEWEST * dim:
        raise TooFew(f"{count} releases are too few for a regression on {dim} latents")
    late = history.draws[count // 2 :]
    mean, covariance = late.mean(dim=0), torch.cov(late.mT).reshape(dim, dim)
    scale = covariance
    for _ in range(_ROUNDS):
        line = fitted(history, _nearness(history.draws, mean, scale))
        factor, noise = prior(mean, covariance), line.noise / line.steps
        posterior = factor * line.evidence(noise)
        scale = (factor * line.evidence(_WIDER * noise)).covariance
        mean, covariance = _moved(mean, posterior.mean, scale), posterior.covariance
    noise = line.noise / line.steps + bias**2 * torch.eye(dim).to(mean)
    line = _careful(line, factor, noise)
    for _ in range(_LAST_ROUNDS):
        factor = prior(mean, covariance)
        posterior = factor * line.evidence(noise)
        mean, covariance = posterior.mean, posterior.covariance
    noise = noise + line.slope_noise(mean)
    evidence = line.evidence(noise + line.curvature_noise(noise))
    aware = (factor * evidence).covariance
    least = factor.precision + _without(evidence.precision, line.slopes.flat)
    exact = inverse(line.curvature)
    reason = None if _fits(line, history, aware) else _CURVED
    if not _is_near(mean, aware, late):
        reason = _FAR_OFF
    return Regressed(
        mean,
        (factor * line.evidence(0 * noise)).covariance,
        aware,
        exact.diagonal() / (exact + exact @ noise @ exact).diagonal(),
        inverse(least).diagonal() > _FAR_LESS * aware.diagonal(),
        reason,
    )


@dataclass(frozen=True, eq=False)
class _Slopes:
    """Weighted least squares of the gradients on the draws.

    What clipping takes adds up over all releases, and noise does not: so it counts T times.

    :param weights: of the releases, (T,), of sum 1.
    :param slopes: (d, d), [i, j] of coordinate j of the gradient in latent i.
    :param error: of the slopes, (d, d), in units of the noise.
    :param private: variance of the privacy noise in a coordinate of one gradient.
    :param variance: and with that of sampling, (d,).
    """

    weights: Tensor
    slopes: Tensor
    error: Tensor
    private: Tensor
    variance: Tensor

    @staticmethod
    def of(history: ReleasedGradients, weights: Tensor) -> "_Slopes":
        draws, private = history.draws, history.noise.square()
        if (private > 0).all():
            cut = torch.zeros_like(private) if history.cut is None else history.cut
            weights = weights / (private + len(private) * cut.square())
        weights = weights / weights.sum()
        away = draws - weights @ draws
        weighted = weights.unsqueeze(1) * away
        inner = inverse(weighted.mT @ away)
        slopes = -inner @ (weighted.mT @ (history.gradients - weights @ history.gradients))
        error = inner @ (weighted.mT @ weighted) @ inner
        squares = weights.square()
        variance = (squares @ private) / squares.sum()
        sampling = (1 - history.rate) / history.rate * slopes.diagonal().clamp(min=0.0)
        return _Slopes(weights, slopes, error, variance, variance + sampling)


def fitted(history: ReleasedGradients, weights: Tensor) -> Line:
    """Weighted least squares.

    :param weights: of the draws, positive, (T,); releases with more noise count less anyway.
    """
    draws, gradients, dim = history.draws, history.gradients, history.draws.shape[1]
    found = _Slopes.of(history, weights)
    weights, error, variance = found.weights, found.error, found.private
    centre, gradient = weights @ draws, weights @ gradients
    away, change = draws - centre, gradients - gradient
    steps = 1 / weights.square().sum().item()
    known = NoisyCurvature.of(found.slopes, error, found.variance)
    curvature = known.mean
    residual = weights @ (change + away @ curvature).square().sum(dim=1)
    residual = residual * min(steps / max(steps - dim - 1, 1.0), 2.0)
    sampled = (residual - dim * variance).clamp(min=0.0) / curvature.trace()
    noise = variance * torch.eye(dim).to(curvature) + sampled * curvature
    return Line(centre, gradient, known, noise, error, steps, centre.new_zeros(dim, 0))


def _careful(line: Line, prior: Gaussian, noise: Tensor) -> Line:
    """Records say nothing where they may say nothing, if the prior says enough.

    An interval some times too wide is better than one that is wrong. Where it would be far too
    wide, the curvature that was found is kept, and told to be doubtful.

    :param noise: in the mean gradient, (d, d).
    """
    free = replace(line, free=line.slopes.flat)
    wide, narrow = (prior.precision + each.evidence(noise).precision for each in (free, line))
    root = torch.linalg.solve_triangular(cholesky(wide), cholesky(narrow), upper=False)
    return free if torch.linalg.matrix_norm(root, 2) < _WIDEST else line


def _without(precision: Tensor, directions: Tensor) -> Tensor:
    """Of an estimate that may be anywhere along these directions, (d, k)."""
    along = precision @ directions
    return precision - along @ torch.linalg.pinv(directions.mT @ along) @ along.mT


def _fits(line: Line, history: ReleasedGradients, covariance: Tensor) -> bool:
    """Whether gradients of the last two quarters are about the line, as far as it matters.

    They are not if their mean residual stands out of the noise, and would move the posterior by
    more than a standard deviation in each direction: the log likelihood is not quadratic there, or
    the run is not there yet.

    :param covariance: of the posterior that knows of the noise, (d, d).
    """
    residual = history.gradients - line.gradient
    residual = residual + (history.draws - line.centre) @ line.curvature
    quarter, dim = len(residual) // 4, residual.shape[1]
    for part in residual[-2 * quarter :].split(quarter):
        mean = part.mean(dim=0)
        moved = torch.linalg.solve(line.curvature, mean)
        chi_square = quarter * mean @ _solved(line.noise, mean)
        stands_out = chi_square > dim + _SIGNIFICANT * (2 * dim) ** 0.5
        if stands_out and moved @ _solved(covariance, moved) > _RELEVANT * dim:
            return False
    return True


def _is_near(mean: Tensor, covariance: Tensor, draws: Tensor) -> bool:
    """Whether draws came near the mean, in their own scale or the posterior's."""
    way = mean - draws.mean(dim=0)
    scale = covariance + torch.cov(draws.mT).reshape(covariance.shape)
    return bool(way @ _solved(scale, way) < _REACH**2 * len(way))


def _solved(matrix: Tensor, vector: Tensor) -> Tensor:
    return torch.cholesky_solve(vector.unsqueeze(1), cholesky(matrix)).squeeze(1)


def _nearness(draws: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Weight of each draw, (T,): 1 at the mean, a half at distance ``_FAR`` in each direction."""
    root = cholesky(scale)
    away = torch.linalg.solve_triangular(root, (draws - mean).mT, upper=False)
    return 1 / (1 + (away.square().mean(dim=0) / _FAR**2).square())


def _moved(mean: Tensor, target: Tensor, scale: Tensor) -> Tensor:
    """Towards the target, at most ``_LONGEST_MOVE`` standard deviations in each direction."""
    move = target - mean
    root = torch.linalg.solve_triangular(cholesky(scale), move.unsqueeze(1), upper=False)
    length = root.square().mean().sqrt().clamp(min=1e-300)
    return mean + move * (_LONGEST_MOVE / length).clamp(max=1.0)
