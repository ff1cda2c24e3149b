"""The curvature of the log likelihood, from slopes that noise hides in part."""

from dataclasses import dataclass

import torch
from torch import Tensor

_ALIKE = 0.01  # squared relative spread of the diagonal that is always allowed
_SPREAD = 0.1  # the same of all elements in a row: of a semicircle of eigenvalues from 0.4 to 1.6
_LEAST = 0.5  # of the mean eigenvalue: up to there noise may raise one
_STANDS_OUT = 1.2  # standard deviations; more would doubt what is only small
_ROUNDS = 20


@dataclass(frozen=True, eq=False)
class NoisyCurvature:
    """H, of which a symmetric random matrix in the scale of the latents is known by its slopes.

    The posterior given slopes S = H + noise, whose rows have covariance ``error`` and whose columns
    ``noise``: draws are chosen by what was released before, narrow where by chance the curvature
    looked large. The slopes found there stay too large, by one or two of their standard deviations.
    A posterior is right for any such choice, as long as it knows which directions of the draws were
    narrow. So elements shrink in the basis in which their errors are independent.

    :param mean: positive definite, (d, d).
    :param basis: B, (d, d): the error of the mean is B X B'.
    :param variance: of the elements of X, which are independent but for their symmetry, (d, d).
    :param flat: directions in which no curvature stands out of the noise, though elsewhere it does,
        in columns, (d, k). There H is a guess, and may be far less.
    """

    mean: Tensor
    basis: Tensor
    variance: Tensor
    flat: Tensor

    @staticmethod
    def of(slopes: Tensor, error: Tensor, noise: Tensor) -> "NoisyCurvature":
        """
        :param slopes: (d, d), [i, j] of coordinate j of the gradient in latent i.
        :param error: (d, d); elements [i, j] and [k, j] of the slopes have the covariance
            error[i, k] noise[j].
        :param noise: (d,).
        """
        least = 1e-20 * slopes.square().max()
        size = _diagonal(slopes.diagonal(), (error.diagonal() * noise).clamp(min=least))
        scale = torch.outer(size, size).sqrt()
        errors, turn = torch.linalg.eigh(error / scale)
        variance = torch.outer(errors, turn.square().mT @ (noise / size))
        variance = variance.clamp(min=(least / size.max().square()).clamp(min=1e-300))
        turned = turn.mT @ (slopes / scale) @ turn
        both = 1 / variance + 1 / variance.mT
        found = (turned / variance + turned.mT / variance.mT) / both  # two estimates of each
        level, shrunk, variance, lowest = _shrunk(found, 1 / both)
        values, vectors = torch.linalg.eigh(shrunk)
        flat = _like_zero(found, 1 / both, vectors, level)
        values = values.clamp(min=lowest)
        basis = turn * size.sqrt().unsqueeze(1)
        mean = basis @ (vectors * values) @ vectors.mT @ basis.mT
        directions = (turn / size.sqrt().unsqueeze(1)) @ vectors[:, flat]
        return NoisyCurvature(mean, basis, variance, directions)

    def squared(self, matrix: Tensor) -> Tensor:
        """E[(H - mean) M (H - mean)] of a symmetric M, (d, d)."""
        inside = self.basis.mT @ matrix @ self.basis
        beside = self.variance - self.variance.diagonal().diag()
        found = self.variance * inside + (beside @ inside.diagonal()).diag()
        return self.basis @ found @ self.basis.mT


def _diagonal(found: Tensor, variance: Tensor) -> Tensor:
    """Shrunk to its mean as far as noise explains its spread (James & Stein), and positive."""
    level = _level(found, variance)
    spread = ((found - level).square() - variance).mean().maximum(_ALIKE * level**2)
    shrunk = level + (found - level) * spread / (spread + variance)
    return shrunk.maximum(variance.sqrt().clamp(max=level))


def _like_zero(found: Tensor, noise: Tensor, vectors: Tensor, level: Tensor) -> Tensor:
    """In which directions a symmetric matrix may be zero, and is not what it is elsewhere, (d,).

    Shrinking to the level would hide it: a matrix of a few directions is no random one.

    :param noise: variance of each element beside the diagonal; twice that on it.
    :param vectors: of length 1, orthogonal, in columns, (d, d).
    :param level: mean eigenvalue.
    """
    squares = vectors.square()
    values = (vectors * (found @ vectors)).sum(dim=0)
    sd = (2 * squares * (noise @ squares)).sum(dim=0).sqrt()
    radius = (noise.sum() / len(noise)).sqrt()  # half of how far noise spreads eigenvalues
    return (values < _STANDS_OUT * sd) & (values.clamp(min=0.0) < level - radius)


def _shrunk(found: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A multiple of one plus a random matrix, of likeliest size: multiple, mean and variance.

    And the eigenvalue up to which all may be noise.

    :param found: symmetric, (d, d).
    :param noise: variance of each element beside the diagonal; twice that on it, as in the spread.
    """
    one = torch.eye(len(found)).to(found)
    least = torch.as_tensor(_SPREAD / len(found)).to(found)
    spread = least
    for _ in range(_ROUNDS):
        weights = 1 / (spread + noise)
        level = _level(found.diagonal(), 2 / weights.diagonal())
        away = found - level * one
        excess = away.square() / (1 + one) - noise
        spread = ((excess * weights**2).sum() / (weights**2).sum()).maximum(least)
    kept = spread / (spread + noise)
    variance = kept * noise * (1 + one)
    radius = (variance.sum() / len(found)).sqrt()  # of the eigenvalues of what is not known
    return level, level * one + kept * away, variance, radius.clamp(1e-9 * level, _LEAST * level)


def _level(values: Tensor, variances: Tensor) -> Tensor:
    """Their mean by what each is known to; at least its own standard deviation."""
    total = (1 / variances).sum()
    return ((values / variances).sum() / total).maximum(total.rsqrt())
