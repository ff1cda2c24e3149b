"""Products and likelihoods of numbers of different dtypes, which torch refuses.

Integer labels meet a Bernoulli's float logits, integer features a float weight: what sums do in
torch by themselves, promote, is done here for the functions that do not.
"""

from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

# Their tensors are numbers, never indices.
OF_NUMBERS = frozenset(
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


def promoted(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of such a function, all tensors of the dtype that a sum of them would have."""
    dtypes = {x.dtype for x in _tensors((*args, *kwargs.values()))}
    if len(dtypes) < 2 or not any(dtype.is_floating_point for dtype in dtypes):
        return args, kwargs
    common = reduce(torch.promote_types, dtypes)
    return pytree.tree_map_only(Tensor, lambda x: x.to(common), (args, kwargs))


def _tensors(values: Sequence) -> Iterator[Tensor]:
    """Also those of lists, as einsum may have one. This is asked in every product of every step."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
