"""Where the numbers of a tensor are, and how often they were changed."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy


def version(value: Any) -> int:
    """How often a tensor was changed in place; 0 for whatever does not tell."""
    if not isinstance(value, Tensor) or is_lazy(value):
        return 0
    return 0 if value.is_inference() else value._version


def address(tensor: Tensor) -> int:
    """Of the memory that a tensor and its views share; -1 for what has no such place."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else -1


def rows_in_cache(size: int) -> int:
    """How many rows of so many numbers to work on at a time: fewer take longer for Python's part,
    and more do not stay in the processor's cache.
    """
    return max(1024, min(32768, 2**20 // size))
