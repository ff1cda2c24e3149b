"""Local draws: the random numbers that a record's model and guide ask for.

Gammas and Dirichlets have derivatives by implicit reparameterisation (Figurnov, Mohamed & Mnih
2018, arXiv 1805.08498). Here the draw is an input, so the derivative can be vectorised over records
and traced.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import Function
from torch.nn import functional

from pyro_dp.records.losses import NotVectorizable

_DIFFER = "the local draws differ between records"


def _pointwise(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An elementwise function with a ``vmap`` rule, which torch lacks."""

    class Pointwise(Function):
        @staticmethod
        def forward(*values: Tensor) -> Tensor:
            return function(*values)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def vmap(info: Any, in_dims: Any, *values: Tensor) -> tuple[Tensor, int]:
            whole = (
                x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
                for x, dim in zip(values, in_dims, strict=True)
            )
            return Pointwise.apply(*(each.contiguous() for each in whole)), 0

    return Pointwise.apply


_gamma_grad = _pointwise(torch._standard_gamma_grad)
_dirichlet_grad = _pointwise(torch._dirichlet_grad)


class _Drawn(Function):
    """A draw as a function of its concentration."""

    generate_vmap_rule = True

    @staticmethod
    def forward(concentration: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)


class _Gamma(_Drawn):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * _gamma_grad(*ctx.saved_tensors), None


class _Dirichlet(_Drawn):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        concentration, value = ctx.saved_tensors
        total = concentration.sum(-1, keepdim=True).expand_as(concentration)
        centred = grad - (value * grad).sum(-1, keepdim=True)
        return _dirichlet_grad(value, concentration, total) * centred, None


_FUNCTIONS = {torch._standard_gamma: _Gamma, torch._sample_dirichlet: _Dirichlet}


def attached(sampler: Callable[..., Tensor], arguments: tuple, value: Tensor) -> Tensor:
    """A draw of a torch sampler, with its derivative in the sampler's arguments, if it has one.

    :param value: the draw, without gradient. The result is a copy.
    """
    function: Any = _FUNCTIONS.get(sampler)
    return value.clone() if function is None else function.apply(arguments[0], value)


# Replaces ``torch.distributions.dirichlet._Dirichlet``, which torch.func does not support.
BY_TORCH = SimpleNamespace(apply=lambda concentration: torch._sample_dirichlet(concentration))


class LocalDraws:
    """The random numbers that a model asks for, from torch's global generators.

    :param values: draws that were made before and come first, in order of use.
    :param more: whether new draws may follow.
    :ivar sampled: the draws in order of use, without gradients.
    """

    def __init__(self, values: Sequence[Tensor] = (), *, more: bool = True):
        self.sampled: list[Tensor] = []
        self._values, self._more = values, more

    def __call__(self, sampler: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """A draw of this torch function."""
        position = len(self.sampled)
        if position < len(self._values):
            value = self._values[position]
        elif self._more:
            with torch.no_grad():
                value = sampler(*args, **kwargs).detach()
        else:
            raise NotVectorizable(_DIFFER)
        self.sampled.append(value)
        return attached(sampler, args, value)


def _standard(kind: str, shape: Sequence[int], **options: Any) -> Tensor:
    """A draw of the standard distribution of this name; one for each record under vmap."""
    if kind in _FACTORIES:
        return _FACTORIES[kind](shape, **options)
    # Under vmap, only a tensor per record can be filled, which torch.rand makes.
    make = torch.empty if peek_interpreter_stack() is None else torch.rand
    drawn: Tensor = getattr(make(shape, **options), kind + "_")()
    return drawn


_FACTORIES = {"normal": torch.randn, "uniform": torch.rand}


def _filling(kind, function):
    """Replaces a method that fills a tensor, by a function of standard draws and its arguments."""

    def fill(draws, tensor, *args, generator=None, **named):
        options = {"dtype": tensor.dtype, "device": tensor.device}
        values = function(draws(_standard, kind, tensor.shape, **options), *args, **named)
        # Under vmap a plain tensor cannot be overwritten, but torch.distributions use the result.
        return tensor.copy_(values) if peek_interpreter_stack() is None else values

    return fill


def _uniform(u, low=0.0, high=1.0, **named):
    low, high = named.get("from", low), named.get("to", high)
    return low + (high - low) * u


def _factory(kind):
    def draw(draws, *size, dtype=None, device=None, generator=None, **options):
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return draws(_standard, kind, options.get("size", shape), dtype=dtype, device=device)

    return draw


def _like(kind):
    def draw(draws, tensor, *, dtype=None, device=None, **options):
        options = {"dtype": dtype or tensor.dtype, "device": device or tensor.device}
        return draws(_standard, kind, tensor.shape, **options)

    return draw


def _by_torch(sampler):
    return lambda draws, *args, **kwargs: draws(sampler, *args, **kwargs)


def _dropout(draws, tensor, p=0.5, training=True, inplace=False):
    if not training or p == 0.0:
        return tensor
    kept = draws(partial(_bernoulli_like, p=1 - p), tensor)
    return tensor * (kept / (1 - p) if p < 1 else kept)


def _bernoulli_like(tensor, p):
    return torch.empty_like(tensor).bernoulli_(p)


_SAMPLERS = (
    *(torch._standard_gamma, torch._sample_dirichlet, torch.bernoulli, torch.binomial),
    *(torch.multinomial, torch.poisson, torch.randperm),
)
DRAWING = {sampler: _by_torch(sampler) for sampler in _SAMPLERS} | {
    functional.dropout: _dropout,
    torch.Tensor.normal_: _filling("normal", lambda z, mean=0.0, std=1.0: mean + std * z),
    torch.Tensor.uniform_: _filling("uniform", _uniform),
    torch.Tensor.exponential_: _filling("exponential", lambda e, lambd=1.0: e / lambd),
    torch.Tensor.cauchy_: _filling("cauchy", lambda c, median=0.0, sigma=1.0: median + sigma * c),
    torch.randn: _factory("normal"),
    torch.rand: _factory("uniform"),
    torch.randn_like: _like("normal"),
    torch.rand_like: _like("uniform"),
}
