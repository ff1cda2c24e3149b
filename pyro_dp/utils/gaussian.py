"""Gaussians in natural parameters (eta, Lambda), and the closest covariance of low rank.

Precision is Lambda, eta = Lambda mean.

A precision of shape (d, d) is full, one of shape (d,) diagonal; a covariance has the same shape as
its precision.

Factor analysis by maximum likelihood fits S by D + L L' with a diagonal D. It minimises KL(N(0, S)
|| N(0, D + L L')). For a fixed D the best L follows from eigenvectors, and a quasi-Newton search
finds D: Jöreskog 1967, Psychometrika 32, 443-482.
"""

from dataclasses import dataclass

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.nn.functional import pad

from pyro_dp.utils.linalg import apply, cholesky, inverse, restricted

# An entry of D may tend to zero (a Heywood case), but a scale must be positive. The bound is this
# part of the coordinate's conditional variance, so it costs almost no divergence.
_LEAST = 1e-6
_SEARCH = {"maxiter": 500, "ftol": 0.0, "gtol": 1e-10}


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
        """The same factor on more coordinates. It says nothing about the others.

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


def low_rank(covariance: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Scale s (d,) and factor F (d, rank), whose covariance is s (F F' + I) s.

    It has the variances of S exactly, and it equals S if S has this form. Otherwise it is a local
    minimum of the divergence. The same S gives the same result.

    :param covariance: S, (d, d), positive definite, float64.
    """
    deviations = covariance.diagonal().sqrt()
    correlation = (covariance / deviations / deviations.unsqueeze(-1)).cpu()
    size, held = len(correlation), min(rank, len(correlation))
    given_others = 1.0 / inverse(correlation).diagonal()

    def divergence(log_diagonal: np.ndarray) -> tuple[float, np.ndarray]:
        """Twice KL at the best L, and its gradient."""
        values, vectors = _whitened(correlation, log_diagonal)
        missed = values < 1.0
        missed[: size - held] = True
        left = values[missed].clamp(min=torch.finfo(values.dtype).tiny)
        gradient = vectors[:, missed].square() @ (1.0 - left)
        return float((left - 1.0 - left.log()).sum()), gradient.numpy()

    start = (1.0 - held / (2 * size)) * given_others  # Jöreskog's
    lowest = (_LEAST * given_others).log()
    bounds = scipy.optimize.Bounds(lowest.numpy(), np.zeros(size))
    found = scipy.optimize.minimize(
        divergence, start.log().numpy(), jac=True, bounds=bounds, method="L-BFGS-B", options=_SEARCH
    )
    values, vectors = _whitened(correlation, found.x)
    factor = (vectors * (values - 1.0).clamp(min=0.0).sqrt())[:, size - held :]
    factor = pad(factor, (0, rank - held)).to(covariance.device)
    # At the minimum this is the square root of D. It keeps the variances where the search stops
    # a little short of it.
    return deviations / (1.0 + factor.square().sum(dim=1)).sqrt(), factor


def _whitened(correlation: Tensor, log_diagonal: np.ndarray) -> tuple[Tensor, Tensor]:
    """Eigenvalues, which ascend, and eigenvectors of D^-1/2 R D^-1/2."""
    roots = torch.from_numpy(log_diagonal).mul(-0.5).exp()
    return torch.linalg.eigh(correlation * roots * roots.unsqueeze(-1))
