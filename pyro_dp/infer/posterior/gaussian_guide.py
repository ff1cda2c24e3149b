"""Guides that are Gaussian in unconstrained space, read and written as one Gaussian."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import Independent, MultivariateNormal, Normal
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoGuide,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.infer.autoguide.initialization import InitMessenger, init_to_feasible, init_to_median
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import transform_to
from torch.distributions.constraints import Constraint

from pyro_dp.records.global_draw import Latent, latents_of
from pyro_dp.records.local_parameters import marked_parameters
from pyro_dp.records.plate import PrivatePlate, Sites, random_sites
from pyro_dp.records.records import Records
from pyro_dp.records.sandbox import guarded
from pyro_dp.records.stand_ins import FewIndices
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import cholesky, inverse, low_rank
from pyro_dp.utils.torch_state import forked_rng

# Autoguides whose scale has two parameters: the form, and the names of their attributes.
_PAIRS = {
    AutoMultivariateNormal: ("rows", "scale_unconstrained", "scale_tril_unconstrained"),
    AutoLowRankMultivariateNormal: ("low_rank", "scale_unconstrained", "cov_factor"),
}
_AUTOGUIDES = (AutoNormal, AutoDiagonalNormal, *_PAIRS)
_DEFAULTS = (init_to_feasible, init_to_median)
_SUPPORTED = (
    "DPSEP needs a guide that is Gaussian in unconstrained space. Use AutoNormal, "
    "AutoDiagonalNormal, AutoMultivariateNormal or AutoLowRankMultivariateNormal. A "
    "hand-written guide needs Normal and MultivariateNormal sites, each location and scale a "
    "pyro.param of its own, passed as it is. DPSVI takes any guide."
)


class NoGaussian(ModelError):
    """Model and guide have no Gaussian posterior in any family of guides."""


class GaussianGuide:
    """A guide whose latents are jointly Gaussian in unconstrained space.

    It is an ``AutoNormal``, ``AutoDiagonalNormal``, ``AutoMultivariateNormal`` or
    ``AutoLowRankMultivariateNormal``. Or it is hand-written, with ``Normal`` and
    ``MultivariateNormal`` sites over real latents of the model. Each location and each scale
    (``scale_tril``, ``covariance_matrix`` or ``precision_matrix``) then has its own parameter. A
    run on placeholders matches parameters to sites.

    :ivar latents: the sites, in the order of the flat vector.
    :ivar size: d, the length of the flat vector.
    :ivar starts_anywhere: whether the start is an autoguide's default, which nobody chose.
    :param globally: leave out latents inside the plate, which may have any form.
    :raises ModelError: the guide has another form, or does not match the model. The error names the
        site or parameter.
    """

    @torch.enable_grad()
    def __init__(
        self, model: Callable, guide: Callable, records: Records, *, globally: bool = False
    ):
        automatic = isinstance(guide, AutoGuide)
        if automatic and not isinstance(guide, _AUTOGUIDES):
            raise ModelError(f"The guide is an {type(guide).__name__}. {_SUPPORTED}")
        runs = OnPlaceholders(records, globally)
        values, prior, parameters = runs.sites(model, guide)
        check_names(values, prior, records.plate)
        self._blocks = tuple(_blocks(guide, runs.auxiliary or values, parameters))
        self.latents: tuple[Latent, ...] = tuple(latents_of(values, prior, automatic=automatic))
        self.size = self.latents[-1].stop
        self._diagonal = all(block.form == "scale" for block in self._blocks)
        self.starts_anywhere = automatic and starts_anywhere(guide)

    @torch.no_grad()
    def read(self) -> tuple[Tensor, Tensor]:
        """The guide's mean (d,) and covariance (d, d), in float64.

        If all sites are ``Normal``, variances (d,) replace the covariance.
        """
        means, covariances = zip(*(block.read() for block in self._blocks), strict=True)
        if self._diagonal:
            return torch.cat(means), torch.cat([each.flatten() for each in covariances])
        return torch.cat(means), torch.block_diag(*(one for each in covariances for one in each))

    @torch.no_grad()
    def write(self, mean: Tensor, covariance: Tensor) -> None:
        """Set the guide's parameters.

        The guide minimises KL(written || guide) in its family. A ``Normal`` site gets its
        variances, and a ``MultivariateNormal`` its block of the covariance. An
        ``AutoLowRankMultivariateNormal`` gets all variances, and correlations of its rank by
        :func:`low_rank`.

        :param mean: (d,), float64.
        :param covariance: (d, d), positive definite; or variances (d,).
        """
        values = [pair for block in self._blocks for pair in block.values(mean, covariance)]
        leaves = [(parameter.leaf, parameter.unconstrained(value)) for parameter, value in values]
        for leaf, value in leaves:  # all or none
            # Use new memory: init_to_value may share the old memory with a tensor of the user's.
            leaf.data = value.to(leaf, copy=True)

    @property
    def names(self) -> set[str]:
        """The names of the parameters."""
        return {p.name for block in self._blocks for p in block.parameters}

    @property
    def locations(self) -> list[str]:
        """The names of the parameters of the mean, in the order of the flat vector."""
        return [block.parameters[0].name for block in self._blocks]

    def is_current(self) -> bool:
        """Whether the parameter store still holds the guide's parameters."""
        return in_store([p for block in self._blocks for p in block.parameters])

    def growth(self) -> dict[str, Tensor]:
        """Derivatives of the scales' parameters by the logarithm of all scales, by name."""
        return {
            b.parameters[1].name: b.parameters[1].growth(_POWERS.get(b.form, 1))
            for b in self._blocks
        }


