"""Observation distributions as functions of few numbers a(z), for linear moments.

Each element of an observed site (one entry of its batch) has a density p(x | a). Its r numbers a
depend on the latents, such as a logit, a rate, or a mean and a scale. A :class:`Family` reads them
from the distribution, in unconstrained coordinates, and evaluates the density at other numbers.

Functions in ``_CLOSED`` return the log density of elements and its first two derivatives. Their
arguments are the distribution's numbers, in the order of its parameters, and the observed value.
Tensors broadcast.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import MaskedDistribution
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Binomial,
    Categorical,
    Distribution,
    Independent,
    NegativeBinomial,
    Normal,
    Poisson,
    biject_to,
)
from torch.nn.functional import logsigmoid
from torch.utils import _pytree as pytree

from pyro_dp.graphs.tracing import tracing
from pyro_dp.records.plate import innermost
from pyro_dp.utils.errors import PrivacyError
from pyro_dp.utils.gauss_hermite import Derivatives, by_autodiff

MAX_RANK = 2
_FARTHEST = 30.0  # largest number at which outcomes are drawn: rates of 1e13 fit into integers
_SYMMETRIC = "Cauchy", "Laplace", "Normal", "StudentT"
_CONCAVE = Bernoulli, Binomial, NegativeBinomial, Normal, Poisson


class Residuals:
    """Kinds of an observation's residuals, the derivatives of its log density."""

    BOUNDED = "bounded"  # finitely many outcomes
    NORMAL = "normal"  # symmetric, from a quadratic log density
    SCALED = "scaled"  # normal, with an unknown scale
    CENTRED = "centred"  # by outcomes that the model draws
    SUMMED = "summed"  # over latents of records, as in a mixture
    LABELS = "labels"  # finitely many outcomes, integrated over latents of records
    INTEGRATED = "integrated"  # over latents of records, whose spread may be unknown
    OTHER = "other"


class NotLinear(PrivacyError):
    """The record's likelihood is not a function of few numbers per element."""


