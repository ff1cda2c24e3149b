"""Clip, sum, release: the one place where data becomes public.

An inference hands per-record quantities to a :class:`ClippedSum`, which bounds what one record can
add, and that to :func:`release`, which records the event in the ledger and adds the noise. Both
relations follow from the bound C alone: zeroing one record out moves the sum by at most C,
replacing it by at most 2C.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import SubsampledGaussian
from pyro_dp.system_stream import SystemStream
from pyro_dp.utils.agreement import require_same
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_number

LEAST_BOUND = 1e-6


@dataclass(frozen=True)
class Block:
    """One block of a joint release.

    A release of several blocks is *one* Gaussian event. With noise multipliers sigma_k in units of
    each block's own bound it costs sigma = (sum_k sigma_k^-2)^(-1/2); a block with share s_k of the
    cost has sigma_k = sigma / sqrt(s_k).

    :param size: number of coordinates.
    :param bound: Euclidean norm to which the block of one record is clipped; at least 1e-6, far
        above where squares underflow.
    :param share: the part of sigma^-2 that this block takes; the shares of a release sum to 1.
    """

    size: int
    bound: float
    share: float = 1.0

    def __post_init__(self) -> None:
        if not self.bound >= LEAST_BOUND:
            raise ConfigurationError(
                f"The bound of a record's part is {self.bound:g}, and norms as small as that are "
                f"not computed safely: use bounds of at least {LEAST_BOUND:g}, in larger units."
            )


@dataclass(frozen=True)
class AdaptiveClip:
    """A clipping bound that follows a quantile of the per-record norms.

    Andrew et al. 2021 (arXiv 1905.03871): in each step every record adds the bit [norm <= C],
    centred to +-1/2, to the same release; the noisy fraction b of records within the bound moves
    it, C <- C exp(-learning_rate (b - quantile)).

    :param initial: the bound of the first step.
    :param quantile: fraction of the records that should lie within the bound, in (0, 1).
    :param learning_rate: step size of the geometric update, in (0, 100).
    :param share: part of the privacy cost (of sigma^-2) that the bit takes from the gradient, in
        (0, 1).
    :raises ConfigurationError: a setting is out of range.
    """

    initial: float = 1.0
    quantile: float = 0.5
    learning_rate: float = 0.2
    share: float = 0.01

    def __post_init__(self) -> None:
        for name, upper in (
            ("initial", math.inf),
            ("learning_rate", 100.0),
            ("quantile", 1.0),
            ("share", 1.0),
        ):
            require_number(f"AdaptiveClip.{name}", getattr(self, name), above=0.0, below=upper)

    def updated(self, bound: float, within: float) -> float:
        """The next bound, given the released fraction of records ``within`` the present one."""
        # Clamping is post-processing: one unlucky draw cannot throw the bound away.
        change = -self.learning_rate * (min(max(within, 0.0), 1.0) - self.quantile)
        return max(LEAST_BOUND, bound * math.exp(change))


class Contributions(Protocol):
    """One block of a batch of records, where a tensor of shape (B, size) would be too large."""

    def norms(self) -> Tensor | None:
        """Euclidean norms of the block's rows, (B, 1) in float64; never below the true ones.

        A record with a NaN or infinite coordinate has a norm that is not finite. None: all rows
        are finite and keep the bound by themselves.
        """

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Sum of the rows times their weights, (size,) in float64.

        :param weights: (B, 1); where a weight is zero, the row must not matter, NaN or not.
        """

    def dense(self) -> Tensor:
        """The tensor itself, in float64, for sums that must see every coordinate."""


class Rows:
    """A block that is held as it is.

    All in float64: the norm of a float32 vector overflows at 1e19, and the scale of a long
    half-precision one is too coarse for the bound to hold.

    :param values: (B, size).
    """

    def __init__(self, values: Tensor):
        self._values = values.to(torch.float64)

    def norms(self) -> Tensor:
        return torch.linalg.vector_norm(self._values, dim=1, keepdim=True)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return torch.where(weights > 0, self._values * weights, 0.0).sum(dim=0)

    def dense(self) -> Tensor:
        return self._values


class _Measured:
    """A block whose norms are known already."""

    def __init__(self, block: Contributions, norms: Tensor):
        self.weighted_sum, self.dense = block.weighted_sum, block.dense
        self._norms = norms

    def norms(self) -> Tensor:
        return self._norms


class _Bits:
    """Numbers +-1/2, (B, 1): a block that keeps its bound of 1/2 by itself."""

    def __init__(self, values: Tensor):
        self._values = values

    def norms(self) -> None:
        return None

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return torch.where(weights > 0, self._values, 0.0).sum(dim=0, dtype=torch.float64)

    def dense(self) -> Tensor:
        return self._values.to(torch.float64)


def with_bit(block: Contributions, bound: Tensor | float) -> list[Contributions]:
    """The block, and one of bound 1/2: +1/2 for each record within the bound, -1/2 beyond it."""
    norms = block.norms()
    return [_Measured(block, norms), _Bits(torch.where(norms <= bound, 0.5, -0.5))]