def in_store(parameters: Sequence["_Parameter"]) -> bool:
    """Whether the parameter store still holds these tensors."""
    store = pyro.get_param_store()
    return all(p.name in store and store[p.name].unconstrained() is p.leaf for p in parameters)


def starts_anywhere(guide: AutoGuide) -> bool:
    """Whether an autoguide has the default ``init_loc_fn``, which wraps its model."""
    wrappers = getattr(guide.model, "args", ())
    return any(isinstance(w, InitMessenger) and w.init_fn in _DEFAULTS for w in wrappers)


def _rows(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and ``scale_tril`` of an AutoMultivariateNormal, from their product."""
    scale = factor.diagonal(dim1=-2, dim2=-1)
    return scale, factor / scale.unsqueeze(-1)


def _of_rows(scale: Tensor, tril: Tensor) -> Tensor:
    return scale[:, None] * (tril @ tril.mT) * scale


def _of_low_rank(scale: Tensor, factor: Tensor) -> Tensor:
    return _of_rows(scale, factor) + scale.square().diag()


# By form, two functions. The first finds a scale's parameters from covariances c (B, k, k) and the
# shape of the last parameter, which has the rank. The second is the inverse.
_FORMS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[..., Tensor]]] = {
    "scale": (lambda c, _: (c.sqrt(),), torch.square),
    "scale_tril": (lambda c, _: (cholesky(c),), lambda factor: factor @ factor.mT),
    "covariance_matrix": (lambda c, _: (c,), lambda c: c),
    "precision_matrix": (lambda c, _: (inverse(c),), inverse),
    "rows": (lambda c, _: _rows(cholesky(c)), _of_rows),
    "low_rank": (lambda c, shape: low_rank(c.squeeze(0), shape[-1]), _of_low_rank),
}


_POWERS = {"covariance_matrix": 2, "precision_matrix": -2}  # parameters that are powers of a scale


@dataclass(frozen=True)
class _Parameter:
    """An entry of the parameter store, and the tensor that the guide read."""

    name: str
    leaf: Tensor
    constraint: Constraint
    value: Tensor

    def read(self) -> Tensor:
        return transform_to(self.constraint)(self.leaf.detach()).double()

    def unconstrained(self, value: Tensor) -> Tensor:
        return transform_to(self.constraint).inv(value.reshape(self.leaf.shape))

    def growth(self, power: int) -> Tensor:
        """The derivative of the unconstrained value by the logarithm of a scale.

        :param power: the value is the scale to this power.
        """
        value, unit = self.read(), 1e-6
        larger = self.unconstrained(value * math.exp(power * unit))
        return (larger - self.unconstrained(value)) / unit


@dataclass(frozen=True)
class _Block:
    """A Gaussian site of the guide, of B independent vectors of k entries."""

    start: int
    count: int  # B
    width: int  # k: 1 for a Normal
    form: str
    parameters: tuple[_Parameter, ...]  # the location, then the scale's

    @property
    def stop(self) -> int:
        return self.start + self.count * self.width

    def read(self) -> tuple[Tensor, Tensor]:
        """Mean (B k,) and covariances (B, k, k)."""
        mean, *scales = (parameter.read() for parameter in self.parameters)
        covariances = _FORMS[self.form][1](*scales)
        return mean.flatten(), covariances.reshape(self.count, self.width, self.width)

    def values(self, mean: Tensor, covariance: Tensor) -> list[tuple[_Parameter, Tensor]]:
        """Each parameter's value for a mean and covariance (or variances) of all latents."""
        part, shape = slice(self.start, self.stop), (self.count, self.width)
        if covariance.dim() == 1:
            block = torch.diag_embed(covariance[part].unflatten(0, shape))
        else:
            pairs = covariance[part, part].unflatten(1, shape).unflatten(0, shape)
            block = pairs.diagonal(dim1=0, dim2=2).movedim(-1, 0)  # (B, k, k)
        scales = _FORMS[self.form][0](block, self.parameters[-1].leaf.shape)
        return list(zip(self.parameters, (mean[part], *scales), strict=True))

    def is_unrestricted(self) -> bool:
        """Whether no constraint excludes a location or a scale."""
        ones = self.parameters[0].read().new_ones(self.stop)
        extremes = ((1e6, 1e12), (-1e6, 1e-12))
        return all(
            p.constraint.check(v.reshape(p.leaf.shape)).all()
            for m, s in extremes
            for p, v in self.values(m * ones, s * ones)
        )


class _ParameterReads(Messenger):
    """Collects the values of parameters. A constrained one is a new tensor at each read."""

    def __init__(self):
        super().__init__()
        self.values: list[tuple[str, Tensor]] = []

    def _pyro_post_param(self, msg: dict) -> None:
        self.values.append((msg["name"], msg["value"]))

    def learnt(self) -> list[_Parameter]:
        store = pyro.get_param_store()
        constraints, leaves = store.get_state()["constraints"], dict(store.named_parameters())
        return [
            _Parameter(name, leaves[name], constraints[name], value)
            for name, value in self.values
            if name in leaves and leaves[name].requires_grad
        ]


class OnPlaceholders:
    """Runs model and guide without any record, or row that was learnt from a record.

    :param globally: :meth:`sites` leaves out the guide's latents inside the plate.
    :ivar arguments: args and kwargs, with placeholders for the records.
    :ivar auxiliary: the Gaussians from which an autoguide computes the latents.
    """

    def __init__(self, records: Records, globally: bool = False):
        # All N rows reveal whether a guide has latents per record. If N is large, a few rows do.
        size = records.plate.size
        self._plate, self._globally = records.plate, globally
        self._few = FewIndices(size, records.shown)
        length = records.shown if records.slice_data else size
        self.arguments = records.arguments(records.placeholder(), length=length)
        self.auxiliary: Sites = {}

    @contextmanager
    def public(self) -> Iterator[None]:
        """A context in which user code may run on these arguments."""
        doing = "Running guide and model on placeholder data"
        rows = marked_parameters(self._plate.size)
        with rows.shown(rows.constants()), self._few.shown(), guarded(doing, public=True):
            yield

    def sites(self, model: Callable, guide: Callable) -> tuple[Sites, Sites, list[_Parameter]]:
        """Sites of the guide, global latent sites of the model, and the guide's parameters."""
        args, kwargs = self.arguments
        with forked_rng(), self.public():
            with _ParameterReads() as by_guide:
                trace = poutine.trace(guide).get_trace(*args, **kwargs)
            with _ParameterReads() as by_model:
                replay = poutine.replay(model, trace=trace)
                replayed = poutine.trace(replay).get_trace(*args, **kwargs)
        for parameter in by_model.learnt():
            raise NoGaussian(
                f"The model learns parameter {parameter.name!r}, which has no posterior: make it a "
                "latent (pyro.sample), or fix it at a constant."
            )
        found = {n: s for n, s in random_sites(replayed).items() if not s["is_observed"]}
        prior = {name: site for name, site in found.items() if not self._plate.holds(site)}
        drawn = random_sites(trace)
        if self._globally:
            drawn = {n: s for n, s in drawn.items() if not self._plate.holds(s)}
        if isinstance(guide, AutoGuide):
            self.auxiliary = {n: s for n, s in drawn.items() if s["infer"].get("is_auxiliary")}
        values = {name: site for name, site in drawn.items() if name not in self.auxiliary}
        return values, prior, by_guide.learnt()


def check_names(values: Sites, prior: Sites, plate: PrivatePlate) -> None:
    """:raises ModelError: model and guide differ in their latents outside the private plate."""
    for name, site in values.items():
        if plate.holds(site):
            raise ModelError(
                f"Site {name!r} of the guide lies within the private plate {plate.name!r}: local "
                "latents can only be enumerated (infer={'enumerate': 'parallel'}, hidden from an "
                "autoguide with poutine.block). DPSVI takes others too."
            )
        if name not in prior:
            raise ModelError(f"Site {name!r} of the guide is no latent of the model: remove it.")
        if (torch.as_tensor(site["scale"]) != 1).any():
            raise NoGaussian(
                f"Site {name!r} of the guide has a scale, which changes what its width means. "
                "Leave poutine.scale out of model and guide, and subsample_size out of other "
                "plates. A factor of both does not move the optimum of SVI."
            )
    for name in prior.keys() - values.keys():
        raise ModelError(f"Latent site {name!r} of the model is not in the guide: add it.")
    if not prior:
        raise ModelError(f"The model has no latent outside the private plate {plate.name!r}.")


def _blocks(guide: Callable, sites: Sites, parameters: list[_Parameter]) -> Iterator[_Block]:
    """The sites of the guide, each with the parameters of its location and scale."""
    start = 0
    taken: set[int] = set()
    pair = next((pair for kind, pair in _PAIRS.items() if isinstance(guide, kind)), None)
    for name, site in sites.items():
        fn = base(site["fn"])
        if not (pair or isinstance(fn, (Normal, MultivariateNormal))):
            raise ModelError(f"Site {name!r} of the guide is a {type(fn).__name__}. {_SUPPORTED}")
        location, scales = find(fn.loc, parameters), []
        if pair:
            form, *attributes = pair
            leaves = [getattr(guide, attribute) for attribute in attributes]
            scales = [p for leaf in leaves for p in parameters if p.leaf is leaf]
        for argument in _FORMS.keys() & vars(fn).keys():
            if scale := find(vars(fn)[argument], parameters):
                form, scales = argument, [scale]
        if not (location and scales):
            raise ModelError(
                f"The {'scale' if location else 'location'} of site {name!r} of the guide is not a "
                f"parameter in the shape of the site. {_SUPPORTED}"
            )
        width = 1 if isinstance(fn, Normal) else fn.event_shape[0]
        block = _Block(start, fn.loc.numel() // width, width, form, (location, *scales))
        leaves_of_site = {id(parameter.leaf) for parameter in block.parameters}
        if len(leaves_of_site) < len(block.parameters) or leaves_of_site & taken:
            raise ModelError(f"Site {name!r} of the guide shares a parameter: use one for each.")
        if not block.is_unrestricted():
            raise ModelError(
                f"The parameters of site {name!r} of the guide are constrained too much. Use no "
                "constraint for a location, and constraints.positive, lower_cholesky or "
                "positive_definite for a scale."
            )
        yield block
        start, taken = block.stop, taken | leaves_of_site


def base(fn: Any) -> Any:
    """The base distribution of an ``Independent``."""
    while isinstance(fn, Independent):
        fn = fn.base_dist
    return fn


def find(tensor: Tensor, parameters: list[_Parameter]) -> _Parameter | None:
    """The parameter of this shape whose value shares this tensor's memory, if there is one."""
    matching = (p for p in parameters if p.value.is_set_to(tensor))
    return next((p for p in matching if p.leaf.shape == tensor.shape), None)
