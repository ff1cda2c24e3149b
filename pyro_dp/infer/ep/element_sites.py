"""Sites of single elements, on the one or two numbers that an observation depends on.

:func:`element_sites` uses quadrature around each element's mode
(:mod:`~pyro_dp.utils.gauss_hermite`), or a cheaper method that is accurate enough. A Gaussian of
fixed scale has a site in closed form. In a narrow cavity, nodes around the cavity's mean suffice.
For Bernoulli outcomes, a limit on the width ensures agreement to 1e-10. Other elements use three
nodes per number if these are accurate to 1e-6, or else six. The cavity's width, in units of the
site, decides this for counts on a log scale. For other families, one node less must agree. The
choice for an element depends on its own numbers alone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Normal

from pyro_dp.graphs.tracing import tracing
from pyro_dp.infer.ep.observation_family import Family
from pyro_dp.utils.gauss_hermite import NODES, Tilted, moments_near_mean, tilted_moments

_USUAL = 2.0  # residuals, in standard deviations
# Up to these limits, 15 nodes around the cavity's mean are as good as around the mode.
_WIDEST, _FARTHEST = 0.25, 12.0  # variance of a logit, and its distance from zero
_AT_A_TIME = 2**16  # nodes, which stay in the processor's cache
# Nodes per number, and the largest width at which they suffice in a smooth family. Errors were at
# most 5e-7 in half a million elements of all scales.
_FEW, _AGREEMENT = ((3, 0.006), (6, 0.06)), 1e-6
Cheap = tuple[int, Callable]  # nodes per number, and the function
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(15)


class ElementSites(NamedTuple):
    """Sites of E elements of each of B records, on r numbers.

    :param precision: (B, E, r, r).
    :param residual: (B, E, r).
    :param largest: the largest absolute residuals for any outcome, (B, E, r).
    """

    precision: Tensor
    residual: Tensor
    largest: Tensor


def element_sites(family: Family, mean: Tensor, variance: Tensor, rest: Any) -> ElementSites:
    """Sites in a cavity.

    :param mean: the numbers' mean in the cavity, (B, E, r), in float64.
    :param variance: their covariance, (B, E, r, r).
    :param rest: the other arguments of the family's density, (B, E) each.
    """
    if family.kind is Normal:
        return _normal(mean, rest)
    if family.is_scaled:
        return _scaled(mean, variance, rest)
    if tracing():
        return by_quadrature(family, mean, variance, rest)
    cheap: list[Cheap] = [(few, partial(_near_mean_in_part, few, most)) for few, most in _FEW]
    if family.kind is Bernoulli:
        cheap = [(len(_NODES), _logits_in_part)]
    return _by_cheapest(cheap, family, mean, variance, rest)


def by_quadrature(family: Family, mean: Tensor, variance: Tensor, rest: Any) -> ElementSites:
    """:func:`element_sites` by quadrature around the mode, for any family and cavity."""
    density = partial(family.derivatives, rest=rest)
    return _sites(family, tilted_moments(density, mean, variance), mean, rest)


def _by_cheapest(
    cheap: list[Cheap], family: Family, mean: Tensor, variance: Tensor, rest: list[Tensor]
) -> ElementSites:
    """Each element's site by the first function that is accurate for it, or by quadrature."""
    rank = mean.shape[-1]
    nodes, function = cheap[0] if cheap else (NODES[rank], by_quadrature)
    size = _AT_A_TIME // nodes**rank
    parts = zip(*(x.split(size) for x in (mean, variance, *rest)), strict=True)
    found = [function(family, m, v, x) for m, v, *x in parts]
    if not cheap:
        return _stacked(found)
    each, accurate = zip(*found, strict=True)
    sites, others = _stacked(each), ~torch.cat(accurate)
    if not others.any():
        return sites
    slow = [x[others].unsqueeze(1) for x in (mean, variance, *rest)]
    left = _by_cheapest(cheap[1:], family, slow[0], slow[1], slow[2:])
    pairs = zip(sites, left, strict=True)
    return ElementSites(*(site.index_put((others,), new.squeeze(1)) for site, new in pairs))


def _logits_in_part(
    family: Family, mean: Tensor, variance: Tensor, rest: list[Tensor]
) -> tuple[ElementSites, Tensor]:
    """Sites of Bernoulli outcomes, and whether each is accurate, (B, E)."""
    value, weight = rest
    logit, width = mean[..., 0], variance[..., 0, 0]
    accurate = ((value == 0) | (value == 1)) & (weight == 1) & (logit.abs() < _FARTHEST)
    return _bernoulli(logit, width, value), accurate & (width < _WIDEST)  # false for a NaN