class Family:
    """Distribution of one observed site, as a function of the numbers a.

    :param site: a site of a trace in which the latents require a gradient.
    :param most: largest rank r.
    :raises NotLinear: the rank is higher, or the distribution's parameters cannot be replaced.
    """

    def __init__(self, site: dict, most: int = MAX_RANK):
        base = innermost(site["fn"])
        self.name = site["name"]
        self.distribution = type(base)
        if not _is_built_in(self.distribution):  # its code would see many records at once
            raise NotLinear(
                f"the class of the distribution of site {self.name!r} is the user's own"
            )
        names = _parameter_names(base)
        self._varying = [n for n in names if getattr(base, n).requires_grad]
        self.constants = [n for n in names if n not in self._varying]
        self._categorical = isinstance(base, Categorical)
        self._closed = None if self.constants else closed_form(self.distribution, self._varying)
        self._ordered = self._categorical and "logits" not in base.arg_constraints
        if self._ordered and (self._closed is None or most == MAX_RANK):
            raise NotLinear(f"site {self.name!r} is categorical, and not made of logits")
        self._transforms = {}
        if self._ordered:
            self.rank = 1 + base.cutpoints.shape[-1]
        elif self._categorical:
            self.rank = base.logits.shape[-1] - 1 if self._varying else 0
        else:
            self.rank = len(self._varying)
            for name in self._varying:
                self._transforms[name] = self._transform(base.arg_constraints[name])
            if base.event_shape:
                raise NotLinear(f"an element of site {self.name!r} is a vector")
        self._num_labels = self.rank + 1 if self._categorical else 2 * isinstance(base, Bernoulli)
        if self.rank > most:
            raise NotLinear(f"site {self.name!r} depends on the latents through many numbers")

    def _transform(self, constraint: Any) -> Any:
        try:
            transform = biject_to(constraint)
        except NotImplementedError:
            transform = None
        if transform is None or transform.domain.event_dim or transform.codomain.event_dim:
            raise NotLinear(f"a parameter of site {self.name!r} has no scalar coordinate")
        return transform

    def read(self, site: dict) -> tuple[Tensor, list[Tensor]]:
        """:meth:`read_each`, with the numbers in one tensor, (E, r)."""
        numbers, rest = self.read_each(site)
        return torch.stack(numbers, dim=-1) if numbers else torch.zeros(len(rest[-1]), 0), rest

    def read_each(self, site: dict) -> tuple[list[Tensor], list[Tensor]]:
        """One record's numbers, and the other arguments of its density, (E,) each.

        The latter are constant parameters, observed value and weight (scale, and zero if masked).
        """
        base, (scale, mask) = innermost(site["fn"]), scale_and_mask(site)
        shape = base.batch_shape
        if self._ordered:
            numbers = [base.predictor, *(base.cutpoints[..., k] for k in range(self.rank - 1))]
        elif self._categorical:
            logits = base.logits
            numbers = [logits[..., k] - logits[..., -1] for k in range(self.rank)]
        else:
            numbers = [self._transforms[n].inv(getattr(base, n)) for n in self._varying]
        constant = [getattr(base, name) for name in self.constants]
        ones = torch.ones(shape, dtype=torch.float64, device=(numbers or [mask])[0].device)
        weight = torch.where(mask, ones * scale, 0.0)
        if site["value"].dim() > len(shape):
            raise NotLinear(f"site {self.name!r} observes more than its distribution has elements")
        value = site["value"].expand(shape)
        if self._categorical:  # a label out of range would raise for all; where masked, it may be
            count = base.param_shape[-1]
            inside = (value >= 0) & (value < count)
            value = value.clamp(0, count - 1)
            weight = torch.where(inside | (weight == 0), weight, torch.nan)
        elif not value.is_floating_point():  # a Bernoulli of torch asks for labels like its logits
            value = value.to(numbers[0]) if numbers else value.to(torch.get_default_dtype())
        rest = [*(x.expand(shape) for x in constant), value, weight]
        numbers, rest = ([x.expand(shape).reshape(-1) for x in each] for each in (numbers, rest))
        return numbers, rest

    def log_prob(self, numbers: Tensor, rest: list[Tensor]) -> Tensor:
        """Weighted log density of every element, (..., E), from numbers (..., E, r).

        :param rest: the other arguments from :meth:`read`, (..., E) each.
        """
        *constant, value, weight = rest
        with pyro.validation_enabled(False):  # a broken record would raise for all
            log_prob = self._made(numbers, constant).log_prob(value)
        return torch.where(weight == 0, 0.0, log_prob) * weight

    def simulated_gradients(self, numbers: Tensor, rest: list[Tensor], count: int) -> Tensor:
        """Gradients of the log density at outcomes drawn from the model, (count, ..., E, r).

        Draws come from torch's global generator, which runs a private stream. The observed value
        does not matter.
        """
        *constant, _, weight = rest
        # torch's draw never ends if a binomial's count is NaN.
        constant = [x.nan_to_num(1.0, 1.0, 1.0) for x in constant]
        near = numbers.detach().nan_to_num(0.0).clamp(-_FARTHEST, _FARTHEST)
        near = near.expand(count, *near.shape)
        with pyro.validation_enabled(False):
            outcomes = self._made(near, constant).sample().to(weight)
        shape = outcomes.shape
        rest = [x.expand(shape).flatten(0, 1) for x in (*constant, outcomes, weight)]
        numbers = near.flatten(0, 1)
        if self._closed is None:
            gradient = self.slope(numbers, rest)
        else:
            found = self.derivatives(list(numbers.unbind(-1)), rest)
            gradient = torch.stack(found.gradient, dim=-1)
        return gradient.reshape(*shape, self.rank).nan_to_num(0.0, 0.0, 0.0)

    def slope(self, numbers: Tensor, rest: list[Tensor]) -> Tensor:
        """The gradient of :meth:`log_prob`, (..., E, r), by automatic differentiation."""
        with torch.enable_grad():
            a = numbers.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.log_prob(a, rest).sum(), a)
        return gradient

    def _made(self, numbers: Tensor, constant: Sequence[Tensor]) -> Any:
        parameters = dict(zip(self.constants, constant, strict=True))
        if self._categorical:
            last = torch.zeros_like(numbers[..., :1])
            parameters = {"logits": torch.cat([numbers, last], dim=-1)}
        else:
            for name, number in zip(self._varying, numbers.unbind(-1), strict=True):
                parameters[name] = self._transforms[name](number)
        return self.distribution(**parameters)

    def derivatives(self, numbers: list[Tensor], rest: list[Tensor]) -> Derivatives:
        """Derivatives of :meth:`log_prob` by r numbers, (..., E) each."""
        if self._closed is None:
            return by_autodiff(partial(self.log_prob, rest=rest), numbers)
        value, weight = rest
        found = self._closed(numbers, value)
        if not tracing() and (weight == 1).all():
            return found
        parts = [torch.where(weight == 0, 0.0, x) * weight for x in pytree.tree_leaves(found)]
        count = len(numbers)
        return Derivatives(parts[0], parts[1 : 1 + count], parts[1 + count :])

    @property
    def kind(self) -> type[Distribution] | None:
        """Bernoulli, or Normal of constant scale, if it is exactly that class; else None."""
        if self.distribution in (Bernoulli, dist.Bernoulli):
            return Bernoulli
        normal = self.distribution in (Normal, dist.Normal) and self._varying == ["loc"]
        return Normal if normal else None

    @property
    def is_scaled(self) -> bool:
        """Whether it is a Normal whose location and scale both depend on the latents."""
        return self.residuals == Residuals.SCALED and self._varying == ["loc", "scale"]

    @property
    def is_symmetric(self) -> bool:
        """Whether residuals are distributed symmetrically, so clipping causes no bias."""
        symmetric = (getattr(dist, name) for name in _SYMMETRIC)
        return self.distribution in symmetric and self._varying == ["loc"]

    @property
    def is_smooth(self) -> bool:
        """Whether derivatives of all orders in the numbers have about the same size."""
        return self._closed in (poisson, negative_binomial)

    @property
    def is_concave(self) -> bool:
        """Whether the log density is concave in its numbers, or nearly so (with a scale)."""
        return issubclass(self.distribution, _CONCAVE)

    @property
    def residuals(self) -> str:
        if self._num_labels:
            return Residuals.BOUNDED
        if self.distribution not in (Normal, dist.Normal):
            return Residuals.OTHER
        return Residuals.NORMAL if self.kind is Normal else Residuals.SCALED

    def largest_gradient(self, numbers: Tensor, rest: list[Tensor]) -> Tensor | None:
        """Largest absolute gradient of the log density over all outcomes, (..., E, r).

        None if there are infinitely many outcomes. The observed value does not matter.
        """
        *constant, value, weight = rest
        largest = None
        for label in range(self._num_labels):
            other = [*constant, torch.full_like(value, label), weight]
            gradient = self.slope(numbers, other).abs()
            largest = gradient if largest is None else largest.maximum(gradient)
        return largest


