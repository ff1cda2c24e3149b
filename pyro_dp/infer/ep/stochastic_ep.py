"""Stochastic expectation propagation by private sums of sites: the base of DPSEP and PaperDPSEP.

The method is that of Li, Hernández-Lobato & Turner 2015 (arXiv 1506.04132). The sites are exact
rather than sampled (:mod:`pyro_dp.infer.ep.tilted_sites`).
"""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from numpy.random import Generator
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp.infer.base import PrivateInference, note_values
from pyro_dp.infer.ep.approximation import Approximation
from pyro_dp.infer.ep.ep_state import EPState
from pyro_dp.infer.ep.problem import MOMENTS, EPProblem
from pyro_dp.infer.ep.site_sum import SiteSum
from pyro_dp.infer.posterior.posterior import CLIPPING, NOISE, REMEDIES, Posterior, Status
from pyro_dp.mechanism.clipped_fraction import ClippedFraction, ClippedFractions, require_fractions
from pyro_dp.mechanism.iterative import whole_step
from pyro_dp.mechanism.releases import Releases
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.records.records import Prepared, Records
from pyro_dp.utils.errors import ClippingWarning, ConfigurationError, ConvergenceWarning, ModelError
from pyro_dp.utils.torch_state import private_rng
from pyro_dp.utils.validation import require_choice

A = TypeVar("A", Approximation, EPState)

_NOT_STARTED = "There is no posterior before the first step."
_NOT_TAKEN_UP = (
    "Call run(*data) to resume the loaded state. This costs nothing if all looks are done."
)
_OTHER_LATENTS = (
    "load_state_dict: the latents of the saved run have {saved} coordinates. This guide has {own}: "
    "{names}. Use the model and guide of the saved run."
)


@dataclass(frozen=True, eq=False)
class PreparedSites(Prepared):
    """:param sites: computes the releases."""

    problem: EPProblem
    sites: SiteSum

    def is_current(self) -> bool:
        return self.problem.guide.is_current()


class Fit(abc.ABC, Generic[A]):
    """The public half of a run: its approximation, with its start, updates and status.

    :param moments: the requested moments.
    :param shaping: settings that a saved state must share.
    :param fractions: estimates of the fraction of clipped records.
    :ivar current: the approximation; None before the first step.
    :ivar loaded: a saved state, until the first step resumes it.
    """

    remedy = ""  # for a posterior that left the finite numbers
    remedies = REMEDIES  # for a posterior that is not ok
    state_names = tuple[str, ...]()
    differs = "{name} differs from that of the saved run."
    current: A | None = None
    loaded: dict[str, Any] | None = None

    def __init__(self, moments: str, shaping: Mapping[str, Any], fractions: ClippedFractions):
        self.moments = require_choice("moments", moments, MOMENTS)
        self.shaping, self.fractions = shaping, fractions

    def state(self) -> dict[str, Any]:
        """:raises ConfigurationError: no step was taken yet."""
        if self.current is None:
            raise ConfigurationError("There is no state before the first step.")
        both = {"clipped_fractions": self.fractions.state(), "settings": dict(self.shaping)}
        return both | self.current.state()

    @property
    def approximation(self) -> A:
        """:raises ConfigurationError: there is none yet."""
        if self.current is None:
            raise ConfigurationError(_NOT_STARTED if self.loaded is None else _NOT_TAKEN_UP)
        return self.current

    def problem(self, run: "StochasticEP[A]", records: Records) -> EPProblem:
        """Guide, prior and likelihood for these records.

        :raises ModelError: model, guide and records do not fit.
        """
        size = run.execution.microbatch_size
        return EPProblem.build(run.model, run.guide, records, self.moments, size)

    @abc.abstractmethod
    def start(self, problem: EPProblem, size: int, releases: Releases, *, new: bool) -> A:
        """The approximation before the first release.

        :param new: nothing has used the guide yet.
        """

    @abc.abstractmethod
    def learner(self, step: int, sample_rate: float) -> Callable[..., tuple[float, A]]:
        """A function of the release, the cavity and the noise multiplier: the next approximation.

        :param step: number of finished steps.
        :raises ConfigurationError: a setting of this step is out of range.
        """

    @abc.abstractmethod
    def status(self) -> Status: ...

    def conclude(self, run: Any) -> None:
        """Fit the guide to the posterior if the steps do not write it."""


