"""Local draws: random numbers that belong to a record, wherever it stands in a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dp.mechanism.streams import LocalStream
from pyro_dp.records.record_elbo import NotVectorizable


@dataclass(frozen=True)
class Draw:
    """One local draw of a record: ``kind`` is "normal" or "uniform" (on (0, 1))."""

    kind: str
    shape: torch.Size
    dtype: torch.dtype

    def sample(self, stream: LocalStream, indices: Tensor, position: int) -> Tensor:
        """(B, *shape), of each record's draw number ``position``."""
        numbers = getattr(stream, self.kind)(indices.cpu().numpy(), position, self.shape.numel())
        values = torch.from_numpy(numbers).reshape(len(indices), *self.shape)
        return values.to(dtype=self.dtype, device=indices.device)

    def public(self, device: torch.device) -> Tensor:
        """(*shape), from torch's global generator."""
        empty = torch.empty(self.shape, dtype=self.dtype, device=device)
        return empty.normal_() if self.kind == "normal" else empty.uniform_()


class LocalDraws:
    """The normals and uniforms that one record's model asks for.

    :param table: the answers, one per draw in order of use; under vmap.
    :param stream: where they come from for ``index``, if there is no table.
    :param in_place: tensors that are to be filled are; under vmap they cannot be.
    """

    def __init__(
        self,
        table: Sequence[Tensor] = (),
        *,
        stream: LocalStream | None = None,
        index: Tensor | None = None,
        in_place: bool = False,
    ):
        self.in_place = in_place or stream is not None
        self.requested: list[Draw] = []
        self._table = table
        self._stream = stream
        self._index = index

    def __call__(
        self, kind: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        draw, position = Draw(kind, torch.Size(shape), dtype), len(self.requested)
        self.requested.append(draw)
        return self._answer(draw, position, device)

    def _answer(self, draw: Draw, position: int, device: torch.device) -> Tensor:
        if self._stream is not None and self._index is not None:
            return draw.sample(self._stream, self._index.reshape(1), position)[0].to(device)
        if position < len(self._table) and self._table[position].shape == draw.shape:
            return self._table[position]
        raise NotVectorizable("the local draws differ between records")


class PublicDraws(LocalDraws):
    """The normals and uniforms that a guide asks for, from torch's global generator."""

    def __init__(self):
        super().__init__(in_place=True)

    def _answer(self, draw: Draw, position: int, device: torch.device) -> Tensor:
        return draw.public(device)


def _fill(draws, tensor, kind, function):
    values = function(draws(kind, tensor.shape, tensor.dtype, tensor.device))
    # Under vmap a plain tensor cannot be filled in place; torch.distributions use what is returned.
    return tensor.copy_(values) if draws.in_place else values


def _normal_(draws, tensor, mean=0.0, std=1.0, *, generator=None):
    return _fill(draws, tensor, "normal", lambda z: mean + std * z)


def _uniform_(draws, tensor, low=0.0, high=1.0, *, generator=None, **named):
    low, high = named.get("from", low), named.get("to", high)
    return _fill(draws, tensor, "uniform", lambda u: low + (high - low) * u)


def _exponential_(draws, tensor, lambd=1.0, *, generator=None):
    return _fill(draws, tensor, "uniform", lambda u: -torch.log1p(-u) / lambd)


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


DRAWING = {
    torch.Tensor.normal_: _normal_,
    torch.Tensor.uniform_: _uniform_,
    torch.Tensor.exponential_: _exponential_,
    torch.randn: _factory("normal"),
    torch.rand: _factory("uniform"),
    torch.randn_like: _like("normal"),
    torch.rand_like: _like("uniform"),
}
