"""The result of an inference for a Pyro model: a Gaussian over unconstrained latents, or draws."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import (
    ComposeTransform,
    IndependentTransform,
    MultivariateNormal,
    Transform,
)

from pyro_dp.infer.posterior.summary import NOTHING_TO_CHECK, Status, Summary, element_names
from pyro_dp.records.global_draw import Latent
from pyro_dp.utils.linalg import cholesky, covariance, dense, power

_NO_GAUSSIAN = "A posterior's mean and covariance must be finite, and the covariance positive."
_NUM_DRAWS = 10_000  # for quantiles of elements that are not monotone functions of one coordinate


class Posterior(Summary, MultivariateNormal):
    """A Gaussian over the guide's unconstrained latents, in the guide's order; all of it is public.

    It is a ``torch.distributions.MultivariateNormal``: ``mean``, ``stddev``,
    ``covariance_matrix``, ``sample()`` and ``log_prob()`` are those of the flat vector (d,) of
    unconstrained latents, whose coordinates are called :attr:`names`. :meth:`draws`,
    :meth:`quantiles` and :meth:`intervals` are in the model's own space, by site.

    The covariance may include the uncertainty that the privacy noise adds. :attr:`noise_share` is
    its share of the variance, and :meth:`plot` shows it. :attr:`status` says whether the intervals
    can be published.

    :param latents: sites, in the order of the flat vector.
    :param mean: (d,).
    :param covariance: (d, d), or variances (d,).
    :param plain: the covariance without the noise, in either shape; ``None``: there is no noise in
        it.
    :param status: whether the intervals can be published.
    :raises ArithmeticError: it is not finite, or no Gaussian.

    >>> sep = DPSEP(model, guide, accountant=accountant, noise=Noise(source=0))
    >>> result = sep.run(heights, progress=False)
    >>> lower, upper = sep.posterior().quantiles([0.025, 0.975])["height"]
    >>> print(f"{lower:.2f} to {upper:.2f}")
    1.69 to 1.71
    """

    def __init__(
        self,
        latents: Sequence[Latent],
        mean: Tensor,
        covariance: Tensor,
        *,
        plain: Tensor | None = None,
        status: Status = NOTHING_TO_CHECK,
    ):
        try:
            root = cholesky(dense(covariance))
        except torch.linalg.LinAlgError as error:
            raise ArithmeticError(_NO_GAUSSIAN) from error
        if not (mean.isfinite().all() and root.isfinite().all() and root.diagonal().min() > 0):
            raise ArithmeticError(_NO_GAUSSIAN)
        super().__init__(mean, scale_tril=root)
        self._latents = tuple(latents)
        self._status = status
        self._aware = dense(covariance)
        self._plain = self._aware if plain is None else dense(plain)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the d coordinates: ``"w[3]"`` is the fourth number of site w, unconstrained."""
        return tuple(n for each in self._latents for n in element_names(each.name, each.shape))

    @property
    def noise_share(self) -> Tensor:
        """How much of each variance is privacy: 1 - plain / noise-aware, in [0, 1], (d,)."""
        share = 1 - self._plain.diagonal() / self._aware.diagonal()
        return share.nan_to_num(0.0).clamp(0.0, 1.0)  # two variances that underflow have none

    @property
    def plain(self) -> "Posterior":
        """The same posterior without the uncertainty that the privacy noise adds."""
        return Posterior(self._latents, self.mean, self._plain, status=self.status)

    def __getitem__(self, site: str) -> "Posterior":
        """The marginal posterior of one site.

        :raises KeyError: there is no such site.
        """
        for each in self._latents:
            if each.name == site:
                own = slice(each.start, each.stop)
                return Posterior(
                    [replace(each, start=0, stop=each.stop - each.start)],
                    self.mean[own],
                    self._aware[own, own],
                    plain=self._plain[own, own],
                    status=self.status,
                )
        raise KeyError(f"{site!r}: the sites are {', '.join(each.name for each in self._latents)}")

    def draws(self, num: int) -> dict[str, Tensor]:
        """Joint draws of all sites in the model's own space, by torch's global generator.

        :returns: by site, ``(num, *site shape)``.
        """
        flat = self._flat(num)
        return {each.name: own_space(each, flat) for each in self._latents}

    def quantiles(self, probabilities: Sequence[float]) -> dict[str, Tensor]:
        """Quantiles of each element of each site, in the model's own space.

        They are exact if the element is a monotone function of one coordinate. Otherwise, as for a
        simplex, they are those of 10,000 draws by a generator with a seed of its own.

        :param probabilities: P numbers in (0, 1).
        :returns: by site, ``(P, *site shape)``.
        """
        at = torch.tensor(probabilities).to(self.mean)
        return {each.name: self._quantiles(each, at) for each in self._latents}

    def expand(self, batch_shape: Any, _instance: Any = None) -> MultivariateNormal:
        """Copies of the Gaussian, like those of ``MultivariateNormal``."""
        gaussian = MultivariateNormal(self.loc, scale_tril=self.scale_tril)
        return gaussian.expand(batch_shape, _instance)

    def _flat(self, num: int) -> Tensor:
        """Draws of the flat vector, (num, d)."""
        return self.sample((num,))

    def _quantiles(self, latent: Latent, at: Tensor) -> Tensor:
        if not _is_elementwise(latent.transform):
            return quantiles_of(own_space(latent, self._fixed_draws(latent)), at)
        way = torch.special.ndtri(at).unsqueeze(1) * self.stddev
        first, last, below, above = (
            own_space(latent, self.mean + each) for each in (-self.stddev, self.stddev, -way, way)
        )
        return torch.where(last < first, below, above)

    def _fixed_draws(self, latent: Latent) -> Tensor:
        """Draws of one site, the others at zero, that are the same whenever they are asked for."""
        own = slice(latent.start, latent.stop)
        normal = torch.randn(
            _NUM_DRAWS,
            latent.stop - latent.start,
            generator=torch.Generator().manual_seed(0),
            dtype=self.mean.dtype,
        ).to(self.mean)
        draws = self.mean.new_zeros(_NUM_DRAWS, len(self.mean))
        draws[:, own] = self.mean[own] + normal @ cholesky(self._aware[own, own]).mT
        return draws


def own_space(latent: Latent, flat: Tensor) -> Tensor:
    """Values of one site in the model's own space, from flat vectors (..., d)."""
    part = flat[..., latent.start : latent.stop]
    return latent.transform(part.reshape(flat.shape[:-1] + latent.shape))


def _is_elementwise(transform: Transform) -> bool:
    """Whether each element of its value is a monotone function of one element."""
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    if isinstance(transform, ComposeTransform):
        return all(_is_elementwise(part) for part in transform.parts)
    events = transform.domain.event_dim, transform.codomain.event_dim
    return events == (0, 0) and transform.bijective


def quantiles_of(draws: Tensor, at: Tensor) -> Tensor:
    """(P, ...) of (draws, ...)."""
    places = (at * (len(draws) - 1)).round().long()
    return draws.sort(dim=0).values[places]


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

    def _flat(self, num: int) -> Tensor:
        return self._sample[torch.randint(len(self._sample), (num,))]

    def _quantiles(self, latent: Latent, at: Tensor) -> Tensor:
        return quantiles_of(own_space(latent, self._sample), at)
