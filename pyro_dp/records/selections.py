"""Numbers that a mask selects, ``x[mask]``, where each record has a mask of its own.

``torch.vmap`` needs equal shapes. So a selection keeps the whole shape. A selected number replaces
those that the mask leaves out, and sums and means skip them.
"""

import sys
from collections.abc import Callable, Container, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp.records.losses import NotVectorizable

_SELECTING = {Tensor.__getitem__, Tensor.masked_select, torch.masked_select}
_OF_EACH = frozenset(
    [
        *("abs", "add", "binary_cross_entropy_with_logits", "broadcast_tensors", "clamp"),
        *("clamp_max", "clamp_min", "clone", "contiguous", "detach", "digamma", "div", "double"),
        *("empty_like", "eq", "erf", "erfc", "exp", "expand", "expand_as", "expm1", "float", "ge"),
        *("gt", "invert", "isfinite", "isnan", "le", "lgamma", "log", "log1p", "logical_and"),
        *("logical_not", "logical_or", "logsigmoid", "long", "lt", "maximum", "minimum", "mul"),
        *("nan_to_num", "ne", "neg", "ones_like", "pow", "radd", "rdiv", "relu", "reshape", "rmul"),
        *("rpow", "rsqrt", "rsub", "rtruediv", "sigmoid", "softplus", "sqrt", "square", "sub"),
        *("tanh", "to", "true_divide", "truediv", "type_as", "unsqueeze", "view", "view_as"),
        *("where", "xlogy", "zeros_like"),
    ]
)
_COUNTING = {"__len__", "nelement", "numel"}  # which see what is left out
_SIZES = {"size", "stride"}
_OTHER = "{name}() of numbers that a mask selects needs one record at a time"


class Selections:
    """The selections that masks make while a model runs for all records at once.

    :param require: takes a condition on one record, under ``torch.vmap``. All records are taken to
        meet it, and those that do not are marked.
    """

    def __init__(self, require: Callable[[Tensor], Any]):
        self._require = require
        self._found: dict[int, tuple[Tensor, Tensor]] = {}  # by id: the selection, and its mask

    def select(self, tensor: Tensor, mask: Tensor) -> Tensor:
        """``tensor[mask]``, for a mask of the tensor's shape: (n,), where n is their size."""
        values, mask = tensor.reshape(-1), mask.reshape(-1)
        self._require(mask.any())  # else no number may stand for the others
        some = values.detach().gather(0, mask.to(torch.uint8).argmax().reshape(1))
        return self._keep(torch.where(mask, values, some), mask)

    def assign(self, tensor: Tensor, mask: Tensor, values: Tensor) -> None:
        """``tensor[mask] = values``, for a selection."""
        self._require_equal([mask.reshape(-1), self.mask(values)])
        tensor.copy_(torch.where(mask, values.reshape(mask.shape), tensor))

    def mask(self, tensor: Any) -> Tensor | None:
        """The mask of a selection, (n,); None: it is none."""
        return self._found[id(tensor)][1] if id(tensor) in self._found else None

    def masks(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        """Those of all selections among the arguments of a function."""
        if not self._found:
            return []
        found = (self.mask(each) for each in pytree.tree_leaves((args, kwargs)))
        return [each for each in found if each is not None]

    def apply(self, func: Any, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A function's result, for arguments with selections among them.

        :param compute: the function, of whole shapes.
        :raises NotVectorizable: it is neither one of each number, nor a sum, nor a mean.
        """
        name, masks = func.__name__, self.masks(args, kwargs)
        mask = masks[0]
        self._require_equal(masks)
        if name in ("sum", "mean") and args and _over_last(args[0].dim(), *args[1:], **kwargs):
            numbers = torch.where(mask, args[0], 0)
            total = compute(numbers, *args[1:], **kwargs)
            return total if name == "sum" else total * (len(mask) / mask.sum())
        result = None if name in _COUNTING else compute(*args, **kwargs)
        made = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
        if result is not None and not made:
            if (name in _SIZES or isinstance(result, torch.Size)) and not _asked_by_torch():
                raise NotVectorizable(_OTHER.format(name="shape"))
            return result
        others = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        others = [x for x in others if self.mask(x) is None]
        fits = all(not x.dim() or x.shape[-1] == 1 for x in others)
        fits = fits and all(x.dim() and x.shape[-1] == len(mask) for x in made)
        if not made or not fits or name.strip("_") not in _OF_EACH:
            raise NotVectorizable(_OTHER.format(name=name.strip("_")))
        for each in made:
            self._keep(each, mask)
        return result

    def _keep(self, tensor: Tensor, mask: Tensor) -> Tensor:
        self._found[id(tensor)] = tensor, mask
        return tensor

    def _require_equal(self, masks: Sequence[Tensor | None]) -> None:
        first, *others = masks
        for each in others:
            if each is first:
                continue
            if each is None or first is None or len(each) != len(first):
                raise NotVectorizable(_OTHER.format(name="a function"))
            self._require((each == first).all())


def by_mask(func: Any, args: Sequence[Any], functions: Container[Any] = _SELECTING) -> bool:
    """Whether one of these functions has a tensor, and a mask of its shape, as arguments."""
    if func not in functions or len(args) < 2 or not isinstance(args[1], Tensor):
        return False
    return args[1].dtype == torch.bool and args[1].shape == args[0].shape


def _over_last(
    dims: int, dim: Any = None, keepdim: bool = False, *, axis: Any = None, **kwargs: Any
) -> bool:
    """Whether a sum or a mean of a tensor with so many dimensions is over the last one, too."""
    dim = axis if dim is None else dim
    if kwargs.keys() - {"dtype"} or not isinstance(dim, int | tuple | list | None):
        return False
    over = range(dims) if dim is None else (dim,) if isinstance(dim, int) else dim
    return dims - 1 in [each % dims for each in over]


def _asked_by_torch() -> bool:
    """Whether code of torch or Pyro calls: it needs shapes, and has no mean of its own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("pyro_dp."):
        frame = frame.f_back
    return frame is not None and frame.f_globals["__name__"].split(".")[0] in ("torch", "pyro")
