"""Sums of outer products: what records add to them, and what can be read from a noisy one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dp.mechanism.outer_products import counted, weighted_gram
from pyro_dp.utils.linalg import noise_radius, stacked, unstacked


def stacked_size(dim: int) -> int:
    """Number of coordinates of a symmetric matrix."""
    return dim * (dim + 1) // 2


@dataclass(frozen=True)
class WeightedSquares:
    """w_n x_n x_n' of B records, as :func:`~pyro_dp.utils.linalg.stacked` would stack it.

    One of :class:`~pyro_dp.mechanism.contributions.Contributions`; the matrices are never made.

    :param rows: x, (B, d) in float64.
    :param weights: w, (B,).
    """

    rows: Tensor
    weights: Tensor

    def norms(self) -> Tensor:
        return (self.weights.abs() * self.rows.square().sum(dim=1)).unsqueeze(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        # What does not count is zero before anything can overflow.
        rows = counted(self.rows, weights)
        own = counted(self.weights.unsqueeze(1), weights) * weights
        total = weighted_gram(rows, own)
        return stacked((total + total.T) / 2)

    def dense(self) -> Tensor:
        products = self.rows.unsqueeze(2) * self.rows.unsqueeze(1)
        return self.weights.unsqueeze(1) * torch.vmap(stacked)(products)


@dataclass(frozen=True)
class NoisySecondMoment:
    """A sum of outer products, positive semidefinite but for noise.

    Two matrices can be had from it. :attr:`known` has no negative eigenvalue: that much the records
    say. In :attr:`stepping` eigenvalues below the spectral radius of the noise are raised to it:
    they cannot be told from zero, and to divide by them would blow up a mean. That makes the mean
    smaller; it is no information about the latents. Without noise both are what was released.

    :param values: eigenvalues, ascending, (d,).
    :param vectors: eigenvectors in columns, (d, d).
    :param radius: of the noise.
    """

    values: Tensor
    vectors: Tensor
    radius: float

    @staticmethod
    def of(coordinates: Tensor, dim: int, noise: float) -> "NoisySecondMoment":
        """
        :param coordinates: stacked, (d (d + 1) / 2,).
        :param noise: standard deviation of the noise in each of them.
        """
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
        """Coordinates most of whose variance lies where eigenvalues cannot be told from zero, (d,).

        :param precision: of the prior, a number.
        """
        variances = 1 / (precision + self.known)
        return mostly_in(self.vectors, variances, self.values < self.radius)

    def matrix(self, values: Tensor) -> Tensor:
        """With these eigenvalues, (d, d)."""
        return (self.vectors * values) @ self.vectors.T


def mostly_in(directions: Tensor, variances: Tensor, hidden: Tensor) -> Tensor:
    """Coordinates more than half of whose variance lies in hidden directions, (d,).

    :param directions: in columns, (d, k).
    :param variances: along each, (k,).
    :param hidden: which of them are, (k,).
    """
    parts = directions.square() * variances
    return parts[:, hidden].sum(dim=1) > 0.5 * parts.sum(dim=1)
