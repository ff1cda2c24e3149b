"""Fisher's information of a logistic regression, from the Pólya-Gamma curvature that was released.

With c^2 = u^2 + t, u = x . w, the E-step of a record is E[omega] = g(c^2), and it moves with the
weights: the information is sum_n h(u_n) x_n x_n', h(u) = g(c^2) + 2 u^2 g'(c^2), which for t = 0 is
that of the logistic likelihood. What was released is sum_n g(c_n^2) x_n x_n'. The step from one to
the other needs the rows, or their distribution: here they count as Gaussian, with the second
moments that give what was released.
"""

import torch
from torch import Tensor

from pyro_dp.vips.models.polya_gamma import polya_gamma_mean

_FARTHEST, _NODES = 8.0, 1001  # standard deviations, for sums over a Gaussian's density
_SMALL = 1e-5  # of a difference of c^2
_BISECTIONS = 60


def logit_information(curvature: Tensor, mean: Tensor, covariance: Tensor, size: int) -> Tensor:
    """(d, d), nowhere larger than the curvature.

    :param curvature: positive definite, (d, d).
    :param mean: of the weights, (d,).
    :param covariance: of the weights, (d, d).
    :param size: number of records.
    """
    nodes = torch.linspace(-_FARTHEST, _FARTHEST, _NODES).to(mean)
    squared = nodes.square()
    weights = torch.softmax(-squared / 2, dim=0)
    spread = (4 * (covariance * curvature).sum() / size).item()  # t, as omega is about 1/4

    def moments(variance: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """E[k(u)] and E[k(u) u^2] / variance, for k = g and k = h."""
        g = polya_gamma_mean(variance * squared + spread)
        slope = (polya_gamma_mean(variance * squared + spread + _SMALL) - g) / _SMALL
        h = g + 2 * variance * squared * slope
        return weights @ g, weights @ (g * squared), weights @ h, weights @ (h * squared)

    # Of u: from E[g u^2], which was released, and no row is longer than 1.
    released = (mean @ curvature @ mean).item() / size
    least, most = 0.0, max((mean @ mean).item(), 1e-12)
    for _ in range(_BISECTIONS):
        variance = (least + most) / 2
        below = variance * moments(variance)[1].item() < released
        least, most = (variance, most) if below else (least, variance)
    g, g_along, h, h_along = moments(most)
    # The rows' second moments S: curvature / N = S g + along along' (g_along - g) / variance.
    along = curvature @ mean / (size * g_along)  # S mean
    outer = torch.outer(along, along) / most
    second_moment = (curvature / size - outer * (g_along - g)) / g
    information = size * (second_moment * h + outer * (h_along - h))
    return _within(information, curvature, least=(h_along / g_along).item())


def _within(information: Tensor, curvature: Tensor, least: float) -> Tensor:
    """Between ``least`` times the curvature and the curvature: noise may have driven it out."""
    root = torch.linalg.cholesky(curvature)
    half = torch.linalg.solve_triangular(root, information, upper=False)
    ratio = torch.linalg.solve_triangular(root, half.mT, upper=False)
    values, vectors = torch.linalg.eigh((ratio + ratio.mT) / 2)
    back = root @ vectors
    return (back * values.clamp(least, 1.0)) @ back.mT
