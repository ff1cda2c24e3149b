"""VIPS: private variational Bayes from noisy expected sufficient statistics.

Algorithm 2 of Park, Foulds, Chaudhuri & Welling 2020 (Variational Bayes in Private Settings, VIPS,
JAIR 68; arXiv 1611.00340), for any :class:`ConjugateModel`.

The algorithm mixes natural parameters, (1 - rho_t) old + rho_t new. Those of a conjugate posterior
are the prior's plus the sums of the statistics, and the prior never changes. So the state here is
the mixture of the statistics, and the posterior is a function of it.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import pyro
import torch
from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import Event, SubsampledGaussian
from pyro_dp.graphs.captured_state import CapturedState, require_no_changes
from pyro_dp.infer.base import Preparation
from pyro_dp.infer.posterior.explanation import Explained
from pyro_dp.infer.posterior.predictive import Predicted
from pyro_dp.mechanism.iterative import IterativeMechanism, whole_step
from pyro_dp.mechanism.nonprivate import row_norms
from pyro_dp.mechanism.reservation import Steps
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.mechanism.settings import Execution, Noise, Sampling, old_names_explained
from pyro_dp.records.arguments import argument_names, as_tensors, find_shards
from pyro_dp.records.column import has_rows
from pyro_dp.records.first_look import refuse_captured_data, refuse_rows
from pyro_dp.records.plate import PrivatePlate
from pyro_dp.records.records import Prepared, Reading, Records
from pyro_dp.records.sandbox import guarded
from pyro_dp.utils.errors import ConfigurationError, ModelError, PrivacyError
from pyro_dp.utils.validation import require_count
from pyro_dp.vips.conjugate_model import (
    ConjugateModel,
    Draws,
    Statistic,
    is_reviewed,
    parts_of,
)
from pyro_dp.vips.e_step import (
    IsolatedModel,
    MixedStatistics,
    Progress,
    StatisticsSum,
    require_step_size,
)
from pyro_dp.vips.noise_response import NoiseResponse, noise_aware
from pyro_dp.vips.site_posterior import SitePosterior

_STATE = ("size", "statistics", "static")


class _Plan(Steps):
    """Planned releases: the static statistics once, and then the steps.

    :param steps_release: whether the steps release anything.
    :param static_pending: whether the static release has yet to happen.
    """

    def __init__(self, steps_release: bool, static_pending: Callable[[], bool], *args: Any):
        super().__init__(*args)
        self._steps_release, self._static_pending = steps_release, static_pending

    def releases(self, rate: float, sigma: float) -> Counter[Event]:
        events = super().releases(rate, sigma) if self._steps_release else Counter[Event]()
        if self._static_pending():
            events[SubsampledGaussian(self.in_one(sigma), rate, self.sampling)] += 1
        return events

    def reserved(self, rate: float, sigma: float, whole: bool) -> Counter[Event] | None:
        if whole or not (self._steps_release and self._static_pending()):
            return super().reserved(rate, sigma, whole)
        # The first step has two releases. Refuse both if only one fits the budget.
        both = (self.in_one(sigma), sigma)
        return Counter(SubsampledGaussian(each, rate, self.sampling) for each in both)


class VIPS(IterativeMechanism, Explained, Predicted):
    """Differentially private variational Bayes for a conjugate-exponential model.

    Each step samples records and computes each record's expected sufficient statistics under the
    current posterior. Every statistic is clipped to the bound that the model declares. All of them
    are released together, as one Gaussian event with equal shares. The sums are divided by the
    public sample rate and mixed into those of earlier steps, s <- (1 - rho_t) s + rho_t s_hat. The
    model computes the posterior from s.

    If all records take part in every step, statistics that the model declares static are released
    once, in the first step. They serve all steps, so they get as much of the budget as all steps
    together: noise multiplier sigma / sqrt(num_steps).

    **Guarantee.** The sequence of posteriors is (epsilon, delta)-differentially private for one
    record, with epsilon = ``accountant.get_epsilon()`` under the accountant's neighbouring
    relation, for finite data.

    **Not protected.** The number N of records, the sample rate, the model's bounds and all other
    settings. Choices of model and settings after looking at the data. Running times. Errors of the
    checks of data, which are for the curator.

    **Uncertainty.** :meth:`posterior` includes the uncertainty that noise adds, to first order. Its
    status says where that is not enough. It does not include the effects of clipping and of
    sampling records.

    :param model: one of :mod:`pyro_dp.vips`, or another :class:`ConjugateModel`.
    :param accountant: as for :class:`DPSVI`. A model's public start uses torch's global
        generator.
    :param num_steps: number of steps of :meth:`run`. If sigma is calibrated, no more steps are
        possible. 1 if all statistics are static.
    :param step_size: (tau0, kappa) of rho_t = (tau0 + t)^-kappa for t = 1, 2, ... They satisfy
        tau0 >= 0 and 0 <= kappa <= 1. kappa = 0 forgets all earlier steps; (0, 1) averages them
        all. Values in between average the noise and forget early, poorer posteriors. ``None``: the
        model's own.
    :param noise: a multiplier or a :class:`Noise`. With K statistics, the noise of each is sqrt(K)
        sigma times its bound. If sigma is calibrated, the steps and the release of static
        statistics fit the remaining budget. 0: plain variational Bayes, not private.
    :param sampling: a sample rate, or an object such as :class:`PoissonSampling`.
    :param execution: an :class:`Execution` with microbatch_size (``None``: as the model says) and
        peers.
    :raises ConfigurationError: a setting is out of range or does not fit the others.
    :raises ClusterError: another process of the cluster failed, or is lost.

    >>> x = torch.linspace(-1.0, 1.0, 5000)[:, None]
    >>> regression = LinearRegression(dim=1, x_bound=1.0, y_bound=1.0)
    >>> vips = VIPS(regression, accountant=accountant, num_steps=1, noise=Noise(source=0))
    >>> result = vips.run(x, 0.5 * x[:, 0], progress=False)
    >>> print(f"{vips.posterior()['weights'].mean.item():.1f}")
    0.5
    """

    @old_names_explained()
    def __init__(
        self,
        model: ConjugateModel,
        *,
        accountant: PrivacyAccountant,
        num_steps: int,
        step_size: tuple[float, float] | None = None,
        noise: Noise | float | None = None,
        sampling: Sampling | float = 1.0,
        execution: Execution | None = None,
    ):
        if not isinstance(model, ConjugateModel):
            raise ConfigurationError(
                "model must be a ConjugateModel, for example "
                "pyro_dp.vips.LogisticRegression(dim=10); DPSVI and DPSEP take Pyro models."
            )
        require_count("num_steps", num_steps)
        sampled = Sampling.read(sampling).only("VIPS", "rate")
        if sampled.rate is None:
            raise ConfigurationError("VIPS needs a rate of sampling, such as sampling=0.05.")
        self.model = model
        self.step_size = require_step_size(model.step_size if step_size is None else step_size)
        declared, full = self._statistics, sampled.rate == 1.0
        static = {name: each for name, each in declared.items() if full and each.static}
        fresh = {n: x for n, x in declared.items() if n not in static}

        def static_pending() -> bool:
            return bool(static) and not (self._found and self._found.static)

        super().__init__(
            accountant=accountant,
            num_steps=num_steps,
            bound=max(statistic.bound for statistic in declared.values()),
            noise=noise,
            sampling=sampled,
            execution=Execution.read(execution).only("VIPS", "microbatch_size", "peers"),
            plan=partial(_Plan, bool(fresh), static_pending),
        )
        # A user's model is isolated to single records. Reviewed models need no isolation.
        self._e_step = model if is_reviewed(model) else IsolatedModel(model, _state(model))
        own = (self.execution.microbatch_size, self._releases.sum_type)
        self._static_sum = StatisticsSum(self._e_step, static, *own) if static else None
        self._step_sum = StatisticsSum(self._e_step, fresh, *own) if fresh else None
        if not fresh and num_steps != 1:
            raise ConfigurationError(
                f"num_steps must be 1: all statistics of {type(model).__name__} are static, and "
                "one release of all records has all their information."
            )
        self._kept = Preparation[Prepared](model.model, "none")
        self._found: Progress | None = None  # from the first look on

    _measure = "change of the statistics"
    _exact = MappingProxyType[str, Callable[..., Any]](
        {"gradient_norms": lambda *given: _exact_norms(*given)}
    )

    @cached_property
    def _statistics(self) -> dict[str, Statistic]:
        return dict(self.model.statistics)

    @whole_step
    @torch.no_grad()
    def step(self, *data: Tensor) -> float:
        """One private update of the posterior, from the full data.

        :param data: tensors of length N, as the model's Pyro model takes them.
        :returns: the change of the mixed statistics per record: its Euclidean norm, with each
            statistic in units of its bound.
        :raises ModelError: the data do not fit, or are not those of the first step; nothing was
            spent.
        :raises PrivacyBudgetExceeded: the step does not fit the budget; nothing was spent.
        :raises ConfigurationError: with these settings the posterior left the finite numbers.
        """
        self._reservation.require_step()
        if not self._step_sum and self._steps:
            raise ConfigurationError(
                f"All statistics of {type(self.model).__name__} are static: there is no second "
                "step."
            )
        prepared = self._look_at(data, {})
        assert self._found is not None  # from the first look on
        if self._static_sum and not self._found.static:
            sigma = self._reservation.calibrate(prepared.sampler.sample_rate)
            sigma = self._reservation.plan.in_one(sigma)
            static = self._released(self._static_sum, prepared, sigma)
            self._found = replace(self._found, static=static)
        estimates, before = self._found.static or MixedStatistics({}, {}), self._found
        if self._step_sum:
            estimates = estimates.joined(self._released(self._step_sum, prepared))
        else:
            self._reservation.plan.done += 1
        tau0, kappa = self.step_size
        declared = self._static_sum.statistics if self._static_sum else {}
        after = before.mixed.mixed(estimates, (tau0 + self._steps) ** -kappa, static=list(declared))
        start = after if self._steps == 1 else before.start
        self._found = _m_step(self.model, replace(before, mixed=after, start=start))
        return after.change(before.mixed, self._statistics) / before.size

    @torch.no_grad()
    def posterior(self, noise_aware: bool = True) -> SitePosterior:
        """The current posterior of each global site of the model's Pyro model:
        ``posterior["weights"]`` is the marginal distribution of a site.

        :param noise_aware: include the uncertainty that the noise adds, to first order, directly
            and through the E-steps (:mod:`pyro_dp.vips.noise_response`). If the model has a
            :meth:`ConjugateModel.feedback`, the parts of the covariance that variational Bayes
            leaves out are included, too. The ``status`` says whether anything is left out. Without
            noise, and with ``False``, the posterior is that of variational Bayes as it is.
        :raises ConfigurationError: no step was taken yet.
        """
        found = self._found
        if found is None or not self._steps:
            raise ConfigurationError("There is no posterior before the first step.")
        with _finite():
            if not noise_aware or self.noise_multiplier == 0:
                return SitePosterior(self.model.marginals(found.posterior))
            aware = found.aware
            if aware is None:
                aware = _noise_aware(self, found)
                self._found = replace(found, aware=aware)
                self._reservation.note_result(None, str(aware.status))
            return aware

    def guide(self, *args: Any, **kwargs: Any) -> None:
        """The current posterior as a Pyro guide for the model's Pyro model.

        Write ``Predictive(vips.model.model, guide=vips.guide, num_samples=100)``. It samples the
        result of :meth:`posterior`, whose sites are independent of each other. Without noise it
        samples the joint posterior of variational Bayes.

        :raises ConfigurationError: no step was taken yet.
        """
        if self.posterior().noise_share.any():
            for site, marginal in self.posterior().items():
                pyro.sample(site, marginal)
        else:
            with _finite():
                self.model.guide(self._found and self._found.posterior)

    def state_dict(self) -> dict[str, Any]:
        """Statistics, step count and accountant; otherwise as :meth:`DPSVI.state_dict`."""
        found = dict.fromkeys((*_STATE, "start")) if self._found is None else self._found.state()
        return self._reservation.state() | found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state: as :meth:`DPSVI.load_state_dict`, and raises the same."""
        self._reservation.require(state, _STATE)
        found = static = start = None
        if state["static"] is not None:
            declared = self._static_sum.statistics if self._static_sum else {}
            static = MixedStatistics.from_state(state["static"], declared)
        if state.get("start") is not None:  # older states have none
            start = MixedStatistics.from_state(state["start"], self._statistics)
        if state["size"] is not None:
            size = require_count("size", state["size"])
            mixed = MixedStatistics.from_state(state["statistics"], self._statistics)
            found = _m_step(self.model, Progress(size, mixed, static, start))
        self._reservation.load(state)
        self._kept = Preparation(self.model.model, "none")  # checks the data again
        self._found = found

    def _look_at(self, args: tuple[Tensor, ...], kwargs: dict) -> Prepared:
        """Check the data if they are new."""
        known = self._kept.current(args, kwargs)
        if self._releases.must_look(known is None, self.sampling.rate):
            records = _checked(self, args, kwargs)
            self._kept.look_at_callbacks(records)
            size, rate = records.plate.size, self.sampling.rate
            assert rate is not None
            sampler = RecordSampler(self.sampling.kind, size, rate, records.count)
            if self._found is None:
                initial = dict(self.model.initial_statistics(size))
                noise = dict.fromkeys(self._statistics, 0.0)
                self._found = Progress(size, MixedStatistics(initial, noise))
            self._found = _m_step(self.model, self._found.to(records.device))
            if isinstance(self._e_step, IsolatedModel):
                self._e_step.check(self._found.posterior, records)
            known = self._kept.keep(Prepared(records, sampler), self._steps)
        assert known is not None
        return known

    def _released(
        self, sums: StatisticsSum, prepared: Prepared, sigma: float | None = None
    ) -> MixedStatistics:
        """Release these sums over records.

        :param sigma: noise multiplier; None for that of a step.
        """
        found, sampler, position = self._found, prepared.sampler, self.accountant.position
        assert found is not None  # from the first look on
        local = self._releases.randomness.stream("local", position)
        indices = prepared.draw(self._releases, position)
        total = sums.sum(found.posterior, local, prepared.records, indices)
        released = self._release(total, sampler, list(found.mixed.values.values()), sigma)
        sigma = self.noise_multiplier if sigma is None else sigma
        return sums.estimates(released, self._releases.in_sums(sigma), sampler.sample_rate)


