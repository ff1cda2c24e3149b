"""One record's view of parameters with a row per record: its own row, N times or once.

Tensors are replaced by ``id`` in every torch function. They may be parameters of Pyro's store, of a
module, or captured by a guide. All rows are equal, so any index reads from a single row. The
derivative of an indexed tensor would be as large as N rows, for each record.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import transform_to
from torch.distributions.constraints import Constraint
from torch.nn import functional

from pyro_dp.records.torch_modes import Substitution


@dataclass(frozen=True)
class OwnRow:
    """A record's row of a local parameter.

    :param leaf: the unconstrained parameter.
    :param dim: its dimension of length N.
    :param row: without that dimension.
    :param constraint: the parameter's.
    """

    leaf: Tensor
    dim: int
    row: Tensor
    constraint: Constraint

    def repeated(self, length: int, *, constrained: bool) -> "_Repeated":
        single = self.row.unsqueeze(self.dim)
        if constrained:
            single = transform_to(self.constraint)(single)
        return _Repeated.of(single, self.dim, length)


@contextlib.contextmanager
def shown(rows: dict[str, OwnRow], length: int) -> Iterator[None]:
    """Inside, a read of one of these parameters returns the row.

    :param rows: by name of the parameter.
    :param length: how often it is repeated.
    """
    with _OwnRows(rows, length) as own, _OwnParams(rows, own):
        yield


@dataclass(frozen=True)
class _Repeated:
    """A row several times.

    :param whole: all of them, a view.
    :param single: one of them: ``dim`` has length 1.
    """

    whole: Tensor
    single: Tensor
    dim: int

    @staticmethod
    def of(single: Tensor, dim: int, length: int) -> "_Repeated":
        shape = [*single.shape[:dim], length, *single.shape[dim + 1 :]]
        return _Repeated(single.expand(shape), single, dim)


class _OwnRows(Substitution):
    """One record's rows instead of the parameters."""

    def __init__(self, rows: dict[str, OwnRow], length: int):
        self._length = length
        self._repeated: dict[int, _Repeated] = {}
        super().__init__({id(x.leaf): self.keep(x, constrained=False) for x in rows.values()})

    def keep(self, row: OwnRow, *, constrained: bool) -> Tensor:
        repeated = row.repeated(self._length, constrained=constrained)
        self._repeated[id(repeated.whole)] = repeated
        return repeated.whole

    def find(self, tensor: Any) -> _Repeated | None:
        return self._repeated.get(id(self.substitutes.get(id(tensor), tensor)))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _READERS:
            read = _READERS[func](self, *args, **(kwargs or {}))
            if read is not None:
                return read
        return super().__torch_function__(func, types, args, kwargs)


@dataclass(eq=False, repr=False)
class _OwnParams(Messenger):
    """Answers ``pyro.param`` with the record's own row, so that only one row is constrained."""

    rows: dict[str, OwnRow]
    own: _OwnRows

    def _pyro_param(self, msg: dict) -> None:
        row = self.rows.get(msg["name"])
        if row is None or msg["value"] is not None:
            return
        value: Any = self.own.keep(row, constrained=True)
        value.unconstrained = lambda: row.leaf
        # Plates note here which rows they took; on the leaf, that would tell who was sampled.
        value._pyro_unconstrained_param = torch.empty(0)
        msg["value"] = value


# Read a single row instead of N; None for unsupported indices.


def _getitem(own: _OwnRows, tensor: Tensor, key: Any) -> Tensor | None:
    repeated = own.find(tensor)
    keys = list(key) if isinstance(key, tuple) else [key]
    if repeated is None or any(k is None or k is Ellipsis or _is_mask(k) for k in keys):
        return None
    if len(keys) <= repeated.dim:
        return None
    place = keys[repeated.dim]
    if isinstance(place, Tensor):
        keys[repeated.dim] = torch.zeros_like(place)
    elif isinstance(place, int):
        keys[repeated.dim] = 0
    else:
        return None
    return repeated.single[tuple(keys)]


def _is_mask(key: Any) -> bool:
    return isinstance(key, bool) or (isinstance(key, Tensor) and key.dtype == torch.bool)


def _index_select(own: _OwnRows, tensor: Tensor, dim: int, index: Tensor) -> Tensor | None:
    repeated = own.find(tensor)
    if repeated is None or dim % tensor.dim() != repeated.dim:
        return None
    return _Repeated.of(repeated.single, repeated.dim, index.numel()).whole


def _embedding(
    own: _OwnRows,
    index: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *others: Any,
    **named: Any,
) -> Tensor | None:
    repeated = own.find(weight)
    if repeated is None or repeated.dim != 0 or padding_idx is not None or max_norm is not None:
        return None
    return functional.embedding(torch.zeros_like(index), repeated.single)


_READERS: dict[Any, Callable[..., Tensor | None]] = {
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.index_select: _index_select,
    torch.index_select: _index_select,
    functional.embedding: _embedding,
}
