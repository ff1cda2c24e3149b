"""Gradients of one record's term, for a batch of records.

:meth:`RecordTerm.looped` is the reference: one record at a time, through the user's loss.
:meth:`RecordTerm.vectorized` takes all at once with ``torch.func``, and is tested against it.

Both differentiate with respect to the unconstrained global latents u and to the parameters used
inside the plate. All records share the public draw u. Local draws are private to each record.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pyro
import torch
from pyro import poutine
from pyro.infer import ELBO
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.utils import _pytree as pytree

from pyro_dp.graphs.captured_state import CapturedState
from pyro_dp.records.global_draw import Particle
from pyro_dp.records.local_draws import LocalDraws
from pyro_dp.records.local_parameters import LocalParameters
from pyro_dp.records.losses import NotVectorizable, looped_loss, record_loss
from pyro_dp.records.plate import Inside, OneRecord, is_random
from pyro_dp.records.records import Records
from pyro_dp.records.sandbox import guarded
from pyro_dp.records.torch_modes import NEVER, Decisions, RecordMode
from pyro_dp.records.vectorised import all_at_once
from pyro_dp.utils.errors import ModelError

_HINT = "Change model, guide or loss accordingly."


@dataclass(frozen=True)
class Batch:
    """Records of one step, or one record without the batch dimension.

    :param indices: (B,), B > 0.
    :param rows: rows of every data tensor, each (B, ...).
    :param values: local draws that were made before, each (B, ...).
    :param local_rows: rows of the local parameters, each (B, ...).
    """

    indices: Tensor
    rows: list[Tensor]
    values: Sequence[Tensor] = ()
    local_rows: dict[str, Tensor] = field(default_factory=dict)

    def at(self, positions: Tensor | int, values: Sequence[Tensor]) -> "Batch":
        """The records at these positions.

        :param values: local draws of all records in the batch.
        """
        everything = (self.indices, self.rows, list(values), self.local_rows)
        return Batch(*pytree.tree_map(lambda x: x[positions], everything))


@dataclass(frozen=True)
class RecordGradients:
    """Per-record gradients of the negative ELBO and its value, for B records.

    :param latents: (B, ...) per global latent, with respect to its unconstrained value.
    :param parameters: (B, ...) per parameter used inside the plate.
    :param losses: (B,), in nats.
    :param local: (B, ...) per local parameter, with respect to the record's own row. They are
        never released.
    :param sampled: the local draws, (B, ...) each.
    :param otherwise: for terms that branch on a record's values, the number of draws before a
        record first branches unlike a placeholder, (B,). Empty for other terms.
    """

    latents: dict[str, Tensor]
    parameters: dict[str, Tensor]
    losses: Tensor
    local: dict[str, Tensor]
    sampled: list[Tensor] = field(default_factory=list)
    otherwise: list[Tensor] = field(default_factory=list)

    @property
    def apart(self) -> Tensor:
        """Whether a record branches unlike a placeholder, so that its gradients are wrong, (B,)."""
        found = [each < NEVER for each in self.otherwise]
        return found[0] if found else torch.zeros_like(self.losses, dtype=torch.bool)

    @property
    def numbers(self) -> tuple[dict, dict, Tensor, dict]:
        """All gradients and losses."""
        return self.latents, self.parameters, self.losses, self.local

    def at(self, positions: Tensor) -> "RecordGradients":
        """Gradients of the records at these positions."""
        return RecordGradients(*pytree.tree_map(lambda x: x[positions], self.numbers))

    def with_rows(self, positions: Tensor, new: "RecordGradients") -> "RecordGradients":
        """Replace the gradients of the records at these positions, after which all are right."""

        def replaced(old: Tensor, other: Tensor) -> Tensor:
            return old.index_copy(0, positions, other.to(old))

        latents, parameters, losses, local = pytree.tree_map(replaced, self.numbers, new.numbers)
        return RecordGradients(latents, parameters, losses, local, self.sampled)


@dataclass(frozen=True, eq=False)
class RecordTerm:
    """One record's term of the negative ELBO, at the global latents.

    :param loss: the user's loss, for one particle.
    :param guide: the guide; :func:`no_sites` if it has no sites inside the plate.
    :param state: the captured state of model and guide, which must keep nothing of a record.
    :param local: unconstrained parameters with a row per record.
    :param latents: names of the global latents that the term uses.
    :param parameters: unconstrained parameters that the term uses.
    :param released: the same, with the parameters of the latents' draws.
    :param enumerates: whether the model has latents inside the plate that are summed out.
    :param samples: number of local draws of one record.
    :param answers: a placeholder's answers at the model's branches on a record's values. ``None``:
        the term cannot be vectorised, and records run one after the other.
    """

    loss: ELBO
    model: Callable
    guide: Callable
    records: Records
    state: CapturedState
    local: LocalParameters
    latents: frozenset[str]
    parameters: dict[str, Tensor]
    released: dict[str, Tensor]
    enumerates: bool
    samples: int = 0
    answers: tuple[bool, ...] | None = None

    @property
    def vectorizes(self) -> bool:
        return self.answers is not None

    def gradients(self, particle: Particle, batch: Batch) -> RecordGradients:
        """Compute gradients by the fastest method that this model allows.

        If the model fails on a record (say, a matrix is not positive definite), the record counts
        as broken, and its gradients are NaN. An error would reveal that such a record exists. Other
        records keep their method: some derivatives, as of a singular matrix's determinant, differ.
        """
        count = len(batch.indices)
        if self.vectorizes:
            try:
                return self.vectorized(particle, batch)
            except (ModelError, NotVectorizable):
                if count > 1:
                    halves = torch.arange(count, device=batch.indices.device).chunk(2)
                    parts = [self.gradients(particle, batch.at(x, batch.values)) for x in halves]
                    numbers = (part.numbers for part in parts)
                    return RecordGradients(*pytree.tree_map(lambda *x: torch.cat(x), *numbers))
        return self.looped(particle, batch, breaks=True)

    def looped(self, particle: Particle, batch: Batch, *, breaks: bool = False) -> RecordGradients:
        """One record after the other, through the user's loss.

        :param breaks: whether a record on which the model fails gets NaN; else the error is raised.
        """
        inputs = particle.latents | self.parameters | self.local.constants()
        columns: dict[str, list[Tensor]] = {name: [] for name in inputs}
        losses = []
        for b in range(len(batch.indices)):
            record, missing = batch.at(b, batch.values), 0.0
            draws = LocalDraws(record.values, more=breaks or not record.values)
            try:
                gradients, loss = self.single(particle, record, draws)
            except ModelError:
                if not breaks:
                    raise
                gradients, loss, missing = {}, torch.tensor(math.nan), math.nan
            for name, column in columns.items():
                column.append(gradients.get(name, torch.full_like(inputs[name], missing)))
            losses.append(loss.to(batch.indices.device))
        kinds = particle.latents, self.parameters, self.local.leaves
        latents, parameters, local = ({n: torch.stack(columns[n]) for n in x} for x in kinds)
        return RecordGradients(latents, parameters, torch.stack(losses), local)

    def single(
        self, particle: Particle, record: Batch, draws: LocalDraws, *, public: bool = False
    ) -> tuple[dict[str, Tensor], Tensor]:
        """One record's gradients by name, without inputs that it does not use, and its loss."""
        latents = {name: u.requires_grad_() for name, u in particle.detached().items()}
        local_rows = {
            name: row.detach().clone().requires_grad_()
            for name, row in (record.local_rows or self.local.constants()).items()
        }
        inputs = latents | self.parameters | local_rows
        own = record.indices, record.rows, RecordMode(draws), local_rows, public
        with self.shown(particle, latents, *own) as shown:
            loss = looped_loss(self.loss, *shown)
            if not loss.requires_grad:
                return {}, loss
            # Inside the context, because a user's derivative may also keep something.
            gradients = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
        used = {n: g for n, g in zip(inputs, gradients, strict=True) if g is not None}
        return used, loss.detach()

    def vectorized(self, particle: Particle, batch: Batch) -> RecordGradients:
        """All records at once, and then one by one those that branch unlike a placeholder.

        A record's method depends on no other record.
        """
        found = self.at_once(particle, batch)
        for made in found.otherwise:  # numbers of draws before the branch
            for count in made[made < NEVER].unique().tolist():
                positions = (made == count).nonzero().squeeze(1)
                apart = batch.at(positions, found.sampled[:count])
                found = found.with_rows(positions, self.looped(particle, apart, breaks=True))
        return found

    def at_once(
        self, particle: Particle, batch: Batch, decisions: Decisions | None = None
    ) -> RecordGradients:
        """All records at once, at the particle's latents and parameters.

        :param decisions: answers at the model's branches; by default those of a placeholder.
        """
        leaves, decided = self.parameters, decisions or Decisions(self.answers or ())

        def term(latents, parameters, local, index, row, values):
            substitutes = {id(leaf): parameters[name] for name, leaf in leaves.items()}
            draws = LocalDraws(values, more=not values)
            mode = RecordMode(draws, substitutes, decided)
            with self.shown(particle, latents, index, row, mode, local) as shown:
                loss = record_loss(self.loss, *shown)
            return loss, (loss.detach(), draws.sampled, decided.otherwise)

        gradient = torch.vmap(
            torch.func.grad(term, argnums=(0, 1, 2), has_aux=True),
            in_dims=(None, None, 0, 0, 0, 0),
            randomness="different",
        )
        parameters = {name: particle.parameters[name].detach() for name in leaves}
        own = (batch.local_rows, batch.indices, batch.rows, list(batch.values))
        with (
            self.state.preserved(batched=True),
            guarded("Differentiating the records' terms"),
            all_at_once(),
        ):
            gradients, aside = gradient(particle.detached(), parameters, *own)
        (of_latents, of_parameters, of_local), (losses, sampled, otherwise) = gradients, aside
        return RecordGradients(of_latents, of_parameters, losses, of_local, sampled, otherwise)

    def observations(
        self,
        particle: Particle,
        latents: dict[str, Tensor],
        index: Tensor,
        row: list[Tensor],
        *,
        validates: bool = False,
    ) -> list[dict]:
        """One record's observed sites. The arguments are those of :meth:`shown`.

        :param validates: whether Pyro's validation is on when distributions are made.
        """
        shown = self.shown(particle, latents, index, row)
        with shown as (model, guide, args, kwargs), pyro.validation_enabled(validates):
            trace = poutine.trace(guide).get_trace(*args, **kwargs)
            trace = poutine.trace(poutine.replay(model, trace=trace)).get_trace(*args, **kwargs)
        return [s for s in trace.nodes.values() if is_random(s) and s["is_observed"]]

    @contextlib.contextmanager
    def shown(
        self,
        particle: Particle,
        latents: dict[str, Tensor],
        index: Tensor,
        row: list[Tensor],
        mode: RecordMode | None = None,
        local_rows: dict[str, Tensor] | None = None,
        public: bool = False,
    ) -> Iterator[tuple[Callable, Callable, tuple, dict]]:
        """Model, guide and arguments of one record, inside the context for their run.

        :param latents: unconstrained values.
        :param row: the record's row of every data tensor.
        :param mode: the mode of torch functions; by default one with new local draws.
        :param local_rows: the record's rows of the local parameters; by default public constants.
        :param public: whether all rows are placeholders.
        """
        plate, (args, kwargs) = self.records.plate, self.records.arguments(row)
        local_rows = local_rows or self.local.constants()  # outside the mode, which replaces draws
        with (
            self.state.preserved(batched=all(map(is_batchedtensor, row))),
            guarded("Running the model on one record", public=public, hint=_HINT if public else ""),
            mode or RecordMode(LocalDraws()),
            self.local.shown(local_rows),
            OneRecord(plate, index.reshape(1), particle.names),
        ):
            inside = Inside(plate, particle.values(latents))
            yield inside(self.model), inside(self.guide), args, kwargs
