"""Integrate out continuous latents of records on a few nodes.

A record's likelihood of the global latents is an integral over the record's own latent. The
integrand is the density of the latent times that of the data. The trapezoidal rule computes it in
unconstrained space, on a grid that covers the latent's posterior for this record. The integrand is
smooth and vanishes at both ends. So the rule's error falls exponentially with the number of nodes
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
_PRIOR_REACH = 8.0  # half length of the first grid, in standard deviations of the prior
_REACH = 6.0  # half length of later grids, in standard deviations of the record's posterior
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

    :param centre: one number, in the shape of the site.
    :param half: half of the grid's length, in the shape of the site.
    :param transform: to the site's support.
    """

    centre: Tensor
    half: Tensor
    transform: Transform

    @staticmethod
    def of_prior(fn: TorchDistribution) -> "Grid":
        """A grid around the mean of the prior.

        :raises NotImplementedError: the prior has no finite moments.
        """
        mean, sd = fn.mean.detach(), fn.stddev.detach()
        if not (is_functorch_wrapped_tensor(sd) or sd.isfinite().all()):  # seen on placeholders
            raise NotImplementedError
        transform = biject_to(fn.support)
        centre = transform.inv(mean)
        slope = transform.log_abs_det_jacobian(centre, mean).exp()
        return Grid(centre, _PRIOR_REACH * sd / slope, transform)

    def nodes(self) -> Tensor:
        """The unconstrained nodes, (K, ...)."""
        units = torch.linspace(-1.0, 1.0, _NODES).to(self.centre)
        return self.centre + self.half * units.reshape(-1, *[1] * self.centre.dim())

    def values(self) -> tuple[Tensor, Tensor]:
        """Nodes in the site's support, (K, ...), and logarithms of their widths, (K,)."""
        nodes = self.nodes()
        values = self.transform(nodes)
        volume = self.transform.log_abs_det_jacobian(nodes, values)
        return values, (volume + (2 * self.half / (_NODES - 1)).log()).reshape(_NODES)

    def narrowed(self, terms: Tensor) -> "Grid":
        """A narrower grid around most of the mass.

        If few nodes have mass, the centre and width follow from a parabola through the logarithms
        of three terms. This is exact for a Gaussian. A peak beyond an end moves the grid there.

        :param terms: logarithms of the terms of the sum over the nodes, (K,).
        """
        nodes, shape = self.nodes(), self.centre.shape
        step = (2 * self.half / (_NODES - 1)).reshape(())
        weights, positions = terms.softmax(dim=0), nodes.reshape(_NODES)
        mean = (weights * positions).sum()
        variance = (weights * (positions - mean).square()).sum()
        best = terms.argmax().clamp(1, _NODES - 2)
        low, middle, high = terms.gather(0, torch.stack([best - 1, best, best + 1])).unbind()
        curvature = ((2 * middle - low - high) / step.square()).clamp(min=1 / step.square())
        away = ((high - low) / (2 * step) / curvature).clamp(-self.half.max(), self.half.max())
        sharp = variance < step.square()
        centre = torch.where(sharp, positions.gather(0, best.reshape(1)).sum() + away, mean)
        sd = torch.where(sharp, curvature.reciprocal(), variance).sqrt()
        half = _REACH * sd + torch.where(sharp, step / 2 + away.abs(), 0.0)
        return Grid(centre.reshape(shape), half.reshape(shape), self.transform)


@dataclass
class _Values:
    """Values of a record's latents. :class:`ObservedLatents` adds grids of latents without one."""

    latents: Mapping[str, Tensor] = field(default_factory=dict)
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
    """Observes the continuous latents of records at chosen values, or at their prior's mean."""

    plate: PrivatePlate

    def _pyro_sample(self, msg: dict) -> None:
        name = msg["name"]
        if name not in self.plate.continuous:
            return
        values = _VALUES.get() or _Values()
        if name in values.latents:
            msg["value"] = values.latents[name]
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
        if msg["value"].numel() != 1:  # a vector, or within a plate inside the record
            raise ModelError(_MANY)
        if isinstance(msg["scale"], Tensor) or msg["scale"] != 1 or msg["mask"] is not None:
            raise ModelError(_WEIGHTED.format(name=msg["name"]))


def integrated(log_prob: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """The log density of a record, with its latents integrated out.

    :param log_prob: a function of the global latents z, from a model of :func:`without_latents`.
    """

    def on(grids: Mapping[str, Grid], z: Tensor) -> Tensor:
        """Logarithms of the terms of the sum, (K, ..., K)."""
        values, widths = zip(*(grid.values() for grid in grids.values()), strict=True)
        chosen = torch.cartesian_prod(*[torch.arange(_NODES)] * len(grids)).reshape(-1, len(grids))

        def term(*latents: Tensor) -> Tensor:
            with _at(_Values(dict(zip(grids, latents, strict=True)))):
                return log_prob(z)

        indices = chosen.to(z.device).unbind(dim=1)
        at_nodes = (x[k] for x, k in zip(values, indices, strict=True))
        found = torch.vmap(term, randomness="same")(*at_nodes)
        found = sum((x[k] for x, k in zip(widths, indices, strict=True)), found)
        return found.reshape([_NODES] * len(grids))

    with torch.no_grad():
        prior = _Values()
        with _at(prior):
            log_prob(z.detach())
        grids = prior.grids
        for _ in range(_ZOOMS):
            found = on(grids, z.detach())
            grids = {
                name: grid.narrowed(found.movedim(axis, 0).reshape(_NODES, -1).logsumexp(dim=1))
                for axis, (name, grid) in enumerate(grids.items())
            }
    return on(grids, z).flatten().logsumexp(0)


def num_nodes(plate: PrivatePlate) -> int:
    """The number of nodes for each record."""
    return _NODES ** len(plate.continuous)


def without_latents(model: Callable, plate: PrivatePlate) -> Callable:
    """The model with the continuous latents of records observed, for :func:`integrated`.

    :raises ModelError: a record has too many of them.
    """
    if sum(plate.continuous.values()) > _MOST_LATENTS:
        raise ModelError(_MANY)
    return ObservedLatents(plate)(model) if plate.continuous else model