def _near_mean_in_part(
    count: int, widest: float, family: Family, mean: Tensor, variance: Tensor, rest: list[Tensor]
) -> tuple[ElementSites, Tensor]:
    """Sites by few nodes, and whether each is accurate, (B, E)."""
    density = partial(family.derivatives, rest=rest)
    sites = _sites(family, moments_near_mean(density, mean, variance, count), mean, rest)
    size = sites.precision.diagonal(dim1=2, dim2=3).abs()
    if family.is_smooth:
        unit = (1 + size.amax(dim=2)).maximum(sites.residual.square().amax(dim=2))
        return sites, variance.diagonal(dim1=2, dim2=3).sum(dim=2) * unit <= widest
    precision, residual = moments_near_mean(density, mean, variance, count - 1).site()
    gap = (precision - sites.precision).diagonal(dim1=2, dim2=3).abs()
    quick = gap <= _AGREEMENT * size
    quick &= (residual - sites.residual).abs() <= _AGREEMENT * (sites.residual.abs() + size.sqrt())
    return sites, quick.all(dim=2)


def _sites(family: Family, tilted: Tilted, mean: Tensor, rest: list[Tensor]) -> ElementSites:
    precision, residual = tilted.site()
    largest = family.largest_gradient(mean, rest)
    return ElementSites(precision, residual, _usual(precision) if largest is None else largest)


def _stacked(parts: Sequence[ElementSites]) -> ElementSites:
    return ElementSites(*map(torch.cat, zip(*parts, strict=True)))


def _usual(precision: Tensor) -> Tensor:
    """Residuals that are seldom exceeded, (B, E, r)."""
    return _USUAL * precision.diagonal(dim1=2, dim2=3).clamp(min=0.0).sqrt()


def _normal(mean: Tensor, rest: Any) -> ElementSites:
    """Sites on a location, which are the likelihood itself."""
    scale, value, weight = (each.unsqueeze(-1) for each in rest)
    precision = weight / scale.square()
    residual = torch.where(weight == 0, 0.0, precision * (value - mean))
    precision = precision.unsqueeze(-1) + 0 * mean.unsqueeze(-1)  # NaN where that is broken
    return ElementSites(precision, residual, _usual(precision))


def _scaled(mean: Tensor, variance: Tensor, rest: Any) -> ElementSites:
    """Sites on a location and the logarithm of a scale, in closed form.

    The residual is the mean score in the cavity, and the precision is the Fisher information, which
    has no cross terms. Its sum over records equals that of the observed curvature where the scores
    sum to zero. Elsewhere the observed curvature may be indefinite, and mislead the search.
    """
    value, weight = rest
    location, logarithm = mean.unbind(-1)
    (spread, cross), (_, width) = (row.unbind(-1) for row in variance.unbind(-2))
    precise = (2 * (width - logarithm)).exp()  # mean of scale^-2
    away = value - location + 2 * cross
    scores = precise * away, precise * (away.square() + spread) - 1
    residual = torch.stack([torch.where(weight == 0, 0.0, weight * x) for x in scores], dim=-1)
    information = torch.stack([weight * precise, 2 * weight + 0 * logarithm], dim=-1)
    precision = torch.diag_embed(information)
    return ElementSites(precision, residual, _usual(precision))


def _bernoulli(mean: Tensor, variance: Tensor, value: Tensor) -> ElementSites:
    """Sites of a logit in a narrow cavity, with the same nodes for all; (B, E) each.

    Let t be the logit with the outcome's sign. The likelihood is p = sigmoid(t), its log gradient
    1 - p and its curvature p (1 - p). All moments of the tilted distribution are sums
    of p, p^2 and p^3 over the nodes.
    """
    shape = mean.shape
    sign = (2 * value - 1).flatten()
    centre, width = mean.flatten() * sign, variance.flatten().clamp(min=0.0).sqrt()
    nodes = torch.from_numpy(_NODES).to(centre)
    weights = torch.from_numpy(np.stack([_WEIGHTS * _NODES**k for k in range(3)])).to(centre)
    p = torch.outer(nodes, width).add_(centre).sigmoid_()  # (15, B E)
    total, first, second = weights @ p
    power = p * p
    likely, cross = weights[:2] @ power
    (square,) = weights[:1] @ power.mul_(p)
    means = (x / total for x in (likely, square, first, second, cross))
    likely, square, first, second, cross = means
    # In units of the cavity's standard deviation: shift `first`, spread, and covariance with p.
    gain = (cross - likely * first) / (second - first * first)
    precision = likely - square - (square - likely * likely) + gain * (cross - likely * first)
    residual = (1 - likely + gain * first) * sign
    largest = centre.sigmoid_()
    largest = largest.maximum(1 - largest)
    return ElementSites(
        precision.reshape(*shape, 1, 1), residual.reshape(*shape, 1), largest.reshape(*shape, 1)
    )
