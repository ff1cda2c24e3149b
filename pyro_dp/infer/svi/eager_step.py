"""A step of DPSVI in Pyro code: the public draw, the records' clipped sums, the gradient.

:class:`EagerStep` runs Pyro code in every step.
:class:`~pyro_dp.infer.svi.traced_step.TracedStep` gives the same numbers from graphs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyro
import torch
from pyro.infer import ELBO
from torch import Tensor

from pyro_dp.infer.svi.coordinates import LatentCoordinates, ParameterCoordinates, mean, mean_loss
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.contributions import Block, Contributions, Measured, Rows
from pyro_dp.mechanism.nonprivate import row_norms
from pyro_dp.mechanism.norm_histogram import bins_alone
from pyro_dp.mechanism.sampling import Indices
from pyro_dp.mechanism.streams import LocalStream, LocalStreams
from pyro_dp.records.global_draw import Particle, draw_particle
from pyro_dp.records.record_term import Batch, RecordTerm
from pyro_dp.records.records import Prepared
from pyro_dp.records.torch_modes import RecordMode
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.torch_state import private_rng, rows_on

COORDINATES: dict[str, type[LatentCoordinates] | type[ParameterCoordinates]] = {
    "latents": LatentCoordinates,
    "parameters": ParameterCoordinates,
}
LocalGradients = tuple[Tensor, dict[str, Tensor]]  # B records (B,), (B, ...) by parameter
NewStream = Callable[[], np.random.Generator]
Report = Callable[[Measured, Tensor | float], list[Contributions]]  # from gradients and bound


class Gradients(NamedTuple):
    """The public results of a release and of public draws.

    :param parameters: by name.
    :param outside: the loss outside the plate.
    """

    parameters: dict[str, Tensor | None]
    outside: Tensor


@dataclass
class EagerStep:
    """The computation of a step, by Pyro's own code on the public part and vectorised on records.

    :param loss: the user's, as are model and guide.
    :param term: one record's part of it, which has the records.
    :param parameters: all unconstrained parameters, by name.
    :param privatize: "latents" or "parameters".
    :param microbatch_size: at most so many records are worked on at a time.
    :param releases_loss: whether the release has a block for the loss.
    :param report: makes a block for the norms beside that of the gradient, as
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
        """Which computes the same: for what takes either step."""
        return self

    def of_norms_alone(self) -> "EagerStep":
        """The same step, whose release has the norms and no more."""
        return replace(self, releases_loss=False, report=bins_alone)

    def draw(self, given: Sequence[RecordMode] | None = None) -> list[Particle]:
        """Draws global latents, which are public, one for each particle."""
        modes: Sequence[RecordMode | None] = given or [None] * self.loss.num_particles
        return [self._particle(mode) for mode in modes]

    def size(self, draws: list[Particle]) -> int:
        """Number of coordinates of the gradient's block."""
        return self.coordinates(draws, self.parameters).size

    def most_records(self, size: int) -> int | None:
        """How many records to work on at a time; None: all of them.

        :param size: number of coordinates.
        """
        records = self.term.records
        return self.microbatch_size or rows_on(records.device, size + records.row_size)

    def add(
        self, clipped: ClippedSum, draws: list[Particle], indices: Indices, new_stream: NewStream
    ) -> list[LocalGradients]:
        """Clip and sum these records' contributions, one microbatch after the other.

        :param new_stream: makes the private source of the records' own draws.
        :returns: gradients of the records' own rows of local parameters.
        """
        stream = new_stream()
        local = [LocalStream(stream) for _ in draws]
        moves = []
        with private_rng(stream):
            limit = self.most_records(self.size(draws))
            for chosen in indices.split(limit or max(len(indices), 1)):
                if len(chosen):  # an empty batch is split into one empty part
                    moves.append(self.add_microbatch(clipped, draws, chosen, local))
        return moves

    def add_microbatch(
        self,
        clipped: ClippedSum,
        draws: list[Particle],
        chosen: Tensor,
        local: LocalStreams,
        sampled: Sequence[list[Tensor]] | None = None,
    ) -> LocalGradients:
        """
        :param sampled: draws of torch's samplers for these records, by particle; by default they
            draw now.
        """
        rows, local_rows = self.term.records.rows(chosen), self.term.local.rows(chosen)
        given: Sequence[list[Tensor] | None] = sampled or [None] * len(draws)
        batches = [
            Batch(chosen, rows, own, values=values, local_rows=local_rows)
            for own, values in zip(local, given, strict=True)
        ]
        gradients = [
            self.term.gradients(particle, batch)
            for particle, batch in zip(draws, batches, strict=True)
        ]
        blocks = self.coordinates(draws, self.parameters).per_record(gradients)
        losses = torch.stack([each.losses for each in gradients]).mean(dim=0)
        # Records that share nothing have rows of their own only.
        flat = torch.cat(
            [losses.new_empty(len(chosen), 0), *(b.reshape(len(chosen), -1) for b in blocks)], dim=1
        )
        clipped.add(*self.blocks(Rows(flat), losses, clipped.blocks[0].bound))
        return chosen, {
            name: mean([each.local[name] for each in gradients]) for name in self.term.local.leaves
        }

    def blocks(
        self, gradient: Measured, losses: Tensor, bound: Tensor | float
    ) -> list[Contributions]:
        """The blocks of the joint release: gradient, loss, report of the norms."""
        blocks: list[Contributions] = [gradient]
        if self.report is not None:
            blocks = self.report(gradient, bound)
        if self.releases_loss:
            blocks.insert(1, Rows(losses.unsqueeze(1)))
        return blocks

    def gradients(self, draws: list[Particle], released: Tensor) -> Gradients:
        """Gradients of the parameters from the released estimate."""
        coordinates = self.coordinates(draws, self.parameters)
        return Gradients(coordinates.gradients(released), mean_loss(draws))

    def coordinates(
        self, particles: list[Particle], parameters: dict[str, Tensor]
    ) -> LatentCoordinates | ParameterCoordinates:
        return COORDINATES[self.privatize](particles, self.term, parameters)

    def _particle(self, given: RecordMode | None) -> Particle:
        own = (self.term.records, given, self.term.local)
        particle = draw_particle(self.loss, self.model, self.guide, *own)
        if particle.parameters.keys() != self.parameters.keys():
            raise ModelError("The parameters of model and guide changed between two steps.")
        return particle.restricted(self.term.latents)


