"""Gradients of one record's term, for a batch of records.

:meth:`RecordTerm.looped` is the reference: one record at a time, through the user's own loss.
:meth:`RecordTerm.vectorized` takes all at once with ``torch.func``, and is tested against it.

Both differentiate with respect to the unconstrained global latents u and to the parameters used
inside the plate, at the same u for all records (the public draw) and with local draws of each
record's own (private).
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro import poutine
from pyro.infer import ELBO
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from pyro_dp.graphs.captured_state import CapturedState
from pyro_dp.mechanism.streams import LocalStream
from pyro_dp.records.global_draw import Particle, single_particle
from pyro_dp.records.local_draws import Draw, LocalDraws
from pyro_dp.records.local_parameters import LocalParameters
from pyro_dp.records.messengers import Inside, OneRecord
from pyro_dp.records.plate import is_random
from pyro_dp.records.record_elbo import record_loss
from pyro_dp.records.records import Records
from pyro_dp.records.sandbox import guarded
from pyro_dp.records.torch_modes import RecordMode
from pyro_dp.utils.errors import ModelError


@dataclass(frozen=True)
class Batch:
    """Records of one step.

    :param indices: (B,), B > 0.
    :param rows: their rows of every data tensor, each (B, ...).
    :param local: for the draws of their own latents.
    :param tables: these draws, where they were made already.
    :param local_rows: their rows of the local parameters, each (B, ...).
    """

    indices: Tensor
    rows: list[Tensor]
    local: LocalStream | None = None
    tables: list[Tensor] | None = None
    local_rows: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class RecordGradients:
    """Per-record gradients of the negative ELBO and its value, for B records.

    :param latents: (B, ...) per global latent, with respect to its unconstrained value.
    :param parameters: (B, ...) per parameter used inside the plate.
    :param losses: (B,), in nats.
    :param local: (B, ...) per local parameter, with respect to the record's own row: never
        released.
    """

    latents: dict[str, Tensor]
    parameters: dict[str, Tensor]
    losses: Tensor
    local: dict[str, Tensor]


class RecordTerm:
    """One record's term of the negative ELBO, given the global latents.

    :param runs_guide: whether the guide has sites inside the plate.
    :param enumerates: whether the model has latents inside the plate that are summed out.
    :param max_plate_nesting: number of nested plates, to the left of which latents are enumerated.
    :param constants: (label, argument), of the arguments that are no data.
    """

    def __init__(
        self,
        loss: ELBO,
        model: Callable,
        guide: Callable,
        *,
        runs_guide: bool,
        enumerates: bool,
        max_plate_nesting: float,
        constants: Sequence[tuple[str, Any]] = (),
    ):
        self.loss = single_particle(loss)
        self.loss.max_plate_nesting = max_plate_nesting
        self.model = model
        self.guide = guide if runs_guide else _no_sites
        self.runs_guide = runs_guide
        self.enumerates = enumerates
        # What model and guide refer to: of a record they keep nothing.
        self.state = CapturedState(model, *([guide] if runs_guide else []), *constants)
        self.latents: set[str] = set()  # names of the global latents that the term uses
        self.parameters: dict[str, Tensor] = {}  # unconstrained parameters that the term uses
        self.released: dict[str, Tensor] = {}  # those, and what the latents' draws depend on
        self.local = LocalParameters()  # unconstrained parameters with a row per record
        self.draws: list[Draw] = []  # local draws of one record
        self.vectorizes = True

    def gradients(self, records: Records, particle: Particle, batch: Batch) -> RecordGradients:
        """By the fastest way that this model allows.

        A record on which the model fails (a matrix that is not positive definite, say) counts as
        broken, and its numbers are NaN. An error would tell the world that there is such a record.
        """
        if self.vectorizes:
            try:
                return self.vectorized(records, particle, batch)
            except ModelError:
                pass
        return self.looped(records, particle, batch, breaks=True)

    def looped(
        self, records: Records, particle: Particle, batch: Batch, *, breaks: bool = False
    ) -> RecordGradients:
        """One record after the other, through the user's own loss.

        :param breaks: whether a record may be broken; else it raises.
        """
        inputs = particle.latents | self.parameters | self.local.constants()
        columns: dict[str, list[Tensor]] = {name: [] for name in inputs}
        losses = []
        for b, index in enumerate(batch.indices):
            arguments = records.arguments([row[b] for row in batch.rows])
            draws = LocalDraws(stream=batch.local, index=index)
            own = {name: rows[b] for name, rows in batch.local_rows.items()}
            missing = 0.0
            try:
                gradients, loss = self.single(records, particle, index, arguments, draws, own)
            except ModelError:
                if not breaks:
                    raise
                gradients, loss, missing = {}, torch.tensor(math.nan), math.nan
            for name, column in columns.items():
                column.append(gradients.get(name, torch.full_like(inputs[name], missing)))
            losses.append(loss.to(batch.indices.device))
        stacked = {name: torch.stack(column) for name, column in columns.items()}
        return RecordGradients(
            {name: stacked[name] for name in particle.latents},
            {name: stacked[name] for name in self.parameters},
            torch.stack(losses),
            {name: stacked[name] for name in self.local.leaves},
        )

    def single(
        self,
        records: Records,
        particle: Particle,
        index: Tensor,
        arguments: tuple[tuple, dict],
        draws: LocalDraws,
        local_rows: dict[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The reference: gradients of what one record uses, by name, and its loss.

        :param local_rows: its rows of the local parameters; by default public constants.
        """
        latents = {name: u.requires_grad_() for name, u in particle.detached().items()}
        local_rows = {
            name: row.detach().clone().requires_grad_()
            for name, row in (local_rows or self.local.constants()).items()
        }
        inputs = latents | self.parameters | local_rows
        args, kwargs = arguments
        with self._one_record(records, particle, index, draws, local_rows=local_rows):
            model, guide = self._inside(records, particle.values(latents))
            loss = torch.as_tensor(self.loss.differentiable_loss(model, guide, *args, **kwargs))
        if not loss.requires_grad:
            return {}, loss
        with guarded("Differentiating a record's term"):
            gradients = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
        return {
            n: g for n, g in zip(inputs, gradients, strict=True) if g is not None
        }, loss.detach()

    def vectorized(self, records: Records, particle: Particle, batch: Batch) -> RecordGradients:
        """All records at once, at the particle's latents and parameters."""
        leaves = self.parameters

        def term(latents, parameters, local, index, row, table):
            substitutes = {id(leaf): parameters[name] for name, leaf in leaves.items()}
            draws = LocalDraws(table)
            return self.loss_of(records, particle, latents, index, row, draws, substitutes, local)

        gradient = torch.vmap(
            torch.func.grad(term, argnums=(0, 1, 2), has_aux=True),
            in_dims=(None, None, 0, 0, 0, 0),
            randomness="different",
        )
        parameters = {name: particle.parameters[name].detach() for name in leaves}
        own = (batch.local_rows, batch.indices, batch.rows, self._tables(batch))
        with guarded("Differentiating the records' terms"):
            gradients, losses = gradient(particle.detached(), parameters, *own)
        of_latents, of_parameters, of_local = gradients
        return RecordGradients(of_latents, of_parameters, losses, of_local)

    def loss_of(
        self,
        records: Records,
        particle: Particle,
        latents: dict[str, Tensor],
        index: Tensor,
        row: list[Tensor],
        draws: LocalDraws | None = None,
        substitutes: dict[int, Tensor] | None = None,
        local_rows: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One record's differentiable surrogate and value at unconstrained latents, for torch.func.

        :param row: its row of every data tensor.
        :param substitutes: for the parameters, by ``id``.
        :param local_rows: its rows of the local parameters; by default public constants.
        """
        own = (index, row, draws, substitutes, local_rows)
        with self._shown(records, particle, latents, *own) as shown:
            return record_loss(self.loss, *shown)

    def observations(
        self,
        records: Records,
        particle: Particle,
        latents: dict[str, Tensor],
        index: Tensor,
        row: list[Tensor],
        draws: LocalDraws | None = None,
    ) -> list[dict]:
        """One record's observed sites at unconstrained latents."""
        shown = self._shown(records, particle, latents, index, row, draws)
        with shown as (model, guide, args, kwargs):
            trace = poutine.trace(guide).get_trace(*args, **kwargs)
            trace = poutine.trace(poutine.replay(model, trace=trace)).get_trace(*args, **kwargs)
        return [s for s in trace.nodes.values() if is_random(s) and s["is_observed"]]

    def supported(self, records: Records, particle: Particle, batch: Batch) -> dict[str, Tensor]:
        """Whether observations lie in the support of their distributions: (B, ...) per site.

        One record at a time where the term is not vectorised.
        """

        def check(index, row, table):
            latents, draws = particle.detached(), LocalDraws(table)
            observed = self.observations(records, particle, latents, index, row, draws)
            return {site["name"]: _in_support(site) for site in observed}

        if self.vectorizes:
            checks = torch.vmap(check, randomness="different")
            return checks(batch.indices, batch.rows, self._tables(batch))
        (index,) = batch.indices
        return check(index, [row[0] for row in batch.rows], [t[0] for t in self._tables(batch)])

    @contextlib.contextmanager
    def _shown(
        self, records, particle, latents, index, row, draws=None, substitutes=None, local_rows=None
    ) -> Iterator[tuple[Callable, Callable, tuple, dict]]:
        """Model, guide and arguments of one record, in the context that they run in."""
        args, kwargs = records.arguments(row)
        draws = draws or LocalDraws()
        batched = all(map(is_batchedtensor, row))
        own = (index, draws, substitutes, local_rows)
        with self._one_record(records, particle, *own, batched=batched):
            model, guide = self._inside(records, particle.values(latents))
            yield model, guide, args, kwargs

    def _tables(self, batch: Batch) -> list[Tensor]:
        if batch.tables is not None:
            return batch.tables
        local = batch.local
        if local is None:
            return []
        return [d.sample(local, batch.indices, i) for i, d in enumerate(self.draws)]

    def _inside(self, records: Records, values: dict[str, Tensor]) -> tuple[Callable, Callable]:
        return Inside(records.plate, values)(self.model), Inside(records.plate, values)(self.guide)

    @contextlib.contextmanager
    def _one_record(
        self,
        records: Records,
        particle: Particle,
        index: Tensor,
        draws: LocalDraws,
        substitutes: dict[int, Tensor] | None = None,
        local_rows: dict[str, Tensor] | None = None,
        *,
        batched: bool = False,
    ) -> Iterator[None]:
        local_rows = local_rows or self.local.constants()  # before draws are the record's own
        with (
            self.state.preserved(batched=batched),
            guarded("Running the model on one record"),
            RecordMode(draws, substitutes),
            self.local.shown(local_rows),
            OneRecord(records.plate, index.reshape(1), particle.names),
        ):
            yield


def _in_support(site: dict) -> Tensor:
    try:
        inside = torch.as_tensor(site["fn"].support.check(site["value"]))
    except (NotImplementedError, RuntimeError):  # a distribution that does not tell, or not in vmap
        return torch.ones((), dtype=torch.bool)
    return inside if site["mask"] is None else inside | ~torch.as_tensor(site["mask"])


def _no_sites(*args: Any, **kwargs: Any) -> None:
    """A guide without sites inside the plate."""
