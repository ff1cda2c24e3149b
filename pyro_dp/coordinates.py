"""The coordinates in which gradients are released, and the way from there to the parameters.

With l_i the negative ELBO term of record i, u the global latents in unconstrained coordinates (K
particles, each with its own pull-back through the guide), phi all parameters and psi those used
inside the plate:

* :class:`LatentCoordinates`: ((1/K) dl_i/du^(1), ..., (1/K) dl_i/du^(K), (1/K) sum_k
  dl_i^(k)/dpsi), jointly clipped. The released sum is the cotangent of u, pulled back through the
  guide exactly: that is post-processing.
* :class:`ParameterCoordinates`: (1/K) sum_k dl_i^(k)/dphi, each record pulled back before it is
  clipped (Algorithm 1 of DPVI).

What lies outside the plate carries no data and is added exactly in both.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pyro_dp.gradients import RecordGradients
from pyro_dp.outside import Particle


class LatentCoordinates:
    """Latents in unconstrained coordinates, and the parameters used inside the plate.

    :param particles: the public draws of this step.
    :param inside: unconstrained parameters used inside the plate.
    :param everything: all unconstrained parameters.
    """

    def __init__(
        self,
        particles: Sequence[Particle],
        inside: dict[str, Tensor],
        everything: dict[str, Tensor],
    ):
        self._particles = particles
        self._inside = inside
        self._everything = everything

    @property
    def _shapes(self) -> list[Tensor]:
        latents = [u for particle in self._particles for u in particle.latents.values()]
        return [*latents, *self._inside.values()]

    @property
    def size(self) -> int:
        return sum(x.numel() for x in self._shapes)

    def per_record(self, gradients: Sequence[RecordGradients]) -> Tensor:
        """(B, size), from one gradient per particle."""
        count = len(self._particles)
        latents = [g / count for each in gradients for g in each.latents.values()]
        inside = [sum(each.parameters[name] for each in gradients) / count for name in self._inside]
        return _flat([*latents, *inside])

    def set_gradients(self, released: Tensor) -> None:
        """Gradients of the parameters, from the released estimate, (size,)."""
        blocks = _unflat(released, self._shapes)
        objective = _mean_loss(self._particles)
        for u, cotangent in zip(
            self._shapes[: len(blocks) - len(self._inside)], blocks, strict=False
        ):
            objective = objective + (cotangent * u).sum()
        direct = dict(zip(self._inside, blocks[len(blocks) - len(self._inside) :], strict=True))
        _assign(self._everything, objective, direct)


class ParameterCoordinates:
    """All unconstrained parameters. The arguments are those of :class:`LatentCoordinates`."""

    def __init__(
        self,
        particles: Sequence[Particle],
        inside: dict[str, Tensor],
        everything: dict[str, Tensor],
    ):
        self._particles = particles
        self._everything = everything

    @property
    def size(self) -> int:
        return sum(x.numel() for x in self._everything.values())

    def per_record(self, gradients: Sequence[RecordGradients]) -> Tensor:
        """(B, size), from one gradient per particle."""
        count = len(self._particles)
        total = dict.fromkeys(self._everything, 0.0)
        for particle, each in zip(self._particles, gradients, strict=True):
            batch = len(each.losses)
            for name, gradient in zip(
                total, _pulled_back(particle, each, self._everything), strict=True
            ):
                total[name] = total[name] + (0.0 if gradient is None else gradient / count)
            for name, gradient in each.parameters.items():
                total[name] = total[name] + gradient / count
        return _flat(
            [
                total[name]
                if isinstance(total[name], Tensor)
                else leaf.new_zeros(batch, *leaf.shape)
                for name, leaf in self._everything.items()
            ]
        )

    def set_gradients(self, released: Tensor) -> None:
        """Gradients of the parameters, from the released estimate, (size,)."""
        blocks = _unflat(released, self._everything.values())
        _assign(
            self._everything,
            _mean_loss(self._particles),
            dict(zip(self._everything, blocks, strict=True)),
        )


def _pulled_back(
    particle: Particle, gradients: RecordGradients, parameters: dict[str, Tensor]
) -> list[Tensor | None]:
    """Each record's gradient through the guide: (B, ...) per parameter it reaches, else ``None``.

    Latents without a reparameterisation enter by their score: l_i times the gradient of log q.
    """
    outputs = {name: u for name, u in particle.latents.items() if u.requires_grad}
    cotangents = [gradients.latents[name] for name in outputs]
    outputs = list(outputs.values())
    if particle.log_q is not None and particle.log_q.requires_grad:
        outputs.append(particle.log_q)
        cotangents.append(gradients.losses.to(particle.log_q.dtype))
    if not outputs:
        return [None] * len(parameters)
    return list(
        torch.autograd.grad(
            outputs,
            list(parameters.values()),
            grad_outputs=cotangents,
            is_grads_batched=True,
            retain_graph=True,
            allow_unused=True,
        )
    )


def _mean_loss(particles: Sequence[Particle]) -> Tensor:
    return sum(particle.loss for particle in particles) / len(particles)


def _assign(parameters: dict[str, Tensor], objective: Tensor, direct: dict[str, Tensor]) -> None:
    exact: Sequence[Tensor | None] = [None] * len(parameters)
    if objective.requires_grad:
        exact = torch.autograd.grad(objective, list(parameters.values()), allow_unused=True)
    for (name, leaf), gradient in zip(parameters.items(), exact, strict=True):
        parts = [g for g in (gradient, direct.get(name)) if g is not None]
        leaf.grad = sum(parts) if parts else None


def _flat(blocks: Iterable[Tensor]) -> Tensor:
    return torch.cat(
        [block.flatten(1) if block.dim() > 1 else block.unsqueeze(1) for block in blocks], dim=1
    )


def _unflat(vector: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    like = list(like)
    parts = vector.split([x.numel() for x in like])
    return [part.reshape(x.shape).to(x.dtype) for part, x in zip(parts, like, strict=True)]
