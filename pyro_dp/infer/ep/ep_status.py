"""The status of DPSEP's posterior: what released numbers say against its intervals."""

import math

import torch

from pyro_dp.infer.ep.ep_state import EPState
from pyro_dp.infer.ep.observation_family import Residuals
from pyro_dp.infer.posterior.summary import (
    CHECK,
    CLIPPING,
    DO_NOT_PUBLISH,
    MODEL,
    NOISE,
    STEPS,
    Status,
)
from pyro_dp.utils.linalg import dense, powers

_LITTLE = 0.8  # an interval this close to the prior's width counts as the prior's
_FAR_AWAY = 4.0  # longest trusted last step, in squared standard deviations per direction
_LARGEST_NOISE = 1.5  # a matrix's noise, relative to its mean
_TOO_NARROW = 1.5  # variance of the estimate, relative to the posterior's
_LARGEST_SCORE = 10.0  # norm of a score, over the root of the curvature; few are larger
_NOT_CONCAVE = "the log likelihood is not concave in {count} of {dim} directions at the last look"
_CURVED = (
    "records see products or sums of curves of the {dim} latents, and the evidence is quadratic. "
    "Name what they see by pyro.deterministic, outside the plate"
)
_OVERDISPERSED = (
    "outcomes vary at least {dispersion:.1f} times as much as the model says, and intervals may be "
    "{ratio:.1f} times too narrow"
)


def status(state: EPState) -> Status:
    """Whether the posterior can be published."""
    seen, pooled = state.seen, state.seen.pooled
    if pooled is None:
        return Status(DO_NOT_PUBLISH, "there was no look at the data yet", STEPS)
    places = state.problem.places
    prior = dense(state.prior.precision).diagonal()[places]
    variances = state.aware.covariance.diagonal()[places]
    remains = (variances * prior).sqrt().median().item()
    if remains > _LITTLE:
        reason = f"the data said little: intervals are {remains:.2f} times as wide as the prior's"
        return Status(DO_NOT_PUBLISH, reason, NOISE)
    mean = state.posterior.mean[places]
    way = mean - seen.looks[-1].point
    precision = state.prior_seen() + pooled.information(mean)
    step = (way @ precision @ way).item() / state.plan.dim
    if step > _FAR_AWAY or not state.finished:
        reason = f"the mean still moved by {math.sqrt(step):.1f} standard deviations in the end"
        return Status(CHECK, reason, STEPS)
    if count := _num_convex(state):
        reason = _NOT_CONCAVE.format(count=count, dim=state.plan.dim)
        return Status(CHECK, reason, STEPS)
    bent = pooled.relative(pooled.bending(mean), mean)
    cut = pooled.relative(state.squared_bias * pooled.geometry, mean)
    if bent + cut > 1:
        share = math.sqrt(bent + cut)
        if cut > bent:
            reason = f"clipping may shift the mean by {share:.1f} standard deviations"
            return Status(CHECK, reason, CLIPPING)
        reason = f"the search may have missed the mean by {share:.1f} standard deviations"
        return Status(CHECK, reason, STEPS)
    dispersion = _dispersion(state)
    varies = 1 + (dispersion - 1) * pooled.relative(pooled.curvature, mean)
    if varies > _TOO_NARROW:
        ratios = {"dispersion": dispersion, "ratio": math.sqrt(varies)}
        return Status(CHECK, _OVERDISPERSED.format(**ratios), MODEL)
    if state.problem.moments.turns and state.plan.multiplier > 0:
        return Status(CHECK, _CURVED.format(dim=state.plan.dim), STEPS)
    return Status()


def _dispersion(state: EPState) -> float:
    """At least so large is the scores' variance, relative to the curvature.

    If the model holds, the two are equal (the information identity; White 1982). Norms of
    bounded residuals do not depend on the outcome, and say nothing.

    Records' curvatures count as if they were all alike. In a mixture or an integral they are not,
    and cancel in the sum.
    """
    says_little = state.plan.residuals == Residuals.BOUNDED or not state.problem.moments.concave
    if not state.seen.histograms.counts or says_little:
        return 0.0
    frame, pooled = state.required_frame, state.seen.required_pooled
    point = state.posterior.mean[state.problem.places]
    curvature = (frame.root @ pooled.curvature @ frame.root).trace().item() / state.plan.size
    squared = state.seen.histogram(point).least_mean_square(_LARGEST_SCORE * math.sqrt(curvature))
    scores = squared - frame.counted**2 - (frame.weight * curvature) ** 2
    return scores / curvature


def _num_convex(state: EPState) -> int:
    """The number of directions in which the posterior's log density is convex at the last look.

    The noise's largest eigenvalue is about sqrt(2 d) times its standard deviation.
    """
    last = state.seen.looks[-1]
    (root,) = powers(last.geometry, (-0.5,))
    values = torch.linalg.eigvalsh(root @ (last.curvature + state.prior_seen()) @ root)
    return int((values < -_LARGEST_NOISE * last.curvature_sd * math.sqrt(2 * state.plan.dim)).sum())
