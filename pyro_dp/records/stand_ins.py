"""Placeholders for data, and a large plate that shows a model a few elements."""

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

_LEAST = 0.25  # varied rows lie in (0.25, 1), where logarithms, roots and probabilities exist
_MOST = 2**22  # numbers of rows that do not overlap
_APART = 4
_MOST_SHOWN = 2**16  # numbers of placeholders that stand for all records
_FEWER = (211, 101, 53, 11)
T = TypeVar("T")


def rows_shown(size: int, numbers: int) -> int:
    """How many placeholders stand for all records: fewer, where all would take much memory.

    The fewer are a prime, which is no length of anything else.

    :param numbers: in the rows of a record.
    """
    fewer = next((n for n in _FEWER if n * numbers <= _MOST_SHOWN), _FEWER[-1])
    return size if size * numbers <= _MOST_SHOWN else min(size, fewer)


def is_table(leaf: object) -> TypeGuard[Tensor]:
    """Whether an argument can have a row per record."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def placeholder_row(table: Tensor) -> Tensor:
    """Ones, or zeros for integers, in the shape of a row."""
    real = table.is_floating_point() or table.is_complex()
    return table.new_full(table.shape[1:], 1 if real else 0)


def placeholder(leaf: object) -> object:
    """The same row for all rows; a leaf without rows stays as it is."""
    if not is_table(leaf):
        return leaf
    return placeholder_row(leaf).expand(leaf.shape)


def identity(leaf: object) -> object:
    """The same, but identities for square matrices, such as covariances."""
    if is_table(leaf) and leaf.dim() > 1 and leaf.shape[-1] == leaf.shape[-2]:
        return torch.eye(leaf.shape[-1], dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
    return placeholder(leaf)


def on_varied(run: Callable[[bool], T]) -> T | None:
    """The result of a run on :func:`varied` rows, with integers that vary, or else without.

    None: it raises :class:`ModelError` on both, because they may lie outside the model's domain.
    """
    for integers in (True, False):
        with contextlib.suppress(ModelError):
            return run(integers)
    return None


def spacing(table: Tensor, length: int) -> int:
    """How far apart the first :func:`varied` rows are that have no number in common."""
    size = table.shape[1:].numel()
    return size if length * size > _MOST and length > _APART * size else 1


def varied(table: Tensor, length: int, seed: int, *, integers: bool = True) -> Tensor:
    """(length, ...): rows that differ from each other. For all seeds the first one is the same.

    Numbers lie in (0.25, 1); integers are 0 or 1. Many rows overlap in memory. Each has one number
    more than the row before.

    :param integers: whether integers vary; else they are 0.
    """
    shape = table.shape[1:]
    size = shape.numel()
    step = 1 if spacing(table, length) > 1 else size
    numbers: np.ndarray = np.random.default_rng(seed).uniform(
        _LEAST, 1.0, size + step * (length - 1)
    )
    numbers[:size] = np.random.default_rng(0).uniform(_LEAST, 1.0, size)
    if not (table.is_floating_point() or table.is_complex()):
        numbers = (numbers > (1 + _LEAST) / 2) & integers
    buffer = torch.from_numpy(numbers).to(table.dtype).to(table.device)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return buffer.as_strided((length, *shape), (step, *strides))


@dataclass
class FewIndices:
    """Inside, plates of this size have the first ``count`` indices, also within Pyro's blocks.

    :ivar declared: the batch size that each of them declares, by name.
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
