"""Factors of single records: Gaussian sites f_n, and the coordinates in which they are released.

A record's site has natural parameters (eta_n, Lambda_n). With m the public cavity mean, its
*residual* eta_n - Lambda_n m is the gradient of its log density at m. One record contributes

    (residual, kappa P(Lambda_n))     or     (eta_n, kappa P(Lambda_n))  (uncentred)

to the release. P projects on the structure of the precision, in coordinates whose Euclidean norm is
the Frobenius norm of the projected matrix.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyro_dp.mechanism.contributions import Rows, counted, weighted_gram
from pyro_dp.utils.linalg import noise_radius, product, stacked, times, unstacked

_TINY = torch.finfo(torch.float64).tiny
_REPETITIONS = 3
_FEW = 3  # rows, for which sums of elements are faster than products
_NOTHING = torch.zeros(0, dtype=torch.float64)


class LowRank:
    """Sites of B records on d coordinates, Lambda_n = J_n' A_n J_n, without d x d matrices.

    If J has one row, the norms of gradients follow from the norm of this row. A site with a full
    matrix has the identity as J.

    :param jacobian: J, (B, R, d).
    :param precision: A, symmetric, (B, R, R).
    :param residual: r, (B, R); the site's residual is J' r.
    :param largest: largest absolute values of r for any outcome, (B, R).
    :param lengths: squared norms of the rows of J, (B, R), if they were computed before.
    :param turn: an orthogonal matrix that turns sums from J's coordinates into the release's; None:
        they are the same.
    :param simulated: residuals at K outcomes drawn from the model, (K, B, R); (0,): there are none.
    """

    def __init__(
        self,
        jacobian: Tensor,
        precision: Tensor,
        residual: Tensor,
        largest: Tensor | None = None,
        lengths: Tensor | None = None,
        turn: Tensor | None = None,
        simulated: Tensor = _NOTHING,
    ):
        self._jacobian, self._precision = jacobian, precision
        self.simulated = simulated
        self._inner, self._largest, self._turn = residual, largest, turn
        lengths = jacobian.square().sum(dim=2) if lengths is None else lengths
        self._lengths = lengths + _TINY  # squares that underflow do not count as zero

    @cached_property
    def residual(self) -> Tensor:
        """The sites' residuals, (B, d)."""
        return self._turned(product(self._inner.unsqueeze(1), self._jacobian).squeeze(1))

    def gradients(self) -> "Gradients | Rows":
        """The residuals, as a part of a block."""
        is_single = self._jacobian.shape[1] == 1
        return Gradients(self, self._inner) if is_single else Rows(self.residual)

    def whitened(self, root: Tensor) -> "LowRank":
        """The same sites in coordinates W^-1 z, for a symmetric W (d, d)."""
        jacobian = self._jacobian @ root.to(self._jacobian)
        return LowRank(jacobian, self._precision, self._inner, self._largest)

    def within(self, basis: Tensor) -> list[Tensor]:
        """J T for a basis T (d, d), and A, residuals, and their largest values."""
        assert self._largest is not None and self._turn is None
        return [self._jacobian @ basis, self._precision, self._inner, self._largest]

    def centred(self, norms: Tensor, bound: Tensor) -> "LowRank":
        """The sites with residuals that have mean zero after clipping, if the model holds.

        Let the factor f(r) clip the residual r of an outcome. Over the model's outcomes, the centre
        c solves E f(r - c) (r - c) = 0 (Kuensch, Stefanski & Carroll 1989). The mean of r is zero,
        so c = cov(f, r) / E f, which a fixed-point iteration finds. Few outcomes are enough,
        because c is zero if f is constant.

        :param norms: norms of the records' parts, (B, 1).
        :param bound: C.
        """
        gram = product(self._jacobian, self._jacobian.mT)  # (B, R, R)
        rows = range(len(gram[0]))

        def squared(residuals: Tensor) -> Tensor:
            """Squared norms of J' r, (..., B), for residuals r (..., B, R)."""
            if len(rows) > _FEW:
                return (residuals * (gram @ residuals.unsqueeze(-1)).squeeze(-1)).sum(dim=-1)
            each, zero = residuals.unbind(-1), torch.zeros_like(residuals[..., 0])
            pairs = itertools.combinations_with_replacement(rows, 2)
            parts = ((2 - (i == j)) * gram[:, i, j] * each[i] * each[j] for i, j in pairs)
            return sum(parts, zero)

        others = (norms[:, 0].square() - squared(self._inner)).clamp(min=0.0)
        centre = torch.zeros_like(self._inner)
        for _ in range(_REPETITIONS):
            longest = (squared(self.simulated - centre) + others).sqrt().unsqueeze(2)
            kept = (bound / longest).clamp(max=1.0)
            mean = kept.mean(dim=0)
            total = ((kept - mean) * self.simulated).sum(dim=0)
            centre = total / (len(self.simulated) - 1) / mean
        parts = self._jacobian, self._precision, self._inner - centre, self._largest, self._lengths
        return LowRank(*parts, self._turn)

    def largest_residual(self) -> Tensor:
        """Upper limit of the residual's squared norm for any outcome, (B,)."""
        if self._largest is None:
            return self.residual.square().sum(dim=1)
        return (self._largest * self._lengths.sqrt()).sum(dim=1).square()

    def times(self, vector: Tensor) -> Tensor:
        """Lambda_n vector, (B, d)."""
        if self._turn is not None:
            vector = self._turn.mT @ vector
        inner = product(self._precision, (self._jacobian @ vector).unsqueeze(2))
        return self._turned(product(inner.mT, self._jacobian).squeeze(1))

    def diagonal(self) -> Tensor:
        """The diagonals of Lambda_n, (B, d)."""
        jacobian = self._turned(self._jacobian)
        return (jacobian * product(self._precision, jacobian)).sum(dim=1)

    def matrices(self) -> Tensor:
        """Lambda_n, (B, d, d)."""
        jacobian = self._turned(self._jacobian)
        return jacobian.mT @ self._precision @ jacobian

    def squared_norm(self) -> Tensor:
        """|Lambda_n|^2 in the Frobenius norm, (B,), never rounded down."""
        if self._jacobian.shape[1] == 1:
            return (1 + 1e-12) * (self._precision[:, 0, 0] * self._lengths[:, 0]).square()
        gram = product(self._jacobian, self._jacobian.mT)  # (B, R, R)
        root = product(self._precision, gram)
        squared = (root * root.mT).sum(dim=(1, 2))
        # The trace of a square is a sum with both signs. The last term covers its rounding.
        size = self._precision.square().sum(dim=(1, 2)) * gram.square().sum(dim=(1, 2))
        return squared.clamp(min=0.0) + 1e-12 * size

    def weighted_precision(self, weights: Tensor) -> Tensor:
        """Sum of weights (B, 1) times Lambda_n, (d, d), without records of weight zero."""
        jacobian = counted(self._jacobian, weights)
        inner = counted(self._precision, weights) * weights.unsqueeze(2)
        if jacobian.shape[1] == 1:
            total = weighted_gram(jacobian[:, 0], inner[:, 0])
        else:
            total = jacobian.flatten(0, 1).T @ product(inner, jacobian).flatten(0, 1)
        if self._turn is not None:
            total = self._turn @ total @ self._turn.mT
        return (total + total.T) / 2

    def _turned(self, rows: Tensor) -> Tensor:
        return rows if self._turn is None else rows @ self._turn.mT


