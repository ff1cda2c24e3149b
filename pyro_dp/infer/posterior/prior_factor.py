"""The prior as a log density of the flat vector of latents, and as a Gaussian factor."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyro
import torch
from pyro import poutine
from pyro.distributions import Unit
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal, biject_to

from pyro_dp.graphs.tracing import Compiler, NotTraceable, called_by_torch, trace
from pyro_dp.records.global_draw import Latent
from pyro_dp.records.plate import Outside, innermost, is_random
from pyro_dp.records.records import Records, on_placeholders
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import Gaussian, apply, cholesky, floored, inverse
from pyro_dp.utils.torch_state import forked_rng

_NUM_DRAWS = 64
_LEAST_PRECISION = 1e-4  # eigenvalue of a factor if the prior is not log-concave
_DAMPING = 0.5  # weight of a new factor if the prior is not Gaussian
_MOST_ROUNDS = 50
_ROUNDS = 3  # with a Gaussian prior, where mean and noise depend on each other
_SETTLED = 1e-4  # the longest last step, in standard deviations
_LONGEST, _UNDAMPED = 2.0, 0.003  # the longest step, and the longest undamped one, likewise
_BATCH = 128  # points of one call
Derivatives = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class PriorDensity:
    """The log density of a model without arguments, as a function of the flat vector (d,)."""

    model: Callable
    latents: Sequence[Latent]
    dtypes: dict[str, torch.dtype]

    @property
    def size(self) -> int:
        """d."""
        return self.latents[-1].stop

    def __call__(self, z: Tensor) -> Tensor:
        return self.trace(z)[1]

    def trace(self, z: Tensor) -> tuple[poutine.Trace, Tensor]:
        """The model's trace at the latents (d,), and their log density in this space."""
        values, log_volume = {}, torch.zeros((), dtype=torch.float64, device=z.device)
        for latent in self.latents:
            u = latent.part(z).to(self.dtypes[latent.name])
            values[latent.name] = latent.transform(u)
            volume = latent.transform.log_abs_det_jacobian(u, values[latent.name])
            log_volume = log_volume + volume.sum()
        trace, log_prob = self._run(poutine.condition(self.model, data=values))
        return trace, (log_prob + log_volume).double()

    def _run(self, model: Callable) -> tuple[poutine.Trace, Tensor]:
        with pyro.validation_enabled(False):  # validation branches on values
            trace = poutine.trace(model).get_trace()
            return trace, trace.log_prob_sum()


def prior_density(model: Callable) -> PriorDensity:
    """The log density of a model without data and arguments.

    :raises ModelError: the model has no latents, or observes a site.
    """
    with forked_rng(), torch.no_grad():
        trace = poutine.trace(model).get_trace()
    latents: list[Latent] = []
    dtypes, start = {}, 0
    for name, site in trace.nodes.items():
        if not is_random(site) or isinstance(site["fn"], Unit):  # pyro.factor
            continue
        if site["is_observed"]:
            raise ModelError(
                f"model observes site {name!r}. Pass the prior alone: a model without data."
            )
        transform = biject_to(site["fn"].support)
        shape = transform.inv(site["value"]).shape
        latents.append(Latent(name, shape, transform, start, start + shape.numel()))
        dtypes[name], start = site["value"].dtype, start + shape.numel()
    if not latents:
        raise ModelError("model has no latent sites.")
    return PriorDensity(model, latents, dtypes)


class BatchedGradient:
    """Gradients (K, d) and values (K,) of a log density at K points (K, d).

    A gradient that is not finite is replaced by 0. If the density cannot be computed at a point, as
    without a Cholesky factor, its value is -inf.

    :param point: any point, (d,), to trace the density at.
    :ivar at_once: false if the density branches on values, so that points are computed one by one.
    """

    def __init__(self, log_prob: Callable[[Tensor], Tensor], point: Tensor):
        one = torch.func.grad_and_value(log_prob)
        points, self.at_once = point.expand(_BATCH, -1).contiguous(), True
        self._eager: Derivatives = torch.func.vmap(one, randomness="different")
        try:
            graph = trace(lambda z: list(self._eager(z)), [points])
            self._fast: Derivatives = Compiler(False)(graph, [points])
            return
        except NotTraceable:  # such as a model with draws that do not enter its density
            self._fast = self._eager
        try:
            self._eager(points)
        except (RuntimeError, ValueError, ModelError):
            self.at_once = False
            self._eager = lambda z: [torch.stack(x) for x in zip(*map(one, z), strict=True)]
            self._fast = self._eager

    def __call__(self, points: Tensor) -> tuple[Tensor, Tensor]:
        padded = torch.cat([points, points[-1:].expand(-len(points) % _BATCH, -1)])
        parts = padded.split(_BATCH) if self.at_once else [points]
        found = [self._bisected(self._fast, part) for part in parts]
        slopes, heights = map(torch.cat, zip(*found, strict=True))
        return slopes[: len(points)].nan_to_num(0.0, 0.0, 0.0), heights[: len(points)]

    def _bisected(self, function: Derivatives, points: Tensor) -> Sequence[Tensor]:
        """Call the function on the points, or on halves of them if it fails."""
        try:
            return function(points)
        except (torch.linalg.LinAlgError, ValueError, ModelError):
            if len(points) == 1:
                return torch.zeros_like(points), points.new_full((1,), -math.inf)
        halves = [self._bisected(self._eager, half) for half in points.chunk(2)]
        return [torch.cat(each) for each in zip(*halves, strict=True)]


