"""Guide, prior and likelihood of one data set: the input of expectation propagation."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from pyro.distributions import AsymmetricLaplace, Laplace, Uniform
from pyro.infer import TraceEnum_ELBO
from torch import Tensor

from pyro_dp.infer.ep.deterministic_sites import DeterministicSites
from pyro_dp.infer.ep.likelihood import Likelihood
from pyro_dp.infer.ep.observation_family import NotLinear, Residuals
from pyro_dp.infer.ep.tilted_sites import LinearMoments, SteinMoments
from pyro_dp.infer.posterior.fitted_guide import FittedGuide
from pyro_dp.infer.posterior.gaussian_guide import GaussianGuide
from pyro_dp.infer.posterior.prior_factor import Prior, model_prior
from pyro_dp.records.global_draw import draw_particle
from pyro_dp.records.plate import innermost
from pyro_dp.records.quadrature import without_latents
from pyro_dp.records.record_term import RecordTerm
from pyro_dp.records.record_term_builder import build_record_term
from pyro_dp.records.records import Records
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import Gaussian
from pyro_dp.utils.torch_state import forked_rng
from pyro_dp.utils.validation import LARGEST

_NO_DRAWS = (
    "The model draws at random inside the private plate (dropout, or a latent that is not "
    "enumerated). Expectation propagation needs a likelihood without draws: use DPSVI."
)
_BRANCHES = (
    "The model branches on values of a record, so sites are computed one record at a time, "
    "which is slow. Use torch.where, which computes both branches for all records."
)
_NO_ROWS = (
    "Parameters {names} have a row per record, which expectation propagation cannot fit: use "
    "DPSVI. (If they are another inference's, call pyro.clear_param_store().)"
)
_HIDE = (
    "The guide draws latents of records, which DPSEP integrates out. Hide them from the guide, as "
    "in AutoNormal(poutine.block(model, hide=['name'])), or use DPSVI."
)
_ONE_BY_ONE = (
    "Records have continuous latents, but torch.vmap cannot run all records at once, which the "
    "integral needs. Use DPSVI."
)
MOMENTS = ("auto", "linear", "stein")
_FEW = 20  # latents, for which one matrix per record is affordable


@dataclass(frozen=True)
class EPProblem:
    """Model, guide and records, checked.

    :param guide: d latents, read as one Gaussian.
    :param likelihood: one record's likelihood, with the latents that it depends on.
    :param prior: the model outside the private plate, on all d latents.
    :param moments: computes the records' sites on the latents of the likelihood.
    :param places: indices of these latents among all, (d_s,).
    :param widths: number of coordinates of each of these latents.
    """

    guide: GaussianGuide | FittedGuide | DeterministicSites
    likelihood: Likelihood
    prior: Prior
    moments: LinearMoments | SteinMoments
    places: Tensor
    widths: list[int]

    @property
    def groups(self) -> list[Tensor]:
        """Groups of coordinates with separate units in a look: real and constrained latents.

        The prior does not give their ratio, such as that of a wide coefficient to the logarithm of
        a scale. If residuals are bounded, the prior's units suffice, and there is one group.
        """
        latents = self.guide.latents
        kinds = [x.is_real for x in latents for _ in range(x.start, x.stop)]
        real = torch.tensor(kinds, device=self.places.device)[self.places]
        if self.moments.residuals == Residuals.BOUNDED or real.all() or not real.any():
            return [torch.arange(len(self.places), device=self.places.device)]
        return [real.nonzero().squeeze(1), (~real).nonzero().squeeze(1)]

    def on_all(self, factor: Gaussian) -> Gaussian:
        """A factor of the likelihood's latents, as one of all latents."""
        return factor.embedded(self.places, self.guide.size)

    def start(self, mean: Tensor) -> Tensor:
        """The point of the first look, (d,), from the guide's mean.

        A default autoguide starts at the median of a few draws, which may be far away if the prior
        is wide. For a generalised linear model, whose likelihood has one peak, the prior's mean
        replaces this start.
        """
        is_linear = isinstance(self.moments, LinearMoments) and not self.moments.curved
        return self.prior.centred(mean) if is_linear and self.guide.starts_anywhere else mean

    @staticmethod
    def build(
        model: Callable,
        guide: Callable,
        records: Records,
        moments: str,
        microbatch_size: int | None,
    ) -> "EPProblem":
        """:raises ModelError: model, guide and records do not fit, or not with these moments."""
        model = without_latents(model, records.plate)
        term = record_term(model, guide, records, microbatch_size)
        problem = EPProblem.of(term, model, guide, moments, microbatch_size)
        problem.check()
        return problem

    @staticmethod
    @torch.enable_grad()
    def of(
        term: RecordTerm,
        model: Callable,
        guide: Callable,
        moments: str,
        microbatch_size: int | None,
        read: Callable[..., GaussianGuide | FittedGuide | DeterministicSites] = GaussianGuide,
    ) -> "EPProblem":
        """The problem, from public values alone.

        If the likelihood depends on products of latents that are deterministic sites, the problem
        is in terms of these sites.

        :param read: reads the guide as a Gaussian.
        :raises ModelError: model and guide do not fit, or not with these moments.
        """
        records = term.records
        continuous = records.plate.continuous
        if term.local and not continuous:
            raise ModelError(_NO_ROWS.format(names=term.local.listed))
        if continuous and not term.vectorizes:
            raise ModelError(_ONE_BY_ONE)
        if term.samples:
            raise ModelError(_HIDE if continuous else _NO_DRAWS)
        if term.answers:  # curvatures are not taken apart
            warnings.warn(_BRANCHES, stacklevel=2)
            term = replace(term, answers=None)
        with forked_rng():
            gaussian = read(model, guide, records)
            particle = draw_particle(term.loss, model, guide, records, local=term.local)
            dtypes = {name: u.dtype for name, u in particle.latents.items()}
            mean, covariance = gaussian.read()
            prior = model_prior(model, gaussian.latents, mean, records, dtypes)
            seen = [latent for latent in gaussian.latents if latent.name in term.latents]
            values = {latent.name: particle.latents[latent.name] for latent in seen}
            particle = replace(particle.restricted(set(values)), latents=values)
            ranges = [torch.arange(latent.start, latent.stop) for latent in seen]
            places = torch.cat(ranges).to(records.device)
            _require_proper(mean, covariance)
            likelihood = Likelihood(term, particle)
            _require_smooth(likelihood, mean[places])
            method = _choose_moments(likelihood, mean[places], moments)
        widths = [latent.stop - latent.start for latent in seen]
        if method.turns and not isinstance(gaussian, DeterministicSites):
            if sites := DeterministicSites.find(model, gaussian, records):
                model, guide = sites.model, sites.draws
                term = record_term(model, guide, records, microbatch_size)
                return EPProblem.of(term, model, guide, moments, microbatch_size, lambda *_: sites)
        return EPProblem(gaussian, likelihood, prior, method, places, widths)

    @torch.enable_grad()
    def check(self) -> None:
        """:raises ModelError: some records do not behave like placeholders."""
        records = self.likelihood.term.records
        indices = torch.tensor(records.examples(), device=records.device)
        mean, _ = self.guide.read()
        # At one of these, an exponential may overflow, or all gradients may vanish.
        points = [each[self.places] for each in (mean, self.start(mean))]
        with forked_rng():
            self.moments.check(points, indices, records.rows(indices))


