"""The public part of a step: the global latents, their draw, and the loss outside the plate."""

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from pyro import poutine
from pyro.infer import ELBO, Trace_ELBO, TraceEnum_ELBO
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import Transform, biject_to, constraints
from torch.distributions.constraints import Constraint

from pyro_dp.records.local_parameters import LocalParameters, leaves_of
from pyro_dp.records.losses import record_loss, single_particle
from pyro_dp.records.plate import Outside, PrivatePlate, Sites, random_sites
from pyro_dp.records.records import Records, on_placeholders
from pyro_dp.records.sandbox import guarded
from pyro_dp.records.torch_modes import RecordMode
from pyro_dp.utils.errors import ModelError


@dataclass(frozen=True)
class Latent:
    """One latent site of the model outside the private plate.

    :param shape: shape of the unconstrained value.
    :param transform: from unconstrained space to the site's support.
    :param start: the value is ``flat[start:stop]`` of the vector of all latents.
    """

    name: str
    shape: torch.Size
    transform: Transform
    start: int
    stop: int

    @property
    def is_real(self) -> bool:
        """Whether the transform is the identity."""
        middle = torch.full(self.shape, 0.5)
        return torch.equal(self.transform(middle), middle)

    def part(self, flat: Tensor) -> Tensor:
        """The latent's unconstrained value in a vector of all latents."""
        return flat[self.start : self.stop].reshape(self.shape)


def latents_of(values: Sites, prior: Sites, *, automatic: bool) -> Iterator[Latent]:
    """The latents of a Gaussian guide, in the order of the flat vector.

    :param values: sites of the guide, in this order.
    :param prior: the model's sites of the same names, replayed with the guide's values.
    :param automatic: whether the guide is an autoguide, which works in unconstrained space.
    :raises ModelError: a site of the guide does not fit the model's; names the first.
    """
    start = 0
    for name, site in values.items():
        support = prior[name]["fn"].support
        if not (automatic or _is_real(support)):
            raise ModelError(
                f"Latent site {name!r} of the model is constrained, and the guide's Gaussian is "
                "not: use an autoguide, which is Gaussian in unconstrained space."
            )
        if site["fn"].shape() != prior[name]["fn"].shape():
            raise ModelError(f"Site {name!r} has different shapes in the guide and in the model.")
        transform = biject_to(support)
        value = transform.inv(site["value"]).detach()
        if transform(value).requires_grad:
            raise ModelError(
                f"The support of site {name!r} depends on another latent: give it a fixed support, "
                "and shift or scale its value."
            )
        yield Latent(name, value.shape, transform, start, start + value.numel())
        start += value.numel()


def _is_real(support: Constraint) -> bool:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return isinstance(support, type(constraints.real))


@dataclass
class Particle:
    """One draw of the global latents from the guide.

    :param loss: negative ELBO of everything outside the plate, attached to the parameters.
    :param latents: unconstrained value u of each latent with a reparameterised draw, attached to
        the guide's parameters.
    :param transforms: from u to each latent's support.
    :param fixed: values of the other latents, in their support.
    :param indices: indices of the other plates, by name.
    :param log_q: log density of the draws without a reparameterisation; ``None`` if there are none.
    :param parameters: all unconstrained parameters that model and guide learn, by name, except
        local ones.
    :param names: names of all parameters, frozen and local ones included.
    """

    loss: Tensor
    latents: dict[str, Tensor]
    transforms: dict[str, Transform]
    fixed: dict[str, Tensor]
    indices: dict[str, Tensor]
    log_q: Tensor | None
    parameters: dict[str, Tensor]
    names: frozenset[str]

    def values(self, latents: dict[str, Tensor]) -> dict[str, Tensor]:
        """All latents in their support, from unconstrained ones, and the plates' indices."""
        constrained = {name: self.transforms[name](u) for name, u in latents.items()}
        return constrained | self.fixed | self.indices

    def detached(self) -> dict[str, Tensor]:
        """The unconstrained latents, detached."""
        return {name: u.detach() for name, u in self.latents.items()}

    def restricted(self, names: Collection[str]) -> "Particle":
        """The particle with gradients only for these latents, so that others need no noise."""
        kept = {name: u for name, u in self.latents.items() if name in names}
        dropped = {name: u.detach() for name, u in self.latents.items() if name not in names}
        fixed = self.fixed | {name: self.transforms[name](u) for name, u in dropped.items()}
        return replace(self, latents=kept, fixed=fixed)

    def reaches(self) -> set[str]:
        """Names of the parameters that the latents' draws depend on."""
        outputs = [u.sum() for u in self.latents.values() if u.requires_grad]
        if self.log_q is not None and self.log_q.requires_grad:
            outputs.append(self.log_q)
        if not outputs:
            return set()
        leaves = list(self.parameters.values())
        gradients = torch.autograd.grad(outputs, leaves, retain_graph=True, allow_unused=True)
        return {n for n, g in zip(self.parameters, gradients, strict=True) if g is not None}


