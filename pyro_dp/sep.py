"""DPSEP: differentially private stochastic expectation propagation.

Algorithm 3 of Vinaroz & Park (DP-SEP, TMLR; arXiv 2111.13219) for any Pyro model with a plate of
individuals and a guide that is Gaussian in unconstrained space. Stochastic EP: Li,
Hernández-Lobato & Turner 2015 (arXiv 1506.04132).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from pyro.infer import TraceEnum_ELBO
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_dp.accounting import PrivacyAccountant
from pyro_dp.average_factor import AverageFactor
from pyro_dp.checks import build_record_term
from pyro_dp.errors import ConfigurationError, ModelError
from pyro_dp.factors import STRUCTURES
from pyro_dp.gaussian import Gaussian, apply, dense, inverse, restricted
from pyro_dp.guides import GaussianGuide, Latent
from pyro_dp.inference import PrivateInference
from pyro_dp.mechanisms import Block, ClippedSum
from pyro_dp.moments import Likelihood, LinearMoments, SteinMoments
from pyro_dp.outside import draw_particle
from pyro_dp.predictors import NotLinear
from pyro_dp.prior import Prior
from pyro_dp.randomness import forked_rng
from pyro_dp.records import Records
from pyro_dp.settings import require_choice, require_number

_MOMENTS = ("auto", "linear", "stein")
_LARGEST_FULL = 256  # latents
_MICROBATCH = 8192


class DPSEP(PrivateInference):
    def __init__(
        self,
        model: Callable,
        guide: Callable,
        *,
        accountant: PrivacyAccountant,
        num_steps: int,
        noise_multiplier: float | None = None,
        max_factor_norm: float = 1.0,
        damping: float | Callable[[int], float] | None = None,
        plate: str | None = None,
        sample_rate: float = 1.0,
        sampling: str = "poisson",
        moments: str = "auto",
        precision: str | None = None,
        precision_weight: float | None = None,
        centred: bool = True,
        noise_aware: bool = True,
        microbatch_size: int | None = None,
        slice_data: bool = False,
        generator: torch.Generator | int | None = None,
        secure: bool = False,
    ):
        require_number("max_factor_norm", max_factor_norm, above=0.0, below=math.inf, closed=True)
        require_choice("moments", moments, _MOMENTS)
        if precision is not None:
            require_choice("precision", precision, tuple(STRUCTURES))
        if precision_weight is not None:
            require_number("precision_weight", precision_weight, above=0.0, below=math.inf)
        if damping is not None and not callable(damping):
            require_number("damping", damping, above=0.0, below=1.0, closed=True)
        for name, flag in (("centred", centred), ("noise_aware", noise_aware)):
            require_choice(name, flag, (True, False))
        self.damping = damping
        self.moments = moments
        self.precision = precision
        self.precision_weight = precision_weight
        self.centred = centred
        self.noise_aware = noise_aware
        super().__init__(
            model,
            guide,
            accountant=accountant,
            num_steps=num_steps,
            noise_multiplier=noise_multiplier,
            bound=max_factor_norm,
            plate=plate,
            sample_rate=sample_rate,
            sampling=sampling,
            microbatch_size=microbatch_size,
            slice_data=slice_data,
            generator=generator,
            secure=secure,
        )
        self._average: AverageFactor | None = None
        self._posterior: Gaussian | None = None
        if num_steps is None:
            raise ConfigurationError("num_steps is needed: the default damping depends on it.")

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> float:
        """One private update of the average factor, given the full data.

        :returns: norm of the change of the released natural parameters (eta, kappa Lambda).
        :raises ModelError: model, guide or data do not fit; nothing was spent.
        :raises PrivacyBudgetExceeded: the step does not fit the budget; nothing was spent.
        """
        self._prepare(args, kwargs)
        position, damping = self.accountant.num_releases, self._damping()
        count, places = self._records.plate.size, self._places
        cavity = self._posterior / self._on_all(self._average.projected()) ** (1 / count)
        mean, covariance = cavity.mean[places], restricted(cavity.covariance, places)
        clipped = self._clipped_sum(mean, covariance, self._sample(position))
        (released,) = self._release(clipped, position)
        change = self._average.update(
            self._estimate(released, mean),
            mean,
            damping,
            noise=self._noise,
            weight=self._weight,
            sample_rate=self._sampler.sample_rate,
        )
        self._posterior = self._prior_factor() * self._on_all(self._average.projected())
        self._add_mean_noise(damping)
        posterior = self.posterior(self.noise_aware)
        self._guide.write(posterior.mean, posterior.covariance_matrix)
        return change

    @torch.no_grad()
    def posterior(self, noise_aware: bool = True) -> MultivariateNormal:
        """The current posterior over the guide's unconstrained latents, in the guide's order."""
        if self._posterior is None:
            raise ConfigurationError("There is no posterior before the first step.")
        mean, places = self._posterior.mean, self._places
        plain = inverse((self._prior * self._on_all(self._average.known)).precision)
        if not noise_aware:
            return MultivariateNormal(mean, dense(plain))
        average = self._average
        minibatch = average.sampling_variance * dense(plain)
        if plain.dim() == 1:
            return MultivariateNormal(mean, dense(plain + self._mean_noise) + minibatch)
        noise = torch.eye(len(places), dtype=mean.dtype, device=mean.device)
        if not self.centred:  # the precision's noise E enters the mean as Sigma E mu
            mu = mean[places]
            noise = noise + (mu @ mu * noise + torch.outer(mu, mu)) / (2 * self._weight**2)
        gain = plain[:, places]
        noise = average.noise_variance * gain @ noise @ gain.T
        return MultivariateNormal(mean, plain + noise + minibatch)

    @torch.enable_grad()
    def _build(self, records: Records) -> None:
        term, parameters = build_record_term(
            TraceEnum_ELBO(),
            self.model,
            self.guide,
            records,
            privatize="latents",
            microbatch_size=self.microbatch_size,
        )
        with forked_rng():
            guide = GaussianGuide(self.model, self.guide, records)
            particle = draw_particle(term.loss, self.model, self.guide, records)
            seen = [latent for latent in guide.latents if latent.name in term.latents]
            own = {latent.name: particle.latents[latent.name] for latent in seen}
            likelihood = Likelihood(
                term, records, replace(particle.restricted(set(own)), latents=own)
            )
            places = torch.cat([torch.arange(latent.start, latent.stop) for latent in seen])
            mean, _ = guide.read()
            moments = self._moments(likelihood, mean[places])
            prior = Prior(self.model, guide, records)
            indices = torch.tensor(records.examples(), device=records.device)
            moments.check(mean[places], indices, records.rows(indices))
        self._guide, self._prior_density, self._method = guide, prior, moments
        self._places = places.to(records.device)
        if self._average is None or len(self._average.known.eta) != len(places):
            self._start(seen)

    def _start(self, seen: Sequence[Latent]) -> None:
        """The guide's initial values are q; f^N = q / prior."""
        widths = [latent.stop - latent.start for latent in seen]
        name = self.precision or ("full" if sum(widths) <= _LARGEST_FULL else "shared")
        self._structure = STRUCTURES[name](widths)
        mean, covariance = self._guide.read()
        covariance = dense(covariance) if name == "full" else _variances(covariance)
        self._posterior = Gaussian.from_moments(mean, covariance)
        prior = self._prior_factor()
        factor = self._posterior / prior
        factor = Gaussian(factor.eta[self._places], restricted(factor.precision, self._places))
        self._average = AverageFactor(self._structure, factor, mean[self._places])
        self._mean_noise = torch.zeros_like(mean)

    def _moments(self, likelihood: Likelihood, mean: Tensor) -> LinearMoments | SteinMoments:
        if self.moments != "stein":
            try:
                return LinearMoments(likelihood, mean)
            except NotLinear as reason:
                if self.moments == "linear":
                    raise ModelError(f"moments='linear' does not apply: {reason}.") from None
        return SteinMoments(likelihood, len(mean))

    def _clipped_sum(self, mean: Tensor, covariance: Tensor, indices: Tensor) -> ClippedSum:
        """Per-record sites, clipped and summed, one microbatch after the other."""
        records = self._records
        size = len(mean) + self._structure.size
        clipped = ClippedSum([Block(size, self._bound)], records.device)
        for chosen in indices.split(self.microbatch_size or _MICROBATCH):
            if len(chosen) == 0:  # an empty batch is split into one empty part
                continue
            factors = self._method.factors(mean, covariance, chosen, records.rows(chosen))
            eta = factors.residual if self.centred else factors.residual + factors.times(mean)
            clipped.add(self._structure.rows(eta, factors, self._weight))
        return clipped

    def _estimate(self, released: Tensor, mean: Tensor) -> Gaussian:
        """f_hat^N, from the released coordinates."""
        eta, coordinates = released.split([len(mean), self._structure.size])
        precision = self._structure.precision(coordinates / self._weight)
        return Gaussian(eta + apply(precision, mean) if self.centred else eta, precision)

    def _prior_factor(self) -> Gaussian:
        self._prior = self._prior_density.factor(self._posterior.mean, self._posterior.covariance)
        return self._prior

    def _on_all(self, factor: Gaussian) -> Gaussian:
        """A factor of the latents that records see, as one of all latents."""
        return factor.embedded(self._places, self._guide.size)

    def _add_mean_noise(self, damping: float) -> None:
        covariance = self._posterior.covariance
        if covariance.dim() == 1:
            kept = 1 - damping * covariance * self._prior.precision
            noise = torch.zeros_like(kept)
            noise[self._places] = (damping * self._noise * covariance[self._places]) ** 2
            self._mean_noise = kept**2 * self._mean_noise + noise

    @property
    def _weight(self) -> float:
        """kappa; 2 / C is equivariant: scaling the latents and C leaves all else the same."""
        if self.precision_weight is not None:
            return self.precision_weight
        return 1.0 if self._bound == math.inf else 2.0 / self._bound

    @property
    def _noise(self) -> float:
        """Standard deviation of the noise in a coordinate of f^N."""
        if self.noise_multiplier == 0:
            return 0.0
        return self.noise_multiplier * self._bound / self._sampler.sample_rate

    def _damping(self) -> float:
        """1 while the posterior is on its way, then 1 / (1 + s): the average of all estimates."""
        if callable(self.damping):
            damping = self.damping(self._steps)
            require_number("damping(step)", damping, above=0.0, below=1.0, closed=True)
            return damping
        if self.damping is not None:
            return self.damping
        if self.noise_multiplier == 0 and self._sampler.sample_rate == 1:
            return 1.0
        return 1 / max(1, self._steps - max(2, self.num_steps // 10) + 1)


def _variances(covariance: Tensor) -> Tensor:
    return covariance if covariance.dim() == 1 else covariance.diagonal()
