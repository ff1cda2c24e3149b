"""Of which coefficients DPSEP's intervals may not hold what they say: post-processing."""

import torch
from torch import Tensor

from pyro_dp.infer.ep.approximation import Approximation
from pyro_dp.infer.ep.evidence import power
from pyro_dp.infer.ep.whitened import WhitenedApproximation
from pyro_dp.infer.posterior.doubts import (
    HIDDEN,
    MANY_CLIPPED,
    NOT_ARRIVED,
    everywhere,
    mostly_in,
)
from pyro_dp.utils.linalg import dense


def doubts(found: Approximation | WhitenedApproximation, *, biased: bool) -> dict[str, Tensor]:
    """Masks of all latents, (d,), by reason.

    In hidden directions the noise says more than the records; what they see is what the run's
    warning counts. A coefficient is doubtful if most of its variance lies there. What records do
    not see themselves, as the scale of effects, is as doubtful as most of what they see. All are
    doubtful if the steps have not arrived.

    :param biased: whether what was cut off matters.
    """
    mean, places = found.posterior.mean, found.problem.places
    seen = _hidden(found)
    hidden = torch.full_like(mean, 2 * int(seen.sum()) > len(seen), dtype=torch.bool)
    hidden = hidden.index_copy(0, places, seen)
    masks = {HIDDEN: hidden}
    if biased:
        masks[MANY_CLIPPED] = everywhere(mean)
    if found.unfinished:
        masks[NOT_ARRIVED] = everywhere(mean)
    return masks


def _hidden(found: Approximation | WhitenedApproximation) -> Tensor:
    places = found.problem.places
    prior = dense(found.prior.precision).diagonal()[places].mean()
    if isinstance(found, Approximation):
        precision = found.average.known.precision
        radius = found.structure.noise_radius(found.average.noise_variance**0.5 / found.weight)
        if precision.dim() == 1:
            return precision < radius
        values, vectors = torch.linalg.eigh(precision)
        return mostly_in(vectors, 1 / (prior + values), values < radius)
    if found.known is None:  # there were norms alone
        return everywhere(places)
    root = power(found.known.curvature, -0.5)
    left, vectors = torch.linalg.eigh(root @ found.known.information @ root)
    return mostly_in(root @ vectors, torch.ones_like(left), left < 0.5)
