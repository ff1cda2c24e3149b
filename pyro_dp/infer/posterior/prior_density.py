"""Log densities of public models, as functions of one flat vector of unconstrained latents."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyro
import torch
from pyro import poutine
from pyro.distributions import Unit
from torch import Tensor
from torch.distributions import biject_to

from pyro_dp.graphs.tracing import Compiler, NotTraceable, trace
from pyro_dp.records.global_draw import Latent
from pyro_dp.records.plate import is_random
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.torch_state import forked_rng

Derivatives = Callable[[Tensor], Sequence[Tensor]]

_TOGETHER = 128  # points of one call


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
        """The sites at these latents (d,), and their log density in unconstrained coordinates."""
        values, log_volume = {}, torch.zeros((), dtype=torch.float64, device=z.device)
        for latent in self.latents:
            u = latent.part(z).to(self.dtypes[latent.name])
            values[latent.name] = latent.transform(u)
            volume = latent.transform.log_abs_det_jacobian(u, values[latent.name])
            log_volume = log_volume + volume.sum()
        trace, log_prob = self._run(poutine.condition(self.model, data=values))
        return trace, (log_prob + log_volume).double()

    def _run(self, model: Callable) -> tuple[poutine.Trace, Tensor]:
        with pyro.validation_enabled(False):  # it looks at values, which derivatives do not have
            trace = poutine.trace(model).get_trace()
            return trace, trace.log_prob_sum()


def prior_density(model: Callable) -> PriorDensity:
    """
    :param model: without data, and without arguments.
    :raises ModelError: it has no latents, observes something, or its supports depend on latents.
    """
    with forked_rng(), torch.no_grad():
        trace = poutine.trace(model).get_trace()
    latents: list[Latent] = []
    dtypes, start = {}, 0
    for name, site in trace.nodes.items():
        if not is_random(site):
            continue
        if isinstance(site["fn"], Unit):  # pyro.factor
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

    A gradient that is not finite is 0. The value is -inf if the density cannot be computed: a
    matrix far out may have no Cholesky factor.

    :param log_prob: a function of one point (d,).
    :param point: any, (d,).
    :ivar at_once: false if the density branches on its point, so that each takes its own time.
    """

    def __init__(self, log_prob: Callable[[Tensor], Tensor], point: Tensor):
        one = torch.func.grad_and_value(log_prob)
        points, self.at_once = point.expand(_TOGETHER, -1).contiguous(), True
        self._eager: Derivatives = torch.func.vmap(one, randomness="different")
        try:
            graph = trace(lambda z: list(self._eager(z)), [points])
            self._found: Derivatives = Compiler(False)(graph, [points])
            return
        except NotTraceable:  # such as a model with draws that do not enter its density
            self._found = self._eager
        try:
            self._eager(points)
        except (RuntimeError, ValueError, ModelError):
            self.at_once = False
            self._eager = lambda z: [torch.stack(x) for x in zip(*map(one, z), strict=True)]
            self._found = self._eager

    def __call__(self, points: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.cat([points, points[-1:].expand(-len(points) % _TOGETHER, -1)])
        parts = whole.split(_TOGETHER) if self.at_once else [points]
        found = [self._where_possible(self._found, part) for part in parts]
        slopes, heights = map(torch.cat, zip(*found, strict=True))
        return slopes[: len(points)].nan_to_num(0.0, 0.0, 0.0), heights[: len(points)]

    def _where_possible(self, function: Derivatives, points: Tensor) -> Sequence[Tensor]:
        """Halves of the points, if it fails, until single points are left."""
        try:
            return function(points)
        except (torch.linalg.LinAlgError, ValueError, ModelError):
            if len(points) == 1:
                return torch.zeros_like(points), points.new_full((1,), -math.inf)
        halves = [self._where_possible(self._eager, half) for half in points.chunk(2)]
        return [torch.cat(each) for each in zip(*halves, strict=True)]
