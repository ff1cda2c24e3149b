"""VIPS's posterior with the uncertainty that the noise adds, and where not to trust it."""

from collections.abc import Mapping

import torch
from pyro.distributions import Distribution
from torch import Tensor

from pyro_dp.infer.posterior.doubts import HIDDEN
from pyro_dp.vips.families import covariance, widened
from pyro_dp.vips.noise_response import NoiseResponse
from pyro_dp.vips.site_posterior import SitePosterior

_LEFT_OUT = "the effect of the noise on a distribution of this family is unknown, and left out"
_UNANSWERED = "the E-step's response to the noise is unknown for this model, and left out"
_BENT = "the noise is too large for a first-order estimate of its effect"
ON_THEIR_WAY = "the steps have not converged: take more, or a step_size that forgets the first ones"
_MUCH = 0.5  # of a standard deviation


def noise_aware(
    marginals: Mapping[str, Distribution],
    response: NoiseResponse,
    feedback: Mapping[tuple[str, str], Tensor] | None,
    hidden: Mapping[str, Tensor],
) -> SitePosterior:
    """
    :param marginals: of variational Bayes, by site.
    :param feedback: what :meth:`ConjugateModel.feedback` says.
    :param hidden: what :meth:`ConjugateModel.hidden` says.
    """
    sites = {site for _, site in feedback or {}}
    moved = response.moved(feedback, {site: covariance(marginals[site]) for site in sites})
    plain, aware, bent, on_way, left_out, unanswered = {}, {}, {}, {}, {}, {}
    for site, marginal in marginals.items():
        everywhere = torch.ones(marginal.batch_shape + marginal.event_shape, dtype=torch.bool)
        if site not in moved.noise:
            plain[site] = aware[site] = marginal
            left_out[site] = everywhere
            continue
        plain[site] = widened(marginal, torch.cat([moved.spread[site], moved.way[site]], dim=-1))
        aware[site] = widened(plain[site], moved.noise[site])
        much = _MUCH * aware[site].variance.sqrt()
        bent[site] = moved.bend[site].squeeze(-1) > much
        on_way[site] = moved.way[site].squeeze(-1).abs() > much
        if feedback is None:
            unanswered[site] = everywhere
    doubts = {HIDDEN: hidden, _LEFT_OUT: left_out, _UNANSWERED: unanswered}
    doubts |= {_BENT: bent, ON_THEIR_WAY: on_way}
    return SitePosterior(aware, plain=plain, doubts=doubts)
