"""VIPS's posterior with the uncertainty that the noise adds, and whether to trust it."""

from collections.abc import Mapping

import torch
from pyro.distributions import Distribution
from torch import Tensor

from pyro_dp.infer.posterior.status import (
    CHECK,
    DO_NOT_PUBLISH,
    NOISE,
    NOTHING_TO_CHECK,
    STEPS,
    Status,
)
from pyro_dp.vips.families import covariance, widened
from pyro_dp.vips.noise_response import NoiseResponse
from pyro_dp.vips.site_posterior import SitePosterior

_HIDDEN = "the privacy noise may outweigh the data in {some} of {all} intervals"
_ON_THEIR_WAY = (
    "the steps have not converged in {some} of {all} intervals, so take more, or a step_size that "
    "forgets the first ones"
)
_LEFT_OUT = "{some} of {all} intervals leave out the noise, whose effect on their family is unknown"
_UNANSWERED = "{some} of {all} intervals leave out how the E-step responds to the noise"
_BENT = "the noise is too large for a first-order estimate in {some} of {all} intervals"
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
    status = _status(
        sum((each.batch_shape + each.event_shape).numel() for each in marginals.values()),
        {
            (_HIDDEN, NOISE): hidden,
            (_ON_THEIR_WAY, STEPS): on_way,
            (_BENT, NOISE): bent,
            (_LEFT_OUT, NOISE): left_out,
            (_UNANSWERED, NOISE): unanswered,
        },
    )
    return SitePosterior(aware, plain=plain, status=status)


def _status(count: int, found: Mapping[tuple[str, str], Mapping[str, Tensor]]) -> Status:
    """
    :param count: number of all elements.
    :param found: which elements of each site have a problem, by its text and its cause.
    """
    for (text, cause), masks in found.items():
        some = sum(int(mask.sum()) for mask in masks.values())
        if some:
            most = text == _HIDDEN and 2 * some > count
            level = DO_NOT_PUBLISH if most else CHECK
            return Status(level, text.format(some=some, all=count), cause)
    return NOTHING_TO_CHECK