def draw_particle(
    loss: ELBO,
    model: Callable,
    guide: Callable,
    records: Records,
    given: RecordMode | None = None,
    local: LocalParameters | None = None,
) -> Particle:
    """Run guide and model on placeholders and keep the sites outside the private plate.

    Global latents come from torch's global generator, in the order in which ``pyro.infer.SVI``
    would draw them. The draws, their loss and their number use no record, so they reveal nothing
    about the data.

    :param given: a mode with other draws. If it also substitutes the parameters, a graph can be
        traced, because no number is read out of a tensor.
    :param local: parameters with a private row per record, which the model sees as constants.
    """
    local = local or LocalParameters()
    plate = records.plate
    # Outside the plate nothing is enumerated, so the simpler Trace_ELBO gives the same loss.
    elbo = Trace_ELBO() if isinstance(loss, TraceEnum_ELBO) else single_particle(loss)
    of_model, of_guide = poutine.trace(model), poutine.trace(guide)
    substitutes = given.substitutes if given else {}
    with (
        poutine.trace(param_only=True) as parameters,
        on_placeholders(records, "guide and model") as (args, kwargs),
        local.shown(local.constants()),
        given or contextlib.nullcontext(),
    ):
        shown = Outside(plate)(of_model), Outside(plate)(of_guide)
        outside = record_loss(elbo, *shown, args, kwargs)
    learnt = {
        name: substitutes.get(id(leaf), leaf)
        for name, leaf in leaves_of(parameters.trace).items()
        if leaf.requires_grad and name not in local.leaves
    }
    names = frozenset(parameters.trace.nodes)
    indices = _other_indices(of_model.trace, plate) | _other_indices(of_guide.trace, plate)
    particle = Particle(outside, {}, {}, {}, indices, None, learnt, names)
    priors = _outside(of_model.trace, plate)
    for name, site in _outside(of_guide.trace, plate).items():
        # The support is the prior's. Auxiliary sites of the guide have no prior.
        transform = _to_support(priors.get(name, site)["fn"].support)
        if transform is not None and getattr(site["fn"], "has_rsample", False):
            particle.transforms[name] = transform
            particle.latents[name] = transform.inv(site["value"])
        else:
            particle.fixed[name] = site["value"].detach()
            with guarded("Running guide and model on placeholder data", public=True):
                log_q = site["fn"].log_prob(particle.fixed[name]).sum()
            particle.log_q = log_q if particle.log_q is None else particle.log_q + log_q
    return particle


def _outside(trace: poutine.Trace, plate: PrivatePlate) -> Sites:
    return {name: site for name, site in random_sites(trace).items() if not plate.holds(site)}


def _other_indices(trace: poutine.Trace, plate: PrivatePlate) -> dict[str, Tensor]:
    """Indices of plates other than the private one."""
    sites = ((n, s) for n, s in trace.nodes.items() if n != plate.name)
    return {name: s["value"] for name, s in sites if isinstance(s.get("fn"), _Subsample)}


def _to_support(support: Constraint) -> Transform | None:
    """The transform from unconstrained space; ``None`` if there is none.

    It is a constant: bounds that are latents are detached.
    """
    try:
        return biject_to(_detached(support))
    except NotImplementedError:
        return None


def _detached(constraint: Constraint) -> Constraint:
    constraint = copy.copy(constraint)
    for name, value in list(vars(constraint).items()):
        if isinstance(value, Tensor):
            setattr(constraint, name, value.detach())
        elif isinstance(value, Constraint):
            setattr(constraint, name, _detached(value))
    return constraint


def unflat(vector: Tensor, likes: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
    """A vector split into tensors of these shapes and dtypes."""
    parts, start = {}, 0
    for name, like in likes.items():
        part = vector[start : start + like.numel()]
        parts[name] = part.reshape(like.shape).to(like.dtype)
        start += like.numel()
    return parts
