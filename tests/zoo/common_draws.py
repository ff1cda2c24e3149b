"""The same draws for ``SVI``, which takes all records at once, and ``DPSVI``, which takes one.

``DPSVI`` draws a record's latents from a private stream of its own. Here both get the same number
for the k-th draw of each record. Draws of N rows by ``SVI`` are taken for those of the records. So
N must be no other dimension of a model. Draws by rejection or by choice are replaced: a Gamma
number is near its mean, and a category the most probable one. Draws outside of the plate are left
to the generators.
"""

import contextlib
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyro_dp.records.local_draws import DRAWING, Draw, LocalDraws


def _numbers(kind: str, size: int, position: int, count: int) -> Tensor:
    """(N, count), of each record's draw number ``position``."""
    generator = torch.Generator().manual_seed(1000 + position)
    shape = (size, count)
    draw = torch.randn if kind == "normal" else torch.rand
    return draw(shape, generator=generator)


class _Median(torch.autograd.Function):
    """Wilson and Hilferty's, with the implicit derivative that torch gives a draw."""

    generate_vmap_rule = True

    @staticmethod
    def forward(concentration):
        return concentration / (1 + 1 / (9 * concentration)) ** 3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx, grad):
        return grad * torch._standard_gamma_grad(*ctx.saved_tensors)


def _gamma(concentration: Tensor, generator=None) -> Tensor:
    return _Median.apply(concentration)


def _choice(probs: Tensor, num_samples: int, replacement: bool = False, **_) -> Tensor:
    return probs.argmax(-1, keepdim=True).expand(*probs.shape[:-1], num_samples)


_CHOSEN = {torch._standard_gamma: _gamma, torch.multinomial: _choice}


class _Chosen(TorchFunctionMode):
    """No draws by rejection or choice."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return _CHOSEN.get(func, func)(*args, **(kwargs or {}))


class _Rows(LocalDraws):
    """Draws of N rows: those of the records."""

    def __init__(self, size: int):
        super().__init__()
        self._size = size

    def _answer(self, draw: Draw, position: int, device: torch.device) -> Tensor:
        if self._size not in draw.shape:
            self.requested.pop()
            return draw.public(device)
        dim = draw.shape.index(self._size)
        rest = draw.shape[:dim] + draw.shape[dim + 1 :]
        numbers = _numbers(draw.kind, self._size, position, rest.numel())
        return numbers.reshape(self._size, *rest).movedim(0, dim).to(draw.dtype)


class _RowMode(TorchFunctionMode):
    def __init__(self, size: int):
        super().__init__()
        self._draws = _Rows(size)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in DRAWING:
            return DRAWING[func](self._draws, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def all_at_once(size: int):
    """For one step of ``SVI`` on so many records."""
    with _Chosen(), _RowMode(size):
        yield


@contextlib.contextmanager
def one_by_one(size: int):
    """For one step of ``DPSVI`` on so many records."""

    def sample(draw, stream, indices, position):
        numbers = _numbers(draw.kind, size, position, draw.shape.numel())[indices]
        return numbers.reshape(len(indices), *draw.shape).to(draw.dtype)

    with _Chosen(), mock.patch.object(Draw, "sample", sample):
        yield
