"""The blocks of a joint release, and how they share its cost."""

import math
from dataclasses import dataclass

from pyro_dp.utils.errors import ConfigurationError

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
                f"The bound of a record's part is {self.bound:g}, and norms that small are not "
                f"computed safely. Use bounds of at least {LEAST_BOUND:g}, in larger units."
            )

    def noise(self, multiplier: float) -> float:
        """Standard deviation of the noise in a coordinate; 0 without noise, whatever the bound.

        :param multiplier: sigma of the release.
        """
        return multiplier * self.bound / math.sqrt(self.share) if multiplier > 0 else 0.0
