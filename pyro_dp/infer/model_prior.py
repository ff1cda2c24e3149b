"""The prior of a model with a private plate: its sites outside the plate, which hold no data."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from pyro import poutine
from torch import Tensor

from pyro_dp.infer.posterior.fitted_guide import FittedGuide
from pyro_dp.infer.posterior.gaussian_guide import GaussianGuide
from pyro_dp.infer.posterior.prior_density import placed
from pyro_dp.infer.posterior.prior_factor import Prior
from pyro_dp.records.messengers import OneRecord, Outside
from pyro_dp.records.records import Records
from pyro_dp.records.sandbox import guarded


@dataclass(frozen=True)
class _Density:
    """The log density on placeholders, as a function of the guide's flat vector (d,)."""

    model: Callable
    guide: GaussianGuide | FittedGuide
    records: Records
    dtypes: dict[str, torch.dtype]

    def __call__(self, z: Tensor) -> Tensor:
        plate, device = self.records.plate, self.records.device
        values, log_volume = placed(self.guide.latents, z, self.dtypes)
        args, kwargs = self.records.arguments(self.records.placeholder())
        model = Outside(plate)(poutine.condition(self.model, data=values))
        with (
            OneRecord(plate, torch.zeros(1, dtype=torch.long, device=device)),
            guarded("Running the model on placeholder data", public=True),
        ):
            log_prob = poutine.trace(model).get_trace(*args, **kwargs).log_prob_sum()
        return (log_prob + log_volume).double()


def model_prior(
    model: Callable,
    guide: GaussianGuide | FittedGuide,
    records: Records,
    dtypes: dict[str, torch.dtype],
) -> Prior:
    """The prior of the guide's latents. It reads no record, so it costs no privacy.

    :param dtypes: the latents' types, by name.
    """
    exact = all(dtype == torch.float64 for dtype in dtypes.values())
    return Prior(_Density(model, guide, records, dtypes), guide.read()[0], exact)
