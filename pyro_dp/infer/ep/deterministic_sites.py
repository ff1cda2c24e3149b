"""Looks at deterministic sites, for likelihoods that depend on products of latents.

A model may write ``effect = pyro.deterministic("effect", mu + scale * z)`` outside the plate, with
a likelihood that depends on ``effect`` alone. As a function of ``scale`` and ``z`` this likelihood
contains a product. As a function of ``effect`` it is that of a regression. So looks are made at
``effect``. The posterior of the latents is the model's prior times this evidence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from pyro import poutine
from pyro.distributions import Normal, TransformedDistribution
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import Transform
from torch.distributions.transforms import identity_transform

from pyro_dp.infer.ep.site_factors import LARGEST_FULL
from pyro_dp.infer.posterior.evidence import Evidence, PriorTimesEvidence
from pyro_dp.infer.posterior.fitted_guide import FittedGuide
from pyro_dp.infer.posterior.gaussian_guide import GaussianGuide
from pyro_dp.infer.posterior.posterior import SampledPosterior
from pyro_dp.infer.posterior.prior_factor import PublicDensity
from pyro_dp.records.global_draw import Latent
from pyro_dp.records.plate import Outside, Sites, is_random
from pyro_dp.records.records import Records, on_placeholders
from pyro_dp.utils.linalg import dense
from pyro_dp.utils.torch_state import forked_rng

_DRAWS = 400  # draws of the prior
_QUARTILES, _SDS = (0.25, 0.5, 0.75), 1.349  # a Gaussian's interquartile range, in sds
_LEAST_SD = 1e-6


@dataclass(frozen=True)
class _Marginal:
    """A Gaussian for the unconstrained values of a site, from draws of the prior."""

    latent: Latent
    mean: Tensor
    sd: Tensor

    @staticmethod
    def of(name: str, transform: Transform, start: int, draws: Sequence[dict]) -> "_Marginal":
        values = torch.stack([transform.inv(site["value"]) for site in draws])
        low, middle, high = values.quantile(torch.tensor(_QUARTILES).to(values), dim=0)
        latent = Latent(name, middle.shape, transform, start, start + middle.numel())
        return _Marginal(latent, middle, ((high - low) / _SDS).clamp(min=_LEAST_SD))

    def distribution(self, event_dim: int) -> TransformedDistribution:
        """A distribution in the site's own space."""
        found = TransformedDistribution(Normal(self.mean, self.sd), self.latent.transform)
        return found.to_event(event_dim - found.event_dim)


class _Sampled(Messenger):
    """Draws the sites of these names from their marginals instead of the model."""

    def __init__(self, marginals: Mapping[str, _Marginal]):
        super().__init__()
        self._marginals = marginals

    def _pyro_sample(self, msg: dict) -> None:
        if marginal := self._marginals.get(msg["name"]):
            msg["fn"] = marginal.distribution(msg["fn"].event_dim)
            msg["is_observed"], msg["value"], msg["infer"] = False, None, {}


