"""Hand-written guides of any family, fitted to a Gaussian posterior without the data."""

import math
from collections.abc import Callable

import pyro
import torch
from pyro import poutine
from pyro.distributions import Delta
from pyro.infer.autoguide import AutoDelta, AutoGuide
from torch import Tensor

from pyro_dp.infer.posterior.chains import Search
from pyro_dp.infer.posterior.gaussian_guide import (
    GaussianGuide,
    NoGaussian,
    OnPlaceholders,
    base,
    check_names,
    find,
    in_store,
    starts_anywhere,
)
from pyro_dp.records.global_draw import latents_of
from pyro_dp.records.records import Records
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import cholesky, dense, standardised
from pyro_dp.utils.torch_state import forked_rng

_DRAWS = 100
_SCALE = 0.1  # an autoguide's initial scale
_FEWEST = 10  # draws to which the guide is fitted
_ROUNDS, _FAR, _TOLERANCE = 10, 60, 1e-3  # rounds of L-BFGS, steps in each, and least gain
_STEPS, _STEP_SIZE, _DECAY = 300, 0.05, 0.005  # settings of Adam


class FittedGuide:
    """A guide of any family over the model's global latents, fitted to a Gaussian posterior.

    It has the interface and the arguments of :class:`GaussianGuide`. :meth:`write` keeps a
    posterior, and :meth:`fit` fits the guide to it. The guide runs on placeholders, which costs no
    privacy.

    :raises ModelError: the guide has no parameters, is an autoguide other than ``AutoDelta``, or
        does not match the model.
    """

    def __init__(
        self, model: Callable, guide: Callable, records: Records, *, globally: bool = False
    ):
        automatic = isinstance(guide, AutoGuide)
        if automatic and not isinstance(guide, AutoDelta):
            raise ModelError(f"An {type(guide).__name__} is fitted by gradient steps alone.")
        self._guide, self._runs = guide, OnPlaceholders(records, globally)
        values, prior, self._parameters = self._runs.sites(model, guide)
        if not self._parameters:
            raise ModelError("The guide has no parameters to fit.")
        check_names(values, prior, records.plate)
        self.latents = tuple(latents_of(values, prior, automatic=True))
        self.size = self.latents[-1].stop
        self._starts_at = guide if automatic else model
        self.starts_anywhere = not automatic or starts_anywhere(guide)
        deltas = {n: s for n, s in values.items() if isinstance(base(s["fn"]), Delta)}
        points = {n: find(base(s["fn"]).v, self._parameters) for n, s in deltas.items()}
        self._points = {name: point for name, point in points.items() if point}
        self._dtypes = {name: site["value"].dtype for name, site in values.items()}
        self._posterior: tuple[Tensor, Tensor] | None = None

    def read(self) -> tuple[Tensor, Tensor]:
        """Mean and variances (d,) of the first posterior, in float64.

        The mean is the prior's median, or the point of an ``AutoDelta``. Initial values of a
        hand-written guide are not used: they may lie far away, with a scale that cannot grow.
        """
        median = self._draws_of(self._starts_at).median(dim=0).values
        return median, torch.full_like(median, _SCALE**2)

    def write(self, mean: Tensor, covariance: Tensor) -> None:
        """Keep a posterior for :meth:`fit`. Arguments are those of :meth:`GaussianGuide.write`."""
        self._posterior = mean, dense(covariance)

    def fit(self) -> float:
        """Minimise KL(posterior || guide). A ``Delta`` of a parameter becomes the posterior's mean.

        :returns: the distance of the guide's mean from the posterior's: the largest over the
            coordinates, in standard deviations.
        """
        assert self._posterior is not None
        mean, covariance = self._posterior
        with forked_rng():
            torch.manual_seed(0)  # all ranks of a cluster find the same guide
            for latent in self.latents:
                if point := self._points.get(latent.name):
                    value = latent.transform(latent.part(mean)).detach()
                    point.leaf.data = point.unconstrained(value.to(point.leaf))
            if len(self._points) < len(self.latents):
                with self._runs.public():
                    draws = self._draws(mean, covariance)
                    local = self._local_draws()
                density = self._density(draws, local)
                with self._runs.public():
                    self._maximise(density)
        away = (self._draws_of(self._guide).mean(dim=0) - mean).abs() / covariance.diagonal().sqrt()
        return away.nan_to_num(math.inf).max().item()

    @property
    def names(self) -> set[str]:
        """The names of the parameters."""
        return {parameter.name for parameter in self._parameters}

    def is_current(self) -> bool:
        """As :meth:`GaussianGuide.is_current`."""
        return in_store(self._parameters)

    def _draws(self, mean: Tensor, covariance: Tensor) -> dict[str, Tensor]:
        """Draws by site, (K, ...), whose sample mean and covariance are exactly these."""
        count = max(_FEWEST, 2 * self.size)
        noise = torch.randn(count, self.size, dtype=torch.float64).to(mean)
        noise = standardised(noise - noise.mean(dim=0))
        flat = mean + noise @ cholesky(covariance).mT
        sites = [each for each in self.latents if each.name not in self._points]
        draws = {s.name: [s.transform(s.part(z)) for z in flat] for s in sites}
        return {name: torch.stack(each).to(self._dtypes[name]) for name, each in draws.items()}

    @torch.enable_grad()
    def _maximise(self, log_densities: Callable[[], Tensor]) -> None:
        """Maximise the guide's mean log density over its parameters.

        L-BFGS moves far in few steps, but its values may become infinite. Adam continues from the
        best values.
        """
        points = {parameter.name for parameter in self._points.values()}
        leaves = [p.leaf for p in self._parameters if p.name not in points]

        def objective() -> tuple[Tensor, Tensor]:
            loss = -log_densities().mean()
            return loss, loss

        Search(leaves, objective).loss()
        search = Search([leaf for leaf in leaves if leaf.grad is not None], objective)
        search.by_lbfgs(_ROUNDS, _FAR, _TOLERANCE)
        search.by_adam(_STEPS, _STEP_SIZE, _DECAY, betas=(0.9, 0.95))

    def _local_draws(self) -> dict[str, Tensor]:
        """One draw of the latents per record, which all densities share."""
        args, kwargs = self._runs.arguments
        nodes = poutine.trace(self._guide).get_trace(*args, **kwargs).nodes
        names = {latent.name for latent in self.latents}
        return {
            name: site["value"].detach()
            for name, site in nodes.items()
            if site["type"] == "sample" and not site["is_observed"]
            if name not in names and site["cond_indep_stack"]
        }

    def _density(self, draws: dict[str, Tensor], local: dict[str, Tensor]) -> Callable[[], Tensor]:
        """A function that returns the guide's log densities at the draws, (K,).

        It computes them in one batch, or one by one if the guide branches on latents.
        """

        def log_density(values: dict[str, Tensor]) -> Tensor:
            args, kwargs = self._runs.arguments
            with pyro.validation_enabled(False):  # validation branches on values
                conditioned = poutine.condition(self._guide, data=local | values)
                trace = poutine.trace(conditioned).get_trace(*args, **kwargs)
                trace.compute_log_prob(lambda name, site: name in values)
            sums = [trace.nodes[name]["log_prob_sum"].double() for name in values]
            return torch.stack(sums).sum()

        def at_once() -> Tensor:
            return torch.func.vmap(log_density, randomness="different")(draws)

        def one_by_one() -> Tensor:
            count = len(next(iter(draws.values())))
            each = ({name: values[i] for name, values in draws.items()} for i in range(count))
            return torch.stack([log_density(values) for values in each])

        try:
            with forked_rng(), self._runs.public(), torch.no_grad():
                at_once()
        except ModelError:
            return one_by_one
        return at_once

    @torch.no_grad()
    def _draws_of(self, sampled: Callable) -> Tensor:
        """Unconstrained draws of the latents from the guide or the model, (_DRAWS, d)."""
        args, kwargs = self._runs.arguments
        draws = []
        with forked_rng(), self._runs.public():
            for _ in range(_DRAWS):
                sites = poutine.trace(sampled).get_trace(*args, **kwargs).nodes
                parts = [each.transform.inv(sites[each.name]["value"]) for each in self.latents]
                draws.append(torch.cat([part.double().flatten() for part in parts]))
        return torch.stack(draws)


def read_guide(
    model: Callable, guide: Callable, records: Records, *, globally: bool = False
) -> GaussianGuide | FittedGuide:
    """A :class:`GaussianGuide` if the guide is one Gaussian, otherwise a :class:`FittedGuide`.

    Arguments and errors are those of :class:`GaussianGuide`.
    """
    try:
        return GaussianGuide(model, guide, records, globally=globally)
    except NoGaussian:
        raise
    except ModelError:
        return FittedGuide(model, guide, records, globally=globally)
