"""Hand-written guides of any family: read by draws, and fitted to a Gaussian without the data."""

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
    held,
    starts_anywhere,
)
from pyro_dp.records.global_draw import latents_of
from pyro_dp.records.records import Records
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import cholesky, dense, standardised
from pyro_dp.utils.torch_state import forked_rng

_DRAWS = 100
_SCALE = 0.1  # that of an autoguide's start
_FEWEST = 10  # draws that the guide is fitted to
_FAR, _STEPS = 60, 300  # steps of L-BFGS, and of Adam
_ROUNDS, _SMALL = 10, 1e-3  # L-BFGS ends if the log density rises by less
_STEP_SIZE, _FALLS = 0.05, 0.005  # Adam's; the step size falls to this fraction
_NOT_FITTED = "An {kind} is fitted by gradient steps alone."


class FittedGuide:
    """A guide over the model's global latents, read as a Gaussian in unconstrained space.

    It has what :class:`GaussianGuide` has, and its arguments. :meth:`write` keeps a posterior, and
    :meth:`fit` brings the guide to it. The guide runs on placeholders, which costs no privacy.

    :raises ModelError: the guide has no parameters, it is an autoguide other than ``AutoDelta``, or
        model and guide do not fit.
    """

    def __init__(
        self, model: Callable, guide: Callable, records: Records, *, globally: bool = False
    ):
        automatic = isinstance(guide, AutoGuide)
        if automatic and not isinstance(guide, AutoDelta):
            raise ModelError(_NOT_FITTED.format(kind=type(guide).__name__))
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
        self._posterior: tuple[Tensor, Tensor] | None = None  # the last one that was written

    def read(self) -> tuple[Tensor, Tensor]:
        """Mean and variances (d,) to start from, in float64.

        They are those of an autoguide: the prior's median, or the point of an ``AutoDelta``. A
        hand-written guide may start far away with a scale that cannot grow.
        """
        median = self._draws_of(self._starts_at).median(dim=0).values
        return median, torch.full_like(median, _SCALE**2)

    def write(self, mean: Tensor, covariance: Tensor) -> None:
        """Keep a posterior for :meth:`fit`. Arguments are those of :meth:`GaussianGuide.write`."""
        self._posterior = mean, dense(covariance)

    def fit(self) -> float:
        """Minimise KL(posterior || guide). A ``Delta`` of a parameter becomes the posterior's mean.

        :returns: distance of the guide's mean from the posterior's, in standard deviations of the
            coordinate where it is largest.
        """
        assert self._posterior is not None
        mean, covariance = self._posterior
        with forked_rng():
            torch.manual_seed(0)  # all ranks of a cluster find the same guide
            self._set_points(mean)
            if len(self._points) < len(self.latents):
                with self._runs.public():
                    draws = self._draws(mean, covariance)
                    others = self._other_draws()
                density = self._density(draws, others)
                with self._runs.public():
                    self._maximise(density)
        away = (self._draws_of(self._guide).mean(dim=0) - mean).abs() / covariance.diagonal().sqrt()
        return away.nan_to_num(math.inf).max().item()

    @property
    def names(self) -> set[str]:
        """Names of its parameters."""
        return {parameter.name for parameter in self._parameters}

    def is_current(self) -> bool:
        """As :meth:`GaussianGuide.is_current`."""
        return held(self._parameters)

    @torch.no_grad()
    def _set_points(self, mean: Tensor) -> None:
        for latent in self.latents:
            if point := self._points.get(latent.name):
                value = latent.transform(latent.part(mean))
                point.leaf.data = point.unconstrained(value.to(point.leaf))

    def _draws(self, mean: Tensor, covariance: Tensor) -> dict[str, Tensor]:
        """Draws of the posterior by site, (K, ...) each, with this mean and this covariance."""
        count = max(_FEWEST, 2 * self.size)
        noise = torch.randn(count, self.size, dtype=torch.float64).to(mean)
        noise = noise - noise.mean(dim=0)
        noise = standardised(noise)
        flat = mean + noise @ cholesky(covariance).mT
        sites = [each for each in self.latents if each.name not in self._points]
        own = {s.name: [s.transform(s.part(z)) for z in flat] for s in sites}
        return {name: torch.stack(each).to(self._dtypes[name]) for name, each in own.items()}

    @torch.enable_grad()
    def _maximise(self, log_densities: Callable[[], Tensor]) -> None:
        """Maximise the guide's mean log density over its parameters.

        L-BFGS goes far in few steps, but may leave the finite numbers. It starts again from its
        best values until they are as good as before, and Adam goes on from there.
        """
        points = {parameter.name for parameter in self._points.values()}
        leaves = [p.leaf for p in self._parameters if p.name not in points]

        def objective() -> tuple[Tensor, Tensor]:
            loss = -log_densities().mean()
            return loss, loss

        Search(leaves, objective).loss()
        search = Search([leaf for leaf in leaves if leaf.grad is not None], objective)
        search.by_lbfgs(_ROUNDS, _FAR, _SMALL)
        search.by_adam(_STEPS, _STEP_SIZE, _FALLS, betas=(0.9, 0.95))

    def _other_draws(self) -> dict[str, Tensor]:
        """One draw of each latent per record: all densities are those of the same draw."""
        args, kwargs = self._runs.arguments
        nodes = poutine.trace(self._guide).get_trace(*args, **kwargs).nodes
        latents = (n for n, s in nodes.items() if s["type"] == "sample" and not s["is_observed"])
        own = {latent.name for latent in self.latents}
        local = (n for n in latents if n not in own and nodes[n]["cond_indep_stack"])
        return {name: nodes[name]["value"].detach() for name in local}

    def _density(self, draws: dict[str, Tensor], others: dict[str, Tensor]) -> Callable[[], Tensor]:
        """The guide's log densities at the draws, (K,): at once, or one by one if it branches.

        Its first run has a guard of its own, which raises for a guide that branches on latents.
        """

        def log_density(values: dict[str, Tensor]) -> Tensor:
            args, kwargs = self._runs.arguments
            with pyro.validation_enabled(False):  # it looks at values, which no batch allows
                conditioned = poutine.condition(self._guide, data=others | values)
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
        """Unconstrained draws of the latents from the guide, or from the model, (count, d)."""
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
    """The guide itself if it is one Gaussian, and otherwise one that can be fitted to a Gaussian.

    Arguments and errors are those of :class:`GaussianGuide`.
    """
    try:
        return GaussianGuide(model, guide, records, globally=globally)
    except NoGaussian:
        raise
    except ModelError:
        return FittedGuide(model, guide, records, globally=globally)
