"""Factors of single records: Gaussian sites f_n, and the coordinates in which they are released.

A record's site has natural parameters (eta_n, Lambda_n). With m the public cavity mean, its
*residual* eta_n - Lambda_n m is the gradient of its log density at m. One record hands

    (residual, kappa P(Lambda_n))     or     (eta_n, kappa P(Lambda_n))  (uncentred)

to the release, where P keeps what the precision's structure keeps, in coordinates whose Euclidean
norm is the Frobenius norm of the kept matrix.
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
_FEW = 3  # rows, whose products are slower than sums of elements
_NOTHING = torch.zeros(0, dtype=torch.float64)


class LowRank:
    """Sites of B records on d coordinates, Lambda_n = J_n' A_n J_n, never made as d x d matrices.

    If J has one row, gradients are no vectors either: their norms follow from that of the row. A
    site with a matrix of its own has the identity as J.

    :param jacobian: J, (B, R, d).
    :param precision: A, symmetric, (B, R, R).
    :param residual: (B, R); the residual is J' times it.
    :param largest: its largest absolute values for any outcome, (B, R).
    :param lengths: squared norms of the rows of J, (B, R), if they were computed before.
    :param turn: an orthogonal matrix that turns sums into the coordinates they are meant in; None:
        J is in those.
    :param simulated: residuals at K outcomes that the model draws, (K, B, R); (0,): there are none.
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
        """(B, d)."""
        return self._turned(product(self._inner.unsqueeze(1), self._jacobian).squeeze(1))

    def gradients(self) -> "Gradients | Rows":
        """The residuals, as a part of a block."""
        if self._jacobian.shape[1] > 1:
            return Rows(self.residual)
        return Gradients(self, self._inner)

    def whitened(self, root: Tensor) -> "LowRank":
        """The same sites in coordinates W^-1 z, for a symmetric W (d, d)."""
        jacobian = self._jacobian @ root.to(self._jacobian)
        return LowRank(jacobian, self._precision, self._inner, self._largest)

    def within(self, basis: Tensor) -> list[Tensor]:
        """J T for a basis T (d, d), and A, residuals, and their largest values."""
        assert self._largest is not None and self._turn is None
        return [self._jacobian @ basis, self._precision, self._inner, self._largest]

    def centred(self, norms: Tensor, bound: Tensor) -> "LowRank":
        """The same sites, whose residuals have mean zero once they are clipped, if the model holds.

        Let f(r) be the factor that brings a record of residual r to the bound. The centre c solves
        E f(r - c) (r - c) = 0 over the model's outcomes (Kuensch, Stefanski & Carroll 1989). There
        r has mean zero, so c = cov(f, r) / E f, which is found by repetition. Few
        outcomes are enough: c is zero if f is the same for all.

        :param norms: norms of the records' parts, (B, 1).
        :param bound: C.
        """
        gram = product(self._jacobian, self._jacobian.mT)  # (B, R, R)
        rows = range(len(gram[0]))

        def squared(residuals: Tensor) -> Tensor:
            """Squared norms of J' times these, (..., B), from (..., B, R)."""
            if len(rows) > _FEW:
                turned = (gram @ residuals.unsqueeze(-1)).squeeze(-1)
                return (residuals * turned).sum(dim=-1)
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
        own = self._jacobian, self._precision, self._inner - centre, self._largest, self._lengths
        return LowRank(*own, self._turn)

    def largest_residual(self) -> Tensor:
        """Squared norm that the residual can reach for other outcomes, (B,)."""
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
        """|Lambda_n|^2 in the Frobenius norm, (B,); never below the true one."""
        if self._jacobian.shape[1] == 1:
            return (1 + 1e-12) * (self._precision[:, 0, 0] * self._lengths[:, 0]).square()
        gram = product(self._jacobian, self._jacobian.mT)  # (B, R, R)
        root = product(self._precision, gram)
        squared = (root * root.mT).sum(dim=(1, 2))
        # The trace of a square is a sum with both signs: what rounding may take away is put back.
        size = self._precision.square().sum(dim=(1, 2)) * gram.square().sum(dim=(1, 2))
        return squared.clamp(min=0.0) + 1e-12 * size

    def weighted_precision(self, weights: Tensor) -> Tensor:
        """Sum of weights (B, 1) times Lambda_n, (d, d); of weight zero, nothing."""
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

    :param numbers: (B, 1).
    """

    sites: LowRank
    numbers: Tensor

    def squared_norms(self) -> Tensor:
        """(B, 1)."""
        return self.numbers.square() * self.sites._lengths

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """(d,), of weights (B, 1)."""
        jacobian = counted(self.sites._jacobian, weights)[:, 0]
        numbers = counted(self.numbers, weights) * weights
        total = times(numbers.mT, jacobian)[0]
        return total if self.sites._turn is None else self.sites._turn @ total

    def dense(self) -> Tensor:
        return self.numbers * self.sites._turned(self.sites._jacobian)[:, 0]


LARGEST_FULL = 1200  # latents, of whose precision all entries are released


class Full:
    """Full precision matrices, released as d (d + 1) / 2 numbers.

    :param widths: number of coordinates of each latent site, d in all.
    """

    name = "full"

    def __init__(self, widths: Sequence[int]):
        self.dim = sum(widths)
        self.size = self.dim * (self.dim + 1) // 2

    def rows(self, eta: "Tensor | Gradients | Rows", factors: LowRank, weight: float) -> "FullRows":
        """The rows of B records in the release, with kappa as the weight."""
        return FullRows(eta, factors, weight)

    def coordinates(self, precision: Tensor) -> Tensor:
        """(size,), of a matrix (d, d)."""
        return stacked(precision)

    def precision(self, coordinates: Tensor) -> Tensor:
        """(d, d), from (size,)."""
        return unstacked(coordinates, self.dim)

    def noise_radius(self, sd: float) -> float:
        """Spectral radius of the matrix whose coordinates are noise of this standard deviation."""
        return noise_radius(sd, self.dim)


class FullRows:
    """(eta, kappa Lambda_n, tau) of B records, for a
    :class:`~pyro_dp.mechanism.clipping.ClippedSum`.

    :param eta: (B, d), or its equivalent.
    :param counted: tau, (1,); (0,): there is no such number.
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

    It is released as sqrt(d_s) times itself, the norm of that multiple of the identity.
    The arguments are those of :class:`Full`.
    """

    name = "shared"

    def __init__(self, widths: Sequence[int]):
        self.size = len(widths)
        self._counts = torch.tensor(widths)
        self._group = torch.repeat_interleave(self._counts)  # (d,)

    def rows(self, eta: Tensor, factors: LowRank, weight: float) -> Tensor:
        sums = eta.new_zeros(len(eta), self.size)
        sums.index_add_(1, self._group.to(eta.device), factors.diagonal())
        return torch.cat([eta, weight * sums / self._roots(eta)], dim=1)

    def coordinates(self, precision: Tensor) -> Tensor:
        starts = self._counts.cumsum(0) - self._counts
        return precision[starts.to(precision.device)] * self._roots(precision)

    def precision(self, coordinates: Tensor) -> Tensor:
        return (coordinates / self._roots(coordinates))[self._group.to(coordinates.device)]

    def noise_radius(self, sd: float) -> Tensor | float:
        """Size of the largest of so many noises."""
        largest = math.sqrt(2 * math.log(2 * self.size))
        return sd * largest / self._counts.sqrt()[self._group].double()

    def _roots(self, like: Tensor) -> Tensor:
        return self._counts.to(like).sqrt()


class Diagonal(Shared):
    """Diagonals of precision matrices: each coordinate has a precision of its own."""

    name = "diagonal"

    def __init__(self, widths: Sequence[int]):
        super().__init__([1] * sum(widths))

    def noise_radius(self, sd: float) -> float:
        return sd * math.sqrt(2 * math.log(2 * self.size))


Structure = Full | Shared
STRUCTURES = {structure.name: structure for structure in (Full, Diagonal, Shared)}