def residuals_of(families: Sequence[Family]) -> str:
    """The kind of :class:`Residuals` of several families together."""
    kinds = {family.residuals for family in families}
    if len(kinds) == 1:
        return kinds.pop()
    scaled = Residuals.SCALED in kinds and Residuals.OTHER not in kinds
    return Residuals.SCALED if scaled else Residuals.OTHER


def scale_and_mask(site: dict) -> tuple[Any, Tensor]:
    """Scale and mask of a site and its wrappers, which broadcast to the innermost distribution."""
    fn, scale, masks = site["fn"], torch.as_tensor(site["scale"]), []
    if site["mask"] is not None:
        masks.append(torch.as_tensor(site["mask"]))
    while isinstance(fn, (Independent, MaskedDistribution)):
        if isinstance(fn, Independent):
            dims = (1,) * fn.reinterpreted_batch_ndims
            scale = scale.reshape(*scale.shape, *dims)
            masks = [mask.reshape(*mask.shape, *dims) for mask in masks]
        else:
            masks.append(torch.as_tensor(fn._mask))
        fn = fn.base_dist
    together = torch.ones((), dtype=torch.bool)
    for mask in masks:
        together = together & mask
    return scale, together


def _parameter_names(base: Distribution) -> list[str]:
    """The constructor's parameters, with either logits or probs, as the user passed them."""
    names = list(base.arg_constraints)
    if "probs" in names and "logits" in names:
        # The other one is computed on demand, and normalised for a Categorical.
        names.remove("logits" if "probs" in vars(base) else "probs")
    if not names or not all(isinstance(getattr(base, name, None), Tensor) for name in names):
        raise NotLinear(f"distribution {type(base).__name__} is not made of tensors")
    return names


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
    count = log_count.exp()
    with_value = count + value
    p = logit.sigmoid()
    expected = with_value * p
    log_q = logsigmoid(-logit)
    constant, first, second = _gamma_ratios(count, value)
    slope = count * (first + log_q)
    return Derivatives(
        constant + value * logit + with_value * log_q,
        [slope, value - expected],
        [slope + count.square() * second, -count * p, expected * (p - 1)],
    )


def _gamma_ratios(count: Tensor, value: Tensor) -> list[Tensor]:
    """The log binomial coefficient of count + value - 1 and value, and its derivatives in count.

    If all records have the same count, each different value is computed once.
    """
    shared = value.dim() == 2 and len(value) > 0 and not tracing()
    if shared and (count == count[..., :1, :1]).all():
        places = value.nan_to_num(0.0).clamp(0, len(value)).long()
        values = torch.arange(int(places.max()) + 1).to(value)
        if not (places == value).all():
            values, places = value.unique(return_inverse=True)
        return [x[..., 0, places] for x in _ratios(count[..., :1, :1], values)]
    return _ratios(count, value)


def _ratios(count: Tensor, value: Tensor) -> list[Tensor]:
    with_value = count + value
    return [
        with_value.lgamma() - count.lgamma() - (value + 1).lgamma(),
        with_value.digamma() - count.digamma(),
        torch.polygamma(1, with_value) - torch.polygamma(1, count),
    ]


def categorical(a: list[Tensor], value: Tensor) -> Derivatives:
    """The numbers are all logits except the last one, which is zero."""
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
    second = [slope * (1 - 2 * x) for slope, x in zip(slopes, below, strict=True)]
    whole = sum(slopes[1:], slopes[0])
    hessian = [sum(second[1:], second[0]) - whole.square()]
    for i, slope in enumerate(slopes):
        hessian.append(whole * slope - second[i])
        hessian += [-slope * other for other in slopes[:i]]
        hessian.append(second[i] - slope.square())
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
    """The closed form of a built-in distribution with these varying parameters, if any."""
    if not _is_built_in(distribution):
        return None
    return _CLOSED.get((distribution.__name__, *parameters))


def _is_built_in(distribution: type) -> bool:
    """Whether the class is torch's or Pyro's, whose densities treat each element separately."""
    modules = torch.distributions, dist
    return distribution in (getattr(each, distribution.__name__, None) for each in modules)
