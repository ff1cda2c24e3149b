"""Evidence: the likelihood of the latents from private looks, without a prior.

A look is one private release of score and curvature at a public point. Evidence contains released
numbers only, so nothing that is computed from it costs privacy.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import init_to_value
from torch import Tensor

from pyro_dp.infer.posterior.chains import chain_draws, full_rank, mean_field
from pyro_dp.infer.posterior.evidence_parts import Part, described, from_plain, to_plain
from pyro_dp.infer.posterior.looks import Look, PooledLooks
from pyro_dp.infer.posterior.posterior import (
    CHECK,
    Posterior,
    SampledPosterior,
    Status,
    element_names,
)
from pyro_dp.infer.posterior.prior_factor import (
    BatchedGradient,
    Prior,
    PriorDensity,
    combined,
    prior_density,
)
from pyro_dp.records.arguments import required_arguments
from pyro_dp.records.global_draw import Latent
from pyro_dp.utils.display import Displayed, Facts, Table, with_rows
from pyro_dp.utils.errors import ConfigurationError, ModelError
from pyro_dp.utils.files import read_file, write_file
from pyro_dp.utils.linalg import Gaussian, covariance, inverse
from pyro_dp.utils.torch_state import forked_rng
from pyro_dp.utils.validation import require_count, require_flag

_MOST_MOVED = 0.5  # standard deviations between the last two rounds of chains
_MOVED = "chains of draws still moved by {moved:.1f} standard deviations at their end"
_SCALE = 0.1  # standard deviation of each latent at the start of a search
_METHODS = "method must be 'gaussian', 'chains', 'nuts', or a Pyro guide."
_ARGUMENTS = (
    "evidence.posterior(model): the model takes {names}, but the prior has no arguments. Pass the "
    "part before the plate of records, without data; PrivateGLM has it as glm.prior."
)


@dataclass(frozen=True, eq=False, repr=False)
class Evidence(Displayed):
    """The likelihood of the latents, from private looks at the data.

    ``inference.evidence`` returns the evidence of a run of :class:`DPSEP`. An office can publish
    its file (:meth:`save`, :meth:`load`) instead of data.

    **Guarantee.** Evidence is a function of released numbers. It is :attr:`mu`-GDP for one record,
    under the ledger's neighbouring relation. It costs nothing beyond its run, and nothing computed
    from it costs more.

    :param latents: sites that the records inform, in the order of the flat vector (d,).
    :param parts: one part for each data set.
    :param disjoint: whether no person has records in two parts.

    >>> sep = DPSEP(model, guide, accountant=accountant, noise=Noise(source=0))
    >>> result = sep.run(heights, progress=False)
    >>> def sceptical():
    ...     pyro.sample("height", dist.Normal(1.6, 0.01))
    >>> print(f"{sep.evidence.posterior(sceptical).mean.item():.2f}")
    1.69
    """

    latents: tuple[Latent, ...]
    parts: tuple[Part, ...]
    disjoint: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the d unconstrained coordinates."""
        return tuple(n for each in self.latents for n in element_names(each.name, each.shape))

    @property
    def size(self) -> int:
        """The number of records in all parts."""
        return sum(part.size for part in self.parts)

    @property
    def mu(self) -> float:
        """The privacy cost for one person, as mu of Gaussian differential privacy.

        If no person is in two parts, it is the largest mu of a part. Otherwise it is the root of
        the sum of squares.
        """
        costs = [part.cost.mu for part in self.parts]
        return max(costs) if self.disjoint else math.hypot(*costs)

    @property
    def status(self) -> Status:
        """The worst status of the runs."""
        return Status.worst(part.status for part in self.parts)

    @property
    def looks(self) -> tuple[Look, ...]:
        """The looks of all parts."""
        return tuple(look for part in self.parts for look in part.looks)

    def log_likelihood(self, values: Mapping[str, Tensor]) -> Tensor:
        """The log likelihood up to a constant, for ``pyro.factor`` in a model with these sites.

        :param values: the value of each site, in the site's support.
        :returns: a differentiable number.
        :raises ModelError: a site is missing, or has the wrong shape.
        """
        z = self.coordinates(values)
        return _over_parts(self.parts, lambda pooled: pooled.log_likelihood()(z))

    def coordinates(self, values: Mapping[str, Tensor]) -> Tensor:
        """The flat vector (d,) of unconstrained values.

        Arguments and errors are those of :meth:`log_likelihood`.
        """
        flat = []
        for each in self.latents:
            if each.name not in values:
                raise ModelError(
                    f"values has no {each.name!r}: the evidence is about "
                    f"{', '.join(latent.name for latent in self.latents)}."
                )
            value = each.transform.inv(torch.as_tensor(values[each.name]))
            if value.numel() != each.stop - each.start:
                raise ModelError(
                    f"Site {each.name!r} has shape {tuple(value.shape)}, and the evidence has "
                    f"{tuple(each.shape)}."
                )
            flat.append(value.reshape(-1).to(self.looks[0].point))
        return torch.cat(flat)

    def factor(self, mean: Tensor) -> Gaussian:
        """The likelihood as a Gaussian factor, with the noise at a posterior mean (d,)."""
        factors = [part.pooled.factor(part.pooled.information(mean)) for part in self.parts]
        return Gaussian(
            torch.stack([each.eta for each in factors]).sum(dim=0),
            torch.stack([each.precision for each in factors]).sum(dim=0),
        )

    def _information(self, mean: Tensor) -> Tensor:
        """The precision (d, d) of the likelihood at the final posterior mean (d,).

        It is lower than the precision of :meth:`factor`, because it also allows for a curvature
        that changes between the looks and the mean.
        """
        return _over_parts(
            self.parts, lambda each: each.information(mean, each.nonquadratic_error(mean))
        )

    def lost(self, mean: Tensor) -> Tensor:
        """The precision (d, d) that noise takes from the likelihood at a posterior mean (d,)."""
        return _over_parts(self.parts, lambda each: each.curvature) - self._information(mean)

    def posterior(self, model: Callable, method: Any = "gaussian", **settings: Any) -> Any:
        """The posterior under any prior on the same sites. It costs no privacy.

        :param model: the prior: a Pyro model without data or arguments. It may have further
            latents, such as the scale of a hierarchy.
        :param method: "gaussian"; "chains" (Hamiltonian chains, which take seconds, and also serve
            deterministic sites); "nuts"; or a guide of the model, which ``SVI`` fits.
        :param settings: NUTS takes ``num_samples`` (1000) and ``warmup_steps`` (500). A guide takes
            ``num_steps`` (2000) and ``lr`` (0.02).
        :returns: a :class:`Posterior`; from NUTS draws by site, ``(num_samples, *shape)``; or the
            guide.
        :raises ModelError: the model takes arguments, lacks a site, or has a site of the wrong
            shape or support.
        :raises ConfigurationError: method is unknown.
        """
        needed = required_arguments(model)
        if needed:
            raise ModelError(_ARGUMENTS.format(names=", ".join(needed)))
        if method == "gaussian" and not settings:
            return self._gaussian(model)
        if method == "chains" and not settings:
            return PriorTimesEvidence(self, model, prior_density).posterior
        if method == "nuts":
            return self._draws(model, **settings)
        if callable(method):
            return self._fitted(model, method, **settings)
        raise ConfigurationError(_METHODS)

    def conditioned(self, model: Callable) -> Callable:
        """The model with the evidence as a factor, for any inference of Pyro.

        :param model: a Pyro model without data: the prior.
        """
        return _conditioned(self, model, [part.pooled for part in self.parts])

    def conditioned_near(self, model: Callable) -> Callable:
        """As :meth:`conditioned`, with the noise of the score at the estimate used everywhere.

        This log likelihood is quadratic, so it can start a search. The exact one is nearly flat far
        from the estimate.
        """
        return _conditioned(self, model, [part.pooled.with_constant_noise() for part in self.parts])

    def times(self, other: "Evidence", *, disjoint: bool) -> "Evidence":
        """The evidence of both data sets: the likelihoods multiply.

        :param other: evidence about the same sites, from other records.
        :param disjoint: whether no person has records in both. Then the cost is the larger of the
            two. Otherwise the costs compose.
        :raises ConfigurationError: sites or relations differ, or both contain the same run.
        """
        require_flag("disjoint", disjoint)
        if described(self.latents) != described(other.latents):
            raise ConfigurationError(
                "other: it is about other sites, or other supports. Both evidences need the same "
                "latents, in the same order."
            )
        if {p.cost.neighboring for p in self.parts} != {p.cost.neighboring for p in other.parts}:
            raise ConfigurationError("other: it has another neighbouring relation.")
        runs = {part.cost.run for part in self.parts} & {part.cost.run for part in other.parts}
        if runs - {""}:
            raise ConfigurationError(
                "other: it has a run that is in this evidence, too. Records may count once."
            )
        together = disjoint and self.disjoint and other.disjoint
        return Evidence(self.latents, self.parts + other.parts, together)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file, which is as public as the evidence.

        :raises ConfigurationError: the support of a site cannot be written.
        :raises OSError: the file cannot be written.
        """
        write_file(path, to_plain(**vars(self)))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Evidence":
        """Read a file of :meth:`save`. Reading runs no code from the file.

        :raises ConfigurationError: the file is damaged, or holds no evidence.
        :raises OSError: the file cannot be read.
        """
        try:
            return Evidence(**from_plain(read_file(path)))
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"{path} is no evidence, or damaged: {error}.") from None

    def _gaussian(self, model: Callable) -> Posterior:
        density = prior_density(model)
        coordinates = self._coordinates_among(density.latents)
        mean = torch.zeros(density.size, dtype=torch.float64)
        prior = Prior(density, mean)
        factor = prior.factor(mean, torch.eye(len(mean)).to(mean))
        mean = factor.mean.clone()
        # Start at the estimate: far from the looks, the noise of the curvature hides the evidence.
        mean[coordinates] = self.parts[0].pooled.estimate

        def evidence(mean: Tensor) -> Gaussian:
            return self.factor(mean[coordinates]).embedded(coordinates, len(mean))

        prior_factor, found = combined(prior, evidence, mean, factor)
        mean = found.mean
        centre = mean[coordinates]
        curvature = _over_parts(self.parts, lambda each: each.curvature)
        aware, plain = (
            prior_factor * Gaussian(precision @ centre, precision).embedded(coordinates, len(mean))
            for precision in (self._information(centre), curvature)
        )
        return Posterior(
            density.latents, mean, aware.covariance, plain=plain.covariance, status=self.status
        )

    def _coordinates_among(self, latents: Sequence[Latent]) -> Tensor:
        """Indices (d,) of the evidence's coordinates in the flat vector of these latents."""
        by_name = {each.name: each for each in latents}
        found = []
        for each in self.latents:
            latent = by_name.get(each.name)
            if latent is None or described([latent]) != described([each]):
                raise ModelError(
                    f"The model has no latent site {each.name!r} of shape {tuple(each.shape)} and "
                    "the evidence's support. If it is a deterministic site, use method='chains'."
                )
            found.append(torch.arange(latent.start, latent.stop))
        return torch.cat(found)

    def _draws(
        self, model: Callable, num_samples: int = 1000, warmup_steps: int = 500
    ) -> dict[str, Tensor]:
        require_count("num_samples", num_samples)
        require_count("warmup_steps", warmup_steps)
        start = init_to_value(values=PriorTimesEvidence(self, model, prior_density).centre)
        kernel = pyro.infer.NUTS(self.conditioned(model), jit_compile=False, init_strategy=start)
        chain = pyro.infer.MCMC(kernel, num_samples, warmup_steps, disable_progbar=True)
        chain.run()
        draws: dict[str, Tensor] = chain.get_samples()
        return draws

    def _fitted(
        self, model: Callable, guide: Callable, num_steps: int = 2000, lr: float = 0.02
    ) -> Callable:
        require_count("num_steps", num_steps)
        optim = pyro.optim.ClippedAdam({"lr": lr, "lrd": 0.1 ** (1 / num_steps)})
        elbo = pyro.infer.Trace_ELBO(num_particles=4)
        for conditioned in (self.conditioned_near, self.conditioned):
            svi = pyro.infer.SVI(conditioned(model), guide, optim, elbo)
            for _ in range((num_steps + 1) // 2):
                svi.step()
        return guide

    def _blocks(self) -> list[Table | Facts]:
        sites = ", ".join(f"{each.name} {tuple(each.shape)}" for each in self.latents)
        facts = [
            ("about", sites),
            ("relation", self.parts[0].cost.neighboring),
            ("cost", f"mu = {self.mu:.4g}"),
            ("status", str(self.status)),
        ]
        rows = []
        for part in self.parts:
            inverse = torch.linalg.inv(part.pooled.curvature)
            for number, look in enumerate(part.looks, start=1):
                noise = inverse @ look.score_noise @ inverse
                sd = noise.diagonal().sqrt().median().item()
                rows.append((f"{part.size:,}", str(number), f"{sd:.3g}"))
        looks = Table(("records", "look", "noise of the estimate (sd, median)"), rows, "Looks")
        return [Facts(facts, f"Evidence of {self.size:,} records"), looks]

    def plot(self) -> Any:
        """Plot the estimates by the likelihood alone, with 95% intervals that include the noise.

        :returns: a ``matplotlib.figure.Figure``.
        :raises ConfigurationError: matplotlib is not installed.
        """
        factor = self.factor(self.parts[0].pooled.estimate)
        mean, sd = factor.mean, factor.covariance.diagonal().sqrt()
        figure, axes = with_rows("evidence.plot()", self.names)
        axes.errorbar(mean, range(len(mean)), xerr=1.96 * sd, fmt="o", color="C0", capsize=2)
        axes.axvline(0.0, color="0.8", zorder=0)
        axes.set_xlabel("estimate by the evidence alone, with 95% interval")
        return figure


class PriorTimesEvidence:
    """The posterior from a model's prior and evidence about its sites. No record enters.

    :param density: makes the log density of a model.
    :param start: mean and standard deviations (d,) at the start of the search.
    :ivar independent: mean and standard deviations (d,) of the mean-field Gaussian that minimises
        KL(q || p).
    """

    def __init__(
        self,
        evidence: Evidence,
        model: Callable,
        density: Callable[[Callable], PriorDensity],
        start: tuple[Tensor, Tensor] | None = None,
    ):
        self._evidence, self._density = evidence, density(evidence.conditioned(model))
        quadratic = density(evidence.conditioned_near(model))
        zeros = torch.zeros(quadratic.size, dtype=torch.float64)
        mean, sds = start or (zeros, torch.full_like(zeros, _SCALE))
        with forked_rng():
            self._gradients = BatchedGradient(self._density, mean)
            mean, sds = mean_field(BatchedGradient(quadratic, mean), mean, sds)
            self.independent = mean_field(self._gradients, mean, sds)

    @property
    def centre(self) -> dict[str, Tensor]:
        """The sites at the mean of the mean-field Gaussian."""
        mean = self.independent[0]
        return {each.name: each.transform(each.part(mean)) for each in self._density.latents}

    @cached_property
    def posterior(self) -> SampledPosterior:
        """Draws by Hamiltonian chains; the status is the worse of the evidence's and theirs."""
        with forked_rng():
            sample, moved = chain_draws(self._gradients, *self.independent)
        chains = Status() if moved < _MOST_MOVED else Status(CHECK, _MOVED.format(moved=moved))
        status = Status.worst([self._evidence.status, chains])
        plain = self._without_noise(sample.mean(0), covariance(sample))
        return SampledPosterior(self._density.latents, sample, plain, status=status)

    @cached_property
    def closest(self) -> tuple[Tensor, Tensor]:
        """Mean (d,) and covariance (d, d) of the Gaussian that minimises KL(q || p)."""
        with forked_rng():
            return full_rank(self._gradients, *self.independent)

    def _without_noise(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """The posterior covariance if the looks had no noise, (d, d)."""

        def coordinates(z: Tensor) -> Tensor:
            nodes: Any = self._density.trace(z)[0].nodes
            names = [each.name for each in self._evidence.latents]
            return self._evidence.coordinates({name: nodes[name]["value"] for name in names})

        with torch.enable_grad(), forked_rng():
            slopes = torch.autograd.functional.jacobian(coordinates, mean)
        lost = self._evidence.lost(coordinates(mean).detach())
        return inverse(inverse(covariance) + slopes.mT @ lost @ slopes)


def _over_parts(parts: Sequence[Part], of: Callable[[PooledLooks], Tensor]) -> Tensor:
    return torch.stack([of(part.pooled) for part in parts]).sum(dim=0)


def _conditioned(evidence: Evidence, model: Callable, pooled: Sequence[PooledLooks]) -> Callable:
    """The model with the sum of these log likelihoods as a factor."""
    # Create these tensors outside torch.func, which would keep wrappers of them.
    likelihoods = [each.log_likelihood() for each in pooled]

    def with_evidence(*args: Any, **kwargs: Any) -> Any:
        trace = poutine.trace(model).get_trace(*args, **kwargs)
        sites = {each.name for each in evidence.latents} & set(trace.nodes)
        z = evidence.coordinates({name: trace.nodes[name]["value"] for name in sites})
        pyro.factor("evidence", torch.stack([each(z) for each in likelihoods]).sum())
        return trace.nodes["_RETURN"]["value"]

    return with_evidence
