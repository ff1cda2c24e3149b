"""Clipped sums over records, by a flat graph for batches of a fixed size."""

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

Contribute = Callable[..., tuple[list[Contributions], list[Tensor]]]
Graph = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class PaddedBatch:
    """Records of a pass."""

    chosen: Tensor  # indices, (B,)
    inputs: list[Tensor]  # inputs of the graph: indices, rows, local parameters and draws, padded
    sampled: list[Tensor]  # local draws, (B, ...) each


class PaddedSum:
    """A graph of the records' contributions, clipped and summed.

    Records of weight zero fill up a smaller batch, so one graph suffices. It is traced on
    placeholders, because a graph must not depend on data.

    :param contribute: function of (bounds, public, indices, rows, rest) of B records. It returns
        their blocks, and further outputs, (B, ...) each. The rest is rows of local parameters, then
        local draws.
    :param public: further inputs, with their final shapes and dtypes.
    :param size: number of records in a pass.
    :param sampling: function of public, indices, rows and local parameters that makes local draws,
        (B, ...) each; None: there are none.
    :param marks: the last output marks records that do not count, (B,).
    :raises NotTraceable: contributions need more than a fixed sequence of tensor operations.
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
            bounds, (weights,), extra, (indices,), rows, rest = parted(inputs, counts)
            values, outputs = contribute(bounds, extra, indices, rows, rest)
            if marks:
                weights = weights * ~outputs[-1].unsqueeze(1)
            return [*add(values, bounds, weights), *outputs]

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
        """A batch of at most ``size`` records, with new local draws."""
        inputs = padded_batch(self._term, chosen, self.size)
        with torch.no_grad():
            sampled = list(self._sampling(*public, *inputs)) if self._sampling else []
        return PaddedBatch(chosen, [*inputs, *sampled], [x[: len(chosen)] for x in sampled])

    def add(
        self, clipped: ClippedSum, public: Sequence[Tensor], batch: PaddedBatch, *also: ClippedSum
    ) -> list[Tensor]:
        """Clip and add these records. If the graph fails, nothing was added.

        :param also: further sums of the same blocks.
        :returns: the further outputs of the graph.
        """
        count = len(batch.chosen)
        with torch.no_grad():
            bounds = self._bounds_of(clipped.blocks)
            found = self._graph(*bounds, self._weights(count), *public, *batch.inputs)
            for each in (*also, clipped):  # the release comes last: nothing fails after it
                each.add_sums(found[: self._num_blocks])
        return [each[:count] for each in found[self._num_blocks :]]

    def _bounds_of(self, blocks: Sequence[Block]) -> list[Tensor]:
        bounds = [block.bound for block in blocks]
        if bounds != self._bounds[0]:  # an adaptive one moves in every step
            device = self._term.records.device
            tensors = [torch.full((), b, dtype=torch.float64, device=device) for b in bounds]
            self._bounds = bounds, tensors  # separate: a graph identifies inputs by identity
        return self._bounds[1]

    def _weights(self, count: int) -> Tensor:
        """(size, 1): ones for the records, zeros for the padding."""
        return self._ones_then_zeros[self.size - count :][: self.size]


def padded_batch(term: RecordTerm, chosen: Tensor, size: int) -> list[Tensor]:
    """Indices, rows of data and of local parameters. The first record fills up missing ones."""
    missing = size - len(chosen)
    indices = torch.cat([chosen, chosen[:1].expand(missing)]) if missing else chosen
    rows = [*term.records.rows(indices, distinct=not missing), *term.local.rows(indices).values()]
    return [indices, *(row.contiguous() for row in rows)]


def placeholder_batch(term: RecordTerm, size: int) -> list[Tensor]:
    """Placeholders for ``size`` records: indices, rows of data and of local parameters."""
    records = term.records
    indices = torch.zeros(size, dtype=torch.long, device=records.device)
    rows = [
        row.expand(size, *row.shape).contiguous()
        for row in (*records.placeholder(), *term.local.constants().values())
    ]
    return [indices, *rows]


def pass_size(batch: int, limit: int | None) -> int:
    """Size of a batch's equal passes, at most the limit."""
    limit = limit or batch
    return math.ceil(batch / math.ceil(batch / limit))


def parted(flat: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    """The list, split into parts of these sizes and the rest."""
    rest = iter(flat)
    return [list(islice(rest, size)) for size in sizes] + [list(rest)]