class Prior:
    """The prior of unconstrained latents, approximated by a Gaussian factor. No record enters.

    A Gaussian prior is exact. Any other prior (a constrained latent, a hierarchy) gets

        Lambda_0 = -E_q[hess log p],    eta_0 = E_q[grad log p] + Lambda_0 m

    at the current posterior q = N(m, V). This is the update of power EP in the limit of small
    powers (Minka 2004), which needs no cavity.

    :param log_prob: log density of the flat vector (d,) of unconstrained latents.
    :param mean: the mean of the first posterior, (d,).
    :param exact: whether the density is computed in float64.
    :param normal: indices of the latents that are normal if all others are fixed.
    :raises ModelError: the density is flat or linear somewhere.
    """

    def __init__(
        self,
        log_prob: Callable[[Tensor], Tensor],
        mean: Tensor,
        exact: bool = True,
        normal: Sequence[int] = (),
    ):
        self._log_prob = log_prob
        self._normal = list(normal)
        self._tolerance = 1e-8 if exact else 1e-4
        self._batched: Callable | None = None  # derivatives at all draws
        self._vectorizes = True  # until a batch fails
        half = torch.randn(_NUM_DRAWS // 2, len(mean), dtype=torch.float64)
        self._draws = torch.cat([half, -half]).to(mean.device)
        at_mean = self._derivatives(mean)
        # Only a Gaussian has the same Hessian far away, in the prior's scale.
        scale = at_mean[1].diagonal().abs().clamp(min=1e-12).rsqrt()
        elsewhere = [self._derivatives(mean + self._draws[0] * s) for s in (1.0, scale)]
        same = all(_agree(at_mean[1], h, self._tolerance) for _, h in elsewhere)
        if same and not (torch.linalg.eigvalsh(at_mean[1]) < 0).all():
            raise ModelError(
                "The log density of the prior is flat or linear somewhere (Laplace?). "
                "Expectation propagation needs a smooth prior, such as Normal or StudentT. "
                "DPSVI takes any."
            )
        self._gaussian = at_mean if same else None
        self._centre = mean
        self._latest: tuple[Tensor, Tensor] | None = None

    @property
    def is_gaussian(self) -> bool:
        """Whether the prior is Gaussian in unconstrained space."""
        return self._gaussian is not None

    def centred(self, z: Tensor) -> Tensor:
        """Set the normal latents of the flat vector to their mean, while the others are fixed.

        The vector does not change if these latents are not jointly normal, such as the factors of
        a product.
        """
        gradient, hessian = self._derivatives(z)
        inner, moved = hessian[self._normal][:, self._normal], z.clone()
        step, singular = torch.linalg.solve_ex(inner, gradient[self._normal])
        if singular:  # a latent whose prior is masked out
            return z
        moved[self._normal] -= step
        there = self._derivatives(moved)[1][self._normal][:, self._normal]
        return moved if _agree(inner, there, self._tolerance) else z

    def factor(self, mean: Tensor, covariance: Tensor) -> Gaussian:
        """The factor at a posterior. It is full or diagonal like the covariance."""
        if self._gaussian is not None:
            gradient, hessian = self._gaussian
            gradient = gradient + hessian @ (mean - self._centre)
            least = 0.0
        else:
            root = covariance.sqrt().diag() if covariance.dim() == 1 else cholesky(covariance)
            gradients, hessians = self._all_derivatives(mean + self._draws @ root.mT)
            finite = gradients.isfinite().all(1) & hessians.isfinite().all(2).all(1)
            if finite.any():
                self._latest = gradients[finite].mean(dim=0), hessians[finite].mean(dim=0)
            # If the density cannot be evaluated at any draw, the factor does not change.
            gradient, hessian = self._latest or self._derivatives(self._centre)
            least = _LEAST_PRECISION
        precision = -hessian.diagonal() if covariance.dim() == 1 else -hessian
        precision = floored(precision, least)
        return Gaussian(gradient + apply(precision, mean), precision)

    def _all_derivatives(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients (K, d) and Hessians (K, d, d) at K points."""
        if self._vectorizes:
            try:
                with warnings.catch_warnings():
                    # torch warns of an operation of simplexes that is slow in batches.
                    warnings.filterwarnings("ignore", message="There is a performance drop")
                    self._batched = self._batched or self._vectorized(points)
                    gradients, hessians = self._batched(points)
                return gradients, hessians
            except (RuntimeError, ValueError, ModelError):  # the model branches on its latents
                self._vectorizes = False
        gradients, hessians = zip(*map(self._derivatives, points), strict=True)
        return torch.stack(gradients), torch.stack(hessians)

    def _vectorized(self, points: Tensor) -> Callable:
        """:meth:`_derivatives` of a batch of points, as a graph if the model can be traced."""
        # The draws inside the plate are random, but do not enter the density.
        batched = torch.func.vmap(self._derivatives, randomness="different")
        try:
            return called_by_torch(trace(lambda z: list(batched(z)), [points]))
        except NotTraceable:
            return batched

    def _derivatives(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient (d,) and Hessian (d, d) of the log density."""

        def gradient(z):
            value = torch.func.jacrev(self._log_prob)(z)
            return value, value

        hessian, value = torch.func.jacrev(gradient, has_aux=True)(z)
        return value.detach(), ((hessian + hessian.mT) / 2).detach()


def _agree(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether two Hessians are equal up to rounding, in the scale of the latents."""
    scale = (one.diagonal().abs() + other.diagonal().abs()).sqrt()
    return bool(((one - other).abs() <= tolerance * torch.outer(scale, scale)).all())


def combined(
    prior: Prior, evidence: Callable[[Tensor], Gaussian], mean: Tensor, prior_factor: Gaussian
) -> tuple[Gaussian, Gaussian]:
    """The Gaussian q that minimises KL(q || prior * evidence), by natural gradient steps.

    If the prior is not Gaussian, each step is halved, and goes at most two standard deviations. The
    precision of a hierarchy grows exponentially as the logarithm of its scale falls, so the search
    would not return from a longer step. The evidence must include its noise. Otherwise it shrinks
    effects to their mean, and the scale of the hierarchy to zero.

    :param evidence: the likelihood as a factor, at a posterior mean (d,).
    :param mean: the mean at the start of the search, (d,).
    :param prior_factor: the prior as a factor at the start.
    :returns: the prior as a factor at q, and q.
    """
    step, rounds = (1.0, _ROUNDS) if prior.is_gaussian else (_DAMPING, _MOST_ROUNDS)
    length = math.inf
    for _ in range(rounds):
        likelihood = evidence(mean)
        covariance = inverse(prior_factor.precision + likelihood.precision)
        prior_factor = prior_factor ** (1 - step) * prior.factor(mean, covariance) ** step
        found = prior_factor * likelihood
        change = found.mean - mean
        part = 1.0 if prior.is_gaussian else _within(change, covariance.diagonal().sqrt())
        mean = mean + step * part * change
        last, length = length, (change.abs() / covariance.diagonal().sqrt()).max().item()
        if length < _SETTLED:
            break
        # Whole steps halve the number of rounds near the end, unless the last step led away.
        step = 1.0 if prior.is_gaussian or length < min(_UNDAMPED, last) else _DAMPING
    return prior_factor, found


def _within(change: Tensor, sds: Tensor) -> float:
    """The fraction of a step that is at most two standard deviations long."""
    return min(1.0, _LONGEST / max((change.abs() / sds).max().item(), _SETTLED))


@dataclass(frozen=True)
class PublicDensity(PriorDensity):
    """The log density outside the plate, on placeholders for the records."""

    records: Records

    def normal(self, z: Tensor) -> list[int]:
        """Indices of the latents whose sites are normal."""
        trace, _ = self.trace(z)
        return [
            index
            for latent in self.latents
            if isinstance(innermost(trace.nodes[latent.name]["fn"]), (Normal, MultivariateNormal))
            for index in range(latent.start, latent.stop)
        ]

    def _run(self, model: Callable) -> tuple[poutine.Trace, Tensor]:
        outside = Outside(self.records.plate)(model)
        with on_placeholders(self.records, "the model") as (args, kwargs):
            trace = poutine.trace(outside).get_trace(*args, **kwargs)
            return trace, trace.log_prob_sum()


def model_prior(
    model: Callable,
    latents: Sequence[Latent],
    mean: Tensor,
    records: Records,
    dtypes: dict[str, torch.dtype],
) -> Prior:
    """The prior of the latents. It reads no record, so it costs no privacy."""
    exact = all(dtype == torch.float64 for dtype in dtypes.values())
    density = PublicDensity(model, latents, dtypes, records)
    return Prior(density, mean, exact, density.normal(mean))
