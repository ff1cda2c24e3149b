"""Noisy sums: counts, Gaussian posteriors and outer products from released statistics."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dp.mechanism.contributions import counted, weighted_gram
from pyro_dp.utils.linalg import cholesky, noise_radius, stacked, unstacked

_FAR = 50.0  # standard deviations below zero


def expected_counts(noisy: Tensor, sd: float, prior_mean: Tensor) -> Tensor:
    """E[x | noisy] for x ~ Exponential with this mean and noisy ~ N(x, sd^2).

    This is the mean of N(noisy - sd^2 / prior_mean, sd^2), truncated to positive numbers. The
    released count if it exceeds the noise, the prior's mean if not.

    :param noisy: any shape.
    :param sd: the noise's; 0 for none.
    :param prior_mean: > 0, of a shape that broadcasts.
    :returns: >= 0.
    """
    if sd == 0:
        return noisy.clamp(min=0.0)
    below = sd / prior_mean - noisy / sd  # the mean before truncation, in sds below zero
    hazard = math.sqrt(2 / math.pi) / torch.special.erfcx(below / math.sqrt(2))
    inverse = 1 / below.clamp(min=_FAR)
    far = inverse * (1 - 2 * inverse.square())  # hazard - below, without cancellation
    return sd * torch.where(below > _FAR, far, (hazard - below).clamp(min=0.0))


def noisy_regression(
    information: Tensor, sums: Tensor, noise: Tensor, precision: Tensor
) -> tuple[Tensor, Tensor]:
    """Gaussian posteriors of J vectors w_j ~ N(0, diag(precision_j)^-1): means and covariances.

    Without noise the likelihood is exp(sums_j . w - w' information_j w / 2). With noise in the sums
    that becomes what N(sums_j; information_j w, information_j + diag(noise)) says about w.

    :param information: (J, d, d).
    :param sums: (J, d).
    :param noise: variances, (d,); all zero or all positive.
    :param precision: (J, d).
    """
    sums = sums.unsqueeze(2)
    if noise.any():
        gain = torch.linalg.solve(information + torch.diag(noise), information).mT
        information, sums = gain @ information, gain @ sums
    symmetric = (information + information.mT) / 2 + torch.diag_embed(precision)
    covariance = torch.cholesky_inverse(cholesky(symmetric))
    return (covariance @ sums).squeeze(2), covariance


def stacked_size(dim: int) -> int:
    """Number of coordinates of a symmetric matrix."""
    return dim * (dim + 1) // 2


@dataclass(frozen=True)
class WeightedSquares:
    """w_n x_n x_n' of B records, as :func:`~pyro_dp.utils.linalg.stacked` would stack it.

    One of :class:`~pyro_dp.mechanism.contributions.Contributions`; the matrices are never made.
    """

    rows: Tensor  # x, (B, d) in float64
    weights: Tensor  # w, (B,)

    def norms(self) -> Tensor:
        return (self.weights.abs() * self.rows.square().sum(dim=1)).unsqueeze(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        # Masked elements become zero before anything can overflow.
        rows = counted(self.rows, weights)
        own = counted(self.weights.unsqueeze(1), weights) * weights
        total = weighted_gram(rows, own)
        return stacked((total + total.T) / 2)

    def dense(self) -> Tensor:
        products = self.rows.unsqueeze(2) * self.rows.unsqueeze(1)
        return self.weights.unsqueeze(1) * torch.vmap(stacked)(products)


@dataclass(frozen=True)
class NoisySecondMoment:
    """A sum of outer products, positive semidefinite except for noise.

    Two matrices can be had from it. :attr:`known` has no negative eigenvalue: that much the records
    say. In :attr:`stepping` eigenvalues below the spectral radius of the noise are raised to it.
    The noise hides whether they are zero, and dividing by them would blow up a mean. That makes the
    mean smaller; it is no information about the latents. Without noise both are the released sums.
    """

    values: Tensor  # eigenvalues, ascending, (d,)
    vectors: Tensor  # eigenvectors in columns, (d, d)
    radius: float  # the noise's

    @staticmethod
    def of(coordinates: Tensor, dim: int, noise: float) -> "NoisySecondMoment":
        """From stacked coordinates, (d (d + 1) / 2,), and the noise's deviation in each."""
        values, vectors = torch.linalg.eigh(unstacked(coordinates, dim))
        return NoisySecondMoment(values, vectors, noise_radius(noise, dim))

    @property
    def known(self) -> Tensor:
        """Eigenvalues, (d,)."""
        return self.values.clamp(min=0.0)

    @property
    def stepping(self) -> Tensor:
        """Eigenvalues, (d,)."""
        return self.values.clamp(min=self.radius)

    def hides(self, precision: Tensor) -> Tensor:
        """Coordinates with most of their variance at eigenvalues below the noise, (d,).

        :param precision: the prior's, a number.
        """
        variances = 1 / (precision + self.known)
        parts = self.vectors.square() * variances
        return parts[:, self.values < self.radius].sum(dim=1) > 0.5 * parts.sum(dim=1)

    def matrix(self, values: Tensor) -> Tensor:
        """The matrix with these eigenvalues, (d, d)."""
        return (self.vectors * values) @ self.vectors.T