def clipped_sums(
    values: Sequence[Contributions],
    bounds: Sequence[Tensor | float],
    weights: Tensor | None = None,
) -> list[Tensor]:
    """Clip each record's blocks and sum them: (size,) in float64 per block, private.

    A record with a NaN or infinite coordinate adds zero to *every* block.

    :param values: one per block.
    :param bounds: norms to which they are clipped.
    :param weights: (B, 1), one for a record and zero for a padded row; all ones by default.
    """
    norms = [each.norms() for each in values]  # (B, 1)
    counted = sum(norm for norm in norms if norm is not None) < math.inf  # (B, 1); NaN is not
    if weights is not None:
        counted = counted & (weights > 0)
    sums = []
    for each, bound, norm in zip(values, bounds, norms, strict=True):
        if norm is None:
            sums.append(each.weighted_sum(counted))
            continue
        target = bound * (1 - 1e-12)  # so that rounding stays within the bound
        scale = torch.where(norm > target, target / norm, 1.0)
        sums.append(each.weighted_sum(torch.where(counted, scale, 0.0)))
    return sums


class ClippedSum:
    """Sum over records of their clipped blocks; microbatches are added one after the other.

    Sums are kept in float64, so that rounding in a long sum stays far below one record's bound.
    (:class:`~pyro_dp.grid_sums.GridSum` keeps them in integers, against attacks on rounding.)
    """

    clipped_sums = staticmethod(clipped_sums)

    @staticmethod
    def most_records(size: int, limit: int | None) -> int | None:
        """How many records to work on at a time, of so many coordinates each.

        :param limit: at most so many, or None.
        """
        return limit

    def __init__(self, blocks: Sequence[Block], device: torch.device | str = "cpu"):
        self.blocks = tuple(blocks)
        self._device = device
        self._totals: tuple[Tensor, ...] = ()  # until there is something

    def add(self, *values: Tensor | Contributions) -> None:
        """Clip each record's blocks and add them.

        :param values: one tensor of shape (B, size), or its equivalent, per block; private.
        """
        rows = [Rows(value) if isinstance(value, Tensor) else value for value in values]
        self.add_sums(self.clipped_sums(rows, [block.bound for block in self.blocks]))

    def add_sums(self, sums: Sequence[Tensor]) -> None:
        """Add what :attr:`clipped_sums` gave for these bounds."""
        if self._totals:
            sums = [total + new for total, new in zip(self._totals, sums, strict=True)]
        self._totals = tuple(sums)

    def require_same_as(self, other: "ClippedSum", *, count: int, exact: bool) -> None:
        """Compare first blocks that two ways of computing gave. No sum leaves this class for it.

        :param other: of the same records and bounds.
        :param count: number of the records.
        :param exact: whether the model computes in float64.
        :raises ModelError: they differ by more than rounding explains.
        """
        bound = self.blocks[0].bound
        require_same(
            self._exact_sums[0],
            other._exact_sums[0],
            exact=exact,
            scale=bound if bound < math.inf else 0.0,
            rounding=self.rounding(count),
        )

    def rounding(self, count: int) -> float:
        """By how much sums of so many equal records may differ, in units of the bound."""
        return 0.0

    def require_noise(self, sigmas: Sequence[float]) -> None:
        """:raises ConfigurationError: noise of such a size, one per block, cannot be added."""

    @property
    def _exact_sums(self) -> tuple[Tensor, ...]:
        """Private until released."""
        return self._totals or tuple(
            torch.zeros(b.size, dtype=torch.float64, device=self._device) for b in self.blocks
        )

    def _noisy(self, sigmas: Sequence[float], noise: np.random.Generator) -> list[Tensor]:
        """For :func:`release` only: the sums with noise.

        :param sigmas: standard deviation of each block's noise in units of the block's bound.
        """
        released = []
        for block, total, sigma in zip(self.blocks, self._exact_sums, sigmas, strict=True):
            if sigma > 0:
                draw = noise.standard_normal(block.size)
                draw *= sigma * block.bound
                released.append(torch.from_numpy(draw).to(total.device).add_(total))
            else:
                released.append(total.clone())
        return released


def release(
    clipped: ClippedSum,
    *,
    accountant: PrivacyAccountant,
    event: SubsampledGaussian,
    noise: np.random.Generator | SystemStream,
) -> list[Tensor]:
    """Record the event, then make the noisy sums public.

    Guarantee: with clipped blocks of norms at most C_k and noise of standard deviation sigma_k C_k,
    sigma_k = sigma / sqrt(share_k), the joint release is the Gaussian mechanism of noise multiplier
    sigma on records of norm at most 1 (each block divided by its noise), subsampled as the event
    says.

    :param clipped: sums over the sampled records; an empty batch is a sum of zeros.
    :param event: noise multiplier sigma, and how the records were sampled.
    :param noise: the private stream of this release; for a sum on a grid a
        :class:`~pyro_dp.system_stream.SystemStream`.
    :returns: one float64 tensor of shape (size,) per block, with memory of its own. Divide it by
        the public sample rate, never by a batch size.
    :raises PrivacyBudgetExceeded: before anything is released; the ledger is unchanged.
    """
    if not math.isclose(sum(b.share for b in clipped.blocks), 1.0, rel_tol=1e-9):
        raise ConfigurationError("The shares of the blocks of one release must sum to 1.")
    sigmas = [event.noise_multiplier / math.sqrt(block.share) for block in clipped.blocks]
    clipped.require_noise(sigmas)
    accountant.record(event)
    return clipped._noisy(sigmas, noise)
