"""Secure mode: sums of integers with integer noise, from the operating system's generator.

A computer cannot hold every real number. Rounding a sum or noise can reveal what the noise should
hide. ``Noise(source="system")`` answers these attacks:

* *Which numbers are possible* (Mironov 2012; Haney et al. 2022, Precision-based attacks, arXiv
  2207.13793). Noise in floating point reaches other numbers from a sum of 0 than from a sum of 1.
  With one release of a coordinate, an attacker is sometimes certain. Here sum and noise are
  integers, multiples of a public grid, and from any sum every integer is possible.
* *Sums whose rounding depends on their order and on other records* (Casacuberta et al. 2022,
  Widespread underestimation of sensitivity, arXiv 2207.10635). A record can then change a sum by
  more than its bound. Here each record's coordinates are rounded towards zero, one record at a
  time, and its norm stays within the bound. Integers are added exactly, in any order. Should they
  ever overflow, they do so modulo 2^64, as the noise does, and reveal nothing.
* *Noise with other probabilities than it should have.* The discrete Gaussian is drawn exactly
  (:mod:`pyro_dp.mechanism.system_random`), and so are the records that take part in a step.
* *Prediction of the generator* from its state, its seed, earlier output, a fork, a copied or
  restored process (Garfinkel & Leclerc 2020, arXiv 2009.03777). Every bit of noise and of sampling
  comes from the operating system's cryptographic generator when it is needed, and nothing is kept
  (:mod:`pyro_dp.mechanism.system_random`). A ``generator=`` is refused.

Not answered: before clipping and rounding, a record's part is computed in floating point, together
with others. In some libraries the last bits of a row of a matrix product depend on its position in
the batch. One record more or less may so move the parts of others. It moves them by a unit if a
coordinate lies on the grid. It moves them more if a model amplifies last bits, as with features of
1e8 and more under a sine. Running time and memory leak, too: a step takes longer for a larger
batch. (Rejection takes a random time, independent of the sum.) Secure mode does not stop readers of
memory or disk, faulty hardware or a broken generator.

**Accounting.** The discrete Gaussian of scale s (Canonne, Kamath & Steinke 2020, arXiv 2004.00010)
costs as much as the continuous one of variance s^2 - 16. That holds up to a factor of 1 +- 1e-136
per coordinate and step. So the ledger's event states an upper bound (docs/proofs/integers.md).
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

_UNITS = 2**30  # grid units in a block's bound: 2^32 records fit into 63 bits
_MOST_NUMBERS = 2**24  # held at a time: matrix products cannot make these sums


def rounded_sums(
    values: Sequence[Contributions],
    bounds: Sequence[Tensor | float],
    weights: Tensor | None = None,
    *,
    fused: bool = False,
) -> list[Tensor]:
    """As :func:`~pyro_dp.mechanism.clipping.clipped_sums`, in units of the grid: (size,) in int64.

    No coordinate of a record is rounded up, so that the norm of each stays within the bound.
    """
    blocks = [divisible(each) for each in values]
    norms = [block.norms() for block in blocks]  # (B, 1)
    counted = torch.stack(norms).isfinite().all(dim=0)
    if weights is not None:
        counted = counted & (weights > 0)
    sums = []
    for block, bound, norm in zip(blocks, bounds, norms, strict=True):
        # A norm of n terms is computed to (n + 2) / 2 units of 2^-52, whatever their order.
        room = 1 - (block.size + 16) * 2.0**-52
        scale = _UNITS * torch.where(norm > room * bound, room / norm, 1 / bound)
        sums.append(block.whole_sum(torch.where(counted, scale, 0.0), fused))
    return sums


class FixedPointSum(ClippedSum):
    """Sum over records of their clipped blocks in whole units, 2^-30 of each block's bound."""

    clipped_sums = staticmethod(rounded_sums)
    compiled_sums = staticmethod(functools.partial(rounded_sums, fused=True))
    dtype = torch.int64
    _shares = 1
    _total: Callable[[Tensor], Tensor] | None = None  # for a single owner of all records

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
            raise ConfigurationError("Secure mode needs a finite bound: no grid fits an infinite.")

    @property
    def _exact_sums(self) -> tuple[Tensor, ...]:
        return tuple(self._in_bounds(self._totals))

    def in_shares(self, shares: int, add: Callable[[Tensor], Tensor]) -> None:
        """Make later noise one share of the noise that hides a record. A release is then a total.

        :param shares: number of shares that make up the whole noise, by their variances.
        :param add: from this owner's noisy units, of all blocks one after the other, to the sum of
            those of all owners.
        """
        self._shares, self._total = shares, add

    def _noisy(self, sigmas: Sequence[float], noise: Stream) -> list[Tensor]:
        if isinstance(noise, Generator):
            raise PrivacyError("A FixedPointSum takes its noise from a SystemGenerator alone.")
        own = []
        for block, units, sigma in zip(self.blocks, self._totals, sigmas, strict=True):
            # The root a, rounded up, and one more: (a + 1)^2 >= a^2 + 16 from a = 8 on.
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
