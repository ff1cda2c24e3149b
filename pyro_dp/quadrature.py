"""Tilted moments of a few numbers by Gauss-Hermite quadrature around the tilted mode."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pyro_dp.gaussian import product

_NODES = {1: 15, 2: 9}  # per dimension
_MODE_STEPS = 6
_LARGEST_STEP = 4.0  # of Newton's method, in standard deviations of the cavity


@dataclass(frozen=True)
class Tilted:
    """log Z of cavity N(m, V) times likelihood, and what a Gaussian site needs of it.

    :param gradient: g = d log Z / dm, (..., r).
    :param curvature: B = -d^2 log Z / dm^2, (..., r, r).
    :param spread: covariance of the tilted distribution in units of V: I - L' B L for V = L L'.
    :param root: L, (..., r, r).
    """

    gradient: Tensor
    curvature: Tensor
    spread: Tensor
    root: Tensor

    def site(self) -> tuple[Tensor, Tensor]:
        """Precision Lambda = B (I - V B)^-1, and eta - Lambda m = (I - B V)^-1 g.

        (I - V B)^-1 = I + L spread^-1 L' B needs no inverse of V, which may be singular.
        """
        inner = product(product(self.root, _function(self.spread, torch.reciprocal)), self.root.mT)
        gain = product(self.curvature, inner)
        precision = self.curvature + product(gain, self.curvature)
        residual = self.gradient + product(gain, self.gradient.unsqueeze(-1)).squeeze(-1)
        return (precision + precision.mT) / 2, residual


def tilted_moments(
    log_likelihood: Callable[[Tensor], Tensor], mean: Tensor, covariance: Tensor
) -> Tilted:
    """Moments of N(a; mean, covariance) times a likelihood, for a batch of problems.

    The nodes are placed around the mode of each problem, with the curvature there, so that a
    Gaussian likelihood is integrated exactly however narrow it is. Derivatives of log Z are
    averages of derivatives of the log likelihood (Stein's identities): a difference of moments
    would lose them to rounding when the cavity is narrow.

    :param log_likelihood: (..., r) -> (...), elementwise.
    :param mean: (..., r), in float64.
    :param covariance: (..., r, r), positive semidefinite.
    """
    rank = mean.shape[-1]
    root = _function(covariance, lambda x: _non_negative(x).sqrt())
    mode = torch.zeros_like(mean)  # in units of the root: a = mean + L z, z ~ N(0, I)
    for _ in range(_MODE_STEPS):
        precision, gradient = _newton(log_likelihood, mean, root, mode)
        step = product(_function(precision, torch.reciprocal), gradient.unsqueeze(-1)).squeeze(-1)
        length = torch.linalg.vector_norm(step, dim=-1, keepdim=True)
        mode = mode + step * (_LARGEST_STEP / length).clamp(max=1.0)
    precision, _ = _newton(log_likelihood, mean, root, mode)
    width = _function(precision, torch.rsqrt)
    nodes, log_weights = _rule(rank, mean)  # (K, r), (K,)
    shape = (-1, *(1,) * (mean.dim() - 1), rank)
    z = mode + product(width, nodes.reshape(*shape, 1)).squeeze(-1)  # (K, ..., r)
    a = mean + product(root, z.unsqueeze(-1)).squeeze(-1)
    value, gradient, hessian = _derivatives(log_likelihood, a)
    log_weights = log_weights.reshape(shape[:-1]) + value - z.square().sum(-1) / 2
    weights = torch.softmax(log_weights, dim=0).unsqueeze(-1)  # (K, ..., 1)
    mean_gradient = (weights * gradient).sum(0)
    spread = _covariance(weights, z)
    curvature = -(weights.unsqueeze(-1) * hessian).sum(0) - _covariance(weights, gradient)
    return Tilted(mean_gradient, curvature, spread, root)


def _newton(log_likelihood, mean, root, z) -> tuple[Tensor, Tensor]:
    """Precision and gradient at z of log likelihood plus cavity; no curvature of the wrong sign."""
    a = mean + product(root, z.unsqueeze(-1)).squeeze(-1)
    _, gradient, hessian = _derivatives(log_likelihood, a)
    gradient = product(root.mT, gradient.unsqueeze(-1)).squeeze(-1) - z
    curvature = _function(-product(product(root.mT, hessian), root), _non_negative)
    return curvature + torch.eye(z.shape[-1], dtype=z.dtype, device=z.device), gradient


def _derivatives(log_likelihood, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Value (...), gradient (..., r) and Hessian (..., r, r)."""
    with torch.enable_grad():
        a = a.detach().requires_grad_()
        value = log_likelihood(a)
        (gradient,) = torch.autograd.grad(value.sum(), a, create_graph=True)
        rows = []
        for component in gradient.unbind(-1):
            row = None
            if component.requires_grad:
                (row,) = torch.autograd.grad(
                    component.sum(), a, retain_graph=True, allow_unused=True
                )
            rows.append(torch.zeros_like(a) if row is None else row)
    return value.detach(), gradient.detach(), torch.stack(rows, dim=-2).detach()


def _rule(rank: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes (K, r) for N(0, I), and log weights that include 1 / N(node; 0, I)."""
    points, weights = np.polynomial.hermite_e.hermegauss(_NODES[rank])
    grids = np.meshgrid(*[points] * rank, indexing="ij")
    products = np.meshgrid(*[np.log(weights)] * rank, indexing="ij")
    nodes = torch.from_numpy(np.stack([g.ravel() for g in grids], axis=-1)).to(like)
    log_weights = torch.from_numpy(sum(p.ravel() for p in products)).to(like)
    return nodes, log_weights + nodes.square().sum(-1) / 2


def _covariance(weights: Tensor, values: Tensor) -> Tensor:
    """Of values (K, ..., r) with weights (K, ..., 1)."""
    centred = values - (weights * values).sum(0)
    return (weights.unsqueeze(-1) * centred.unsqueeze(-1) * centred.unsqueeze(-2)).sum(0)


def _function(matrix: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of a symmetric matrix (..., r, r), r <= 2, by its eigenvalues.

    In closed form: a broken record's NaN stays in its place, where torch.linalg raises for all.
    """
    if matrix.shape[-1] == 1:
        return function(matrix)
    (a, b), (_, d) = (row.unbind(-1) for row in matrix.unbind(-2))
    centre, radius = (a + d) / 2, torch.hypot((a - d) / 2, b)
    high, low = function(centre + radius), function(centre - radius)
    slope = torch.where(radius > 0, (high - low) / (2 * radius), 0.0)[..., None, None]
    identity = torch.eye(2, dtype=matrix.dtype, device=matrix.device)
    level = ((high + low) / 2)[..., None, None]
    return level * identity + slope * (matrix - centre[..., None, None] * identity)


def _non_negative(x: Tensor) -> Tensor:
    return x.clamp(min=0.0)
