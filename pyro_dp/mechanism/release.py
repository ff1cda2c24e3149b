"""The only function that makes data public.

An inference adds per-record quantities to a :class:`ClippedSum`, which clips each record. Then
:func:`release` records the event in the ledger, and returns the sums with noise.
"""

import math

from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import SubsampledGaussian
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.system_random import Stream
from pyro_dp.utils.errors import ConfigurationError


def release(
    clipped: ClippedSum, *, accountant: PrivacyAccountant, event: SubsampledGaussian, noise: Stream
) -> list[Tensor]:
    """Record the event in the ledger, then return the sums with noise.

    **Guarantee.** Block k of a record has norm at most C_k. Its noise has standard deviation
    sigma_k C_k, with sigma_k = sigma / sqrt(share_k). Divide each block by its noise: a record then
    has norm at most sqrt(sum_k sigma_k^-2) = 1 / sigma, and the noise has unit variance. So the
    joint release is one Gaussian mechanism with noise multiplier sigma, subsampled as the event
    states.

    :param clipped: sums over the sampled records; an empty batch is a sum of zeros.
    :param event: noise multiplier sigma, and how the records were sampled.
    :param noise: the private stream of this release. A :class:`FixedPointSum` needs a
        :class:`~pyro_dp.mechanism.system_random.SystemGenerator`.
    :returns: one new float64 tensor of shape (size,) per block. Divide it by the public sample
        rate, never by a batch size.
    :raises PrivacyBudgetExceeded: the budget does not cover it. Nothing is released, and the ledger
        is unchanged.
    """
    if not math.isclose(sum(b.share for b in clipped.blocks), 1.0, rel_tol=1e-9):
        raise ConfigurationError("The shares of the blocks of one release must sum to 1.")
    sigmas = [event.noise_multiplier / math.sqrt(block.share) for block in clipped.blocks]
    clipped.require_noise(sigmas)
    accountant.record(event)
    return clipped._noisy(sigmas, noise)
