"""Tilted moments of a few numbers by Gauss-Hermite quadrature around the tilted mode."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pyro_dp.utils.linalg import product

_NODES = {1: 15, 2: 9}  # per dimension
_MODE_STEPS = 10
_FIRST_STEP = 4.0  # at most, in standard deviations of the cavity


@dataclass(frozen=True)
class Tilted:
    """log Z of cavity N(m, V), V = L L', times likelihood, and what a Gaussian site needs of it.

    With a = m + L z and z standard normal in the cavity:

    :param gradient: g = d log Z / dm, (..., r).
    :param curvature: B = -d^2 log Z / dm^2, (..., r, r).
    :param shift: tilted mean of z, which is L' g, (..., r).
    :param spread: tilted covariance of z, which is I - L' B L, (..., r, r).
    :param cross: minus the tilted covariance of the log likelihood's gradient and z, which is
        B L, (..., r, r).
    """

    gradient: Tensor
    curvature: Tensor
    shift: Tensor
    spread: Tensor
    cross: Tensor

    def site(self) -> tuple[Tensor, Tensor]:
        """Precision Lambda = B (I - V B)^-1, and eta - Lambda m = (I - B V)^-1 g.

        That is B + B L spread^-1 L' B and g + B L spread^-1 L' g: no inverse of V, which may be
        singular, and no difference of numbers that are nearly equal.
        """
        gain = product(self.cross, _function(self.spread, torch.reciprocal))
        precision = self.curvature + product(gain, self.cross.mT)
        residual = self.gradient + product(gain, self.shift.unsqueeze(-1)).squeeze(-1)
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
    root = _function(covariance, lambda x: x.clamp(min=0.0).sqrt())
    mode, precision = _mode(log_likelihood, mean, root)
    width = _function(precision, torch.rsqrt)
    nodes, log_weights = _rule(rank, mean)  # (K, r), (K,)
    shape = (-1, *(1,) * (mean.dim() - 1), rank)
    z = mode + product(width, nodes.reshape(*shape, 1)).squeeze(-1)  # (K, ..., r)
    value, gradient, hessian = _derivatives(log_likelihood, _at(mean, root, z))
    log_weights = log_weights.reshape(shape[:-1]) + value - z.square().sum(-1) / 2
    weights = torch.softmax(log_weights, dim=0).unsqueeze(-1)  # (K, ..., 1)
    mean_gradient, shift = (weights * gradient).sum(0), (weights * z).sum(0)
    gradient, z = gradient - mean_gradient, z - shift
    curvature = -(weights.unsqueeze(-1) * hessian).sum(0) - _covariance(weights, gradient, gradient)
    return Tilted(
        gradient=mean_gradient,
        curvature=curvature,
        shift=shift,
        spread=_covariance(weights, z, z),
        cross=-_covariance(weights, gradient, z),
    )


def _mode(log_likelihood, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Mode in z, (..., r), and the precision there: Newton's method in a trust region.

    Each problem takes the same number of steps, whatever the others do.
    """
    z = torch.zeros_like(mean)
    radius = torch.full_like(z[..., :1], _FIRST_STEP)
    value, precision, gradient = _newton(log_likelihood, mean, root, z)
    for _ in range(_MODE_STEPS):
        step = product(_function(precision, torch.reciprocal), gradient.unsqueeze(-1)).squeeze(-1)
        length = torch.linalg.vector_norm(step, dim=-1, keepdim=True)
        trial = z + step * (radius / length).clamp(max=1.0)
        there = _newton(log_likelihood, mean, root, trial)
        better = (there[0] >= value - 1e-9 * value.abs()).unsqueeze(-1)
        z = torch.where(better, trial, z)
        value = torch.where(better.squeeze(-1), there[0], value)
        precision = torch.where(better.unsqueeze(-1), there[1], precision)
        gradient = torch.where(better, there[2], gradient)
        radius = torch.where(better, 2 * radius, torch.minimum(radius, length) / 4)
    return z, precision


def _newton(log_likelihood, mean: Tensor, root: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log tilted density at z, its precision (no curvature of the wrong sign) and gradient."""
    value, gradient, hessian = _derivatives(log_likelihood, _at(mean, root, z))
    gradient = product(root.mT, gradient.unsqueeze(-1)).squeeze(-1) - z
    curvature = _function(-product(product(root.mT, hessian), root), lambda x: x.clamp(min=0.0))
    identity = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
    return value - z.square().sum(-1) / 2, curvature + identity, gradient


def _at(mean: Tensor, root: Tensor, z: Tensor) -> Tensor:
    return mean + product(root, z.unsqueeze(-1)).squeeze(-1)


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


def _covariance(weights: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Of centred values (K, ..., r) with weights (K, ..., 1)."""
    return (weights.unsqueeze(-1) * one.unsqueeze(-1) * other.unsqueeze(-2)).sum(0)


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
