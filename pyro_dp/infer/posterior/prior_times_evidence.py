"""The posterior of latents that the records see through other sites: draws, and Gaussians."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from pyro_dp.infer.posterior.closest_gaussian import full_rank, mean_field
from pyro_dp.infer.posterior.hamiltonian_chains import chain_draws
from pyro_dp.infer.posterior.posterior import SampledPosterior
from pyro_dp.infer.posterior.prior_density import BatchedGradient, PriorDensity
from pyro_dp.infer.posterior.summary import CHECK, Status
from pyro_dp.records.global_draw import Latent
from pyro_dp.utils.linalg import covariance, inverse
from pyro_dp.utils.torch_state import forked_rng

_NEAR = 0.5  # standard deviations
_MOVED = "chains of draws still moved by {moved:.1f} standard deviations at their end"


class Likelihood(Protocol):
    """Evidence, as of :class:`~pyro_dp.infer.posterior.evidence.Evidence`."""

    @property
    def latents(self) -> tuple[Latent, ...]: ...

    @property
    def status(self) -> Status: ...

    def coordinates(self, values: Mapping[str, Tensor]) -> Tensor: ...

    def lost(self, mean: Tensor) -> Tensor: ...


class PriorTimesEvidence:
    """A model's prior times evidence about its sites. No record enters.

    :param density: the model's, with the evidence as a factor.
    :param latents: the model's, in the order of the flat vector (d,).
    :param mean: where to start, (d,).
    :param sds: at the start, (d,).
    :ivar independent: mean and sds (d,) of the independent Gaussians closest in KL(q || p).
    """

    def __init__(
        self,
        evidence: Likelihood,
        density: PriorDensity,
        latents: Sequence[Latent],
        mean: Tensor,
        sds: Tensor,
    ):
        self._evidence, self._density, self._latents = evidence, density, latents
        with forked_rng():
            self._gradients = BatchedGradient(density, mean)
            self.independent = mean_field(self._gradients, mean, sds)

    @cached_property
    def posterior(self) -> SampledPosterior:
        """Draws. Its status is the worst of the evidence's and of the chains'."""
        with forked_rng():
            sample, moved = chain_draws(self._gradients, *self.independent)
        chains = Status() if moved < _NEAR else Status(CHECK, _MOVED.format(moved=moved))
        status = Status.worst([self._evidence.status, chains])
        plain = self._without_noise(sample.mean(0), covariance(sample))
        return SampledPosterior(self._latents, sample, plain, status=status)

    @cached_property
    def closest(self) -> tuple[Tensor, Tensor]:
        """Mean (d,) and covariance (d, d) of the Gaussian closest in KL(q || p)."""
        with forked_rng():
            return full_rank(self._gradients, *self.independent)

    def _without_noise(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """The covariance with the precision that the noise takes from the evidence there."""

        def coordinates(z: Tensor) -> Tensor:
            nodes: Any = self._density.trace(z)[0].nodes
            seen = [each.name for each in self._evidence.latents]
            return self._evidence.coordinates({name: nodes[name]["value"] for name in seen})

        with torch.enable_grad(), forked_rng():
            slopes = torch.autograd.functional.jacobian(coordinates, mean)
        lost = self._evidence.lost(coordinates(mean).detach())
        return inverse(inverse(covariance) + slopes.mT @ lost @ slopes)
