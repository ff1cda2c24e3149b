"""A posterior that is no Gaussian, as draws."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_dp.infer.posterior.looks import power
from pyro_dp.infer.posterior.posterior import Posterior, own_space, quantiles_of
from pyro_dp.infer.posterior.summary import Status
from pyro_dp.records.global_draw import Latent
from pyro_dp.utils.linalg import covariance


class SampledPosterior(Posterior):
    """Draws of the unconstrained latents. All of it is public.

    :meth:`draws`, :meth:`quantiles` and :meth:`intervals` are those of the draws. As a
    ``MultivariateNormal``, it is the Gaussian with their mean and covariance.

    :param latents: sites, in the order of the flat vector.
    :param sample: draws, (K, d).
    :param plain: the covariance without the uncertainty of the noise, (d, d).
    :param status: whether the intervals can be published.
    :raises ArithmeticError: draws are not finite, or fewer than d.
    """

    def __init__(self, latents: Sequence[Latent], sample: Tensor, plain: Tensor, *, status: Status):
        super().__init__(latents, sample.mean(0), covariance(sample), plain=plain, status=status)
        self._sample = sample

    @property
    def plain(self) -> "SampledPosterior":
        """The same posterior without the noise's uncertainty: draws move towards their mean."""
        # Gaussian optimal transport: the linear map that moves draws least.
        root, back = power(self._aware, 0.5), power(self._aware, -0.5)
        way = back @ power(root @ self._plain @ root, 0.5) @ back
        sample = self.mean + (self._sample - self.mean) @ way
        return SampledPosterior(self._latents, sample, self._plain, status=self.status)

    def __getitem__(self, site: str) -> "SampledPosterior":
        found = super().__getitem__(site)
        (own,) = (each for each in self._latents if each.name == site)
        sample = self._sample[:, own.start : own.stop]
        return SampledPosterior(found._latents, sample, found._plain, status=self.status)

    def draws(self, num: int) -> dict[str, Tensor]:
        """Joint draws of all sites in the model's own space, by torch's global generator.

        :returns: by site, ``(num, *site shape)``.
        """
        flat = self._sample[torch.randint(len(self._sample), (num,))]
        return {each.name: own_space(each, flat) for each in self._latents}

    def _quantiles(self, latent: Latent, at: Tensor) -> Tensor:
        return quantiles_of(own_space(latent, self._sample), at)
