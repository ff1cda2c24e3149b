"""Release: the only code that makes data public.

An inference hands per-record quantities to a :class:`ClippedSum`, which bounds one record's part.
It hands that to :func:`release`, which records the event in the ledger and adds the noise.
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
    """Record the event, then make the noisy sums public.

    Guarantee: let the clipped blocks have norms at most C_k and noise of standard deviation sigma_k
    C_k, with sigma_k = sigma / sqrt(share_k). The joint release is a Gaussian mechanism of noise
    multiplier sigma on records of norm at most 1 (each block divided by its noise). It is
    subsampled as the event says.

    :param clipped: sums over the sampled records; an empty batch is a sum of zeros.
    :param event: noise multiplier sigma, and how the records were sampled.
    :param noise: the private stream of this release; for a sum on a grid a
        :class:`~pyro_dp.mechanism.system_random.SystemGenerator`.
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
