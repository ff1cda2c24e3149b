"""Symmetric matrices, Gaussians in natural parameters, and agreement up to rounding.

A matrix of shape (d, d) is full, and one of shape (d,) is diagonal.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.functional import pad

from pyro_dp.utils.errors import ModelError

MISMATCH = (
    "The traced step gives other numbers than the model itself. The model must have a state, or "
    "depend on values that a graph cannot follow. Use jit='none'."
)
_CACHED = 2**18  # numbers


def require_same(
    found: Tensor, expected: Tensor, *, exact: bool, scale: float = 0.0, rounding: float = 0.0
) -> None:
    """:raises ModelError: the results of a graph and of the model differ.

    :param exact: whether the model computes in float64.
    :param rounding: a difference that is always allowed, in units of ``scale``.
    """
    size = max(scale, largest(expected))
    tolerance = (1e-8 if exact else 1e-3) * size + rounding * scale
    if not close(found, expected, tolerance):
        raise ModelError(MISMATCH)


def largest(values: Tensor) -> float:
    """The largest absolute value of a finite number; 0 if there is none."""
    if not values.numel():
        return 0.0
    sizes = torch.stack(values.aminmax()).abs()
    if not sizes.isfinite().all():  # this makes a copy
        sizes = values.abs().nan_to_num(0.0, 0.0, 0.0)
    return sizes.max().item()


def close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether tensors of equal shape differ by at most the tolerance. NaNs are equal."""
    pairs = zip(one.reshape(-1).split(_CACHED), other.reshape(-1).split(_CACHED), strict=True)
    return all(
        bool(((ours - theirs).abs() <= tolerance).all())
        or torch.allclose(ours, theirs, rtol=0.0, atol=tolerance, equal_nan=True)
        for ours, theirs in pairs
    )


def agree(one: Tensor, other: Tensor, *, tolerance: float | None = None) -> bool:
    """Whether tensors are equal up to rounding, relative to the largest entry."""
    if torch.equal(one, other):  # the usual case, and 100 times as fast
        return True
    if one.shape != other.shape or not one.is_floating_point():
        return False
    if tolerance is None:
        tolerance = 1e-8 if one.dtype == torch.float64 else 1e-4
    return close(one, other, tolerance * largest(one.detach()))


def apply(matrix: Tensor, vector: Tensor) -> Tensor:
    """Matrix (full or diagonal) times vector."""
    return matrix * vector if matrix.dim() == 1 else matrix @ vector


def product(left: Tensor, right: Tensor) -> Tensor:
    """Batched left @ right. A 1 x 1 factor or result is computed elementwise, which is faster."""
    if left.shape[-2:] == (1, 1):
        return left * right
    if left.shape[-2] == right.shape[-1] == 1:
        return (left * right.mT).sum(dim=-1, keepdim=True)
    return left @ right


