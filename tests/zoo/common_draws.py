"""The same draws for ``SVI``, which takes all records at once, and ``DPSVI``, which takes one.

``DPSVI`` draws a record's latents from a private stream of its own. Here both get the same number
for the k-th draw of each record. Draws of N rows by ``SVI`` are taken for those of the records. So
N must be no other dimension of a model. Draws by rejection or by choice are replaced: a Gamma
number is near its mean, and a category the most probable one. Draws outside of the plate are left
to the generators.
"""

import contextlib
import math

import pytest
import torch
from record_draws import by_index, numbers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyro_dp.records import local_draws
from pyro_dp.records.local_draws import DRAWING, LocalDraws


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
        self._size, self._position = size, 0

    def __call__(self, sampler, *args, **kwargs) -> Tensor:
        if sampler is not local_draws._standard or self._size not in args[1]:
            return super().__call__(sampler, *args, **kwargs)
        kind, shape = args[0], list(args[1])
        dim = shape.index(self._size)
        rest = shape[:dim] + shape[dim + 1 :]
        found = numbers(kind, self._position, math.prod(rest), self._size)
        self._position += 1
        return found.reshape(self._size, *rest).movedim(0, dim).to(kwargs["dtype"])


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

    with _Chosen(), pytest.MonkeyPatch.context() as patch:
        by_index(patch, size)
        yield