@dataclass
class Gradients:
    """Multiples of the only row of J of B records: a part of a block.

    :param numbers: the factors, (B, 1).
    """

    sites: LowRank
    numbers: Tensor

    def squared_norms(self) -> Tensor:
        """Squared norms, (B, 1)."""
        return self.numbers.square() * self.sites._lengths

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """The sum with weights (B, 1), (d,)."""
        jacobian = counted(self.sites._jacobian, weights)[:, 0]
        numbers = counted(self.numbers, weights) * weights
        total = times(numbers.mT, jacobian)[0]
        return total if self.sites._turn is None else self.sites._turn @ total

    def dense(self) -> Tensor:
        return self.numbers * self.sites._turned(self.sites._jacobian)[:, 0]


LARGEST_FULL = 1200  # latents for a full precision


class Full:
    """Full precision matrices, released as d (d + 1) / 2 numbers.

    :param widths: number of coordinates of each latent site, d in all.
    """

    name = "full"

    def __init__(self, widths: Sequence[int]):
        self.dim = sum(widths)
        self.size = self.dim * (self.dim + 1) // 2

    def rows(self, eta: "Tensor | Gradients | Rows", factors: LowRank, weight: float) -> "FullRows":
        """The rows of B records in the release; the weight is kappa."""
        return FullRows(eta, factors, weight)

    def coordinates(self, precision: Tensor) -> Tensor:
        """The released numbers (size,) of a matrix (d, d)."""
        return stacked(precision)

    def precision(self, coordinates: Tensor) -> Tensor:
        """The matrix (d, d) of released numbers (size,)."""
        return unstacked(coordinates, self.dim)

    def noise_radius(self, sd: float) -> float:
        """Spectral radius of a matrix of noise with this standard deviation in each coordinate."""
        return noise_radius(sd, self.dim)


