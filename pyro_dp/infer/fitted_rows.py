"""Rows of parameters per record, fitted to the global latents of a finished guide."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pyro_dp.infer.ep.problem import record_term
from pyro_dp.infer.posterior.gaussian_guide import OnPlaceholders
from pyro_dp.infer.svi.optimizers import RowAdam, RowOptimizer, row_step_size
from pyro_dp.records.global_draw import draw_particle
from pyro_dp.records.record_term import Batch, RecordTerm
from pyro_dp.records.record_term_builder import initialise_parameters
from pyro_dp.records.records import Records
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.torch_state import forked_rng

_STEPS = 300
_AT_A_TIME = 2**14  # records
_AMORTISED = "Records share parameters of the guide for latents of their own."


@dataclass(frozen=True)
class FittedRows:
    """Parameters per record, which a run of looks ends with.

    :param term: one record's, with the guide's sites inside the plate.
    """

    term: RecordTerm
    model: Callable
    guide: Callable

    @staticmethod
    def find(
        model: Callable, guide: Callable, records: Records, microbatch_size: int | None
    ) -> "FittedRows | None":
        """None: the guide has no such parameters.

        :raises ModelError: the guide's sites inside the plate have other parameters, too.
        """
        with forked_rng():
            # Before any other run, which a new autoguide would keep in memory of its parameters.
            initialise_parameters(model, guide, records)
        sites, *_ = OnPlaceholders(records).sites(model, guide)
        if not any(map(records.plate.holds, sites.values())):
            return None
        term = record_term(model, guide, records, microbatch_size)
        if term.parameters:
            raise ModelError(_AMORTISED)
        return FittedRows(term, model, guide)

    @property
    def names(self) -> str:
        return self.term.local.listed

    @torch.enable_grad()
    def fit(self) -> None:
        """Move each record's row by its own gradients, as steps of SVI would.

        Nothing is released. The rows are for the curator, and no guarantee covers them.
        """
        term, records, rows = self.term, self.term.records, RowOptimizer(lambda _: RowAdam())
        rows.use(term.local)
        indices = torch.arange(records.count, device=records.device)
        with forked_rng():
            for step in range(_STEPS):
                rows.set_step_size(row_step_size(step / _STEPS))
                given = (self.model, self.guide, records)
                particle = draw_particle(term.loss, *given, local=term.local)
                for chosen in indices.split(_AT_A_TIME):
                    own = term.local.rows(chosen)
                    batch = Batch(chosen, records.rows(chosen), local_rows=own)
                    rows.step(chosen, term.gradients(particle, batch).local)
