"""Continuous latents of records, integrated out on a few nodes.

The likelihood of the global latents is an integral over the latent of the record. The integrand is
the density of the latent times that of the data. The trapezoidal rule takes this integral in
unconstrained space. Its grid covers the posterior of the latent for this record. The integrand is
smooth, and vanishes at both ends. So the rule's error falls exponentially with the number of nodes
(Trefethen & Weideman 2014, SIAM Review 56).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from pyro.distributions import TorchDistribution
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.distributions import Transform, biject_to

from pyro_dp.records.plate import PrivatePlate
from pyro_dp.utils.errors import ModelError

_NODES = 14
_MOST_LATENTS = 2  # for each record
_FIRST = 8.0  # standard deviations of the prior that the first grid has on either side
_REACH = 6.0  # the same of later grids, and of a record's own posterior
_ZOOMS = 4
_MANY = (
    "Each record has more than two continuous latents, which are too many to integrate out. DPSVI "
    "takes gradient steps for them."
)
_NO_MEAN = (
    "Each record has a latent {name!r}, whose prior has no finite mean and variance. So it is not "
    "integrated out. DPSVI takes gradient steps for it."
)
_WEIGHTED = (
    "Each record has a latent {name!r}, which has a scale or a mask. So it is not integrated out. "
    "DPSVI takes gradient steps for it."
)


@dataclass(frozen=True)
class Grid:
    """Equidistant nodes in unconstrained space.

    :param centre: a number, in the shape of the site.
    :param half: half of the grid's length, likewise.
    :param transform: to the site's own space.
    """

    centre: Tensor
    half: Tensor
    transform: Transform

    @staticmethod
    def of_prior(fn: TorchDistribution) -> "Grid":
        """:raises NotImplementedError: the distribution has no finite moments."""
        mean, sd = fn.mean.detach(), fn.stddev.detach()
        if not (is_functorch_wrapped_tensor(sd) or sd.isfinite().all()):  # a placeholder's
            raise NotImplementedError
        transform = biject_to(fn.support)
        centre = transform.inv(mean)
        slope = transform.log_abs_det_jacobian(centre, mean).exp()
        return Grid(centre, _FIRST * sd / slope, transform)

    def nodes(self) -> Tensor:
        """(K, ...), unconstrained."""
        places = torch.linspace(-1.0, 1.0, _NODES).to(self.centre)
        return self.centre + self.half * places.reshape(-1, *[1] * self.centre.dim())

    def values(self) -> tuple[Tensor, Tensor]:
        """Nodes in the site's own space, (K, ...), and logarithms of their widths, (K,)."""
        nodes = self.nodes()
        values = self.transform(nodes)
        volume = self.transform.log_abs_det_jacobian(nodes, values)
        return values, (volume + (2 * self.half / (_NODES - 1)).log()).reshape(_NODES)

    def narrowed(self, terms: Tensor) -> "Grid":
        """A grid around most of the mass.

        If few nodes hold it, a parabola through the logarithms of three terms finds it. That is
        exact for a Gaussian. If it lies beyond an end, the grid moves on.

        :param terms: logarithms of the terms of the sum over the nodes, (K,).
        """
        nodes, shape = self.nodes(), self.centre.shape
        step = (2 * self.half / (_NODES - 1)).reshape(())
        weights, places = terms.softmax(dim=0), nodes.reshape(_NODES)
        mean = (weights * places).sum()
        variance = (weights * (places - mean).square()).sum()
        best = terms.argmax().clamp(1, _NODES - 2)
        low, middle, high = terms.gather(0, torch.stack([best - 1, best, best + 1])).unbind()
        curvature = ((2 * middle - low - high) / step.square()).clamp(min=1 / step.square())
        away = ((high - low) / (2 * step) / curvature).clamp(-self.half.max(), self.half.max())
        sharp = variance < step.square()
        centre = torch.where(sharp, places.gather(0, best.reshape(1)).sum() + away, mean)
        sd = torch.where(sharp, curvature.reciprocal(), variance).sqrt()
        half = _REACH * sd + torch.where(sharp, step / 2 + away.abs(), 0.0)
        return Grid(centre.reshape(shape), half.reshape(shape), self.transform)


@dataclass
class _Values:
    """Values of the latents of a record. Grids of their priors are added."""

    own: Mapping[str, Tensor] = field(default_factory=dict)
    grids: dict[str, Grid] = field(default_factory=dict)


_VALUES: ContextVar[_Values | None] = ContextVar("values", default=None)


@contextlib.contextmanager
def _at(values: _Values) -> Iterator[None]:
    token = _VALUES.set(values)
    try:
        yield
    finally:
        _VALUES.reset(token)


@dataclass(eq=False, repr=False)
class ObservedLatents(Messenger):
    """Observes the continuous latents of records, at :func:`_at` or at their prior's mean."""

    plate: PrivatePlate

    def _pyro_sample(self, msg: dict) -> None:
        name = msg["name"]
        if name not in self.plate.continuous:
            return
        values = _VALUES.get() or _Values()
        if name in values.own:
            msg["value"] = values.own[name]
        else:
            try:
                grid = values.grids[name] = Grid.of_prior(msg["fn"])
            except NotImplementedError:
                raise ModelError(_NO_MEAN.format(name=name)) from None
            msg["value"] = grid.transform(grid.centre)
        msg["is_observed"] = True

    def _pyro_post_sample(self, msg: dict) -> None:
        values = _VALUES.get()
        if values is None or msg["name"] not in values.grids:
            return
        if msg["value"].numel() != 1:  # in a plate of the record's own
            raise ModelError(_MANY)
        if isinstance(msg["scale"], Tensor) or msg["scale"] != 1 or msg["mask"] is not None:
            raise ModelError(_WEIGHTED.format(name=msg["name"]))


def integrated(log_prob: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """The log density of a record, on a grid around its own posterior.

    :param log_prob: a function of the global latents z, by a model of :func:`without_latents`.
    """

    def on(grids: Mapping[str, Grid], z: Tensor) -> Tensor:
        """Logarithms of the terms of the sum, (K, ..., K)."""
        values, widths = zip(*(grid.values() for grid in grids.values()), strict=True)
        chosen = torch.cartesian_prod(*[torch.arange(_NODES)] * len(grids)).reshape(-1, len(grids))

        def term(*own: Tensor) -> Tensor:
            with _at(_Values(dict(zip(grids, own, strict=True)))):
                return log_prob(z)

        places = chosen.to(z.device).unbind(dim=1)
        found = torch.vmap(term, randomness="same")(
            *(x[k] for x, k in zip(values, places, strict=True))
        )
        found = sum((x[k] for x, k in zip(widths, places, strict=True)), found)
        return found.reshape([_NODES] * len(grids))

    with torch.no_grad():
        prior = _Values()
        with _at(prior):
            log_prob(z.detach())
        grids = prior.grids
        for _ in range(_ZOOMS):
            found = on(grids, z.detach())
            grids = {
                name: grid.narrowed(found.movedim(place, 0).reshape(_NODES, -1).logsumexp(dim=1))
                for place, (name, grid) in enumerate(grids.items())
            }
    return on(grids, z).flatten().logsumexp(0)


def num_nodes(plate: PrivatePlate) -> int:
    return _NODES ** len(plate.continuous)


def without_latents(model: Callable, plate: PrivatePlate) -> Callable:
    """The model, which observes the continuous latents of records.

    :raises ModelError: a record has too many of them.
    """
    if sum(plate.continuous.values()) > _MOST_LATENTS:
        raise ModelError(_MANY)
    return ObservedLatents(plate)(model) if plate.continuous else model