def times(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows @ matrix. On some processors NumPy's library is faster than torch's."""
    if not in_memory(rows):
        return rows @ matrix
    with np.errstate(all="ignore"):  # a warning would reveal a broken record
        return torch.from_numpy(rows.numpy() @ matrix.numpy())


def gram(rows: Tensor) -> Tensor:
    """rows' rows, (d, d), of rows (n, d). NumPy needs half the work, because it is symmetric."""
    if not in_memory(rows):
        return rows.mT @ rows
    array = rows.numpy()
    with np.errstate(all="ignore"):
        return torch.from_numpy(array.T @ array)


def covariance(rows: Tensor) -> Tensor:
    """The sample covariance (d, d) of (n, d)."""
    centred = rows - rows.mean(dim=0)
    return centred.mT @ centred / (len(rows) - 1)


def inverse(matrix: Tensor) -> Tensor:
    """The inverse of a positive definite matrix, full or diagonal."""
    return 1.0 / matrix if matrix.dim() == 1 else torch.cholesky_inverse(cholesky(matrix))


def cholesky(matrix: Tensor) -> Tensor:
    """Lower triangular factor of matrices (..., d, d), positive definite up to rounding.

    For any other matrix, small and negative eigenvalues are raised first.
    """
    size = matrix.diagonal(dim1=-2, dim2=-1).abs().amax(dim=-1)[..., None, None]
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for jitter in (0.0, 1e-15, 1e-13, 1e-11, 1e-9):
        factor, failed = torch.linalg.cholesky_ex(matrix + jitter * size * identity)
        if not failed.any():
            return factor
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp(min=1e-9 * size.squeeze(-1)).sqrt().unsqueeze(-2)
    factor = torch.linalg.qr((vectors * values).mT)[1].mT
    return factor * factor.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def spectra(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """As ``torch.linalg.eigh`` of (B, d, d). A matrix on which it fails gets NaN eigenvalues."""
    try:
        found = torch.linalg.eigh(matrices)
        return found.eigenvalues, found.eigenvectors
    except torch.linalg.LinAlgError:
        if len(matrices) == 1:
            return torch.full_like(matrices[..., 0], torch.nan), matrices
        parts = [spectra(part) for part in matrices.split(math.ceil(len(matrices) / 2))]
        values, vectors = zip(*parts, strict=True)
        return torch.cat(values), torch.cat(vectors)


def capped(covariance: Tensor, precision: Tensor) -> Tensor:
    """Reduce a covariance to at most a precision's inverse. Both are full, or both diagonal."""
    if covariance.dim() == 1:
        return torch.minimum(covariance, 1 / precision)
    _, failed = torch.linalg.cholesky_ex(inverse(precision) - covariance)
    if not failed:
        return covariance
    root = cholesky(precision)
    values, vectors = torch.linalg.eigh(root.mT @ covariance @ root)
    back = torch.linalg.solve_triangular(root.mT, vectors, upper=True)
    return (back * values.clamp(max=1.0)) @ back.mT


def restricted(matrix: Tensor, indices: Tensor) -> Tensor:
    """The rows and columns of a matrix, full or diagonal, at these indices."""
    return matrix[indices] if matrix.dim() == 1 else matrix[indices.unsqueeze(1), indices]


def dense(matrix: Tensor) -> Tensor:
    """The full matrix, (d, d)."""
    return torch.diag(matrix) if matrix.dim() == 1 else matrix


def floored(matrix: Tensor, least: Tensor | float) -> Tensor:
    """The closest symmetric matrix, full or diagonal, without an eigenvalue below ``least``."""
    least = torch.as_tensor(least, dtype=matrix.dtype, device=matrix.device)
    if matrix.dim() == 1:
        return matrix.clamp(min=least)
    _, failed = torch.linalg.cholesky_ex(matrix - least * torch.eye(len(matrix)).to(matrix))
    if not failed:  # ten times as fast
        return matrix
    values, vectors = torch.linalg.eigh(matrix)
    if values[0] >= least:
        return matrix
    return (vectors * values.clamp(min=least)) @ vectors.T


def stacked(matrix: Tensor) -> Tensor:
    """A symmetric matrix (d, d) as a vector (d (d + 1) / 2,) of the same Euclidean norm.

    The diagonal comes first. Off-diagonals, which occur twice, are multiplied by sqrt 2.
    """
    rows, columns = torch.triu_indices(len(matrix), len(matrix), offset=1, device=matrix.device)
    return torch.cat([matrix.diagonal(), math.sqrt(2) * matrix[rows, columns]])


def unstacked(vector: Tensor, size: int) -> Tensor:
    """The symmetric matrix (size, size) of :func:`stacked`."""
    rows, columns = torch.triu_indices(size, size, offset=1, device=vector.device)
    matrix = torch.diag(vector[:size])
    matrix[rows, columns] = matrix[columns, rows] = vector[size:] / math.sqrt(2)
    return matrix


def in_memory(tensor: Tensor) -> bool:
    """Whether NumPy may read it: on the CPU, and neither traced nor vectorised."""
    plain = tensor.device.type == "cpu" and not tensor.requires_grad
    return plain and not is_functorch_wrapped_tensor(tensor) and not _len_torch_dispatch_stack()


def noise_radius(sd: float, size: int) -> float:
    """Asymptotic spectral radius of a matrix (size, size) whose stacked entries are noise."""
    return sd * math.sqrt(2 * size)


def clipped_rows(rows: Tensor, bound: float) -> Tensor:
    """Rows (..., d), scaled down to Euclidean norm ``bound`` where they are longer."""
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    if in_memory(rows) and not (norms > bound).any():
        return rows  # multiplying by one changes nothing
    return rows * torch.where(norms > bound, bound / norms, 1.0)


def power(matrix: Tensor, exponent: float) -> Tensor:
    """A power of a positive definite matrix (d, d)."""
    return powers(matrix, (exponent,))[0]


def powers(matrix: Tensor, exponents: Sequence[float]) -> list[Tensor]:
    """Several powers of a positive definite matrix (d, d)."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    values = values.clamp(min=1e-12 * values[-1].item())
    return [(vectors * values**exponent) @ vectors.mT for exponent in exponents]


def standardised(draws: Tensor) -> Tensor:
    """Whiten draws (K, d) of mean 0: their covariance becomes the identity."""
    return draws @ torch.linalg.inv(cholesky(draws.mT @ draws / len(draws))).mT


# An entry of D may tend to zero (a Heywood case), but a scale must be positive. The bound is this
# share of the coordinate's conditional variance. It hardly changes the divergence.
_LEAST = 1e-6
_SEARCH = {"maxiter": 500, "ftol": 0.0, "gtol": 1e-10}


@dataclass(frozen=True)
class Gaussian:
    """A Gaussian factor in natural parameters, not necessarily normalisable.

    :param eta: precision times mean, (d,).
    :param precision: Lambda, (d, d) or (d,).
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

    def restricted(self, indices: Tensor) -> "Gaussian":
        """The factor as a function of these coordinates, with the others at zero."""
        return Gaussian(self.eta[indices], restricted(self.precision, indices))

    def embedded(self, indices: Tensor, size: int) -> "Gaussian":
        """The factor as a function of ``size`` coordinates, constant in the added ones.

        :param indices: (d,), the positions of its d coordinates.
        """
        eta = self.eta.new_zeros(size).index_copy(0, indices, self.eta)
        if self.precision.dim() == 1:
            return Gaussian(eta, self.eta.new_zeros(size).index_copy(0, indices, self.precision))
        precision = self.eta.new_zeros(size, size)
        precision[indices.unsqueeze(1), indices] = self.precision
        return Gaussian(eta, precision)

    def with_precision(self, precision: Tensor, centre: Tensor) -> "Gaussian":
        """The factor with this precision, and an unchanged log-density gradient at ``centre``."""
        return Gaussian(self.eta + apply(precision - self.precision, centre), precision)


def low_rank(covariance: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Scale s (d,) and factor F (d, rank), whose covariance is s (F F' + I) s.

    The variances are those of S. If S has this form, the result equals S. Otherwise it is a local
    minimum of the divergence. The same S gives the same result.

    Factor analysis by maximum likelihood fits S by T = D + L L' with a diagonal D. It minimises
    KL(N(0, S), N(0, T)). For a fixed D the best L follows from eigenvectors, and a quasi-Newton
    search finds D: Jöreskog 1967, Psychometrika 32, 443-482.

    :param covariance: S, (d, d), positive definite, float64.
    """
    deviations = covariance.diagonal().sqrt()
    correlation = (covariance / deviations / deviations.unsqueeze(-1)).cpu()
    size, held = len(correlation), min(rank, len(correlation))
    conditional = 1.0 / inverse(correlation).diagonal()  # variances

    def divergence(log_diagonal: np.ndarray) -> tuple[float, np.ndarray]:
        """Twice KL at the best L, and its gradient."""
        values, vectors = _whitened(correlation, log_diagonal)
        missed = values < 1.0
        missed[: size - held] = True
        left = values[missed].clamp(min=torch.finfo(values.dtype).tiny)
        gradient = vectors[:, missed].square() @ (1.0 - left)
        return float((left - 1.0 - left.log()).sum()), gradient.numpy()

    start = (1.0 - held / (2 * size)) * conditional  # Jöreskog's
    lowest = (_LEAST * conditional).log()
    bounds = scipy.optimize.Bounds(lowest.numpy(), np.zeros(size))
    found = scipy.optimize.minimize(
        divergence, start.log().numpy(), jac=True, bounds=bounds, method="L-BFGS-B", options=_SEARCH
    )
    values, vectors = _whitened(correlation, found.x)
    factor = (vectors * (values - 1.0).clamp(min=0.0).sqrt())[:, size - held :]
    factor = pad(factor, (0, rank - held)).to(covariance.device)
    # At the minimum this is the square root of D. If the search stops short of the minimum, it
    # still keeps the variances.
    return deviations / (1.0 + factor.square().sum(dim=1)).sqrt(), factor


def _whitened(correlation: Tensor, log_diagonal: np.ndarray) -> tuple[Tensor, Tensor]:
    """Ascending eigenvalues, and eigenvectors, of D^-1/2 R D^-1/2."""
    roots = torch.from_numpy(log_diagonal).mul(-0.5).exp()
    return torch.linalg.eigh(correlation * roots * roots.unsqueeze(-1))