class FullRows:
    """(eta, kappa Lambda_n, tau) of B records, for a
    :class:`~pyro_dp.mechanism.clipping.ClippedSum`.

    :param eta: (B, d), or its equivalent.
    :param counted: tau, (1,); (0,): there is no tau.
    """

    def __init__(
        self,
        eta: Tensor | Gradients | Rows,
        factors: LowRank,
        weight: float | Tensor,
        counted: Tensor = _NOTHING,
    ):
        self._eta = Rows(eta) if isinstance(eta, Tensor) else eta
        self._factors, self._weight, self._counted = factors, weight, counted

    def norms(self) -> Tensor:
        precisions = self._weight**2 * self._factors.squared_norm()
        squared = self._eta.squared_norms() + precisions.unsqueeze(1)
        return (squared + self._counted.square().sum()).sqrt()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        eta = self._eta.weighted_sum(weights)
        precision = self._factors.weighted_precision(weights)
        counted = self._counted.to(weights) * weights.sum()
        return torch.cat([eta, self._weight * stacked(precision), counted])

    def dense(self) -> Tensor:
        precision = torch.vmap(stacked)(self._factors.matrices())
        counted = self._counted.to(precision).expand(len(precision), -1)
        return torch.cat([self._eta.dense(), self._weight * precision, counted], dim=1).double()


class Shared:
    """One precision for each latent site: the mean of the diagonal over its d_s coordinates.

    The released number is sqrt(d_s) times it, the norm of this multiple of the identity. The
    arguments are those of :class:`Full`.
    """

    name = "shared"

    def __init__(self, widths: Sequence[int]):
        self.size = len(widths)
        self._counts = torch.tensor(widths)
        self._group = torch.repeat_interleave(self._counts)  # (d,)

    def rows(self, eta: Tensor, factors: LowRank, weight: float) -> Rows:
        sums = eta.new_zeros(len(eta), self.size)
        sums.index_add_(1, self._group.to(eta.device), factors.diagonal())
        return Rows(torch.cat([eta, weight * sums / self._roots(eta)], dim=1))

    def coordinates(self, precision: Tensor) -> Tensor:
        starts = self._counts.cumsum(0) - self._counts
        return precision[starts.to(precision.device)] * self._roots(precision)

    def precision(self, coordinates: Tensor) -> Tensor:
        return (coordinates / self._roots(coordinates))[self._group.to(coordinates.device)]

    def noise_radius(self, sd: float) -> Tensor | float:
        """Typical size of the largest noise among ``size`` coordinates."""
        largest = math.sqrt(2 * math.log(2 * self.size))
        return sd * largest / self._counts.sqrt()[self._group].double()

    def _roots(self, like: Tensor) -> Tensor:
        return self._counts.to(like).sqrt()


class Diagonal(Shared):
    """Diagonal precisions: one for each coordinate."""

    name = "diagonal"

    def __init__(self, widths: Sequence[int]):
        super().__init__([1] * sum(widths))

    def noise_radius(self, sd: float) -> float:
        return sd * math.sqrt(2 * math.log(2 * self.size))


Structure = Full | Shared
STRUCTURES = {structure.name: structure for structure in (Full, Diagonal, Shared)}
