"""Tilted moments of one or two numbers by Gauss-Hermite quadrature.

Each number is a separate tensor. The first number is constant along the second axis of nodes. So a
density computes terms of the first number only once for that axis.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_dp.utils.linalg import product

NODES = {1: 15, 2: 10}  # per number
_MODE_STEPS = 10
_FIRST_STEP = 4.0  # at most, in standard deviations of the cavity
_LEAST_SPREAD = 1e-6  # near 1 around a mode; below this, rounding decides the moments
_LARGEST_VALUE = 1e10  # rounding of larger log densities exceeds differences between nodes


class Derivatives(NamedTuple):
    """A log density with its derivatives in r numbers; the tensors broadcast.

    :param gradient: r tensors.
    :param hessian: the lower triangle, by rows: one tensor, or three.
    """

    value: Tensor
    gradient: list[Tensor]
    hessian: list[Tensor]


Density = Callable[[list[Tensor]], Derivatives]


@dataclass(frozen=True)
class Tilted:
    """log Z of cavity N(m, V), V = L L', times likelihood, with the derivatives that a Gaussian
    site needs.

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

        The forms B + B L spread^-1 L' B and g + B L spread^-1 L' g are equal to these. They avoid
        the inverse of V, which may be singular, and differences of nearly equal numbers.
        """
        gain = product(self.cross, _function(self.spread, torch.reciprocal))
        precision = self.curvature + product(gain, self.cross.mT)
        residual = self.gradient + product(gain, self.shift.unsqueeze(-1)).squeeze(-1)
        return (precision + precision.mT) / 2, residual


def tilted_moments(density: Density, mean: Tensor, covariance: Tensor) -> Tilted:
    """Moments of N(a; mean, covariance) times a likelihood, for a batch of problems.

    The nodes are placed around the mode of each problem, with the curvature there. So a
    Gaussian likelihood is integrated exactly, however narrow it is. Derivatives of log Z are
    averages of derivatives of the log likelihood (Stein's identities). A difference
    of moments would lose them to rounding when the cavity is narrow.

    :param density: takes r tensors with one axis of nodes for each number, and then (...).
    :param mean: (..., r), in float64.
    :param covariance: (..., r, r), positive semidefinite.
    """
    root = _root(covariance)
    mode, precision = _mode(density, mean, root)
    width = _root(_function(precision, torch.reciprocal))
    return _moments(density, mean, root, mode, width, NODES[mean.shape[-1]])


def moments_near_mean(density: Density, mean: Tensor, covariance: Tensor, nodes: int) -> Tilted:
    """As :func:`tilted_moments`, with few nodes around the mean of a narrow cavity.

    :param nodes: for each number.
    """
    return _moments(density, mean, _root(covariance), None, None, nodes)


def by_autodiff(log_likelihood: Callable[[Tensor], Tensor], a: list[Tensor]) -> Derivatives:
    """Derivatives of any log likelihood, (..., r) -> (...), elementwise."""
    with torch.enable_grad():
        a = [x.detach().requires_grad_() for x in torch.broadcast_tensors(*a)]
        value = log_likelihood(torch.stack(a, dim=-1))
        gradient = _gradient(value, a)
        rows = [_gradient(g, a[: i + 1]) for i, g in enumerate(gradient)]
    hessian = [h.detach() for row in rows for h in row]
    return Derivatives(value.detach(), [g.detach() for g in gradient], hessian)


def _gradient(value: Tensor, a: list[Tensor]) -> list[Tensor]:
    if not value.requires_grad:
        return [torch.zeros_like(x) for x in a]
    return list(torch.autograd.grad(value.sum(), a, create_graph=True, materialize_grads=True))


def _moments(
    density: Density,
    mean: Tensor,
    root: Tensor,
    centre: Tensor | None,
    width: Tensor | None,
    count: int,
) -> Tilted:
    """Moments from nodes z = centre + width n (lower triangular), or z = n if both are None."""
    rank, batch = mean.shape[-1], mean.shape[:-1]
    *axes, features, log_weights = (torch.from_numpy(x).to(mean) for x in _rule(rank, count))
    axes = [n.reshape(*n.shape, *(1,) * len(batch)) for n in axes]
    z = axes if centre is None or width is None else _moved(centre, width, axes)
    value, gradient, hessian = density(_moved(mean, root, z))
    log_weights = log_weights.reshape(*log_weights.shape, *(1,) * len(batch))
    value = value + (log_weights - sum(x.square() for x in z) / 2)
    weights = torch.softmax(value.reshape(count**rank, -1), dim=0)  # (K, B)

    def averages(x: Tensor) -> Tensor:
        """Sums over the nodes: x times 1, times n, and times n n'."""
        return (features @ x).reshape(-1, *batch)

    def along(x: Tensor) -> Tensor:
        return x.expand(value.shape).reshape(weights.shape)

    _, *moments = averages(weights)
    shift = torch.stack(moments[:rank], dim=-1)
    spread = _symmetric(moments[rank:]) - shift.unsqueeze(-1) * shift.unsqueeze(-2)
    slopes = [along(g) for g in gradient]
    levels = [(weights * g).sum(0) for g in slopes]
    slopes = [g.sub(level) for g, level in zip(slopes, levels, strict=True)]
    weighted = [weights * g for g in slopes]
    cross = torch.stack([torch.stack(tuple(averages(g)[1 : 1 + rank]), -1) for g in weighted], -2)
    curvature: list[Tensor] = []
    for i in range(rank):
        for j in range(i + 1):
            each = torch.addcmul(along(hessian[len(curvature)]), slopes[i], slopes[j])
            curvature.append(-(weights * each).sum(0).reshape(batch))
    usual = value[(count // 2,) * rank].abs() < _LARGEST_VALUE
    spread = torch.where(usual[..., None, None], spread, torch.nan)
    if centre is not None and width is not None:
        # If no mode was found, one node has all the weight, and rounding would decide the site.
        spread = _function(spread, lambda x: torch.where(x > _LEAST_SPREAD, x, torch.nan))
        shift = centre + product(width, shift.unsqueeze(-1)).squeeze(-1)
        spread = product(product(width, spread), width.mT)
        cross = product(cross, width.mT)
    return Tilted(
        gradient=torch.stack([level.reshape(batch) for level in levels], dim=-1),
        curvature=_symmetric(curvature),
        shift=shift,
        spread=spread,
        cross=-cross,
    )


def _mode(density: Density, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Mode in z, (..., r), and the precision there: Newton's method in a trust region.

    Each problem takes a fixed number of steps, which no other problem can change.
    """
    z = torch.zeros_like(mean)
    radius = torch.full_like(z[..., :1], _FIRST_STEP)
    value, precision, gradient = _newton(density, mean, root, z)
    for _ in range(_MODE_STEPS):
        step = product(_function(precision, torch.reciprocal), gradient.unsqueeze(-1)).squeeze(-1)
        length = torch.linalg.vector_norm(step, dim=-1, keepdim=True)
        trial = z + step * (radius / length).clamp(max=1.0)
        there = _newton(density, mean, root, trial)
        better = (there[0] >= value - 1e-9 * value.abs()).unsqueeze(-1)
        z = torch.where(better, trial, z)
        value = torch.where(better.squeeze(-1), there[0], value)
        precision = torch.where(better.unsqueeze(-1), there[1], precision)
        gradient = torch.where(better, there[2], gradient)
        radius = torch.where(better, 2 * radius, torch.minimum(radius, length) / 4)
    return z, precision


def _newton(
    density: Density, mean: Tensor, root: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log tilted density at z, its precision (negative curvature counts as zero) and gradient."""
    value, gradients, hessians = density(_moved(mean, root, list(z.unbind(-1))))
    hessian = _symmetric([h.expand(value.shape) for h in hessians])
    gradient = torch.stack([g.expand(value.shape) for g in gradients], dim=-1)
    gradient = product(root.mT, gradient.unsqueeze(-1)).squeeze(-1) - z
    curvature = _function(-product(product(root.mT, hessian), root), lambda x: x.clamp(min=0.0))
    identity = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
    return value - z.square().sum(-1) / 2, curvature + identity, gradient


def _moved(mean: Tensor, root: Tensor, z: list[Tensor]) -> list[Tensor]:
    """The r numbers mean + root z, for a lower triangular root."""
    count = len(z)
    return [sum((root[..., i, j] * z[j] for j in range(i + 1)), mean[..., i]) for i in range(count)]


@cache
def _rule(rank: int, count: int) -> list[np.ndarray]:
    """Nodes for N(0, I).

    :returns: nodes n, on an axis for each number; 1, n and n n' of each node, (F, K); log weights,
        (count,) or (count, count). Weights include 1 / N(n; 0, I).
    """
    points, weights = np.polynomial.hermite_e.hermegauss(count)
    n = np.stack(np.meshgrid(*[points] * rank, indexing="ij")).reshape(rank, -1)
    products = [n[i] * n[j] for i in range(rank) for j in range(i + 1)]
    features = np.stack([np.ones_like(n[0]), *n, *products])
    log_weights = np.sum(np.meshgrid(*[np.log(weights) + points**2 / 2] * rank), axis=0)
    axes = [points.reshape(-1, *(1,) * (rank - 1)), points.reshape(1, -1)][:rank]
    return [*axes, features, log_weights]


def _symmetric(triangle: list[Tensor]) -> Tensor:
    """(..., r, r), from the lower triangle by rows."""
    if len(triangle) == 1:
        return triangle[0][..., None, None]
    a, b, d = triangle
    return torch.stack([a, b, b, d], dim=-1).unflatten(-1, (2, 2))


def _root(matrix: Tensor) -> Tensor:
    """The lower triangular root of a semidefinite matrix (..., r, r), r <= 2.

    The closed form keeps a broken record's NaN to that record.
    """
    if matrix.shape[-1] == 1:
        return matrix.clamp(min=0.0).sqrt()
    (a, _), (b, d) = (row.unbind(-1) for row in matrix.unbind(-2))
    first = a.clamp(min=0.0).sqrt()
    below = torch.where(first > 0, b / first, 0.0 * b)
    second = (d - below.square()).clamp(min=0.0).sqrt()
    return torch.stack([first, torch.zeros_like(a), below, second], dim=-1).unflatten(-1, (2, 2))


def _function(matrix: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of a symmetric matrix (..., r, r), r <= 2, by its eigenvalues.

    The closed form keeps a broken record's NaN to that record. torch.linalg would raise for all.
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
