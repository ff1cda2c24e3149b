"""Placeholders and other public rows that replace data."""

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeGuard, TypeVar
from unittest import mock

import numpy as np
import torch
from pyro.poutine.subsample_messenger import SubsampleMessenger
from torch import Tensor

from pyro_dp.utils.errors import ModelError

_LOWEST = 0.25  # varied rows lie in (0.25, 1), where logarithms, roots and probabilities exist
_MOST_SEPARATE = 2**22  # numbers of varied rows that do not overlap in memory
_MOST_PLACEHOLDERS = 2**16  # numbers of placeholders for all records
_FEWER = (211, 101, 53, 11)  # primes, which are no other length
T = TypeVar("T")


def rows_shown(size: int, numbers: int) -> int:
    """The number of placeholders for all records: fewer than N, if N would take much memory.

    :param size: N.
    :param numbers: how many numbers the rows of a record have.
    """
    fewer = next((n for n in _FEWER if n * numbers <= _MOST_PLACEHOLDERS), _FEWER[-1])
    return size if size * numbers <= _MOST_PLACEHOLDERS else min(size, fewer)


def is_table(leaf: object) -> TypeGuard[Tensor]:
    """Whether an argument can have a row per record."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def placeholder_row(table: Tensor) -> Tensor:
    """Ones, or zeros for integers, in the shape of a row."""
    real = table.is_floating_point() or table.is_complex()
    return table.new_full(table.shape[1:], 1 if real else 0)


def placeholder(leaf: object) -> object:
    """A tensor of this shape that repeats a placeholder row; a leaf without rows unchanged."""
    if not is_table(leaf):
        return leaf
    return placeholder_row(leaf).expand(leaf.shape)


def identity(leaf: object) -> object:
    """A placeholder, with identities for square matrices, such as covariances."""
    if is_table(leaf) and leaf.dim() > 1 and leaf.shape[-1] == leaf.shape[-2]:
        return torch.eye(leaf.shape[-1], dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
    return placeholder(leaf)


def on_varied(run: Callable[[bool], T]) -> T | None:
    """The result of a run on :func:`varied` rows: with integers that vary, else with zeros.

    ``None`` if both raise :class:`ModelError`: such rows may lie outside the model's domain.
    """
    for integers in (True, False):
        with contextlib.suppress(ModelError):
            return run(integers)
    return None


def spacing(table: Tensor, length: int) -> int:
    """The distance of two :func:`varied` rows that have no number in common."""
    size = table.shape[1:].numel()
    return size if length * size > _MOST_SEPARATE and length > 4 * size else 1


def varied(table: Tensor, length: int, seed: int, *, integers: bool = True) -> Tensor:
    """Rows that differ from each other, (length, ...). The first row is the same for all seeds.

    Numbers lie in (0.25, 1); integers are 0 or 1. If there are many rows, each is the row before
    it, shifted by one number, in the same memory.

    :param integers: whether integers vary; else they are 0.
    """
    shape = table.shape[1:]
    size = shape.numel()
    step = 1 if spacing(table, length) > 1 else size
    count = size + step * (length - 1)
    numbers: np.ndarray = np.random.default_rng(seed).uniform(_LOWEST, 1.0, count)
    numbers[:size] = np.random.default_rng(0).uniform(_LOWEST, 1.0, size)
    if not (table.is_floating_point() or table.is_complex()):
        numbers = (numbers > (1 + _LOWEST) / 2) & integers
    buffer = torch.from_numpy(numbers).to(table.dtype).to(table.device)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return buffer.as_strided((length, *shape), (step, *strides))


@dataclass
class FewIndices:
    """Give plates of this size only their first ``count`` indices, also within Pyro's blocks.

    :ivar declared: the batch size that each of these plates declares, by name.
    """

    size: int
    count: int
    declared: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def shown(self) -> Iterator[None]:
        original = SubsampleMessenger._subsample

        def subsample(name, size=None, subsample_size=None, subsample=None, *rest):
            if size == self.size > self.count and subsample is None:
                self.declared[name] = subsample_size or size
                subsample_size, subsample = None, torch.arange(self.count)
            return original(name, size, subsample_size, subsample, *rest)

        with mock.patch.object(SubsampleMessenger, "_subsample", staticmethod(subsample)):
            yield
