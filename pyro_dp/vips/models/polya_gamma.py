"""Pólya-Gamma means, and the information of a logistic likelihood from the released curvature.

With c^2 = u^2 + t and u = x . w, the E-step of a record is E[omega] = g(c^2). It depends on the
weights. The information is sum_n h(u_n) x_n x_n', h(u) = g(c^2) + 2 u^2 g'(c^2). For t = 0 this is
the information of the logistic likelihood. The release is sum_n g(c_n^2) x_n x_n'. The step from
one to the other needs the rows, or their distribution. Here they are assumed Gaussian, with second
moments that match the release.
"""

import torch
from torch import Tensor

_FARTHEST, _NODES = 8.0, 1001  # standard deviations, for sums over a Gaussian's density
_SMALL = 1e-5  # step in c^2 of a finite difference
_BISECTIONS = 60


def polya_gamma_mean(squared: Tensor) -> Tensor:
    """Mean of PG(1, c), tanh(c / 2) / (2 c), from c^2: at most 1/4."""
    c = squared.clamp(min=0.0).sqrt()
    near_zero = 0.25 - squared / 48  # the next term is c^4 / 480
    return torch.where(c < 1e-3, near_zero, torch.tanh(c / 2) / (2 * c))


def logit_information(curvature: Tensor, mean: Tensor, covariance: Tensor, size: int) -> Tensor:
    """The information of the likelihood, (d, d), between 0 and the curvature.

    :param curvature: the released one, positive definite, (d, d).
    :param mean: mean of the weights, (d,); ``covariance`` is theirs, (d, d).
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

    # The variance of u follows from the released E[g u^2], and no row is longer than 1.
    released = (mean @ curvature @ mean).item() / size
    least, most = 0.0, max((mean @ mean).item(), 1e-12)
    for _ in range(_BISECTIONS):
        variance = (least + most) / 2
        below = variance * moments(variance)[1].item() < released
        least, most = (variance, most) if below else (least, variance)
    g, g_along, h, h_along = moments(most)
    # The rows' second moments S: `curvature / N = S g + along along' (g_along - g) / variance`.
    along = curvature @ mean / (size * g_along)  # S mean
    outer = torch.outer(along, along) / most
    second_moment = (curvature / size - outer * (g_along - g)) / g
    information = size * (second_moment * h + outer * (h_along - h))
    return _within(information, curvature, least=(h_along / g_along).item())


def _within(information: Tensor, curvature: Tensor, least: float) -> Tensor:
    """Clamp the information between ``least`` times the curvature and the curvature."""
    root = torch.linalg.cholesky(curvature)
    half = torch.linalg.solve_triangular(root, information, upper=False)
    ratio = torch.linalg.solve_triangular(root, half.mT, upper=False)
    values, vectors = torch.linalg.eigh((ratio + ratio.mT) / 2)
    back = root @ vectors
    return (back * values.clamp(least, 1.0)) @ back.mT
