"""Numbers that torch draws by rejection, as functions of their parameters.

Gammas and Dirichlets have derivatives by implicit reparameterisation (Figurnov, Mohamed & Mnih
2018, arXiv 1805.08498). Here the number is given, and the derivative can be vectorised over records
and traced.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def _pointwise(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of tensors of one shape, for which torch has no rule of batches."""

    class Pointwise(Function):
        @staticmethod
        def forward(*values: Tensor) -> Tensor:
            return function(*values)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def vmap(info: Any, in_dims: Any, *values: Tensor) -> tuple[Tensor, int]:
            whole = [
                value.expand(info.batch_size, *value.shape)
                if dim is None
                else value.movedim(dim, 0)
                for value, dim in zip(values, in_dims, strict=True)
            ]
            return Pointwise.apply(*(each.contiguous() for each in whole)), 0

    return Pointwise.apply


_gamma_grad = _pointwise(torch._standard_gamma_grad)
_dirichlet_grad = _pointwise(torch._dirichlet_grad)


class _Given(Function):
    """A number that was drawn already, as a function of its concentration."""

    generate_vmap_rule = True

    @staticmethod
    def forward(concentration: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)


class _Gamma(_Given):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * _gamma_grad(*ctx.saved_tensors), None


class _Dirichlet(_Given):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        concentration, value = ctx.saved_tensors
        total = concentration.sum(-1, keepdim=True).expand_as(concentration)
        own = grad - (value * grad).sum(-1, keepdim=True)
        return _dirichlet_grad(value, concentration, total) * own, None


_FUNCTIONS = {torch._standard_gamma: _Gamma, torch._sample_dirichlet: _Dirichlet}


def attached(sampler: Callable[..., Tensor], arguments: tuple, value: Tensor) -> Tensor:
    """What this sampler of torch gave, as a function of its arguments, if it is one.

    :param value: without gradient; stays as it is, whatever is written into the result.
    """
    function: Any = _FUNCTIONS.get(sampler)
    return value.clone() if function is None else function.apply(arguments[0], value)


class ByTorch:
    """In place of ``torch.distributions.dirichlet._Dirichlet``, where torch functions are seen."""

    @staticmethod
    def apply(concentration: Tensor) -> Tensor:
        return torch._sample_dirichlet(concentration)