def _exact_norms(
    ep: "StochasticEP", prepared: PreparedSites, batches: Iterable[Tensor], stream: Generator
) -> Tensor:
    """Norms of the records' sites before clipping, (N,)."""
    at = ep._fit.approximation.at(prepared.records.plate.size)
    with torch.no_grad(), private_rng(stream):
        return torch.cat([prepared.sites.norms(at, chosen) for chosen in batches])


class StochasticEP(PrivateInference[PreparedSites], Generic[A]):
    """Each step releases one sum of sites, which moves the posterior and the guide.

    :param fit: turns a release into a posterior.
    """

    _measure = "change of the factor"
    _usual_jit = "none"
    _exact = MappingProxyType[str, Callable[..., Any]]({"gradient_norms": _exact_norms})

    def __init__(self, model: Callable, guide: Callable, *, fit: Fit[A], **settings: Any):
        super().__init__(model, guide, **settings)
        self._fit: Fit[A] = fit

    @property
    def moments(self) -> str:
        """The requested moments: "auto", "linear" or "stein"."""
        return self._fit.moments

    @whole_step
    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> float:
        """Make one private update from the full data.

        :returns: how far the posterior moved; 0 if it did not.
        :raises ModelError: model, guide or data do not fit, and nothing was spent.
        :raises PrivacyBudgetExceeded: the step does not fit the budget, and nothing was spent.
        :raises ConfigurationError: with these settings the posterior left the finite numbers.
        """
        self._reservation.require_step()
        prepared: PreparedSites = self._look_at(args, kwargs)
        self._reservation.require_step()  # a state resumed here may have no step left
        rate = prepared.sampler.sample_rate
        self._reservation.catch_up()
        learn = self._fit.learner(self._steps, rate)
        position = self.accountant.position
        current = self._fit.approximation
        at = current.at(prepared.records.plate.size)
        batch = prepared.draw(self._releases, position)
        stream = self._releases.randomness.stream("local", position)
        clipped = self._releases.sum_type(current.blocks, prepared.records.device)
        current.next_sum(prepared.sites).add(clipped, at, batch, stream)
        q, fractions = current.posterior, self._fit.fractions
        released = self._release(clipped, prepared.sampler, [q.eta, q.precision])
        self._reservation.plan.lose()  # until a posterior follows from it
        noise = self._releases.in_sums(self.noise_multiplier)
        fractions.add(released[1 : 1 + len(fractions.blocks)], prepared.sampler, noise)
        try:
            change, approximation = learn(released, at, noise / rate)
            mean, covariance = approximation.moments(True)
            variances = covariance if covariance.dim() == 1 else covariance.diagonal()
            if not (mean.isfinite().all() and covariance.isfinite().all() and variances.min() > 0):
                raise ArithmeticError
            prepared.problem.guide.write(mean, covariance)
        except (ArithmeticError, torch.linalg.LinAlgError):
            raise ConfigurationError(
                "The posterior left the finite numbers, and was not changed. The release was "
                f"spent. {self._fit.remedy}"
            ) from None
        self._fit.current = approximation
        if self._reservation.plan.finished:
            with torch.enable_grad():
                self._fit.conclude(self)
        return change

    @torch.no_grad()
    def posterior(self, noise_aware: bool = True) -> Posterior:
        """The current posterior over the guide's unconstrained latents, in the guide's order.

        Its ``status`` says whether its intervals can be published.

        :param noise_aware: include the uncertainty of the privacy noise and of the sampling, to
            first order. The total never exceeds the prior's covariance.
        :raises ConfigurationError: no step was taken yet.
        """
        current = self._fit.approximation
        _, plain = current.moments(False)
        mean, covariance = current.moments(noise_aware)
        return Posterior(
            current.problem.guide.latents, mean, covariance, plain=plain, status=self._fit.status()
        )

    @property
    def clipped_fraction(self) -> ClippedFraction | None:
        """The fraction of all N records whose part was clipped, with its standard error.

        It is the mean over the last half of the steps so far (of n steps, the last n - n // 2). A
        step sums its records' bits, +1/2 within the bound and -1/2 beyond it, with noise. The
        sample rate and N divide the sum. A record whose part is NaN or infinite counts as half
        clipped. The standard error is that of noise and sampling, which are public. None before the
        first step, with ``Clip(report=False)``, and with an infinite bound.
        """
        return self._fit.fractions.mean()

    @torch.no_grad()
    def _noise_parts(self) -> Mapping[str, Tensor]:
        return self._fit.approximation.noise_parts()

    def state_dict(self) -> dict[str, Any]:
        """Everything a new object needs to continue this run, as :meth:`DPSVI.state_dict`.

        The guide's parameters hold the result itself.

        :raises ConfigurationError: no step was taken yet.
        """
        return self._reservation.state() | self._fit.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, with the errors of :meth:`DPSVI.load_state_dict`.

        A new object resumes the state when ``run`` or ``step`` gets the data. If all looks are
        done, ``run`` costs nothing.
        """
        self._reservation.require(state, ("settings",))
        for name, value in self._fit.shaping.items():
            if state["settings"].get(name) != value:
                raise ConfigurationError(self._fit.differs.format(name=name))
        self._reservation.require(state, self._fit.state_names)
        require_fractions(state.get("clipped_fractions"))
        current = self._fit.current
        resumed = current and _resumed(current, state, current.posterior.eta.device)
        self._reservation.load(state)
        self._fit.fractions.load(state.get("clipped_fractions"))
        if resumed is None:
            self._fit.loaded = state
        else:
            self._fit.current = resumed
            resumed.problem.guide.write(*resumed.moments(True))

    def _conclude(self, status: str | None = None) -> Sequence[Warning]:
        found = self._fit.status()
        super()._conclude(str(found))
        self._fit.conclude(self)
        if found.is_ok or (found.cause == NOISE and not self.noise_multiplier):
            return ()
        kind = ClippingWarning if found.cause == CLIPPING else ConvergenceWarning
        return [kind(f"{found}. {self._fit.remedies[found.cause]}")]

    def _shown(self) -> dict[str, Any]:
        current = self._fit.current
        moments = self.moments if current is None else current.problem.moments.name
        return {"moments": moments} | super()._shown()

    def _build(self, records: Records, sampler: RecordSampler) -> PreparedSites:
        started, before = self._kept.values_before(self.guide)
        problem = self._fit.problem(self, records)
        size, current = records.plate.size, self._fit.current
        if current is not None and not torch.equal(problem.places, current.problem.places):
            raise ModelError("The likelihood's latents changed between two steps.")
        if current is not None and problem.moments.name != current.problem.moments.name:
            raise ModelError("The likelihood changed its form between two steps.")
        used = bool(started or before & problem.guide.names)
        note_values(self._reservation, used)
        if current is None:
            current = self._fit.start(problem, size, self._releases, new=not used)
        else:
            current = replace(current, problem=problem)
        if self._fit.loaded is not None:
            current = _resumed(current, self._fit.loaded, records.device)
            problem.guide.write(*current.moments(True))
        self._fit.current, self._fit.loaded = current, None
        sites = current.site_sum(self.execution.microbatch_size)
        trace = partial(sites.trace, current.at(size), self._releases.sum_type, sampler.usual_size)
        self._kept.traced(trace, problem.likelihood.term, self.model, self.guide)
        return PreparedSites(records, sampler, problem, sites)


def _resumed(approximation: A, state: Mapping[str, Any], device: torch.device) -> A:
    """The approximation from a saved state.

    :raises ModelError: the state has other latents.
    :raises ConfigurationError: the state lacks a part.
    """
    latents = approximation.problem.guide.latents
    try:
        moved = pytree.tree_map_only(Tensor, lambda each: each.to(device), dict(state))
        found = approximation.resumed(moved)
        saved, own = len(found.posterior.eta), latents[-1].stop
    except (KeyError, TypeError, AttributeError):
        raise ConfigurationError("load_state_dict: this state is damaged.") from None
    if saved != own:
        names = ", ".join(f"{each.name!r} ({each.stop - each.start})" for each in latents)
        raise ModelError(_OTHER_LATENTS.format(saved=saved, own=own, names=names))
    return found