class DeterministicSites:
    """The sites that the likelihood depends on, deterministic ones among them, as one Gaussian.

    For looks it has the interface of :class:`GaussianGuide`. :meth:`posterior` returns the
    posterior of the latents themselves, and :meth:`fit` fits the guide to it.

    :ivar model: the model, with these deterministic sites as latents. The latents that determine
        them are constants.
    :ivar draws: a guide of these latents.
    """

    starts_anywhere = True

    def __init__(
        self,
        model: Callable,
        guide: GaussianGuide | FittedGuide,
        records: Records,
        seen: Sequence[_Marginal],
        draw: Sites,
    ):
        self._model, self._guide, self._records = model, guide, records
        self._seen = {each.latent.name: each for each in seen}
        self.latents = tuple(each.latent for each in seen)
        self.size = self.latents[-1].stop
        values = {each.name: draw[each.name]["value"] for each in guide.latents}
        self._dtypes = {name: value.dtype for name, value in values.items()}
        constants = {name: x for name, x in values.items() if name not in self._seen}
        new = {name: each for name, each in self._seen.items() if name not in values}
        changed = poutine.condition(_Sampled(new)(model), data=constants)
        self.model = poutine.block(changed, hide=list(constants))
        self.draws = poutine.block(_Sampled(self._seen)(self.model), expose=list(self._seen))
        self._result: tuple[int, PriorTimesEvidence] | None = None  # the number of looks in it

    @staticmethod
    def find(
        model: Callable, guide: GaussianGuide | FittedGuide, records: Records
    ) -> "DeterministicSites | None":
        """None if the likelihood depends on each latent directly."""
        few = _prior_draws(model, records, 2)
        candidates = _deterministic(few, model, records)
        latents = {each.name: each.transform for each in guide.latents}
        transforms = latents | dict.fromkeys(candidates, identity_transform)
        names = _seen_names(model, list(transforms), few[0], records)
        if latents.keys() <= set(names):
            return None
        seen, draws = list[_Marginal](), _prior_draws(model, records, _DRAWS)
        for name in names:
            start = seen[-1].latent.stop if seen else 0
            seen.append(_Marginal.of(name, transforms[name], start, [x[name] for x in draws]))
        if seen[-1].latent.stop > LARGEST_FULL:
            return None
        return DeterministicSites(model, guide, records, seen, draws[0])

    @property
    def names(self) -> set[str]:
        """Names of the guide's parameters."""
        return self._guide.names

    def read(self) -> tuple[Tensor, Tensor]:
        """Mean and variances of draws of the prior, (d,) each, in float64."""
        means = [each.mean.flatten() for each in self._seen.values()]
        sds = [each.sd.flatten() for each in self._seen.values()]
        return torch.cat(means).double(), torch.cat(sds).double() ** 2

    def write(self, mean: Tensor, covariance: Tensor) -> None:
        """Nothing: no parameter holds this Gaussian."""

    def is_current(self) -> bool:
        """As :meth:`GaussianGuide.is_current`."""
        return self._guide.is_current()

    def posterior(self, evidence: Evidence) -> SampledPosterior:
        """The posterior of the latents: the model's prior times the evidence."""
        return self._product(evidence).posterior

    def fit(self, evidence: Evidence) -> float:
        """Fit the guide to the posterior.

        :returns: as :meth:`FittedGuide.fit`; 0 for a Gaussian guide.
        """
        found = self._product(evidence)
        if self._guide.read()[1].dim() == 1:
            # Marginals of factors would not give the marginal of their product.
            mean, sds = found.independent
            self._guide.write(mean, sds**2)
        else:
            self._guide.write(*found.closest)
        return self._guide.fit() if isinstance(self._guide, FittedGuide) else 0.0

    def _product(self, evidence: Evidence) -> PriorTimesEvidence:
        count = len(evidence.looks)
        if self._result is None or self._result[0] != count:
            mean, covariance = self._guide.read()
            start = mean, dense(covariance).diagonal().sqrt()
            found = PriorTimesEvidence(evidence, self._model, self._density, start)
            self._result = count, found
        return self._result[1]

    def _density(self, model: Callable) -> PublicDensity:
        return PublicDensity(model, self._guide.latents, self._dtypes, self._records)


@torch.no_grad()
def _prior_draws(model: Callable, records: Records, count: int) -> list[Sites]:
    """Draws of the sites outside the plate. A larger count repeats those of a smaller one."""
    with forked_rng():
        torch.manual_seed(0)  # all ranks of a cluster draw the same
        return [_outside(model, records, 1) for _ in range(count)]


def _outside(model: Callable, records: Records, count: int) -> Sites:
    """Sites outside the plate, from a run on ``count`` placeholder records."""
    with on_placeholders(records, "the model", count) as (args, kwargs):
        return dict(poutine.trace(Outside(records.plate)(model)).get_trace(*args, **kwargs).nodes)


def _deterministic(draws: Sequence[Sites], model: Callable, records: Records) -> list[str]:
    """Names of deterministic floating-point sites that depend on latents, and on no record."""
    found, other = [], draws[1]
    with torch.no_grad(), forked_rng():
        of_two = _outside(model, records, 2)
    for name, site in draws[0].items():
        if site["type"] != "sample" or isinstance(site["fn"], _Subsample) or is_random(site):
            continue
        value = site["value"]
        by_record = records.plate.size in value.shape or value.shape != of_two[name]["value"].shape
        varies = not torch.equal(value, other[name]["value"])
        if value.is_floating_point() and not by_record and varies:
            found.append(name)
    return found


@torch.enable_grad()
def _seen_names(model: Callable, names: Sequence[str], draw: Sites, records: Records) -> list[str]:
    """Those of the sites that a record's term depends on directly."""
    leaves = {name: draw[name]["value"].detach().clone().requires_grad_() for name in names}
    with on_placeholders(records, "the model") as (args, kwargs):
        trace = poutine.trace(poutine.condition(model, data=leaves)).get_trace(*args, **kwargs)
        trace.compute_log_prob(lambda _, site: records.plate.holds(site) and is_random(site))
    terms = [site["log_prob_sum"] for site in trace.nodes.values() if "log_prob_sum" in site]
    gradients = torch.autograd.grad(sum(terms), list(leaves.values()), allow_unused=True)
    return [name for name, slope in zip(names, gradients, strict=True) if slope is not None]
