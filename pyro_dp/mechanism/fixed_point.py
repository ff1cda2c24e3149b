"""Secure mode: sums of integers with integer noise, from the operating system's generator.

Floating-point rounding of a sum, or of its noise, can reveal what the noise should hide.
``Noise(source="system")`` prevents these attacks:

* *The set of possible outputs* (Mironov 2012; Haney et al. 2022, Precision-based attacks, arXiv
  2207.13793). Floating-point noise added to 0 can reach other numbers than noise added to 1. One
  released coordinate may thus identify the sum with certainty. In secure mode sum and noise are
  integers, multiples of a public grid. From any sum, every integer is possible.
* *Sums whose rounding depends on their order and on other records* (Casacuberta et al. 2022,
  Widespread underestimation of sensitivity, arXiv 2207.10635). A record can then change a sum by
  more than its bound. In secure mode each record's coordinates are rounded towards zero, one record
  at a time, so its norm stays within the bound. Integers are added exactly, in any order. If they
  overflow, they do so modulo 2^64, as the noise does, and reveal nothing.
* *Noise of the wrong distribution.* The discrete Gaussian is drawn exactly
  (:mod:`pyro_dp.mechanism.system_random`), and so are the records that take part in a step.
* *Prediction of the generator* from its state, its seed, earlier output, a fork, a copied or
  restored process (Garfinkel & Leclerc 2020, arXiv 2009.03777). Each random bit is read from the
  operating system's cryptographic generator when it is needed, and is not stored. A
  ``torch.Generator`` or seed is refused.

**Not prevented.** A record's contribution is computed in floating point before it is clipped and
rounded, together with those of other records. In some libraries the last bits of a row of a matrix
product depend on its position in the batch. So an additional record may change the contributions of
others. A contribution changes by one grid unit if a coordinate lies at a boundary of the rounding.
It changes by more if the model amplifies last bits, as a sine of features above 1e8 does. Running
time and memory also reveal something: a step takes longer for a larger batch. (The time of
rejection sampling is random, and independent of the sum.) Secure mode does not protect against
anyone who reads memory or disk, against faulty hardware, or against a broken generator.

**Accounting.** The discrete Gaussian of scale s is that of Canonne, Kamath & Steinke 2020 (arXiv
2004.00010). It costs at most as much as a continuous Gaussian of variance s^2 - 16. This holds up
to a factor of 1 +- 1e-136 per coordinate and step. So the ledger's event states an upper bound
(docs/proofs/integers.md).
"""

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from numpy.random import Generator
from torch import Tensor

from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.contributions import Contributions, divisible
from pyro_dp.mechanism.system_random import MOST, Stream, discrete_gaussian
from pyro_dp.utils.errors import ConfigurationError, PrivacyError
from pyro_dp.utils.torch_state import sent

_UNITS = 2**30  # grid units in a block's bound: sums of 2^32 records fit into 63 bits
_MOST_NUMBERS = 2**24  # in memory at a time: rows are built, as no matrix product can round them


def rounded_sums(
    values: Sequence[Contributions],
    bounds: Sequence[Tensor | float],
    weights: Tensor | None = None,
    *,
    fused: bool = False,
) -> list[Tensor]:
    """As :func:`~pyro_dp.mechanism.clipping.clipped_sums`, in units of the grid: (size,) in int64.

    Each record's coordinates are rounded towards zero, so its norm stays within the bound.
    """
    blocks = [divisible(each) for each in values]
    norms = [block.norms() for block in blocks]  # (B, 1)
    counted = torch.stack(norms).isfinite().all(dim=0)
    if weights is not None:
        counted = counted & (weights > 0)
    sums = []
    for block, bound, norm in zip(blocks, bounds, norms, strict=True):
        # In any order of summation, the norm of n numbers has a relative error of at most
        # (n + 2) / 2 units of 2^-52.
        room = 1 - (block.size + 16) * 2.0**-52
        scale = _UNITS * torch.where(norm > room * bound, room / norm, 1 / bound)
        sums.append(block.whole_sum(torch.where(counted, scale, 0.0), fused))
    return sums


class FixedPointSum(ClippedSum):
    """The sum of clipped contributions, in integer multiples of 2^-30 of each block's bound."""

    clipped_sums = staticmethod(rounded_sums)
    compiled_sums = staticmethod(functools.partial(rounded_sums, fused=True))
    dtype = torch.int64
    _shares = 1
    _total: Callable[[Tensor], Tensor] | None = None  # None: one owner has all records

    @staticmethod
    def most_records(size: int, limit: int | None) -> int:
        return min(limit or _MOST_NUMBERS, max(1, _MOST_NUMBERS // max(1, size)))

    def rounding(self, count: int) -> float:
        return count / _UNITS

    def require_noise(self, sigmas: Sequence[float]) -> None:
        least, most = 2.0**-16, MOST / 2**31
        own = [sigma / math.sqrt(self._shares) for sigma in sigmas]
        if not all(least <= sigma <= most for sigma in own):
            raise ConfigurationError(
                f"Secure mode adds noise of {least:g} to {most:g} times a bound, not of "
                f"{min(own):g} to {max(own):g}: choose another multiplier."
            )
        if not all(block.bound < math.inf for block in self.blocks):
            raise ConfigurationError(
                "Secure mode needs a finite bound, because its grid is a fraction of the bound."
            )

    @property
    def _exact_sums(self) -> tuple[Tensor, ...]:
        return tuple(self._in_bounds(self._totals))

    def in_shares(self, shares: int, add: Callable[[Tensor], Tensor]) -> None:
        """Add only a share of the noise here. The release is then the total over all owners.

        :param shares: number of shares whose variances add up to that of the full noise.
        :param add: takes this owner's noisy integers of all blocks, concatenated, and returns the
            sum over all owners.
        """
        self._shares, self._total = shares, add

    def _noisy(self, sigmas: Sequence[float], noise: Stream) -> list[Tensor]:
        if isinstance(noise, Generator):
            raise PrivacyError("A FixedPointSum takes its noise from a SystemGenerator alone.")
        own = []
        for block, units, sigma in zip(self.blocks, self._totals, sigmas, strict=True):
            # The root a of the variance, rounded up, plus one: (a + 1)^2 >= a^2 + 16 if a >= 8.
            variance = math.ceil(Fraction(sigma * _UNITS) ** 2 / self._shares)
            scale = math.isqrt(variance - 1) + 2
            draw = torch.from_numpy(discrete_gaussian(scale, block.size, noise))
            own.append(sent(draw, units.device).add_(units))
        if self._total is not None:
            total = self._total(torch.cat(own)).to(self.device)
            own = list(torch.split(total, [block.size for block in self.blocks]))
        return self._in_bounds(own)

    def _in_bounds(self, units: Sequence[Tensor]) -> list[Tensor]:
        return [
            own.double() * (block.bound / _UNITS)
            for block, own in zip(self.blocks, units, strict=True)
        ]
