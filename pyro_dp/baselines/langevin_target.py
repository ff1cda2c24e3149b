"""Where a Langevin chain moves: points of unconstrained space, and the models that have them."""

from collections.abc import Callable

import torch
from pyro import poutine
from pyro.infer import ELBO, Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoLaplaceApproximation

from pyro_dp.records.latents import Latent, latents_of
from pyro_dp.records.messengers import OneRecord
from pyro_dp.records.plate import random_sites
from pyro_dp.records.records import Records
from pyro_dp.records.sandbox import guarded
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.rng import forked_rng


def point_guide(model: Callable, records: Records, start: Callable) -> AutoLaplaceApproximation:
    """A guide at one point of the global latents' unconstrained space.

    Its density is the Jacobian's there, so that the negative ELBO is the negative log posterior
    density of the unconstrained latents, up to a constant.

    :param start: initialises each site, as for any autoguide.
    """
    return AutoLaplaceApproximation(_outside(model, records), init_loc_fn=start)


def suitable_loss(model: Callable, records: Records) -> ELBO:
    """The loss that sums out the records' own latents, if there are any.

    :raises ModelError: there is no gradient of the posterior density; names the site or parameter.
    """
    trace = _run(model, records)
    for name, site in trace.nodes.items():
        if site["type"] == "param" and site["value"].unconstrained().requires_grad:
            raise ModelError(
                f"The model learns parameter {name!r}, but DPSGLD learns no parameters: make it a "
                "latent (pyro.sample), or fix it at a constant."
            )
    latents = {n: s for n, s in random_sites(trace).items() if not s["is_observed"]}
    inside = {name: site for name, site in latents.items() if records.plate.holds(site)}
    for name in latents.keys() - inside.keys():
        if latents[name]["fn"].support.is_discrete:
            raise ModelError(
                f"Global latent site {name!r} is discrete: Langevin dynamics needs its gradient. "
                "DPSVI takes it with privatize='parameters'."
            )
    for name, site in inside.items():
        summed = site["infer"].get("enumerate") == "parallel" and site["fn"].has_enumerate_support
        if not summed:
            raise ModelError(
                f"Latent site {name!r} lies within the private plate {records.plate.name!r}. "
                "DPSGLD samples global latents only, and sums out discrete local ones marked "
                f"with infer={{'enumerate': 'parallel'}}. DPSVI takes others too."
            )
    if latents.keys() == inside.keys():
        raise ModelError(
            f"The model has no latent outside the private plate {records.plate.name!r}."
        )
    return TraceEnum_ELBO() if inside else Trace_ELBO()


def global_latents(
    model: Callable, guide: AutoLaplaceApproximation, records: Records
) -> tuple[Latent, ...]:
    """The latents in the order of the guide's flat vector.

    :raises ModelError: the support of one depends on another.
    """
    drawn = _run(guide, records)
    prior = _run(poutine.replay(_outside(model, records), trace=drawn), records)
    values = {n: s for n, s in random_sites(drawn).items() if not s["infer"].get("is_auxiliary")}
    return tuple(latents_of(values, random_sites(prior), automatic=True))


def _outside(model: Callable, records: Records) -> Callable:
    return poutine.block(model, hide_fn=records.plate.holds)


@torch.enable_grad()
def _run(function: Callable, records: Records) -> poutine.Trace:
    args, kwargs = records.arguments(records.placeholder())
    index = torch.zeros(1, dtype=torch.long, device=records.device)
    with (
        forked_rng(),
        OneRecord(records.plate, index),
        guarded("Running the model on placeholder data", public=True),
    ):
        return poutine.trace(function).get_trace(*args, **kwargs)
