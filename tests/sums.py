"""The parts of a clipped sum that only tests may read."""

from torch import Tensor

from pyro_dp.mechanism.clipping import ClippedSum


def exact_sums(clipped: ClippedSum) -> tuple[Tensor, ...]:
    """The sums before any noise, one for each block."""
    return clipped._exact_sums