def _checked(vips: VIPS, given: tuple, kwargs: dict) -> Records:
    model, peers = vips.model.model, vips._releases.peers
    data, _ = as_tensors(model, given, {})
    # A shard may be empty.
    if kwargs or not data or not all(has_rows(x) and (len(x) or not peers.alone) for x in data):
        raise ModelError("step() takes tensors with one row per record.")
    size = len(data[0])
    if any(len(x) != size for x in data):
        raise ModelError("All arguments of step() must have one row per record, the same N.")
    shard = None
    if not peers.alone:
        shard = find_shards(argument_names(model, data, {}), (data, {}), peers.exchange)[0]
        size = shard.size
    if vips._found is not None and vips._found.size != size:
        raise ModelError("The number of records is not that of the first step.")
    plate, own = PrivatePlate("data", size, size), (given, dict[str, Any]())
    records = Records(model, plate, data, {}, Reading.WHOLE, given=own, shard=shard)
    first = vips._kept.first(vips._steps)
    if first is not None:
        first.require_same_data(records)
    if isinstance(vips._e_step, IsolatedModel):
        state = vips._e_step.state
        state.references.require_all()
        refuse_rows(state.references, size)
        refuse_rows(state.references, records.count)
    else:
        state = _state(vips.model)
    refuse_captured_data(state.references, records)
    with state.pristine() as kept:
        for _, rows in records.checked(records.block):  # copies: check() may write
            vips.model.check(*rows)
    require_no_changes(kept)
    return records


