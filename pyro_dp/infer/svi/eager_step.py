"""A step of DPSVI in Pyro code: the public draw, the records' clipped sums, the gradient.

:class:`~pyro_dp.infer.svi.traced_step.TracedStep` computes the same numbers with graphs.

**Coordinates.** Let l_i be the negative ELBO term of record i, and u the global latents in
unconstrained coordinates, with K draws (particles). Let phi be all parameters, and psi those used
inside the plate. The contribution of a record, which is clipped, is

* in :class:`LatentCoordinates`: ((1/K) dl_i/du^(1), ..., (1/K) dl_i/du^(K), (1/K) sum_k
  dl_i^(k)/dpsi). The released sum is the cotangent of u. It is pulled back through the guide
  exactly, which is post-processing.
* in :class:`ParameterCoordinates`: (1/K) sum_k dl_i^(k)/dphi. Each record is pulled back before it
  is clipped (Algorithm 1 of DPVI).

In both cases, terms outside the plate carry no data and are added exactly.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyro
import torch
from pyro.infer import ELBO
from torch import Tensor

from pyro_dp.infer.svi.optimizers import PublicOptimizer
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.contributions import Contributions, Joined, Measured, Rows
from pyro_dp.mechanism.nonprivate import row_norms
from pyro_dp.mechanism.norm_histogram import bins_alone
from pyro_dp.mechanism.sampling import Indices
from pyro_dp.records.global_draw import Particle, draw_particle, unflat
from pyro_dp.records.record_term import Batch, RecordGradients, RecordTerm
from pyro_dp.records.records import Prepared
from pyro_dp.records.torch_modes import RecordMode
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.torch_state import private_rng, rows_on


class LatentCoordinates:
    """Latents in unconstrained coordinates, and the parameters used inside the plate.

    :ivar size: number of coordinates of a release.
    """

    def __init__(
        self, particles: Sequence[Particle], term: RecordTerm, parameters: dict[str, Tensor]
    ):
        self._particles, self._parameters = particles, parameters
        self._latents = [u for particle in particles for u in particle.latents.values()]
        self._inside = list(term.parameters)
        # Keys are numbers of latents and names of parameters.
        self._released: dict[Any, Tensor] = dict(enumerate(self._latents))
        self._released |= {name: parameters[name] for name in self._inside}
        self.size = sum(x.numel() for x in self._released.values())

    def per_record(self, gradients: Sequence[RecordGradients]) -> list[Tensor]:
        """Contributions (B, ...) of ``size`` coordinates in total, from one gradient a particle."""
        count = len(self._particles)
        latents = [g for each in gradients for g in each.latents.values()]
        latents = latents if count == 1 else [g / count for g in latents]
        inside = [mean([each.parameters[name] for each in gradients]) for name in self._inside]
        return latents + inside

    def gradients(self, released: Tensor) -> dict[str, Tensor | None]:
        parts = unflat(released, self._released)
        objective = mean_loss(self._particles)
        for i, u in enumerate(self._latents):
            objective = objective + (parts[i] * u).sum()
        return _with_exact(self._parameters, objective, parts)


class ParameterCoordinates:
    """All unconstrained parameters that records inform, directly or through the guide."""

    def __init__(
        self, particles: Sequence[Particle], term: RecordTerm, parameters: dict[str, Tensor]
    ):
        self._particles, self._parameters = particles, parameters
        self._released = {name: parameters[name] for name in term.released}
        self.size = sum(x.numel() for x in self._released.values())

    def per_record(self, gradients: Sequence[RecordGradients]) -> list[Tensor]:
        batch = len(gradients[0].losses)
        total = {name: x.new_zeros(batch, *x.shape) for name, x in self._released.items()}
        for particle, each in zip(self._particles, gradients, strict=True):
            through_guide = _pulled_back(particle, each, self._released)
            for name in total:
                for gradient in (through_guide.get(name), each.parameters.get(name)):
                    if gradient is not None:
                        total[name] = total[name] + gradient / len(self._particles)
        return list(total.values())

    def gradients(self, released: Tensor) -> dict[str, Tensor | None]:
        direct = unflat(released, self._released)
        return _with_exact(self._parameters, mean_loss(self._particles), direct)


def _pulled_back(
    particle: Particle, gradients: RecordGradients, parameters: dict[str, Tensor]
) -> dict[str, Tensor | None]:
    """Each record's gradient through the guide, (B, ...) by parameter; ``None`` without a path.

    Latents without a reparameterisation have score-function gradients, l_i times that of log q.
    """
    reached = {name: u for name, u in particle.latents.items() if u.requires_grad}
    outputs = list(reached.values())
    cotangents = [gradients.latents[name] for name in reached]
    if particle.log_q is not None and particle.log_q.requires_grad:
        outputs.append(particle.log_q)
        cotangents.append(gradients.losses.to(particle.log_q.dtype))
    if not outputs:
        return {}
    pulled = torch.autograd.grad(
        outputs,
        list(parameters.values()),
        grad_outputs=cotangents,
        is_grads_batched=True,
        retain_graph=True,
        allow_unused=True,
    )
    return dict(zip(parameters, pulled, strict=True))


def mean_loss(particles: Sequence[Particle]) -> Tensor:
    """The negative ELBO outside the plate, averaged over the particles."""
    return mean([particle.loss for particle in particles])


def mean(values: Sequence[Tensor]) -> Tensor:
    """The mean of these tensors; a single one is not copied."""
    total = sum(values[1:], values[0])
    return total if len(values) == 1 else total / len(values)


def _with_exact(
    parameters: dict[str, Tensor], objective: Tensor, direct: dict[str, Tensor]
) -> dict[str, Tensor | None]:
    """Gradients of the objective plus those in ``direct``; ``None`` if there are neither."""
    exact: Sequence[Tensor | None] = [None] * len(parameters)
    if objective.requires_grad:
        exact = torch.autograd.grad(objective, list(parameters.values()), allow_unused=True)
    gradients = {}
    for name, gradient in zip(parameters, exact, strict=True):
        parts = [g for g in (gradient, direct.get(name)) if g is not None]
        gradients[name] = sum(parts[1:], parts[0]) if parts else None
    return gradients


COORDINATES: dict[str, type[LatentCoordinates] | type[ParameterCoordinates]] = {
    "latents": LatentCoordinates,
    "parameters": ParameterCoordinates,
}
_MOST_HELD = 2**25  # numbers of gradients in a microbatch
LocalGradients = tuple[Tensor, dict[str, Tensor]]  # indices (B,), gradients (B, ...) by parameter
NewStream = Callable[[], np.random.Generator]
Report = Callable[[Measured, Tensor | float], list[Contributions]]  # from gradients and bound


class Gradients(NamedTuple):
    """The gradients of a step, which are public."""

    parameters: dict[str, Tensor | None]
    outside: Tensor  # the loss outside the plate


@dataclass
class EagerStep:
    """A step that runs Pyro code on the public part, and is vectorised over records.

    :param term: one record's part of the user's loss.
    :param parameters: all unconstrained parameters, by name.
    :param privatize: "latents" or "parameters".
    :param releases_loss: whether the release has a block for the loss.
    :param report: makes the block that reports norms, as
        :func:`~pyro_dp.mechanism.contributions.with_bit`; None: there is no such block.
    """

    loss: ELBO
    model: Callable
    guide: Callable
    term: RecordTerm
    parameters: dict[str, Tensor]
    privatize: str = field(kw_only=True)
    microbatch_size: int | None = field(kw_only=True)
    releases_loss: bool = field(default=False, kw_only=True)
    report: Report | None = field(default=None, kw_only=True)

    @property
    def eager(self) -> "EagerStep":
        """The step itself, as of a :class:`GradientStep`."""
        return self

    def of_norms_alone(self) -> "EagerStep":
        """A step whose only block is the histogram of the norms."""
        return replace(self, releases_loss=False, report=bins_alone)

    @property
    def num_noises(self) -> int:
        """The number of released numbers that enter the gradient of a latent's location."""
        return self.loss.num_particles if self.privatize == "latents" else 1

    def draw(self, modes: Sequence[RecordMode] | None = None) -> list[Particle]:
        """Draw the global latents, which are public, for each particle."""
        each: Sequence[RecordMode | None] = modes or [None] * self.loss.num_particles
        return [self._particle(mode) for mode in each]

    def size(self, draws: list[Particle]) -> int:
        """The number of coordinates of a release."""
        return self.coordinates(draws, self.parameters).size

    def most_records(self, size: int) -> int | None:
        """The size of a microbatch of records with this many coordinates; None: no limit."""
        records = self.term.records
        return self.microbatch_size or rows_on(records.device, size + records.row_size)

    def add(
        self, clipped: ClippedSum, draws: list[Particle], indices: Indices, new_stream: NewStream
    ) -> list[LocalGradients]:
        """Clip and sum the contributions of these records, in microbatches.

        :param new_stream: makes the private random stream of the records' local draws.
        :returns: gradients of rows of parameters per record.
        """
        moves = []
        with private_rng(new_stream()):
            size = self.size(draws)
            limit = self.most_records(size) or max(1, _MOST_HELD // max(1, size))
            for chosen in indices.split(limit):
                if len(chosen):  # an empty batch is split into one empty part
                    moves.append(self.add_microbatch(clipped, draws, chosen))
        return moves

    def add_microbatch(
        self,
        clipped: ClippedSum,
        draws: list[Particle],
        chosen: Tensor,
        sampled: Sequence[list[Tensor]] = (),
    ) -> LocalGradients:
        """As :meth:`add`, for one microbatch.

        :param sampled: local draws for these records, by particle; by default they draw now.
        """
        gradients, losses, local = self.of_records(draws, chosen, sampled)
        clipped.add(*self.blocks(gradients, losses, clipped.blocks[0].bound))
        return chosen, local

    def of_records(
        self, draws: list[Particle], chosen: Tensor, sampled: Sequence[list[Tensor]] = ()
    ) -> tuple[Joined, Tensor, dict[str, Tensor]]:
        """Gradients and losses (B,) of these records, and gradients of their rows. Private."""
        rows, local_rows = self.term.records.rows(chosen), self.term.local.rows(chosen)
        gradients = [
            self.term.gradients(particle, Batch(chosen, rows, values, local_rows))
            for particle, values in zip(draws, sampled or [[]] * len(draws), strict=True)
        ]
        blocks = self.coordinates(draws, self.parameters).per_record(gradients)
        losses = torch.stack([each.losses for each in gradients]).mean(dim=0)
        # There are no blocks if all parameters have a row per record.
        parts = [Rows(each) for each in blocks or [losses.new_empty(len(chosen), 0)]]
        local = {n: mean([each.local[n] for each in gradients]) for n in self.term.local.leaves}
        return Joined(parts), losses, local

    def blocks(
        self, gradient: Measured, losses: Tensor, bound: Tensor | float
    ) -> list[Contributions]:
        """The blocks of the joint release: the gradient, the loss, and the report of the norms."""
        blocks: list[Contributions] = [gradient]
        if self.report is not None:
            blocks = self.report(gradient, bound)
        if self.releases_loss:
            blocks.insert(1, Rows(losses.unsqueeze(1)))
        return blocks

    def gradients(self, draws: list[Particle], released: Tensor) -> Gradients:
        """The gradients of all parameters, from a release. This is post-processing."""
        coordinates = self.coordinates(draws, self.parameters)
        return Gradients(coordinates.gradients(released), mean_loss(draws))

    def coordinates(
        self, particles: list[Particle], parameters: dict[str, Tensor]
    ) -> LatentCoordinates | ParameterCoordinates:
        return COORDINATES[self.privatize](particles, self.term, parameters)

    def _particle(self, mode: RecordMode | None) -> Particle:
        term = self.term
        particle = draw_particle(self.loss, self.model, self.guide, term.records, mode, term.local)
        if particle.parameters.keys() != self.parameters.keys():
            raise ModelError("The parameters of model and guide changed between two steps.")
        return particle.restricted(self.term.latents)


class GradientStep(Protocol):
    """An :class:`EagerStep`, or a faster one of equal results. The type of draws is its own."""

    @property
    def eager(self) -> EagerStep: ...

    def draw(self) -> Any: ...

    def size(self, draws: Any) -> int: ...

    def add(
        self, clipped: ClippedSum, draws: Any, indices: Indices, new_stream: NewStream
    ) -> list[LocalGradients]: ...

    def gradients(self, draws: Any, released: Tensor) -> Gradients: ...


@dataclass(frozen=True, eq=False)
class PreparedGradient(Prepared):
    """:param parameters: all unconstrained parameters without a row per record, by name."""

    term: RecordTerm
    parameters: dict[str, Tensor]
    step: GradientStep
    optimizer: PublicOptimizer

    def is_current(self) -> bool:
        store = pyro.get_param_store()
        return not self.optimizer.failed and all(
            store.param_name(leaf) == name and leaf.requires_grad
            for name, leaf in (self.parameters | self.term.local.leaves).items()
        )


@torch.enable_grad()
def exact(
    prepared: PreparedGradient, batches: Iterable[Tensor], stream: np.random.Generator
) -> tuple[float, Tensor]:
    """The negative ELBO of all records, and norms (N,) of their gradients before clipping.

    They use the draws that the next step would make.
    """
    eager = prepared.step.eager
    particles = eager.draw()
    loss = mean_loss(particles).item()
    norms = []
    with private_rng(stream):
        for chosen in batches:
            gradients, losses, _ = eager.of_records(particles, chosen)
            norms.append(row_norms(gradients))
            loss += losses.double().sum().item()
    return loss, torch.cat(norms)
