"""Log densities of elements with their first two derivatives, in closed form.

Each is a function of the distribution's numbers, in unconstrained coordinates and in the order of
its parameters, and of the observed value. Tensors broadcast.
"""

import math
from collections.abc import Callable, Sequence

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pyro_dp.infer.ep.gauss_hermite import Derivatives

Closed = Callable[[list[Tensor], Tensor], Derivatives]


def bernoulli(a: list[Tensor], value: Tensor) -> Derivatives:
    """The number is a logit."""
    (logit,) = a
    p = logit.sigmoid()
    return Derivatives(value * logit + logsigmoid(-logit), [value - p], [p * (p - 1)])


def poisson(a: list[Tensor], value: Tensor) -> Derivatives:
    """The number is a log rate."""
    (log_rate,) = a
    rate = log_rate.exp()
    constant = (value + 1).lgamma()
    return Derivatives(value * log_rate - rate - constant, [value - rate], [-rate])


def normal(a: list[Tensor], value: Tensor) -> Derivatives:
    """The numbers are a location and a log scale."""
    loc, log_scale = a
    inverse = (-log_scale).exp()
    u = (value - loc) * inverse
    square = u.square()
    slope = u * inverse
    return Derivatives(
        -square / 2 - (log_scale + math.log(2 * math.pi) / 2),
        [slope, square - 1],
        [-inverse.square(), -2 * slope, -2 * square],
    )


def negative_binomial(a: list[Tensor], value: Tensor) -> Derivatives:
    """The numbers are the logarithm of the total count, and a logit."""
    log_count, logit = a
    count, with_value = log_count.exp(), log_count.exp() + value
    p = logit.sigmoid()
    log_q = logsigmoid(-logit)
    constant = with_value.lgamma() - count.lgamma() - (value + 1).lgamma()
    first = with_value.digamma() - count.digamma()
    second = torch.polygamma(1, with_value) - torch.polygamma(1, count)
    slope = count * (first + log_q)
    return Derivatives(
        constant + value * logit + with_value * log_q,
        [slope, value - with_value * p],
        [slope + count.square() * second, -count * p, with_value * p * (p - 1)],
    )


def categorical(a: list[Tensor], value: Tensor) -> Derivatives:
    """The numbers are all logits without the last one, which is zero."""
    a = list(torch.broadcast_tensors(*a))
    logits = torch.stack([*a, torch.zeros_like(a[0])])
    log_p = logits.log_softmax(0)
    p = log_p.exp().unbind()
    chosen = [value == k for k in range(len(logits))]
    return Derivatives(
        sum((torch.where(c, x, 0.0) for c, x in zip(chosen, log_p, strict=True)), 0.0 * log_p[0]),
        [c.to(x) - x for c, x in zip(chosen[:-1], p, strict=False)],
        [p[i] * (p[j] - float(i == j)) for i in range(len(a)) for j in range(i + 1)],
    )


def ordered_logistic(a: list[Tensor], value: Tensor) -> Derivatives:
    """The numbers are the predictor and the cutpoints. Probabilities are clamped as torch's are."""
    predictor, *cutpoints = a
    below = [(cut - predictor).sigmoid() for cut in cutpoints]
    # The probability is a sum of distribution functions with signs 1, -1 and 0.
    signs = [(value == k).to(x) - (value == k + 1).to(x) for k, x in enumerate(below)]
    p = sum((s * x for s, x in zip(signs, below, strict=True)), (value == len(below)).to(below[0]))
    least = torch.finfo(p.dtype).eps
    inverse = torch.where((p >= least) & (p <= 1 - least), p.reciprocal(), 0.0)
    slopes = [s * x * (1 - x) * inverse for s, x in zip(signs, below, strict=True)]
    bends = [slope * (1 - 2 * x) for slope, x in zip(slopes, below, strict=True)]
    whole, bend = sum(slopes[1:], slopes[0]), sum(bends[1:], bends[0])
    hessian = [bend - whole.square()]
    for i, slope in enumerate(slopes):
        hessian.append(whole * slope - bends[i])
        hessian += [-slope * other for other in slopes[:i]]
        hessian.append(bends[i] - slope.square())
    return Derivatives(p.clamp(least, 1 - least).log(), [-whole, *slopes], hessian)


_CLOSED: dict[tuple[str, ...], Closed] = {
    ("Bernoulli", "logits"): bernoulli,
    ("Categorical", "logits"): categorical,
    ("OrderedLogistic", "predictor", "cutpoints"): ordered_logistic,
    ("Poisson", "rate"): poisson,
    ("Normal", "loc", "scale"): normal,
    ("NegativeBinomial", "total_count", "logits"): negative_binomial,
}


def closed_form(distribution: type, parameters: Sequence[str]) -> Closed | None:
    """
    :param distribution: a class of torch's or of Pyro's own; a subclass may mean anything.
    :param parameters: which all vary.
    """
    name = distribution.__name__
    if distribution not in (getattr(each, name, None) for each in (torch.distributions, dist)):
        return None
    return _CLOSED.get((name, *parameters))
