"""A step of DPSVI with a graph for the records alone, where the public part has none.

The public part is the guide and the model outside the plate. A guide may draw from a distribution
that cannot be traced, or branch on a value. So the public part runs Pyro code in every step. Its
latents are inputs of the records' graph.
"""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributions import Transform

from pyro_dp.graphs.tracing import Compiler, NotTraceable
from pyro_dp.infer.padded_sum import parted
from pyro_dp.infer.svi.eager_step import EagerStep, Gradients, LocalGradients, NewStream
from pyro_dp.infer.svi.traced_step import TracedStep
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.sampling import Indices
from pyro_dp.records.global_draw import Particle

_KINDS = ("latents", "fixed", "indices")
_PARTLY = (
    "jit={jit!r} does not apply to the guide and to the model outside the plate, which run Pyro "
    "code in every step: {reason}. The records have a graph."
)


def step_from_graphs(
    eager: EagerStep, sum_type: type[ClippedSum], usual_size: int, compiler: Compiler
) -> TracedStep:
    """A step with a graph for each part, or with a warning and a graph for the records alone.

    Its arguments and errors are those of :class:`TracedStep`.
    """
    own = (eager, sum_type, usual_size, compiler)
    try:
        return TracedStep(*own)
    except NotTraceable as whole:
        try:
            step = RecordsTracedStep(*own)
        except NotTraceable:
            raise whole from None
        jit = "compile" if compiler.enabled else "trace"
        warnings.warn(_PARTLY.format(jit=jit, reason=whole), stacklevel=2)
        return step


class RecordsTracedStep(TracedStep):
    """As :class:`TracedStep`, with public draws that are particles, as those of the eager step.

    If a draw's latents have other names, shapes or supports than the first draw's, it does not fit
    the graph. Then the step is the eager one's.

    :raises NotTraceable: the records' terms are more than a fixed sequence of tensor operations.
        Or the release is of parameters, or the latents' supports change from draw to draw.
    """

    def _first_draw(self) -> list[Particle]:
        if self.eager.privatize != "latents":
            raise NotTraceable("each record is pulled back through the guide")
        self._inside = list(self.eager.term.parameters)
        self._template = self.eager.draw()
        self._counts = [0] * len(self._template)  # no draws are inputs: latents are
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
        """Whether these particles are the template with other numbers in its tensors."""
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
            own: dict[str, Any] = {kind: {} for kind in _KINDS}
            for (kind, name), value in zip(_tensors(particle), table, strict=True):
                own[kind][name] = value
            particles.append(replace(particle, parameters=particle.parameters | inside, **own))
        return self.eager.parameters | inside, particles

    def _trace_public(self, compiler: Compiler) -> None:
        """There is no such graph."""

    def _particles(self, public: Any) -> list[Particle]:
        return public

    def _check_gradients(self, public: Any) -> None:
        """They are those of the eager step."""


def _tensors(particle: Particle) -> dict[tuple[str, str], Tensor]:
    """The tensors of a draw on which the records' terms depend."""
    return {(kind, name): x for kind in _KINDS for name, x in getattr(particle, kind).items()}


def _fixed(particle: Particle) -> list[Any]:
    """The shapes and transforms of a draw, which are constants in a graph."""
    shapes = {name: (x.shape, x.dtype) for name, x in _tensors(particle).items()}
    transforms = (particle.transforms[name] for name in particle.latents)
    return [shapes, *(each for own in transforms for each in _constants(own))]


def _constants(transform: Transform, known: frozenset[int] = frozenset()) -> Iterator[Any]:
    """Constants of a transform, and of those that it is made of: some refer to their inverse.

    :param known: the transforms visited before.
    """
    yield type(transform)
    known = known | {id(transform)}
    for name, value in vars(transform).items():
        if name == "_cached_x_y":
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, Transform) and id(each) not in known:
                yield from _constants(each, known)
            elif isinstance(each, Tensor):
                yield name, each.dtype, each.tolist()
            elif isinstance(each, int | float | str):
                yield name, each