class GradientStep(Protocol):
    """An :class:`EagerStep`, or a faster one that computes the same. Draws are of its own kind."""

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
    """
    :param term: one record's.
    :param parameters: all unconstrained parameters without a row per record, by name.
    :param step: computes releases and gradients.
    """

    term: RecordTerm
    parameters: dict[str, Tensor]
    step: GradientStep

    def is_current(self) -> bool:
        """Whether the parameters are those of Pyro's store still."""
        store = pyro.get_param_store()
        return all(
            store.param_name(leaf) == name and leaf.requires_grad
            for name, leaf in (self.parameters | self.term.local.leaves).items()
        )


def exact_loss(
    prepared: PreparedGradient, batches: Iterable[Tensor], stream: np.random.Generator
) -> float:
    """The negative ELBO of all records, with the draws that the next step would make."""
    kept, outside = _gradients(prepared, batches, stream)
    return sum(kept.losses) + outside


def exact_norms(
    prepared: PreparedGradient, batches: Iterable[Tensor], stream: np.random.Generator
) -> Tensor:
    """Norms of the records' gradients before they are clipped, (N,)."""
    kept, _ = _gradients(prepared, batches, stream)
    return torch.cat(kept.norms)


@torch.enable_grad()
def _gradients(
    prepared: PreparedGradient, batches: Iterable[Tensor], stream: np.random.Generator
) -> tuple["_Kept", float]:
    """Norms and losses of the records, and the loss outside the plate."""
    eager = replace(prepared.step.eager, releases_loss=True, report=None)
    particles = eager.draw()
    local = [LocalStream(stream) for _ in particles]
    kept: Any = _Kept([Block(eager.size(particles), 1.0)])
    with private_rng(stream):
        for chosen in batches:
            eager.add_microbatch(kept, particles, chosen, local)
    outside = torch.stack([particle.loss.detach() for particle in particles]).mean()
    return kept, outside.item()


class _Kept:
    """It keeps the norms of records, and the sums of their losses."""

    def __init__(self, blocks: list[Block]):
        self.blocks = blocks
        self.norms: list[Tensor] = []
        self.losses: list[float] = []

    def add(self, gradients: Measured, losses: Contributions) -> None:
        norms = row_norms(gradients)
        self.norms.append(norms)
        self.losses.append(losses.weighted_sum(torch.ones_like(norms).unsqueeze(1)).item())
