"""Whether a graph gives the numbers of the model that it was traced from."""

import torch
from torch import Tensor

from pyro_dp.utils.errors import ModelError

MISMATCH = (
    "The traced step gives other numbers than the model itself, which must have a state, or depend "
    "on values in a way that a graph cannot: use jit='none'."
)


def require_same(
    found: Tensor, expected: Tensor, *, exact: bool, scale: float = 0.0, rounding: float = 0.0
) -> None:
    """:raises ModelError: a graph's numbers are not those of the model.

    :param exact: whether the model computes in float64.
    :param scale: of numbers that are large for these.
    :param rounding: by how much they may differ in any case, in units of the scale.
    """
    size = max(scale, expected.abs().nan_to_num(0.0, 0.0, 0.0).max().item())
    tolerance = (1e-8 if exact else 1e-3) * size + rounding * scale
    if not torch.allclose(found, expected, rtol=0.0, atol=tolerance, equal_nan=True):
        raise ModelError(MISMATCH)
