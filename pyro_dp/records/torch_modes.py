"""Modes of torch functions for a model's run: parameters, draws, branches on a record, masks."""

import sys
from collections.abc import Callable, Container, Sequence
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    peek_interpreter_stack,
)
from torch.distributions import dirichlet
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pyro_dp.graphs.tracing import constant_number
from pyro_dp.records.local_draws import BY_TORCH, DRAWING, LocalDraws
from pyro_dp.records.losses import NotVectorizable
from pyro_dp.records.vectorised import VECTORISED

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
_COUNTING = {"__len__", "nelement", "numel"}  # these would also count what a mask leaves out
_SIZES = {"size", "stride"}
_BY_MASK = "{name}() of numbers that a mask selects needs one record at a time"
_SEVERAL = "a branch depends on more than one number of a record"
NEVER = 2**62  # draws
_OTHERS = "its branches on values of a record depend on public draws"


class Decisions:
    """A model's branches on a record: ``if``, ``while``, ``assert`` or ``bool``.

    All records take the branches of a placeholder. A record that would branch differently is
    marked. Only its draws before that branch count.

    :param answers: the placeholder's answers, in order of use. ``None``: these records are
        placeholders, and their answers are kept in :attr:`answers`.
    """

    def __init__(self, answers: Sequence[bool] | None = None):
        self.answers: list[bool] = []
        self._placeholders = answers
        self._otherwise: list[Tensor] = []

    def __call__(self, drawn: int, condition: Tensor, answer: bool | None = None) -> bool:
        """The answer with which all records go on.

        :param drawn: number of draws that the record made before.
        :param condition: the condition on one record, under ``torch.vmap``.
        :param answer: an answer to assume; ``None``: the placeholder's.
        """
        if condition.numel() != 1:
            raise NotVectorizable(_SEVERAL)
        actual = condition.detach().reshape(()) != 0
        if answer is not None:
            pass
        elif self._placeholders is None:
            answer = bool(_of_all(actual).flatten()[0])
        elif len(self.answers) < len(self._placeholders):
            answer = self._placeholders[len(self.answers)]
        else:
            raise NotVectorizable(_OTHERS)
        self.answers.append(answer)
        self._otherwise.append(torch.where(actual != answer, drawn, NEVER))
        return answer

    @property
    def otherwise(self) -> list[Tensor]:
        """The number of a record's draws before it first branches differently, a scalar.

        The list is empty without branches. The number is ``NEVER`` if the record agrees.
        """
        return [torch.stack(self._otherwise).amin()] if self._otherwise else []


def _of_all(value: Tensor) -> Tensor:
    """The tensor of all records behind one under ``torch.func``."""
    while is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
    return value


