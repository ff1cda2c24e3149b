"""The log density of a model's prior, as a function of one flat vector of unconstrained latents."""

from collections.abc import Callable, Sequence

import pyro
import torch
from pyro import poutine
from pyro.distributions import Unit
from torch import Tensor
from torch.distributions import biject_to

from pyro_dp.records.latents import Latent
from pyro_dp.records.plate import is_random
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.torch_state import forked_rng


def placed(latents: Sequence[Latent], z: Tensor, dtypes: dict[str, torch.dtype]) -> tuple:
    """Values of all sites, in the model's own space, and the log volume of the map to them.

    :param z: unconstrained, (d,).
    """
    values, log_volume = {}, torch.zeros((), dtype=torch.float64, device=z.device)
    for latent in latents:
        u = latent.part(z).to(dtypes[latent.name])
        values[latent.name] = latent.transform(u)
        volume = latent.transform.log_abs_det_jacobian(u, values[latent.name])
        log_volume = log_volume + volume.sum()
    return values, log_volume


def prior_density(model: Callable) -> tuple[list[Latent], Callable[[Tensor], Tensor]]:
    """
    :param model: without data, and without arguments.
    :returns: its latents, and their log density as a function of the flat vector (d,).
    :raises ModelError: it has no latents, observes something, or its supports depend on latents.
    """
    with forked_rng(), torch.no_grad():
        trace = poutine.trace(model).get_trace()
    latents: list[Latent] = []
    dtypes, start = {}, 0
    for name, site in trace.nodes.items():
        if not is_random(site):
            continue
        if isinstance(site["fn"], Unit):  # pyro.factor
            continue
        if site["is_observed"]:
            raise ModelError(
                f"model observes site {name!r}. Pass the prior alone: a model without data."
            )
        transform = biject_to(site["fn"].support)
        shape = transform.inv(site["value"]).shape
        latents.append(Latent(name, shape, transform, start, start + shape.numel()))
        dtypes[name], start = site["value"].dtype, start + shape.numel()
    if not latents:
        raise ModelError("model has no latent sites.")

    def log_prob(z: Tensor) -> Tensor:
        values, log_volume = placed(latents, z, dtypes)
        conditioned = poutine.condition(model, data=values)
        with pyro.validation_enabled(False):  # it looks at values, which derivatives do not have
            log_prob = poutine.trace(conditioned).get_trace().log_prob_sum()
        return (log_prob + log_volume).double()

    return latents, log_prob
