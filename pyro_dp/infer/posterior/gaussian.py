"""Gaussians in natural parameters (eta, Lambda): precision Lambda, eta = Lambda mean.

A precision of shape (d, d) is full, one of shape (d,) diagonal; a covariance has the same shape as
its precision.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dp.utils.linalg import apply, cholesky, inverse, restricted


@dataclass(frozen=True)
class Gaussian:
    """A Gaussian factor, not necessarily normalisable.

    :param eta: (d,).
    :param precision: (d, d) or (d,).
    """

    eta: Tensor
    precision: Tensor

    @staticmethod
    def from_moments(mean: Tensor, covariance: Tensor) -> "Gaussian":
        precision = inverse(covariance)
        return Gaussian(apply(precision, mean), precision)

    def to(self, device: torch.device) -> "Gaussian":
        return Gaussian(self.eta.to(device), self.precision.to(device))

    @property
    def covariance(self) -> Tensor:
        return inverse(self.precision)

    @property
    def mean(self) -> Tensor:
        if self.precision.dim() == 1:
            return self.eta / self.precision
        return torch.cholesky_solve(self.eta.unsqueeze(1), cholesky(self.precision)).squeeze(1)

    def __mul__(self, other: "Gaussian") -> "Gaussian":
        return Gaussian(self.eta + other.eta, self.precision + other.precision)

    def __truediv__(self, other: "Gaussian") -> "Gaussian":
        return Gaussian(self.eta - other.eta, self.precision - other.precision)

    def __pow__(self, power: float) -> "Gaussian":
        return Gaussian(power * self.eta, power * self.precision)

    def restricted(self, places: Tensor) -> "Gaussian":
        """The factor as a function of these coordinates, the others at zero."""
        return Gaussian(self.eta[places], restricted(self.precision, places))

    def embedded(self, places: Tensor, size: int) -> "Gaussian":
        """The same factor on more coordinates, of which it says nothing about the others.

        :param places: (d,), where its own coordinates are.
        """
        eta = self.eta.new_zeros(size).index_copy(0, places, self.eta)
        if self.precision.dim() == 1:
            return Gaussian(eta, self.eta.new_zeros(size).index_copy(0, places, self.precision))
        precision = self.eta.new_zeros(size, size)
        precision[places.unsqueeze(1), places] = self.precision
        return Gaussian(eta, precision)

    def with_precision(self, precision: Tensor, centre: Tensor) -> "Gaussian":
        """Another precision, and the same gradient of the log density at ``centre``."""
        return Gaussian(self.eta + apply(precision - self.precision, centre), precision)
