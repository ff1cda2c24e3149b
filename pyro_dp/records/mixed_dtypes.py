"""Products and likelihoods of numbers of different dtypes, which torch refuses.

Integer labels meet a Bernoulli's float logits, integer features a float weight: what sums do in
torch by themselves, promote, is done here for the functions that do not.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

# Their tensors are numbers, never indices.
_OF_NUMBERS = frozenset(
    [
        *(getattr(torch, name) for name in ("addmm", "addmv", "baddbmm", "einsum", "tensordot")),
        *(
            getattr(owner, name)
            for owner in (torch, Tensor)
            for name in ("bmm", "dot", "matmul", "mm", "mv")
        ),
        Tensor.__matmul__,
        Tensor.__rmatmul__,
        functional.bilinear,
        functional.binary_cross_entropy,
        functional.binary_cross_entropy_with_logits,
        functional.conv1d,
        functional.conv2d,
        functional.conv3d,
        functional.linear,
    ]
)


def promoted(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of a torch function, all tensors of the dtype that a sum of them would have."""
    if func not in _OF_NUMBERS:
        return args, kwargs
    dtypes = {x.dtype for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
    if len(dtypes) < 2 or not any(dtype.is_floating_point for dtype in dtypes):
        return args, kwargs
    first, *others = dtypes
    for other in others:
        first = torch.promote_types(first, other)
    return pytree.tree_map_only(Tensor, lambda x: x.to(first), (args, kwargs))