@torch.enable_grad()
def record_term(
    model: Callable, guide: Callable, records: Records, microbatch_size: int | None
) -> RecordTerm:
    """One record's term of the log likelihood, with enumerated latents summed out."""
    loss = TraceEnum_ELBO()
    return build_record_term(loss, model, guide, records, microbatch_size=microbatch_size)[0]


def _require_proper(mean: Tensor, covariance: Tensor) -> None:
    """:raises ModelError: powers of the guide's public initial values overflow."""
    sds = (covariance if covariance.dim() == 1 else covariance.diagonal()).sqrt()
    within = (mean.abs() <= LARGEST) & (sds >= 1 / LARGEST) & (sds <= LARGEST)
    if not within.all():
        raise ModelError(
            "The guide starts at locations or scales that are not finite, or so extreme that "
            f"their powers overflow. Start it at scales of {1 / LARGEST:g} to {LARGEST:g}."
        )


def _require_smooth(likelihood: Likelihood, z: Tensor) -> None:
    """:raises ModelError: the likelihood draws at random, or lacks a second derivative."""
    before = torch.get_rng_state()
    likelihood.log_prob(z, *likelihood.placeholder)
    if not torch.equal(before, torch.get_rng_state()):
        raise ModelError(_NO_DRAWS)
    for name, site in likelihood.observations(z, *likelihood.placeholder).items():
        if isinstance(innermost(site["fn"]), (AsymmetricLaplace, Laplace, Uniform)):
            raise ModelError(
                f"Site {name!r} has a density with kinks or jumps, which a Gaussian site cannot "
                "fit. Use DPSVI, or a smooth distribution such as StudentT."
            )


def _choose_moments(
    likelihood: Likelihood, mean: Tensor, moments: str
) -> LinearMoments | SteinMoments:
    if moments != "stein":
        try:
            found = LinearMoments(likelihood, mean)
            if moments == "linear" or not found.monotone or len(mean) > _FEW:
                return found
        except NotLinear as reason:
            if moments == "linear":
                raise ModelError(f"moments='linear' does not apply: {reason}.") from None
    return SteinMoments(likelihood, mean)