class Substitution(TorchFunctionMode):
    """Replaces tensors in the arguments of torch functions, also within tuples and lists.

    :param substitutes: replacements by the ``id`` of the tensor.
    """

    def __init__(self, substitutes: dict[int, Tensor] | None = None):
        super().__init__()
        self.substitutes = substitutes or {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = self._replaced(args, kwargs)
        return func(*args, **kwargs)

    def _replaced(self, args: Any, kwargs: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        if not self.substitutes:
            return args, kwargs or {}
        named = {key: self._substituted(value) for key, value in (kwargs or {}).items()}
        return self._substituted(args), named

    def _substituted(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.substitutes.get(id(value), value)
        if type(value) in (tuple, list):
            return type(value)(self._substituted(each) for each in value)
        return value


class Selections:
    """Numbers that a mask selects, ``x[mask]``, if each record has its own mask.

    ``torch.vmap`` needs equal shapes, so a selection keeps the whole shape. A selected number
    replaces those that the mask leaves out, and sums and means skip them.

    :param require: takes a condition on one record, under ``torch.vmap``. The run assumes that all
        records meet it, and marks those that do not.
    """

    def __init__(self, require: Callable[[Tensor], Any]):
        self._require = require
        self._found: dict[int, tuple[Tensor, Tensor]] = {}  # by id: the selection, and its mask

    def select(self, tensor: Tensor, mask: Tensor) -> Tensor:
        """``tensor[mask]``, for a mask of the tensor's shape, as (n,), where n is their size."""
        values, mask = tensor.reshape(-1), mask.reshape(-1)
        self._require(mask.any())  # else no selected number can replace the others
        some = values.detach().gather(0, mask.to(torch.uint8).argmax().reshape(1))
        return self._keep(torch.where(mask, values, some), mask)

    def assign(self, tensor: Tensor, mask: Tensor, values: Tensor) -> None:
        """``tensor[mask] = values``, for a selection."""
        self._require_equal([mask.reshape(-1), self.mask(values)])
        tensor.copy_(torch.where(mask, values.reshape(mask.shape), tensor))

    def mask(self, tensor: Any) -> Tensor | None:
        """The mask of a selection, (n,); ``None`` for other tensors."""
        return self._found[id(tensor)][1] if id(tensor) in self._found else None

    def masks(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        """The masks of all selections among the arguments of a function."""
        if not self._found:
            return []
        found = (self.mask(each) for each in pytree.tree_leaves((args, kwargs)))
        return [each for each in found if each is not None]

    def apply(self, func: Any, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A function's result for arguments that include selections.

        :param compute: computes the function on whole shapes.
        :raises NotVectorizable: the function is neither elementwise, nor a sum, nor a mean.
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
                raise NotVectorizable(_BY_MASK.format(name="shape"))
            return result
        others = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        others = [x for x in others if self.mask(x) is None]
        fits = all(not x.dim() or x.shape[-1] == 1 for x in others)
        fits = fits and all(x.dim() and x.shape[-1] == len(mask) for x in made)
        if not made or not fits or name.strip("_") not in _OF_EACH:
            raise NotVectorizable(_BY_MASK.format(name=name.strip("_")))
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
                raise NotVectorizable(_BY_MASK.format(name="a function"))
            self._require((each == first).all())


def by_mask(func: Any, args: Sequence[Any], functions: Container[Any] = _SELECTING) -> bool:
    """Whether this is one of the functions, for a tensor and a mask of the same shape."""
    if func not in functions or len(args) < 2 or not isinstance(args[1], Tensor):
        return False
    return args[1].dtype == torch.bool and args[1].shape == args[0].shape


def _over_last(
    dims: int, dim: Any = None, keepdim: bool = False, *, axis: Any = None, **kwargs: Any
) -> bool:
    """Whether these arguments of a sum or a mean include the last of ``dims`` dimensions."""
    dim = axis if dim is None else dim
    if kwargs.keys() - {"dtype"} or not isinstance(dim, int | tuple | list | None):
        return False
    over = range(dims) if dim is None else (dim,) if isinstance(dim, int) else dim
    return dims - 1 in [each % dims for each in over]


def _asked_by_torch() -> bool:
    """Whether code of torch or Pyro asks. It needs shapes, but does not divide sums by them."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("pyro_dp."):
        frame = frame.f_back
    return frame is not None and frame.f_globals["__name__"].split(".")[0] in ("torch", "pyro")


class RecordMode(Substitution):
    """Changes torch functions while a model runs on one record.

    * Parameters are substituted by identity. By name, ``pyro.module`` and flows that alias a weight
      would keep their own tensors, and their gradients would silently be zero.
    * Draws come from :class:`LocalDraws`. Otherwise, normals and uniforms that overwrite a tensor
      could not be vectorised, and rejection samplers could not be traced.

    If all records run at once:

    * :mod:`.vectorised` replaces some functions.
    * A tensor that all records share becomes one per record when a record's value is written into
      it. Earlier views of it do not change. The check against the one-record loop notices this.
    * Writing a number at a mask becomes ``torch.where``. :class:`Selections` handles ``x[mask]``.
    * If a model branches on values of records, :class:`Decisions` answers.
    """

    def __init__(
        self,
        draws: LocalDraws,
        substitutes: dict[int, Tensor] | None = None,
        decisions: Decisions | None = None,
    ):
        super().__init__(dict(substitutes or {}))
        self.draws = draws
        self._decisions = decisions or Decisions(())
        self._selections = Selections(partial(self._decide, answer=True))
        self._written: list[Tensor] = []  # kept alive, so that no other tensor gets their id

    def __enter__(self):
        self._dirichlet = mock.patch.object(dirichlet, "_Dirichlet", BY_TORCH)
        self._dirichlet.start()
        return super().__enter__()

    def __exit__(self, *exc_info):
        self._dirichlet.stop()
        return super().__exit__(*exc_info)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "generator" in kwargs:  # a user's generator is public, and would count the records
            kwargs = {**kwargs, "generator": None}
        answer = DRAWING.get(func)
        if answer is not None:
            args, kwargs = self._replaced(args, kwargs)
            return answer(self.draws, *args, **kwargs)
        if peek_interpreter_stack() is None:
            if func in _READERS:  # during tracing, numbers that need no input are constants
                return constant_number(func, self._substituted(args[0]))
            return super().__torch_function__(func, types, args, kwargs)
        if func is Tensor.__bool__ and _differs(args[0]):
            return self._decide(args[0])
        if args and _writes(func):
            self._widen(*args, *kwargs.values())
            if func is Tensor.__setitem__ and _is_masked(*args):
                tensor, mask, value = self._substituted(args)
                mask = mask.reshape(*mask.shape, *[1] * (tensor.dim() - mask.dim()))
                tensor.copy_(torch.where(mask, value, tensor))
                return None
        args, kwargs = self._replaced(args, kwargs)
        selections = self._selections
        if by_mask(func, args) and _differs(args[1]) and selections.mask(args[0]) is None:
            return selections.select(*args)
        if not selections.masks(args, kwargs):
            return _vectorised(func, *args, **kwargs)
        if by_mask(func, args, [Tensor.__setitem__]):
            return selections.assign(*args)
        return selections.apply(func, partial(_vectorised, func), args, kwargs)

    def _decide(self, condition: Tensor, answer: bool | None = None) -> bool:
        return self._decisions(len(self.draws.sampled), condition, answer)

    def _widen(self, tensor: Any, *others: Any) -> None:
        """Replace a tensor that all records share by one per record, if they write into it."""
        of_records = [x for x in pytree.tree_leaves(self._substituted(others)) if _differs(x)]
        value = self._substituted(tensor)
        if of_records and isinstance(value, Tensor) and not _differs(value):
            own = of_records[0].new_empty(value.shape, dtype=value.dtype)
            self.substitutes[id(tensor)] = own.copy_(value)
            self._written.append(tensor)


def _vectorised(func: Any, *args: Any, **kwargs: Any) -> Any:
    result = VECTORISED[func](*args, **kwargs) if func in VECTORISED else None
    return func(*args, **kwargs) if result is None else result


def _writes(func: Any) -> bool:
    name = func.__name__
    return name in _WRITERS or (name.endswith("_") and not name.endswith("__"))


def _is_masked(tensor: Any, index: Any, value: Any) -> bool:
    """Whether one number is written where a mask is true, which works for all records at once."""
    masked = isinstance(index, Tensor) and index.dtype == torch.bool
    return masked and (isinstance(value, int | float) or getattr(value, "shape", None) == ())


def _differs(value: Any) -> bool:
    """Whether ``torch.vmap`` has a separate value of this tensor for each record."""
    if not isinstance(value, Tensor):
        return False
    while is_gradtrackingtensor(value):
        value = get_unwrapped(value)
    return is_batchedtensor(value)


_READERS = {
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
    *(Tensor.item, Tensor.tolist),
}
_WRITERS = {"__setitem__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}
