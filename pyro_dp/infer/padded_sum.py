"""Clipped sums over records, by a flat graph that takes a fixed number of them at a time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from pyro_dp.graphs.tracing import Compiler, trace
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.contributions import Block, Contributions
from pyro_dp.records.record_term import RecordTerm

CHECKED_STEPS = 3

Contribute = Callable[
    [list[Tensor], list[Tensor], Tensor, list[Tensor], list[Tensor]],
    tuple[list[Contributions], list[Tensor]],
]
Graph = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class PaddedBatch:
    """Records of a pass."""

    chosen: Tensor  # their indices, (B,)
    inputs: list[Tensor]  # the graph's: indices, rows, local parameters and draws, padded
    sampled: list[Tensor]  # (B, ...) each, the local draws


class PaddedSum:
    """A graph of the records' contributions, clipped and summed.

    A smaller batch is padded with records of weight zero, so that there is one graph only. It is
    traced on placeholders: a graph must not depend on data.

    :param contribute: from (bounds, public, indices, rows, rest) of B records it makes their
        blocks, and further outputs, (B, ...) each. The rest is rows of local parameters, then
        local draws.
    :param public: further inputs, in the form that they will always have.
    :param size: number of records in a pass.
    :param sampling: makes the local draws of the records, (B, ...) each, from public, indices and
        the rest; None: there are none.
    :param marks: whether the last output marks records that do not count, (B,).
    :raises NotTraceable: they come from more than a fixed sequence of tensor operations.
    """

    def __init__(
        self,
        contribute: Contribute,
        term: RecordTerm,
        public: Sequence[Tensor],
        *,
        blocks: int,
        size: int,
        sampling: Graph | None = None,
        marks: bool = False,
        sum_type: type[ClippedSum],
        compiler: Compiler,
    ):
        self.size = size
        self._term, self._sampling, self._num_blocks = term, sampling, blocks
        records = term.records
        ones = torch.ones(size, 1, dtype=torch.float64, device=records.device)
        self._ones_then_zeros = torch.cat([ones, 0 * ones])
        self._bounds: tuple[list[float], list[Tensor]] = ([], [])
        add = sum_type.compiled_sums if compiler.enabled else sum_type.clipped_sums

        def sums(*inputs: Tensor) -> list[Tensor]:
            counts = [blocks, 1, len(public), 1, len(records.placeholder())]
            bounds, (weights,), own, (indices,), rows, rest = parted(inputs, counts)
            values, beside = contribute(bounds, own, indices, rows, rest)
            if marks:
                weights = weights * ~beside[-1].unsqueeze(1)
            return [*add(values, bounds, weights), *beside]

        batch = placeholder_batch(term, size)
        inputs = [
            *self._bounds_of([Block(1, 1.0)] * blocks),
            self._weights(1),
            *public,
            *batch,
            *(sampling(*public, *batch) if sampling else []),
        ]
        self._graph = compiler(trace(sums, inputs), inputs)

    def batch(self, public: Sequence[Tensor], chosen: Tensor) -> PaddedBatch:
        """A batch of at most ``size`` records, with draws of their own."""
        inputs = padded_batch(self._term, chosen, self.size)
        sampled: list[Tensor] = []
        if self._sampling:
            with torch.no_grad():
                sampled = list(self._sampling(*public, *inputs))
        return PaddedBatch(chosen, [*inputs, *sampled], [x[: len(chosen)] for x in sampled])

    def add(
        self, clipped: ClippedSum, public: Sequence[Tensor], batch: PaddedBatch, *also: ClippedSum
    ) -> list[Tensor]:
        """Clip and add these records. If the graph fails, nothing was added.

        :param also: sums of the same blocks that they are added to, too.
        :returns: the further outputs of the graph.
        """
        count = len(batch.chosen)
        with torch.no_grad():
            bounds = self._bounds_of(clipped.blocks)
            found = self._graph(*bounds, self._weights(count), *public, *batch.inputs)
            for each in (*also, clipped):  # the release's last: nothing fails after it
                each.add_sums(found[: self._num_blocks])
        return [each[:count] for each in found[self._num_blocks :]]

    def _bounds_of(self, blocks: Sequence[Block]) -> list[Tensor]:
        bounds = [block.bound for block in blocks]
        if bounds != self._bounds[0]:  # an adaptive one moves in every step
            device = self._term.records.device
            tensors = [torch.full((), b, dtype=torch.float64, device=device) for b in bounds]
            self._bounds = bounds, tensors  # each its own: a graph tells its inputs by identity
        return self._bounds[1]

    def _weights(self, count: int) -> Tensor:
        """(size, 1): ones for the records, zeros for the padding."""
        return self._ones_then_zeros[self.size - count :][: self.size]


def padded_batch(term: RecordTerm, chosen: Tensor, size: int) -> list[Tensor]:
    """Indices, rows of data and of local parameters. The first record stands for missing ones."""
    missing = size - len(chosen)
    indices = torch.cat([chosen, chosen[:1].expand(missing)]) if missing else chosen
    rows = [*term.records.rows(indices, distinct=not missing), *term.local.rows(indices).values()]
    return [indices, *(row.contiguous() for row in rows)]


def placeholder_batch(term: RecordTerm, size: int) -> list[Tensor]:
    """So many public placeholders: indices, rows of data and of local parameters."""
    records = term.records
    indices = torch.zeros(size, dtype=torch.long, device=records.device)
    rows = [
        row.expand(size, *row.shape).contiguous()
        for row in (*records.placeholder(), *term.local.constants().values())
    ]
    return [indices, *rows]


def pass_size(batch: int, limit: int | None) -> int:
    """Size of equal passes, none above the limit, that a batch of this size takes."""
    limit = limit or batch
    return math.ceil(batch / math.ceil(batch / limit))


def parted(flat: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    """Consecutive parts of these sizes, and the rest."""
    rest = iter(flat)
    return [list(islice(rest, size)) for size in sizes] + [list(rest)]
