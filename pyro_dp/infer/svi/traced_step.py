"""A step of DPSVI from two flat graphs, which run no Pyro code.

* The *records' graph* maps parameters, public draws and rows to clipped sums.
* The *public graph* maps parameters, public draws and the released sums to gradients. It covers the
  guide, and the model outside the plate.

Both are traced from :class:`~pyro_dp.infer.svi.eager_step.EagerStep`, and compared with it in the
first steps. If the public part cannot be traced, it runs Pyro code in every step, and its latents
are inputs of the records' graph (:class:`RecordsTracedStep`).
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Transform

from pyro_dp.graphs.factorisation import Form, Lookup, factorised
from pyro_dp.graphs.references import References
from pyro_dp.graphs.tracing import (
    Compiler,
    NotTraceable,
    called_by_torch,
    give_back_memory,
    trace,
    without_draws,
)
from pyro_dp.infer.padded_sum import (
    CHECKED_STEPS,
    PaddedBatch,
    PaddedSum,
    parted,
    pass_size,
    placeholder_batch,
)
from pyro_dp.infer.svi.eager_step import (
    EagerStep,
    Gradients,
    LocalGradients,
    NewStream,
    mean,
    mean_loss,
)
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.contributions import Contributions, Joined, LookedUpRows, OuterProducts, Rows
from pyro_dp.mechanism.sampling import Indices
from pyro_dp.records.global_draw import Particle
from pyro_dp.records.local_draws import LocalDraws
from pyro_dp.records.record_term import Batch
from pyro_dp.records.torch_modes import RecordMode
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import MISMATCH, require_same
from pyro_dp.utils.torch_state import forked_rng, private_rng, private_torch, put_back

_MOST_CHECKED = 2**22  # numbers
_AT_ONCE = 50  # records in a call of Pyro's code
_NOT_RELEASED = torch.tensor(math.nan)
PublicTables = list[list[Tensor]]  # draws, by particle


class TracedStep:
    """A faster :class:`EagerStep` of equal results.

    :param usual_size: number of records that few batches exceed.
    :raises NotTraceable: model or guide is no fixed sequence of tensor operations.
    """

    def __init__(
        self, eager: EagerStep, sum_type: type[ClippedSum], usual_size: int, compiler: Compiler
    ):
        self.eager = eager
        self._leaves = list(eager.parameters.values())
        leaves = [*self._leaves, *eager.term.local.leaves.values()]
        self._exact = all(leaf.dtype == torch.float64 for leaf in leaves)
        self._unchecked = CHECKED_STEPS
        with forked_rng():
            self._size = eager.size(self._first_draw())
            limit = sum_type.most_records(self._size, eager.most_records(self._size))
            size = pass_size(usual_size, limit)
            self._passes = self._trace_records(size, sum_type, compiler)
            self._trace_public(compiler)

    def _first_draw(self) -> list[Particle]:
        self._drawing, self._counts = self._trace_draws()
        return self.eager.draw()

    def draw(self) -> PublicTables:
        """Draw the guide's public numbers from torch's global generator."""
        with torch.no_grad():
            drawn = self._drawing(*(leaf.detach() for leaf in self._leaves))
        return parted(drawn, self._counts)[:-1]

    def size(self, draws: PublicTables) -> int:
        return self._size

    def add(
        self, clipped: ClippedSum, draws: PublicTables, indices: Indices, new_stream: NewStream
    ) -> list[LocalGradients]:
        inputs, moves = self._public_inputs(draws), []
        stream = functools.cache(new_stream)  # all uses share one stream, so no number is reused
        private = private_rng if self._unchecked else private_torch  # graphs draw by torch alone
        draws_more = self.eager.term.samples or self._unchecked
        with private(stream()) if draws_more else contextlib.nullcontext():
            if self._unchecked:
                self._check_gradients(draws)
            for chosen in indices.split(self._passes.size):
                if len(chosen):  # an empty batch is split into one empty part
                    moves += self._add_pass(clipped, draws, inputs, chosen, stream)
        if len(indices):
            self._unchecked = max(0, self._unchecked - 1)
        return moves

    def _add_pass(
        self,
        clipped: ClippedSum,
        draws: PublicTables,
        inputs: list[Tensor],
        chosen: Tensor,
        stream: NewStream,
    ) -> list[LocalGradients]:
        def by_pyro(chosen: Tensor, sampled: Sequence[list[Tensor]] = ()) -> LocalGradients:
            with private_rng(stream()):
                own = (self._particles(draws), chosen, sampled)
                return self.eager.add_microbatch(clipped, *own)

        checked = [self._like(clipped)] if self._unchecked else []
        try:
            batch = self._passes.batch(inputs, chosen)
            found = self._passes.add(clipped, inputs, batch, *checked)
        except Exception:  # some record fails in the graph, and the eager step finds out which
            return [by_pyro(chosen)]
        # From here on, no failure may add the records again.
        kept, beside = self._kept(chosen, found)
        moves = []
        if len(kept) < len(chosen):
            apart = torch.ones_like(chosen, dtype=torch.bool).index_fill(0, kept, False)
            moves.append(by_pyro(chosen[apart], self._sampled(batch, apart)))
        if checked and len(kept):
            self._check_sums(checked[0], draws, batch, kept, beside)
        names = self.eager.term.local.leaves
        return [*moves, (chosen[kept], dict(zip(names, beside, strict=True)))]

    def _like(self, clipped: ClippedSum) -> ClippedSum:
        return type(clipped)(clipped.blocks, self.eager.term.records.device)

    def _kept(self, chosen: Tensor, found: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Indices (n,) of the records in the sums, and the graph's other outputs for them."""
        kept = torch.arange(len(chosen), device=chosen.device)
        if self.eager.term.answers:  # the model branches on values of a record
            *found, apart = found
            kept = kept[~apart]
        return kept, [each[kept] for each in found]

    def gradients(self, draws: PublicTables, released: Tensor) -> Gradients:
        """As :meth:`EagerStep.gradients`. A loss that is not released is NaN."""
        with torch.no_grad():
            found = list(self._pull_back(*self._public_inputs(draws), released))
        outside = found.pop() if self.eager.releases_loss else _NOT_RELEASED
        gradients = dict.fromkeys(self.eager.parameters)
        gradients.update(zip(self._with_gradient, found, strict=True))
        return Gradients(gradients, outside)

    def _public_inputs(self, public: PublicTables) -> list[Tensor]:
        values = [leaf.detach() for leaf in self._leaves]
        return values + [table for tables in public for table in tables]

    def _modes(
        self, public: PublicTables, substitutes: dict[int, Tensor] | None = None
    ) -> list[RecordMode]:
        """Modes that feed these draws to the guide, by particle."""
        return [RecordMode(LocalDraws(tables, more=False), substitutes) for tables in public]

    def _substitutes(self, values: Sequence[Tensor]) -> dict[int, Tensor]:
        """New leaves with these values, by the ``id`` of the parameter that they replace."""
        values = [value.detach().requires_grad_() for value in values]
        return {id(x): y for x, y in zip(self._leaves, values, strict=True)}

    def _at(self, inputs: list[Tensor]) -> tuple[dict[str, Tensor], list[Particle]]:
        """Parameters and particles, as functions of the public inputs."""
        counts = [len(self._leaves), *self._counts]
        values, *tables, _ = parted(inputs, counts)
        substitutes = self._substitutes(values)
        with torch.enable_grad():
            particles = self.eager.draw(self._modes(tables, substitutes))
        return dict(zip(self.eager.parameters, substitutes.values(), strict=True)), particles

    def _trace_draws(self) -> tuple[Callable[..., Sequence[Tensor]], list[int]]:
        """The graph that makes the guide's draws, and each particle's number of draws."""
        made: list[LocalDraws] = []

        def drawn(*values: Tensor) -> list[Tensor]:
            made[:] = [LocalDraws() for _ in range(self.eager.loss.num_particles)]
            substitutes = self._substitutes(values)
            with torch.enable_grad():
                self.eager.draw([RecordMode(draws, substitutes) for draws in made])
            return [each for draws in made for each in draws.sampled]

        values = [leaf.detach() for leaf in self._leaves]
        if not drawn(*values):
            return lambda *_: [], [0] * len(made)
        graph = trace(drawn, values, draws=True)
        return called_by_torch(graph), [len(draws.sampled) for draws in made]

    def _trace_records(
        self, size: int, sum_type: type[ClippedSum], compiler: Compiler
    ) -> PaddedSum:
        """Trace the gradients per record, and their clipped sum."""
        eager, term = self.eager, self.eager.term
        names = list(term.local.leaves)
        public = self._public_inputs(self.draw())
        counts = [len(public), 1, len(term.records.placeholder())]

        def per_record(*inputs: Tensor) -> list[Tensor]:
            shared, (indices,), rows, local_rows = parted(inputs, counts)
            parameters, drawn = self._at(shared)
            batch = Batch(indices, rows, local_rows=dict(zip(names, local_rows, strict=True)))
            found = [term.at_once(particle, batch) for particle in drawn]
            losses = mean([each.losses for each in found])
            blocks = eager.coordinates(drawn, parameters).per_record(found)
            beside = [mean([each.local[name] for each in found]) for name in names]
            if term.answers:
                beside.append(torch.stack([each.apart for each in found]).any(dim=0))
            sampled = [value for each in found for value in each.sampled]
            return [*(blocks or [losses.new_empty(len(losses), 0)]), losses, *beside, *sampled]

        def contribute(bounds, shared, indices, rows, rest) -> tuple[list[Contributions], list]:
            outputs = graph(*shared, indices, *rows, *rest)
            losses, *beside = outputs[len(outputs) - others :]
            return eager.blocks(joined(outputs, forms), losses, bounds[0]), beside

        others = 1 + len(names) + bool(term.answers)
        inputs = [*public, *placeholder_batch(term, size)]
        graph, sampling = trace(per_record, inputs, draws=term.samples > 0), None
        if term.samples:
            drawing, graph = without_draws(graph, term.samples * len(self._counts))
            sampling = called_by_torch(drawing)
        graph, forms = factorised(graph, fused=compiler.enabled, others=others)
        return PaddedSum(
            contribute,
            term,
            public,
            blocks=1 + eager.releases_loss + (eager.report is not None),
            size=size,
            sampling=sampling,
            marks=bool(term.answers),
            sum_type=sum_type,
            compiler=compiler,
        )

    def _trace_public(self, compiler: Compiler) -> None:
        """Trace the pull-back, and note which parameters have a gradient."""
        public = self._public_inputs(self.draw())
        with_gradient: list[str] = []

        def pull_back(*inputs: Tensor) -> list[Tensor]:
            *shared, released = inputs
            parameters, particles = self._at(shared)
            coordinates = self.eager.coordinates(particles, parameters)
            gradients = coordinates.gradients(released)
            found = {name: g.detach() for name, g in gradients.items() if g is not None}
            with_gradient[:] = found
            outside = [mean_loss(particles).detach()] if self.eager.releases_loss else []
            return [*found.values(), *outside]

        device = self.eager.term.records.device
        inputs = [*public, torch.ones(self._size, dtype=torch.float64, device=device)]
        self._pull_back = compiler(trace(pull_back, inputs), inputs)
        self._with_gradient = with_gradient

    @functools.cached_property
    def _generators(self) -> list[Any]:
        """Random generators of model and guide. The number of runs must not change their state."""
        return [x for _, x in References(self.eager.model, self.eager.guide).generators]

    def _particles(self, public: PublicTables) -> list[Particle]:
        with put_back(self._generators):
            return self.eager.draw(self._modes(public))

    def _check_sums(
        self,
        found: ClippedSum,
        public: PublicTables,
        batch: PaddedBatch,
        kept: Tensor,
        beside: list[Tensor],
    ) -> None:
        """Compare a pass with Pyro's code, on few records if the model is large."""
        give_back_memory()
        most = max(2, _MOST_CHECKED // max(1, self._size))
        if len(kept) > most:
            few, found = batch.chosen[kept][:most], self._like(found)
            inputs = self._public_inputs(public)
            batch = self._passes.batch(inputs, few)
            kept, beside = self._kept(few, self._passes.add(found, inputs, batch))
        expected, particles = self._like(found), self._particles(public)
        for part in torch.arange(len(kept), device=kept.device).split(min(most, _AT_ONCE)):
            rows = kept[part]
            sampled = self._sampled(batch, rows)
            _, moves = self.eager.add_microbatch(expected, particles, batch.chosen[rows], sampled)
            for one, other in zip(beside, moves.values(), strict=True):
                require_same(one[part], other, exact=self._exact)
        found.require_same_as(expected, count=len(kept), exact=self._exact)

    def _sampled(self, batch: PaddedBatch, rows: Tensor) -> list[list[Tensor]]:
        """Local draws of these rows of a batch, by particle."""
        draws = [each[rows] for each in batch.sampled]
        return parted(draws, [self.eager.term.samples] * len(self._counts))[:-1]

    def _check_gradients(self, public: PublicTables) -> None:
        """Compare the gradients at a constant with Pyro's code, before anything is spent."""
        device = self.eager.term.records.device
        constant = torch.linspace(-1.0, 1.0, self._size, dtype=torch.float64, device=device)
        found = self.gradients(public, constant)
        expected = self.eager.gradients(self._particles(public), constant)
        for name, other in expected.parameters.items():
            one = found.parameters[name]
            if (one is None) != (other is None):
                raise ModelError(MISMATCH)
            if one is not None and other is not None:
                require_same(one, other, exact=self._exact)


def joined(outputs: Sequence[Tensor], forms: Sequence[Form]) -> Joined:
    """The records' block, from the factors that a graph returns first."""
    rest = iter(outputs)
    parts: list[OuterProducts | LookedUpRows | Rows] = []
    for form in forms:
        first = next(rest)
        if form is None:
            parts.append(Rows(first))
        elif isinstance(form, Lookup):
            indices = next(rest) % form.size
            if form.padding is not None:
                is_read = (indices != form.padding).unsqueeze(2)
                first = torch.where(is_read, first, 0.0)
            parts.append(LookedUpRows(first, indices, form.size))
        else:
            parts.append(OuterProducts(first, next(rest), form.transposed))
    return Joined(parts)


_KINDS = ("latents", "fixed", "indices")
_PARTLY = (
    "jit={jit!r} does not apply to the guide and to the model outside the plate, which run Pyro "
    "code in every step: {reason}. The records have a graph."
)


def step_from_graphs(
    eager: EagerStep, sum_type: type[ClippedSum], usual_size: int, compiler: Compiler
) -> TracedStep:
    """A step from both graphs, or from the records' graph alone with a warning."""
    settings = (eager, sum_type, usual_size, compiler)
    try:
        return TracedStep(*settings)
    except NotTraceable as whole:
        try:
            step = RecordsTracedStep(*settings)
        except NotTraceable:
            raise whole from None
        jit = "compile" if compiler.enabled else "trace"
        warnings.warn(_PARTLY.format(jit=jit, reason=whole), stacklevel=2)
        return step


class RecordsTracedStep(TracedStep):
    """A step from the records' graph alone, whose public draws are particles.

    If names, shapes or supports of the latents differ from those of the first draw, the step is
    eager.

    :raises NotTraceable: a record's term is no fixed sequence of tensor operations, or the release
        is of parameters. Or names, shapes or supports of the latents change from draw to draw.
    """

    def _first_draw(self) -> list[Particle]:
        if self.eager.privatize != "latents":
            raise NotTraceable("each record is pulled back through the guide")
        self._inside = list(self.eager.term.parameters)
        self._template = self.eager.draw()
        self._counts = [0] * len(self._template)  # the inputs are latents, not draws
        if not self._fits(self.eager.draw()):
            raise NotTraceable("the latents' names, shapes or supports change")
        return self._template

    def draw(self) -> Any:
        return self.eager.draw()

    def size(self, draws: Any) -> int:
        return self.eager.size(draws)

    def add(
        self, clipped: ClippedSum, draws: Any, indices: Indices, new_stream: NewStream
    ) -> list[LocalGradients]:
        if not self._fits(draws):
            return self.eager.add(clipped, draws, indices, new_stream)
        return super().add(clipped, draws, indices, new_stream)

    def gradients(self, draws: Any, released: Tensor) -> Gradients:
        return self.eager.gradients(draws, released)

    def _fits(self, draws: list[Particle]) -> bool:
        """Whether these particles differ from the template in numbers alone."""
        return list(map(_fixed, draws)) == list(map(_fixed, self._template))

    def _public_inputs(self, public: Any) -> list[Tensor]:
        values = [self.eager.parameters[name].detach() for name in self._inside]
        return values + [x.detach() for particle in public for x in _tensors(particle).values()]

    def _at(self, inputs: list[Tensor]) -> tuple[dict[str, Tensor], list[Particle]]:
        counts = [len(self._inside), *(len(_tensors(each)) for each in self._template)]
        values, *tables, _ = parted(inputs, counts)
        inside = dict(zip(self._inside, values, strict=True))
        particles = []
        for particle, table in zip(self._template, tables, strict=True):
            values_of: dict[str, Any] = {kind: {} for kind in _KINDS}
            for (kind, name), value in zip(_tensors(particle), table, strict=True):
                values_of[kind][name] = value
            parameters = particle.parameters | inside
            particles.append(replace(particle, parameters=parameters, **values_of))
        return self.eager.parameters | inside, particles

    def _trace_public(self, compiler: Compiler) -> None:
        """Do nothing: the public part is eager."""

    def _particles(self, public: Any) -> list[Particle]:
        return public

    def _check_gradients(self, public: Any) -> None:
        """Do nothing: the gradients are eager."""


def _tensors(particle: Particle) -> dict[tuple[str, str], Tensor]:
    """The tensors of a particle on which the records' terms depend."""
    return {(kind, name): x for kind in _KINDS for name, x in getattr(particle, kind).items()}


def _fixed(particle: Particle) -> list[Any]:
    """The shapes and transforms of a particle, which are constants of a graph."""
    shapes = {name: (x.shape, x.dtype) for name, x in _tensors(particle).items()}
    transforms = (particle.transforms[name] for name in particle.latents)
    return [shapes, *(each for transform in transforms for each in _constants(transform))]


def _constants(transform: Transform, visited: frozenset[int] = frozenset()) -> Iterator[Any]:
    """Constants of a transform and of its parts, which may refer to their inverse."""
    yield type(transform)
    visited = visited | {id(transform)}
    for name, value in vars(transform).items():
        if name == "_cached_x_y":
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, Transform) and id(each) not in visited:
                yield from _constants(each, visited)
            elif isinstance(each, Tensor):
                yield name, each.dtype, each.tolist()
            elif isinstance(each, int | float | str):
                yield name, each