def _noise_aware(vips: VIPS, found: Progress) -> SitePosterior:
    model, current = vips.model, found.posterior
    mixed, size, (tau0, kappa) = found.mixed, found.size, vips.step_size
    response = NoiseResponse(
        lambda values: model.marginals(model.posterior(values, mixed.noise, size)),
        mixed,
        static=found.static.values if found.static else (),
        weights=[(tau0 + step) ** -kappa for step in range(1, vips._steps + 1)],
        first=found.start.values if found.start else None,
    )
    feedback: Any = {}
    if not all(each.static for each in vips._statistics.values()):
        feedback = model.feedback(current, mixed.values, mixed.noise, size)
    hidden = model.hidden(current, mixed.values, mixed.noise)
    return noise_aware(model.marginals(current), response, feedback, hidden)


def _exact_norms(
    vips: VIPS, prepared: Prepared, batches: Iterable[Tensor], stream: np.random.Generator
) -> dict[str, Tensor]:
    """Norms of the records' statistics before they are clipped, (N,) each."""
    posterior = vips._found and vips._found.posterior
    norms: dict[str, list[Tensor]] = {name: [] for name in vips._statistics}
    for chosen in batches:
        rows, draws = prepared.records.rows(chosen), Draws.by(stream, chosen)
        with torch.no_grad(), guarded("The E-step"):
            parts = parts_of(vips._e_step, vips._statistics, posterior, draws, rows)
        for name, found in norms.items():
            found.append(row_norms(parts[name]))
    return {name: torch.cat(found) for name, found in norms.items()}


def _m_step(model: ConjugateModel, found: Progress) -> Progress:
    with _finite():
        posterior = model.posterior(found.mixed.values, found.mixed.noise, found.size)
    return replace(found, posterior=posterior, aware=None)


def _state(model: ConjugateModel) -> CapturedState:
    """The objects that a model's methods can reach while they read data."""
    return CapturedState(model.expected_statistics, model.static_statistics, model.check)


@contextlib.contextmanager
def _finite() -> Iterator[None]:
    """Explain an error of the M-step. It depends on settings and released numbers alone."""
    try:
        yield
    except PrivacyError:
        raise
    except (ArithmeticError, ValueError, torch.linalg.LinAlgError) as error:
        raise ConfigurationError(
            "The posterior left the finite numbers, and the release was spent. Use a model with "
            "less extreme bounds and prior, or less noise."
        ) from error
