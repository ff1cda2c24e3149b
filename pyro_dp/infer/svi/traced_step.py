"""A step of DPSVI from two flat graphs, which run no Pyro code.

*Records*: parameters, public draws, rows -> clipped sums. *Public*: parameters, public draws,
released estimate -> gradients of the parameters. Both are traced from the functions of
:class:`~pyro_dp.infer.svi.eager_step.EagerStep` and compared with it in the first steps. All draws
are inputs.
"""

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pyro_dp.graphs.factorisation import factorised
from pyro_dp.graphs.tracing import Compiler, NotTraceable, trace
from pyro_dp.infer.padded_sum import CHECKED_STEPS, PaddedSum, parted, pass_size, placeholder_batch
from pyro_dp.infer.svi.coordinates import mean, mean_loss
from pyro_dp.infer.svi.eager_step import EagerStep, Gradients, LocalGradients, NewStream
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.contributions import Contributions
from pyro_dp.mechanism.outer_products import Joined
from pyro_dp.mechanism.streams import LocalStream, LocalStreams
from pyro_dp.records.global_draw import Particle
from pyro_dp.records.local_draws import LocalDraws, PublicDraws
from pyro_dp.records.record_term import Batch
from pyro_dp.records.torch_modes import RecordMode
from pyro_dp.utils.agreement import MISMATCH, require_same
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.rng import forked_rng, private_rng

_MOST_CHECKED = 2**24  # numbers
_NOT_RELEASED = torch.tensor(math.nan)
PublicTables = list[list[Tensor]]  # the draws of each particle


