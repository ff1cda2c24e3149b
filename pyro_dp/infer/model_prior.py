"""The prior of a model with a private plate: its sites outside the plate, which hold no data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from pyro_dp.infer.ep.observation_family import innermost
from pyro_dp.infer.posterior.prior_density import PriorDensity
from pyro_dp.infer.posterior.prior_factor import Prior
from pyro_dp.records.global_draw import Latent
from pyro_dp.records.messengers import OneRecord, Outside
from pyro_dp.records.records import Records
from pyro_dp.records.sandbox import guarded


@dataclass(frozen=True)
class PublicDensity(PriorDensity):
    """The log density outside the plate, on placeholders for the records."""

    records: Records

    def normal(self, z: Tensor) -> list[int]:
        """Indices of the latents whose sites are normal."""
        trace, _ = self.trace(z)
        return [
            place
            for latent in self.latents
            if isinstance(innermost(trace.nodes[latent.name]["fn"]), (Normal, MultivariateNormal))
            for place in range(latent.start, latent.stop)
        ]

    def _run(self, model: Callable) -> tuple[poutine.Trace, Tensor]:
        plate, device = self.records.plate, self.records.device
        args, kwargs = self.records.arguments(self.records.placeholder())
        with (
            OneRecord(plate, torch.zeros(1, dtype=torch.long, device=device)),
            guarded("Running the model on placeholder data", public=True),
        ):
            trace = poutine.trace(Outside(plate)(model)).get_trace(*args, **kwargs)
            return trace, trace.log_prob_sum()


def model_prior(
    model: Callable,
    latents: Sequence[Latent],
    mean: Tensor,
    records: Records,
    dtypes: dict[str, torch.dtype],
) -> Prior:
    """The prior of the latents. It reads no record, so it costs no privacy.

    :param mean: the first posterior's, (d,).
    :param dtypes: the latents' types, by name.
    """
    exact = all(dtype == torch.float64 for dtype in dtypes.values())
    density = PublicDensity(model, latents, dtypes, records)
    return Prior(density, mean, exact, density.normal(mean))
