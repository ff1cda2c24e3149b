"""Whether two ways to the same numbers agree: up to rounding, and a graph with its model."""

import torch
from torch import Tensor

from pyro_dp.utils.errors import ModelError

MISMATCH = (
    "The traced step gives other numbers than the model itself. The model must have a state, or "
    "depend on values that a graph cannot follow. Use jit='none'."
)


def require_same(
    found: Tensor, expected: Tensor, *, exact: bool, scale: float = 0.0, rounding: float = 0.0
) -> None:
    """:raises ModelError: a graph's numbers are not those of the model.

    :param exact: whether the model computes in float64.
    :param scale: of numbers that are large for these.
    :param rounding: by how much they may differ in any case, in units of the scale.
    """
    largest = expected.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if expected.numel() else 0.0
    size = max(scale, largest)
    tolerance = (1e-8 if exact else 1e-3) * size + rounding * scale
    if not torch.allclose(found, expected, rtol=0.0, atol=tolerance, equal_nan=True):
        raise ModelError(MISMATCH)


def agree(one: Tensor, other: Tensor, *, tolerance: float | None = None) -> bool:
    """Equal up to rounding, relative to the largest entry."""
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    if tolerance is None:
        tolerance = 1e-8 if one.dtype == torch.float64 else 1e-4
    size = one.detach().abs().nan_to_num(0.0, 0.0, 0.0).amax().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=tolerance * size, equal_nan=True)
