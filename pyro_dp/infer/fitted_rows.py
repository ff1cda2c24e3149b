"""Parameters per record, fitted to the global latents of a finished guide."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_dp.graphs.tracing import NotTraceable, called_by_torch, trace
from pyro_dp.infer.ep.problem import record_term
from pyro_dp.infer.padded_sum import padded_batch, parted, pass_size, placeholder_batch
from pyro_dp.infer.posterior.gaussian_guide import OnPlaceholders
from pyro_dp.infer.svi.optimizers import RowAdam, RowOptimizer, row_step_size
from pyro_dp.records.global_draw import Particle, draw_particle
from pyro_dp.records.record_term import Batch, RecordTerm
from pyro_dp.records.record_term_builder import initialise_parameters
from pyro_dp.records.records import Records
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.torch_state import forked_rng

_STEPS = 300
_AT_A_TIME = 2**14  # records
Gradients = Callable[[Particle, Tensor], dict[str, Tensor]]
_AMORTISED = "Records share parameters of the guide for latents of their own."


@dataclass(frozen=True)
class FittedRows:
    """The fit of parameters per record at the end of a run of looks.

    :param term: one record's term, with the guide's sites inside the plate.
    """

    term: RecordTerm
    model: Callable
    guide: Callable

    @staticmethod
    def find(
        model: Callable, guide: Callable, records: Records, microbatch_size: int | None
    ) -> "FittedRows | None":
        """None if the guide has no parameters per record.

        :raises ModelError: the guide's sites inside the plate have other parameters, too.
        """
        with forked_rng():
            # Before any other run: a new autoguide makes its parameters from the first one.
            initialise_parameters(model, guide, records)
        sites, *_ = OnPlaceholders(records).sites(model, guide)
        if not any(map(records.plate.holds, sites.values())):
            return None
        term = record_term(model, guide, records, microbatch_size)
        if term.parameters:
            raise ModelError(_AMORTISED)
        return FittedRows(term, model, guide)

    @torch.enable_grad()
    def fit(self) -> None:
        """Fit each record's row by gradient steps, as SVI would.

        Nothing is released. The rows are for the curator, and no guarantee covers them.
        """
        term, records, rows = self.term, self.term.records, RowOptimizer(lambda _: RowAdam())
        rows.use(term.local)
        indices = torch.arange(records.count, device=records.device)
        size = pass_size(records.count, _AT_A_TIME)
        with forked_rng():
            gradients = self._gradients(self._draw(), size)
            for step in range(_STEPS):
                rows.set_step_size(row_step_size(step / _STEPS))
                particle = self._draw()
                for chosen in indices.split(size):
                    rows.step(chosen, gradients(particle, chosen))

    def _draw(self) -> Particle:
        term = self.term
        return draw_particle(term.loss, self.model, self.guide, term.records, local=term.local)

    def _gradients(self, like: Particle, size: int) -> Gradients:
        """A function that returns the gradients of records' rows, by a graph if possible.

        :param like: a draw.
        :param size: largest number of records at a time.
        """
        term, names = self.term, list(like.latents)

        def by_pyro(particle: Particle, chosen: Tensor) -> dict[str, Tensor]:
            batch = Batch(chosen, term.records.rows(chosen), local_rows=term.local.rows(chosen))
            return term.gradients(particle, batch).local

        def at_once(*inputs: Tensor) -> list[Tensor]:
            counts = [len(names), 1, len(term.records.placeholder())]
            latents, (indices,), rows, rest = parted(inputs, counts)
            particle = replace(like, latents=dict(zip(names, latents, strict=True)))
            local_rows = dict(zip(term.local.leaves, rest, strict=True))
            found = term.at_once(particle, Batch(indices, rows, local_rows=local_rows))
            return list(found.local.values())

        if term.answers != () or like.fixed or like.indices:
            return by_pyro
        try:
            values = [each.detach() for each in like.latents.values()]
            graph = trace(at_once, [*values, *placeholder_batch(term, size)], draws=True)
        except NotTraceable:
            return by_pyro
        called = called_by_torch(graph)

        def by_graph(particle: Particle, chosen: Tensor) -> dict[str, Tensor]:
            latents = [particle.latents[name].detach() for name in names]
            try:
                with torch.no_grad():
                    found = called(*latents, *padded_batch(term, chosen, size))
            except Exception:  # Pyro's code finds the record
                return by_pyro(particle, chosen)
            kept = (each[: len(chosen)] for each in found)
            return dict(zip(term.local.leaves, kept, strict=True))

        return by_graph
