"""The posterior of a run of DPSVI from what it released: what a regression needs beside that."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_dp.infer.model_prior import model_prior
from pyro_dp.infer.posterior.gaussian import Gaussian
from pyro_dp.infer.posterior.gaussian_guide import GaussianGuide
from pyro_dp.infer.posterior.prior_factor import Prior
from pyro_dp.infer.svi.gradient_regression import Regressed, TooFew, regressed
from pyro_dp.infer.svi.released_gradients import ReleasedGradients
from pyro_dp.records.global_draw import draw_particle
from pyro_dp.records.record_term import RecordTerm
from pyro_dp.records.records import Records
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import inverse
from pyro_dp.utils.rng import forked_rng

_NO_GAUSSIAN = "the guide is not one Gaussian of all latents in unconstrained space"
_NO_PRIOR = "the log density of the prior is flat or linear somewhere"
_NOT_FINITE = "the regression left the finite numbers"


class NotRegressed(Exception):
    """No posterior comes of the released gradients; the text is a clause that says why."""


def gaussian_guide(model: Callable, guide: Callable, records: Records) -> GaussianGuide:
    """:raises NotRegressed: the guide is no Gaussian."""
    with forked_rng():
        try:
            return GaussianGuide(model, guide, records)
        except ModelError:
            raise NotRegressed(_NO_GAUSSIAN) from None


@dataclass(eq=False)
class RegressionProblem:
    """A Gaussian guide, the prior of its d latents, and which of them records see.

    The prior as a factor depends on the posterior, unless it is Gaussian; what records do not see,
    follows from it.

    :param places: of the coordinates of the released gradients among all, (s,).
    """

    guide: GaussianGuide
    prior: Prior
    places: Tensor
    _factor: Gaussian = field(init=False)  # the latest

    def __post_init__(self) -> None:
        mean, covariance = self.guide.read()
        full = covariance.diag() if covariance.dim() == 1 else covariance
        self._factor = self.prior.factor(mean, full)

    @staticmethod
    @torch.enable_grad()
    def build(
        model: Callable, guide: Callable, gaussian: GaussianGuide, term: RecordTerm
    ) -> "RegressionProblem":
        """
        :param gaussian: the guide, read as one.
        :raises NotRegressed: the prior has no curvature in places.
        """
        with forked_rng():
            particle = draw_particle(term.loss, model, guide, term.records)
            dtypes = {name: u.dtype for name, u in particle.latents.items()}
            try:
                prior = model_prior(model, gaussian, term.records, dtypes)
            except ModelError:
                raise NotRegressed(_NO_PRIOR) from None
        latents = {latent.name: latent for latent in gaussian.latents}
        seen = [latents[name] for name in particle.restricted(term.latents).latents]
        places = torch.cat([torch.arange(each.start, each.stop) for each in seen])
        return RegressionProblem(gaussian, prior, places.to(term.records.device))

    def solved(self, history: ReleasedGradients, bias: float) -> Regressed:
        """The posterior of all d latents, on their device.

        :param bias: of a coordinate of the gradients, by clipping, about.
        :raises NotRegressed: what was released tells no Gaussian.
        """
        try:
            return self._solved(history, bias)
        except TooFew as why:
            raise NotRegressed(str(why)) from None
        except (ArithmeticError, torch.linalg.LinAlgError):
            raise NotRegressed(_NOT_FINITE) from None

    def moved(self, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Variances of the mean, (d,), by an error in the gradients' mean, to first order.

        :param covariance: of the posterior without noise, (d, d).
        :returns: for an error of unit covariance, and of that of the likelihood's curvature.
        """
        gain = covariance[:, self.places]
        seen = covariance[self.places.unsqueeze(1), self.places]
        curvature = inverse(seen) - self._marginal().precision
        of_curvature = (gain @ curvature * gain).sum(dim=1)
        return gain.square().sum(dim=1), of_curvature.clamp(min=0.0)

    def _solved(self, history: ReleasedGradients, bias: float) -> Regressed:
        found = regressed(history, self._prior_of_seen, bias)
        device = self.places.device
        plain, aware = (
            self._extended(Gaussian.from_moments(found.mean, each).to(device))
            for each in (found.covariance, found.aware)
        )
        information = torch.ones_like(plain.mean)
        information[self.places] = found.information.to(device)
        unseen = torch.zeros_like(plain.mean, dtype=torch.bool)
        unseen[self.places] = found.unseen.to(device)
        mean, covariances = plain.mean, (plain.covariance, aware.covariance)
        if not all(each.isfinite().all() for each in (mean, *covariances)):
            raise ArithmeticError
        return Regressed(mean, *covariances, information, unseen, found.reason)

    def _prior_of_seen(self, mean: Tensor, covariance: Tensor) -> Gaussian:
        """The prior as a factor of the latents that records see, at a posterior of these."""
        seen = Gaussian.from_moments(mean, covariance).to(self.places.device)
        posterior = self._extended(seen)
        self._factor = self.prior.factor(posterior.mean, posterior.covariance)
        return self._marginal().to(mean.device)

    def _extended(self, posterior: Gaussian) -> Gaussian:
        """A posterior of the latents that records see, and with it of all."""
        evidence = posterior / self._marginal()
        return self._factor * evidence.embedded(self.places, self.guide.size)

    def _marginal(self) -> Gaussian:
        if len(self.places) == self.guide.size:
            return Gaussian(
                self._factor.eta[self.places],
                self._factor.precision[self.places.unsqueeze(1), self.places],
            )
        covariance = self._factor.covariance[self.places.unsqueeze(1), self.places]
        return Gaussian.from_moments(self._factor.mean[self.places], covariance)
