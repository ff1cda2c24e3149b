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


_CLOSED: dict[tuple[str, ...], Closed] = {
    ("Bernoulli", "logits"): bernoulli,
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
