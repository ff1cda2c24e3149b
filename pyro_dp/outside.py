"""The public part of a step: the draw of the global latents, and the loss outside the plate."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from pyro import poutine
from pyro.infer import ELBO, Trace_ELBO, TraceEnum_ELBO
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Transform, biject_to

from pyro_dp.guard import PLACEHOLDERS, guarded
from pyro_dp.plates import OneRecord, Outside, PrivatePlate, is_random
from pyro_dp.records import Records


@dataclass
class Particle:
    """One draw of the global latents from the guide.

    :param loss: negative ELBO of everything outside the plate, attached to the parameters.
    :param latents: unconstrained value u of each latent with a reparameterised draw, attached to
        the guide's parameters.
    :param transforms: from u to the latent's own space.
    :param fixed: values of the other latents, in their own space.
    :param log_q: log density of the draws without a reparameterisation; ``None`` if there are none.
    :param parameters: all unconstrained parameters that model and guide used, by name.
    """

    loss: Tensor
    latents: dict[str, Tensor]
    transforms: dict[str, Transform]
    fixed: dict[str, Tensor]
    log_q: Tensor | None
    parameters: dict[str, Tensor]

    def values(self, latents: dict[str, Tensor]) -> dict[str, Tensor]:
        """All latents in their own space, given unconstrained ones."""
        return {name: self.transforms[name](u) for name, u in latents.items()} | self.fixed

    def detached(self) -> dict[str, Tensor]:
        return {name: u.detach() for name, u in self.latents.items()}

    def restricted(self, names: set[str]) -> "Particle":
        """With gradients for these latents only: what records do not see gets no noise either."""
        fixed = self.values({n: u.detach() for n, u in self.latents.items() if n not in names})
        return replace(
            self, latents={n: u for n, u in self.latents.items() if n in names}, fixed=fixed
        )


def single_particle(loss: ELBO) -> ELBO:
    """The user's loss for one particle; several are handled one by one."""
    loss = copy.copy(loss)
    loss.num_particles = 1
    loss.vectorize_particles = False
    return loss


def draw_particle(loss: ELBO, model: Callable, guide: Callable, records: Records) -> Particle:
    """Run guide and model on placeholders and keep what lies outside the private plate.

    Global latents come from torch's global generator, in the order in which ``pyro.infer.SVI``
    would draw them. No record is touched: not their draw, nor their loss, nor their count can tell
    anything about the data.
    """
    plate = records.plate
    # Outside the plate nothing is enumerated: there the two losses agree, but TraceEnum_ELBO
    # refuses a constant ELBO.
    elbo = Trace_ELBO() if isinstance(loss, TraceEnum_ELBO) else single_particle(loss)
    guide_sites, model_sites = _Sites(plate), _Sites(plate)
    args, kwargs = records.arguments(records.placeholder())
    with (
        poutine.trace(param_only=True) as parameters,
        OneRecord(plate, torch.zeros(1, dtype=torch.long, device=records.device)),
        guarded("Running guide and model on placeholder data", hint=PLACEHOLDERS),
    ):
        outside = elbo.differentiable_loss(
            Outside(plate)(model_sites(model)), Outside(plate)(guide_sites(guide)), *args, **kwargs
        )
    particle = Particle(
        torch.as_tensor(outside), {}, {}, {}, None, _unconstrained(parameters.trace)
    )
    for name, site in guide_sites.found.items():
        # A latent's own space is that of its prior; auxiliary sites have only the guide's.
        support = model_sites.found.get(name, site)["fn"].support
        if getattr(site["fn"], "has_rsample", False):
            particle.transforms[name] = biject_to(support)
            particle.latents[name] = particle.transforms[name].inv(site["value"])
        else:
            particle.fixed[name] = site["value"].detach()
            log_q = site["fn"].log_prob(particle.fixed[name]).sum()
            particle.log_q = log_q if particle.log_q is None else particle.log_q + log_q
    return particle


class _Sites(Messenger):
    """Keeps the sample sites outside the plate."""

    def __init__(self, plate: PrivatePlate):
        super().__init__()
        self.plate = plate
        self.found: dict[str, dict] = {}

    def _pyro_post_sample(self, msg: dict) -> None:
        if is_random(msg) and not self.plate.holds(msg):
            self.found[msg["name"]] = msg


def _unconstrained(trace: poutine.Trace) -> dict[str, Tensor]:
    return {
        name: site["value"].unconstrained()
        for name, site in trace.nodes.items()
        if site["type"] == "param"
    }