class TracedStep:
    """The same numbers as an :class:`EagerStep`'s, faster.

    :param eager: what is traced, and what the first steps are compared with; kept as ``eager``.
    :param sum_type: what the records' contributions will be added to.
    :param usual_size: number of records that few batches exceed.
    :param compiler: of the graphs.
    :raises NotTraceable: model or guide does more than a fixed sequence of tensor operations.
    """

    def __init__(
        self, eager: EagerStep, sum_type: type[ClippedSum], usual_size: int, compiler: Compiler
    ):
        if eager.term.local:
            raise NotTraceable("there are parameters with a row per record")
        self.eager = eager
        self._leaves = list(eager.parameters.values())
        self._exact = all(leaf.dtype == torch.float64 for leaf in self._leaves)
        self._unchecked = CHECKED_STEPS
        with forked_rng():
            self._size = eager.size(self._first_draw())
            limit = sum_type.most_records(self._size, eager.microbatch_size)
            size = pass_size(usual_size, limit)
            self._passes = self._trace_records(size, sum_type, compiler)
            self._trace_public(compiler)

    def _first_draw(self) -> list[Particle]:
        """To learn what steps draw."""
        given = [RecordMode(PublicDraws()) for _ in range(self.eager.loss.num_particles)]
        particles = self.eager.draw(given)
        self._draws = [mode.draws.requested for mode in given]
        return particles

    def draw(self) -> PublicTables:
        """Public draws, from torch's global generator, in the guide's order of use."""
        device = self.eager.term.records.device
        return [[draw.public(device) for draw in draws] for draws in self._draws]

    def size(self, draws: PublicTables) -> int:
        """Number of coordinates of the gradient's block."""
        return self._size

    def add(
        self, clipped: ClippedSum, draws: PublicTables, indices: Tensor, new_stream: NewStream
    ) -> list[LocalGradients]:
        """As :meth:`EagerStep.add`, without local parameters."""
        local = self._local_streams(new_stream)
        inputs = self._public_inputs(draws)
        if self._unchecked:
            self._check_gradients(draws)
        for chosen in indices.split(self._passes.size):
            if len(chosen) == 0:
                continue
            try:
                self._passes.add(clipped, inputs, chosen, local)
            except Exception:  # on some record; which one, the eager step finds out
                with private_rng(new_stream()):
                    self.eager.add_microbatch(clipped, self._particles(draws), chosen, local)
                continue
            if self._unchecked:
                self._check_sums(clipped, draws, chosen, local)
        if len(indices):
            self._unchecked = max(0, self._unchecked - 1)
        return []

    def gradients(self, draws: PublicTables, released: Tensor) -> Gradients:
        """As :meth:`EagerStep.gradients`; a loss that is not released is NaN."""
        with torch.no_grad():
            found = list(self._pull_back(*self._public_inputs(draws), released))
        found, points = found[: -self._num_points or None], found[len(found) - self._num_points :]
        outside = found.pop() if self.eager.releases_loss else _NOT_RELEASED
        gradients = dict.fromkeys(self.eager.parameters)
        gradients.update(zip(self._with_gradient, found, strict=True))
        return Gradients(gradients, outside, points)

    def _local_streams(self, new_stream: NewStream) -> LocalStreams:
        """One per particle, where records have draws of their own."""
        if not self.eager.term.draws:
            return [None] * len(self._draws)
        stream = new_stream()
        return [LocalStream(stream) for _ in self._draws]

    def _public_inputs(self, public: PublicTables) -> list[Tensor]:
        values = [leaf.detach() for leaf in self._leaves]
        return values + [table for own in public for table in own]

    def _at(self, inputs: list[Tensor]) -> tuple[dict[str, Tensor], list[Particle]]:
        """Parameters and particles that are functions of the public inputs."""
        counts = [len(self._leaves), *map(len, self._draws)]
        values, *tables, _ = parted(inputs, counts)
        values = [value.detach().requires_grad_() for value in values]
        substitutes = {id(x): y for x, y in zip(self._leaves, values, strict=True)}
        with torch.enable_grad():
            particles = self.eager.draw(
                [RecordMode(LocalDraws(t, in_place=True), substitutes) for t in tables]
            )
        return dict(zip(self.eager.parameters, values, strict=True)), particles

    def _trace_records(
        self, size: int, sum_type: type[ClippedSum], compiler: Compiler
    ) -> PaddedSum:
        """First per record, to find out what need not be stored; then clipped and summed."""
        eager, term = self.eager, self.eager.term
        local = self._local_streams(partial(np.random.default_rng, 0))
        public = self._public_inputs(self.draw())
        counts = [len(public), 1, len(term.records.placeholder())]

        def per_record(*inputs: Tensor) -> list[Tensor]:
            own, (indices,), rows, tables = parted(inputs, counts)
            parameters, particles = self._at(own)
            parts = parted(tables, [len(term.draws)] * len(particles))[:-1]
            gradients = [
                term.vectorized(particle, Batch(indices, rows, tables=part))
                for particle, part in zip(particles, parts, strict=True)
            ]
            blocks = eager.coordinates(particles, parameters).per_record(gradients)
            return [*blocks, mean([each.losses for each in gradients])]

        def contribute(bounds, own, indices, rows, tables) -> list[Contributions]:
            *outputs, losses = graph(*own, indices, *rows, *tables)
            return eager.blocks(Joined.of(outputs, products), losses, bounds[0])

        inputs = [*public, *placeholder_batch(term, size, local)]
        graph = trace(per_record, inputs)
        graph, products = factorised(graph, fused=compiler.enabled)
        return PaddedSum(
            contribute,
            term,
            public,
            blocks=1 + eager.releases_loss + (eager.report is not None),
            size=size,
            local=local,
            sum_type=sum_type,
            compiler=compiler,
        )

    def _trace_public(self, compiler: Compiler) -> None:
        """The pull-back, and the parameters whose gradients it gives, in their order."""
        public = self._public_inputs(self.draw())
        with_gradient: list[str] = []

        def pull_back(*inputs: Tensor) -> list[Tensor]:
            *own, released = inputs
            parameters, particles = self._at(own)
            coordinates = self.eager.coordinates(particles, parameters)
            gradients, points = coordinates.gradients(released), coordinates.points
            found = {name: g.detach() for name, g in gradients.items() if g is not None}
            self._num_points = len(points)
            with_gradient[:] = found
            outside = [mean_loss(particles).detach()] if self.eager.releases_loss else []
            return [*found.values(), *outside, *points]

        device = self.eager.term.records.device
        inputs = [*public, torch.ones(self._size, dtype=torch.float64, device=device)]
        self._pull_back = compiler(trace(pull_back, inputs), inputs)
        self._with_gradient = with_gradient

    def _particles(self, public: PublicTables) -> list[Particle]:
        """The eager step's, of the same draws."""
        return self.eager.draw([RecordMode(LocalDraws(table, in_place=True)) for table in public])

    def _check_sums(
        self, clipped: ClippedSum, public: PublicTables, chosen: Tensor, local: LocalStreams
    ) -> None:
        # Pyro's code holds the gradients of all records, of which a large model affords only a few.
        chosen = chosen[: max(1, _MOST_CHECKED // self._size)]
        found, expected = (
            type(clipped)(clipped.blocks, self.eager.term.records.device) for _ in range(2)
        )
        self._passes.add(found, self._public_inputs(public), chosen, local)
        self.eager.add_microbatch(expected, self._particles(public), chosen, local)
        found.require_same_as(expected, count=len(chosen), exact=self._exact)

    def _check_gradients(self, public: PublicTables) -> None:
        """With a constant in place of a release: before anything is spent."""
        device = self.eager.term.records.device
        constant = torch.linspace(-1.0, 1.0, self._size, dtype=torch.float64, device=device)
        found = self.gradients(public, constant)
        expected = self.eager.gradients(self._particles(public), constant)
        pairs = [(found.parameters[name], each) for name, each in expected.parameters.items()]
        for one, other in [*pairs, *zip(found.points, expected.points, strict=True)]:
            if (one is None) != (other is None):
                raise ModelError(MISMATCH)
            if one is not None and other is not None:
                require_same(one, other, exact=self._exact)
