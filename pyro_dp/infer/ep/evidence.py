"""What all releases say together: post-processing, in which each counts as much as it is worth.

A release at m tells the gradient g of the log likelihood there and its curvature L, both with noise
of known size. If L were exact and constant, g + L m would be the same number plus noise wherever it
was made; far from where the posterior is now, the likelihood is not quadratic any more. So each
release is weighted by its noise and by how far away it was made.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_HALF, _STEEP = 0.67, 8  # where, in sd sqrt(d), and how fast a noisy curvature stops to count
_BEND = 2.5  # of the curvature, over a way of which it sees one nat per record


@dataclass(frozen=True, eq=False)
class Look:
    """One release: the log likelihood of all records around m.

    :param mean: m, (d,).
    :param gradient: with noise, (d,).
    :param curvature: minus the Hessian, with noise, (d, d).
    :param geometry: M; the noise was isotropic in the coordinates M^-1/2 z, (d, d).
    :param gradient_sd: of a coordinate of the gradient there.
    :param curvature_sd: of a diagonal element of the curvature there; 1/sqrt(2) of it beside.
    :param rate: at which the records were sampled.
    """

    mean: Tensor
    gradient: Tensor
    curvature: Tensor
    geometry: Tensor
    gradient_sd: float
    curvature_sd: float
    rate: float

    @property
    def privacy_noise(self) -> Tensor:
        """Covariance of the privacy noise in the gradient, (d, d)."""
        return self.gradient_sd**2 * self.geometry

    def sampling_noise(self, curvature: Tensor) -> Tensor:
        """Covariance in the gradient of what comes of sampling the records, (d, d).

        :param curvature: L.
        """
        return (1 - self.rate) / self.rate * curvature


@dataclass(frozen=True, eq=False)
class Evidence:
    """Of all records about d latents, as Gaussian.

    :param estimate: where the log likelihood is greatest, (d,).
    :param curvature: L, positive definite, (d, d).
    :param noise: V, covariance of the noise in the gradient, (d, d).
    """

    estimate: Tensor
    curvature: Tensor
    noise: Tensor

    @property
    def information(self) -> Tensor:
        """What is left of L under the noise, (L^-1 + L^-1 V L^-1)^-1, (d, d).

        The estimate's error is that of finite data, of covariance L^-1, and the noise's. Where the
        noise is far greater than the information, this goes to zero, and with it to the prior.
        """
        left = self.curvature @ torch.linalg.solve(self.curvature + self.noise, self.curvature)
        return (left + left.mT) / 2


def evidence(
    looks: Sequence[Look], known: Tensor | None, geometry: Tensor, size: int, least: float
) -> Evidence:
    """Of all looks so far, for where the last one was made.

    :param known: L as it is known so far, by which distances are measured; None: not yet.
    :param geometry: M now, (d, d).
    :param size: N.
    :param least: a curvature that does not matter beside the prior's.
    """
    here = looks[-1].mean
    root, back = powers(geometry, (-0.5, 0.5))
    values, vectors, sd = _curvature(looks, known, root, size, least)
    curvature = back @ (vectors * values) @ vectors.mT @ back
    curvature, inverse = powers(curvature, (1, -1))  # where records say nothing, rounding may win
    noises = [look.privacy_noise + look.sampling_noise(curvature) for look in looks]
    costs = torch.stack([(inverse * noise).sum() for noise in noises])
    distances = _distances(looks, curvature, size)
    weights = 1 / (costs + _BEND**2 * size * distances**2).clamp(min=1e-9 / size)
    weights = weights / weights.sum()
    mean = _sum(weights, [look.mean for look in looks])
    gradient = _sum(weights, [look.gradient for look in looks])
    # Noise E in the curvature enters the gradient as E times the way from where it was made.
    way = back @ (here - mean)
    identity = torch.eye(len(here)).to(here)
    carried = back @ (way.square().sum() * identity + torch.outer(way, way)) @ back * sd**2 / 2
    # Where the curvature may be noise itself, it is no information: half of it at a level that goes
    # with the noise's largest eigenvalue.
    level = _HALF * sd * len(here) ** 0.5
    doubt = (vectors * (values * (level / values) ** _STEEP)) @ vectors.mT
    noise = _sum(weights**2, noises) + carried + back @ doubt @ back
    return Evidence(mean + inverse @ gradient, curvature, noise)


def power(matrix: Tensor, exponent: float) -> Tensor:
    """Of a positive definite matrix (d, d)."""
    return powers(matrix, (exponent,))[0]


def powers(matrix: Tensor, exponents: Sequence[float]) -> list[Tensor]:
    """Several, of a positive definite matrix (d, d)."""
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp(min=1e-12 * values[-1].item())
    return [(vectors * values**exponent) @ vectors.mT for exponent in exponents]


def _curvature(
    looks: Sequence[Look], known: Tensor | None, root: Tensor, size: int, least: float
) -> tuple[Tensor, Tensor, float]:
    """In the coordinates of ``root``, without what noise does: eigenvalues (d,), positive, and
    eigenvectors (d, d); sd of the noise.

    :param root: M^-1/2, of the geometry now.
    """
    dim = len(root)
    sds = torch.tensor([look.curvature_sd for look in looks]).to(root)
    geometries = root @ torch.stack([look.geometry for look in looks]) @ root
    noise = sds * torch.linalg.eigvalsh(geometries)[:, -1]  # their spectral norms
    bend = torch.zeros_like(noise)
    if known is not None:
        level = (root @ known @ root).trace() / dim
        bend = (_BEND * level) ** 2 * _distances(looks, known, size) / dim
    weights = 1 / (noise**2 + bend).clamp(min=1e-30)
    weights = weights / weights.sum()
    mean = root @ _sum(weights, [look.curvature for look in looks]) @ root
    sd = (weights * noise).norm().item()
    values, vectors = torch.linalg.eigh((mean + mean.mT) / 2)
    return _cleaned(values, sd**2 / 2, least), vectors, sd


def _cleaned(values: Tensor, variance: float, least: float) -> Tensor:
    """Eigenvalues of a symmetric matrix as they were before noise: positive, (d,).

    Noise of this variance off the diagonal (twice that on it) pushes eigenvalues apart, to first
    order by the sum of variance / (value - other). Taken back, pure noise leaves their mean, and
    eigenvalues far apart stay (Bun, Bouchaud & Potters 2017, arXiv 1610.08104, section 6).

    :param values: ascending.
    :param least: what their mean is raised to.
    """
    apart = values.unsqueeze(1) - values
    pushed = 2 * variance * (apart / (apart.square() + variance).clamp(min=1e-300)).sum(dim=1)
    mean = max(values.mean().item(), (2 * variance / len(values)) ** 0.5, least)
    floor = min(mean, max(variance**0.5, 1e-9 * mean))
    return (values - pushed).cummax(dim=0).values.clamp(min=floor)


def _distances(looks: Sequence[Look], curvature: Tensor, size: int) -> Tensor:
    """Squared, from each look to the last: in nats per record."""
    ways = torch.stack([look.mean for look in looks]) - looks[-1].mean
    return ((ways @ curvature) * ways).sum(dim=1) / size


def _sum(weights: Tensor, values: Sequence[Tensor]) -> Tensor:
    return torch.tensordot(weights, torch.stack(list(values)), dims=1)
