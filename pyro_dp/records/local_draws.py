"""Local draws: random numbers that belong to a record, wherever it stands in a batch.

Gammas and Dirichlets have derivatives by implicit reparameterisation (Figurnov, Mohamed & Mnih
2018, arXiv 1805.08498). Here the draw is an input, and the derivative can be vectorised over
records and traced.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import Function
from torch.nn import functional

from pyro_dp.mechanism.streams import LocalStream
from pyro_dp.records.losses import NotVectorizable

_FROM_UNIFORM: dict[str, Callable[[Tensor], Tensor]] = {
    "exponential": lambda u: -torch.log1p(-u),
    "cauchy": lambda u: torch.tan(math.pi * (u - 0.5)),
}
_DIFFER = "the local draws differ between records"


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
    """A draw of this sampler of torch, as a function of its arguments, if it is one.

    :param value: without gradient; writing into the result does not change it.
    """
    function: Any = _FUNCTIONS.get(sampler)
    return value.clone() if function is None else function.apply(arguments[0], value)


class ByTorch:
    """Replaces ``torch.distributions.dirichlet._Dirichlet`` where torch functions are traced."""

    @staticmethod
    def apply(concentration: Tensor) -> Tensor:
        return torch._sample_dirichlet(concentration)


@dataclass(frozen=True)
class Draw:
    """One local draw of a record.

    :param kind: the standard distribution: "normal", "uniform" (on (0, 1)), "exponential" or
        "cauchy".
    """

    kind: str
    shape: torch.Size
    dtype: torch.dtype

    def sample(self, stream: LocalStream, indices: Tensor, position: int) -> Tensor:
        """(B, *shape), of each record's draw number ``position``."""
        draw = stream.normal if self.kind == "normal" else stream.uniform
        numbers = draw(indices, position, self.shape.numel())
        if self.kind in _FROM_UNIFORM:
            numbers = _FROM_UNIFORM[self.kind](numbers)
        return numbers.reshape(len(indices), *self.shape).to(self.dtype)

    def public(self, device: torch.device) -> Tensor:
        """(*shape), from torch's global generator."""
        empty = torch.empty(self.shape, dtype=self.dtype, device=device)
        drawn: Tensor = getattr(empty, self.kind + "_")()
        return drawn


class LocalDraws:
    """The random numbers that one record's model asks for.

    Normals and uniforms are the same whatever the model computes. Other draws (gammas, categories)
    depend on earlier results and come from torch's own samplers. ``sampled`` keeps them, in order
    of use and without gradients.

    :param table: the normals and uniforms, one per draw in order of use; under vmap.
    :param stream: their source for ``index``, if there is no table.
    :param values: earlier draws of torch's samplers for this record; by default new ones.
    """

    def __init__(
        self,
        table: Sequence[Tensor] = (),
        *,
        stream: LocalStream | None = None,
        index: Tensor | None = None,
        values: Sequence[Tensor] | None = None,
    ):
        self.requested: list[Draw] = []
        self.sampled: list[Tensor] = []
        self._table = table
        self._stream = stream
        self._index = index
        self._values = values

    def __call__(
        self, kind: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        draw, position = Draw(kind, torch.Size(shape), dtype), len(self.requested)
        self.requested.append(draw)
        return self._answer(draw, position, device)

    def by_torch(self, sampler: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """A draw of this function of torch."""
        position = len(self.sampled)
        if self._values is None:
            with torch.no_grad():
                value = sampler(*args, **kwargs).detach()
        elif position < len(self._values):
            value = self._values[position]
        else:
            raise NotVectorizable(_DIFFER)
        self.sampled.append(value)
        return attached(sampler, args, value)

    def _answer(self, draw: Draw, position: int, device: torch.device) -> Tensor:
        if self._stream is not None and self._index is not None:
            return draw.sample(self._stream, self._index.reshape(1), position)[0].to(device)
        if position < len(self._table) and self._table[position].shape == draw.shape:
            return self._table[position]
        raise NotVectorizable(_DIFFER)


class PublicDraws(LocalDraws):
    """The numbers that a guide asks for, from torch's global generator.

    ``table`` keeps the normals and uniforms.
    """

    def __init__(self):
        super().__init__()
        self.table: list[Tensor] = []

    def _answer(self, draw: Draw, position: int, device: torch.device) -> Tensor:
        self.table.append(draw.public(device))
        return self.table[-1].clone()


def _fill(draws, tensor, kind, function):
    values = function(draws(kind, tensor.shape, tensor.dtype, tensor.device))
    # Under vmap a plain tensor cannot be overwritten; torch.distributions use the result.
    return tensor.copy_(values) if peek_interpreter_stack() is None else values


def _normal_(draws, tensor, mean=0.0, std=1.0, *, generator=None):
    return _fill(draws, tensor, "normal", lambda z: mean + std * z)


def _uniform_(draws, tensor, low=0.0, high=1.0, *, generator=None, **named):
    low, high = named.get("from", low), named.get("to", high)
    return _fill(draws, tensor, "uniform", lambda u: low + (high - low) * u)


def _exponential_(draws, tensor, lambd=1.0, *, generator=None):
    return _fill(draws, tensor, "exponential", lambda e: e / lambd)


def _cauchy_(draws, tensor, median=0.0, sigma=1.0, *, generator=None):
    return _fill(draws, tensor, "cauchy", lambda c: median + sigma * c)


def _factory(kind):
    def draw(draws, *size, dtype=None, device=None, generator=None, **options):
        shape = options.get(
            "size", size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        )
        return draws(kind, shape, dtype or torch.get_default_dtype(), device or "cpu")

    return draw


def _like(kind):
    def draw(draws, tensor, *, dtype=None, device=None, **options):
        return draws(kind, tensor.shape, dtype or tensor.dtype, device or tensor.device)

    return draw


def _by_torch(sampler):
    def draw(draws, *args, **kwargs):
        return draws.by_torch(sampler, *args, **kwargs)

    return draw


def _dropout(draws, tensor, p=0.5, training=True, inplace=False):
    if not training or p == 0.0:
        return tensor
    kept = draws.by_torch(partial(_bernoulli_like, p=1 - p), tensor)
    return tensor * (kept / (1 - p) if p < 1 else kept)


def _bernoulli_like(tensor, p):
    return torch.empty_like(tensor).bernoulli_(p)


_SAMPLERS = (
    *(torch._standard_gamma, torch._sample_dirichlet, torch.bernoulli, torch.binomial),
    *(torch.multinomial, torch.poisson, torch.randperm),
)
DRAWING = {sampler: _by_torch(sampler) for sampler in _SAMPLERS} | {
    functional.dropout: _dropout,
    torch.Tensor.normal_: _normal_,
    torch.Tensor.uniform_: _uniform_,
    torch.Tensor.exponential_: _exponential_,
    torch.Tensor.cauchy_: _cauchy_,
    torch.randn: _factory("normal"),
    torch.rand: _factory("uniform"),
    torch.randn_like: _like("normal"),
    torch.rand_like: _like("uniform"),
}
