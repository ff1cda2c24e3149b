"""Gaussian posteriors from sums that were released with noise."""

import torch
from torch import Tensor

from pyro_dp.utils.linalg import cholesky


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
