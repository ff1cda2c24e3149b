"""The coordinates in which gradients are released, and the map from there to the parameters.

Let l_i be the negative ELBO term of record i, and u the global latents in unconstrained
coordinates. There are K particles, each with its own pull-back through the guide. Let phi be all
parameters and psi those used inside the plate. A record's part of the release is

* in :class:`LatentCoordinates`: ((1/K) dl_i/du^(1), ..., (1/K) dl_i/du^(K), (1/K) sum_k
  dl_i^(k)/dpsi), jointly clipped. The released sum is the cotangent of u, pulled back through the
  guide exactly: that is post-processing.
* in :class:`ParameterCoordinates`: (1/K) sum_k dl_i^(k)/dphi, each record pulled back before it is
  clipped (Algorithm 1 of DPVI).

Terms outside the plate carry no data and are added exactly in both.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_dp.records.global_draw import Particle, unflat
from pyro_dp.records.record_term import RecordGradients, RecordTerm


class LatentCoordinates:
    """Latents in unconstrained coordinates, and the parameters used inside the plate.

    :param particles: the public draws of this step.
    :param term: tells which parameters the records use.
    :param parameters: all unconstrained parameters.
    """

    def __init__(
        self, particles: Sequence[Particle], term: RecordTerm, parameters: dict[str, Tensor]
    ):
        self._particles = particles
        self._latents = [u for particle in particles for u in particle.latents.values()]
        self._inside = {name: parameters[name] for name in term.parameters}
        self._parameters = parameters

    @property
    def size(self) -> int:
        return sum(x.numel() for x in (*self._latents, *self._inside.values()))

    def per_record(self, gradients: Sequence[RecordGradients]) -> list[Tensor]:
        """Blocks (B, ...) of ``size`` coordinates in all, from one gradient per particle."""
        count = len(self._particles)
        latents = [g for each in gradients for g in each.latents.values()]
        latents = latents if count == 1 else [g / count for g in latents]
        inside = [mean([each.parameters[name] for each in gradients]) for name in self._inside]
        return latents + inside

    def gradients(self, released: Tensor) -> dict[str, Tensor | None]:
        """Gradients of the parameters, from the released estimate, (size,)."""
        # Latents by number, parameters by name.
        parts = unflat(released, dict(enumerate(self._latents)) | self._inside)
        objective = mean_loss(self._particles)
        for i, u in enumerate(self._latents):
            objective = objective + (parts[i] * u).sum()
        return _with_exact(self._parameters, objective, parts)


class ParameterCoordinates:
    """The unconstrained parameters. The arguments are those of :class:`LatentCoordinates`."""

    def __init__(
        self, particles: Sequence[Particle], term: RecordTerm, parameters: dict[str, Tensor]
    ):
        self._particles = particles
        self._released = {name: parameters[name] for name in term.released}
        self._parameters = parameters

    @property
    def size(self) -> int:
        return sum(x.numel() for x in self._released.values())

    def per_record(self, gradients: Sequence[RecordGradients]) -> list[Tensor]:
        """Blocks (B, ...) of ``size`` coordinates in all, from one gradient per particle."""
        batch = len(gradients[0].losses)
        total = {name: x.new_zeros(batch, *x.shape) for name, x in self._released.items()}
        for particle, each in zip(self._particles, gradients, strict=True):
            through_guide = _pulled_back(particle, each, self._released)
            for name in total:
                for gradient in (through_guide.get(name), each.parameters.get(name)):
                    if gradient is not None:
                        total[name] = total[name] + gradient / len(self._particles)
        return list(total.values())

    def gradients(self, released: Tensor) -> dict[str, Tensor | None]:
        """Gradients of the parameters, from the released estimate, (size,)."""
        direct = unflat(released, self._released)
        return _with_exact(self._parameters, mean_loss(self._particles), direct)


def _pulled_back(
    particle: Particle, gradients: RecordGradients, parameters: dict[str, Tensor]
) -> dict[str, Tensor | None]:
    """Each record's gradient through the guide: (B, ...) per parameter, ``None`` if out of reach.

    Latents without a reparameterisation enter by their score: l_i times the gradient of log q.
    """
    reached = {name: u for name, u in particle.latents.items() if u.requires_grad}
    outputs = list(reached.values())
    cotangents = [gradients.latents[name] for name in reached]
    if particle.log_q is not None and particle.log_q.requires_grad:
        outputs.append(particle.log_q)
        cotangents.append(gradients.losses.to(particle.log_q.dtype))
    if not outputs:
        return {}
    pulled = torch.autograd.grad(
        outputs,
        list(parameters.values()),
        grad_outputs=cotangents,
        is_grads_batched=True,
        retain_graph=True,
        allow_unused=True,
    )
    return dict(zip(parameters, pulled, strict=True))


def mean_loss(particles: Sequence[Particle]) -> Tensor:
    """Negative ELBO of everything outside the plate."""
    return mean([particle.loss for particle in particles])


def mean(values: Sequence[Tensor]) -> Tensor:
    """Over the particles."""
    total = sum(values[1:], values[0])
    return total if len(values) == 1 else total / len(values)


def _with_exact(
    parameters: dict[str, Tensor], objective: Tensor, direct: dict[str, Tensor]
) -> dict[str, Tensor | None]:
    """Gradients of the objective plus those released directly; ``None`` if there are neither."""
    exact: Sequence[Tensor | None] = [None] * len(parameters)
    if objective.requires_grad:
        exact = torch.autograd.grad(objective, list(parameters.values()), allow_unused=True)
    gradients = {}
    for name, gradient in zip(parameters, exact, strict=True):
        parts = [g for g in (gradient, direct.get(name)) if g is not None]
        gradients[name] = sum(parts[1:], parts[0]) if parts else None
    return gradients
