"""The covariance of low rank plus a diagonal that is closest to a given one.

It minimises KL(N(0, S) || N(0, D + L L')) over D and L, which is factor analysis of S by maximum
likelihood. For a fixed D the best L follows from eigenvectors, and a quasi-Newton search finds D:
Jöreskog 1967, Psychometrika 32, 443-482.
"""

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.nn.functional import pad

from pyro_dp.utils.linalg import inverse

# An entry of D may tend to zero (a Heywood case), but a scale must be positive. The bound is this
# part of the variance given all other coordinates, so it costs almost no divergence.
_LEAST = 1e-6
_SEARCH = {"maxiter": 500, "ftol": 0.0, "gtol": 1e-10}


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
        divergence,
        start.log().numpy(),
        jac=True,
        bounds=bounds,
        method="L-BFGS-B",
        options=_SEARCH,
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
