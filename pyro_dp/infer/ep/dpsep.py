"""DPSEP: differentially private stochastic expectation propagation.

Algorithm 3 of Vinaroz & Park (DP-SEP, TMLR 2022, arXiv 2111.13219) for any Pyro model with a plate
of individuals and a guide that is Gaussian in unconstrained space. Stochastic EP: Li,
Hernández-Lobato & Turner 2015 (arXiv 1506.04132).

Where this differs from the paper: sites are exact rather than sampled
(:mod:`pyro_dp.infer.ep.tilted_sites`); what is released is centred
(:mod:`pyro_dp.infer.ep.site_factors`); all records take part in every step, and estimates are
averaged once the posterior has arrived (:mod:`pyro_dp.infer.ep.step_control`). The paper moves q by
gamma / N per record: there the signal-to-noise ratio of one step is that of one record.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyro
import torch
from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.infer.base import PrivateInference
from pyro_dp.infer.ep.approximation import Approximation
from pyro_dp.infer.ep.doubts import doubts
from pyro_dp.infer.ep.problem import MOMENTS, EPProblem
from pyro_dp.infer.ep.release_plan import ReleasePlan
from pyro_dp.infer.ep.site_factors import STRUCTURES
from pyro_dp.infer.ep.site_sum import SiteSum
from pyro_dp.infer.ep.whitened import WhitenedApproximation
from pyro_dp.infer.ep.whitened_sum import WhitenedSum
from pyro_dp.infer.posterior.posterior import Posterior
from pyro_dp.mechanism.blocks import Block
from pyro_dp.mechanism.norm_histogram import SHARE, SIZE
from pyro_dp.mechanism.release_settings import ReleaseSettings
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.records.initial_values import initialised
from pyro_dp.records.records import Prepared, Records
from pyro_dp.utils.errors import ConfigurationError, ConvergenceWarning, ModelError
from pyro_dp.utils.rng import private_rng
from pyro_dp.utils.validation import (
    require_choice,
    require_flag,
    require_number,
    require_scale,
    value_at,
)

_STATE = ("settings", "average", "control", "mean_noise", "gaussians")
_WHITENED_STATE = (
    "settings",
    "looks",
    "counts",
    "known",
    "frame",
    "scale",
    "radius",
    "gaussians",
    "plan",
)
_UNSETTLED = (
    "The posterior did not settle, and is not to be used: {count} of the last {judged} estimates "
    "were left aside, or made where the gradient stood out of the noise. Try DPSVI, other "
    "coordinates (such as non-centred ones of a hierarchy), or more steps."
)
_HIDDEN = (
    "In {hidden} of {dim} directions the noise may be more than what the records say: there the "
    "posterior is little more than the prior. Try DPSVI, fewer latents, more records, a smaller "
    "max_factor_norm or a larger epsilon."
)


@dataclass(frozen=True, eq=False)
class PreparedSites(Prepared):
    """
    :param problem: guide, prior and likelihood.
    :param sites: computes the releases.
    """

    problem: EPProblem
    sites: SiteSum


class DPSEP(PrivateInference[PreparedSites]):
    """Differentially private stochastic expectation propagation: the guide is the result.

    The posterior is approximated by q = prior * f^N, with one Gaussian factor f for the average
    record. Each step forms the cavity q / f; every sampled record's site f_n, the Gaussian that
    replaces its likelihood there, is clipped jointly in its natural parameters to norm C; the sum
    is released with noise N(0, (sigma C)^2 I), divided by the public sample rate, and averaged into
    f^N. After each step the guide's parameters hold the current posterior: ``Predictive``,
    ``guide.median()`` and ``guide.quantiles()`` work.

    **Guarantee.** The sequence of posteriors is (epsilon, delta)-differentially private for one
    element of the private plate, with epsilon = ``accountant.get_epsilon()`` under the accountant's
    neighbouring relation, for finite data.

    **Not protected.** As for :class:`DPSVI`.

    **Uncertainty.** :meth:`posterior` can include the uncertainty that the privacy noise adds, to
    first order in the noise: 95% intervals then covered the truth in 92 to 97% of simulated data
    sets. That does not make up for clipping, which biases the mean where C cuts much; nor for a
    posterior that is not Gaussian; nor for the noise in the precision, which draws the mean towards
    the prior in directions that the data determine weakly. Where the noise hides all information
    the posterior falls back to the prior.

    **Where it fails.** At its end :meth:`run` warns, by what was released, with a
    :class:`ConvergenceWarning`: where most estimates of the last half of the steps were left aside
    by the step control, or made where the gradient stood out of the noise (not with a ``damping``
    of one's own); and where in most directions the noise may be more than what the records say.
    Hierarchies with unknown scales are such models: :class:`DPSVI` serves them better.

    :param model: Pyro model; the records are the elements of a ``pyro.plate`` that holds all
        observations. Discrete latents of a record are summed out where they are marked with
        ``infer={"enumerate": "parallel"}``; it can have no other latents inside the plate.
    :param guide: ``AutoNormal``, ``AutoDiagonalNormal``, ``AutoMultivariateNormal``, or a
        hand-written one of ``Normal`` and ``MultivariateNormal`` sites. Its initial values are the
        first q.
    :param accountant: as for :class:`DPSVI`, as are plate, sampling, microbatch_size, slice_data,
        generator, secure and report_clipping.
    :param num_steps: number of steps of :meth:`run`. 20 to 50 on full batches serve regressions.
    :param noise_multiplier: standard deviation sigma of the noise in units of C, but for what
        ``report_clipping`` takes of the cost. ``None``: the
        smallest that fits what remains of the budget at the first step. 0: plain SEP, not private.
    :param max_factor_norm: C, to which the norm of a record's (eta_n - Lambda_n m, kappa Lambda_n)
        is clipped. Clipping acts on residuals: it should let nearly all records through. For
        logistic regression a C equal to the bound on the features' norm cuts nothing; the smaller
        epsilon, the more a smaller C is worth its bias. ``math.inf`` needs ``noise_multiplier=0``.
    :param damping: weight in (0, 1] of a new estimate in f, or a function of the step number that
        gives it. ``None``: 1 until the posterior has arrived, up to noise, then the average of all
        estimates since; with a step control that judges what was released.
    :param sample_rate: expected fraction of the records in a step, in (0, 1]. Full batches use the
        budget best.
    :param moments: "linear" (the observation depends on the latents through one or two numbers per
        element; exact for generalised linear models), "stein" (any twice differentiable
        likelihood), "auto": linear where it applies. ``repr`` tells which.
    :param precision: structure of the released precisions: "full", "diagonal", or "shared" (one
        number for each latent site). ``None``: full up to 1200 latents, else shared. It does not
        depend on the guide: a guide without correlations gets the marginals of the full posterior.
    :param precision_weight: kappa, the public weight of the precision in the release; its noise is
        sigma C / kappa. ``None``: 2 / C, which makes the result independent of the latents' scale.
    :param centred: release eta_n - Lambda_n m, m the cavity mean, rather than eta_n. Then the
        precision's noise does not move the mean.
    :param noise_aware: whether the guide holds the noise-aware posterior or the plain one.
    :param jit: "none": Pyro code in every step; "trace": sites come from a graph that is traced
        once; "compile": the same, as machine code (needs a C++ compiler). A few dozen steps on full
        batches gain little: tracing takes a second or two, compiling up to a minute.
    :raises ConfigurationError: a setting is out of range or does not fit the others.
    """

    def __init__(
        self,
        model: Callable,
        guide: Callable,
        *,
        accountant: PrivacyAccountant,
        num_steps: int | None = None,
        noise_multiplier: float | None = None,
        max_factor_norm: float | None = None,
        damping: float | Callable[[int], float] | None = None,
        plate: str | None = None,
        sample_rate: float = 1.0,
        sampling: str = "poisson",
        moments: str = "auto",
        precision: str | None = None,
        precision_weight: float | None = None,
        centred: bool = True,
        noise_aware: bool = True,
        microbatch_size: int | None = None,
        slice_data: bool = False,
        jit: str = "none",
        generator: torch.Generator | int | None = None,
        secure: bool = False,
        report_clipping: bool = True,
    ):
        self._automatic = max_factor_norm is None
        if max_factor_norm is not None:
            require_scale("max_factor_norm", max_factor_norm, infinite=True)
        require_flag("centred", centred)
        require_flag("noise_aware", noise_aware)
        require_choice("moments", moments, MOMENTS)
        if precision is not None:
            require_choice("precision", precision, tuple(STRUCTURES))
        if precision_weight is not None:
            require_scale("precision_weight", precision_weight)
        if damping is not None and not callable(damping):
            require_number("damping", damping, above=0.0, below=1.0, closed=True)
        if self._automatic:
            given = (damping, precision_weight, None if centred else False)
            if any(each is not None for each in given) or precision in ("diagonal", "shared"):
                raise ConfigurationError(
                    "damping, precision, precision_weight and centred=False need a "
                    "max_factor_norm: without one, all of them follow from what was released."
                )
        elif num_steps is None:
            raise ConfigurationError("num_steps is needed: the default damping depends on it.")
        self.moments = moments
        self.precision = precision
        self.damping = damping
        self.centred = centred
        self.noise_aware = noise_aware
        bound = 1.0 if max_factor_norm is None else max_factor_norm
        settings = ReleaseSettings.among(locals() | {"plans": self._automatic}, bound=bound)
        super().__init__(
            model,
            guide,
            settings,
            plate=plate,
            slice_data=slice_data,
            jit=jit,
            report_clipping=report_clipping and not self._automatic,
        )
        self._weight = precision_weight or (1.0 if bound == math.inf else 2.0 / bound)
        self._share = 1.0 - (self._bit.share if self._bit else 0.0)
        self._plan: ReleasePlan | None = None  # from the first look on, if there is no bound
        self._known: Approximation | WhitenedApproximation | None = None  # the same
        self._loaded: dict[str, Any] | None = None  # until the first step

    _bound_name = "max_factor_norm"

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> float:
        """One private update of the average factor, given the full data.

        :returns: norm of the change of the released natural parameters (eta, kappa Lambda); 0 for
            an estimate that the step control left aside.
        :raises ModelError: model, guide or data do not fit; nothing was spent.
        :raises PrivacyBudgetExceeded: the step does not fit the budget; nothing was spent.
        :raises ConfigurationError: with these settings the posterior left the finite numbers.
        """
        prepared = self._prepare(args, kwargs)
        damping = self._fixed_damping()
        position = self.accountant.position
        at = self._approximation.at(prepared.records.plate.size)
        batch = self._draw_records(prepared, position)
        clipped = self._sum_type(self._blocks(), prepared.records.device)
        prepared.sites.add(clipped, at, batch, self._randomness.stream("local", position))
        released = self._release(clipped, prepared.sampler)
        if self._bit:
            self._add_bit(self._bit, released[1], prepared)
        try:
            change, approximation = self._updated(
                released, at, damping, prepared.sampler.sample_rate
            )
            mean, covariance = approximation.moments(self.noise_aware)
            variances = covariance if covariance.dim() == 1 else covariance.diagonal()
            if not (mean.isfinite().all() and covariance.isfinite().all() and variances.min() > 0):
                raise ArithmeticError
            prepared.problem.guide.write(mean, covariance)
        except (ArithmeticError, torch.linalg.LinAlgError):
            raise ConfigurationError(
                "The posterior left the finite numbers, and stays where it was; the release was "
                "spent. Use a smaller max_factor_norm or damping, or other units."
            ) from None
        self._known = approximation
        return change

    def run(self, *args: Any, progress: bool = True, **kwargs: Any) -> list[float]:
        """What is left of ``num_steps`` steps, with a progress bar.

        :returns: what the steps returned.
        :raises PrivacyBudgetExceeded: so many steps do not fit the budget.
        """
        self._prepare(args, kwargs)  # which chooses num_steps
        return super().run(*args, progress=progress, **kwargs)

    @property
    def _approximation(self) -> Approximation | WhitenedApproximation:
        if self._known is None:
            raise ConfigurationError("There is no posterior before the first step.")
        return self._known

    @torch.no_grad()
    def posterior(self, noise_aware: bool = True) -> Posterior:
        """The current posterior over the guide's unconstrained latents, in the guide's order.

        Where the noise is more than what the records say, or many of them were clipped, its
        ``doubtful`` says so.

        :param noise_aware: include the uncertainty that the noise adds to the mean, to first order
            (:func:`~pyro_dp.infer.ep.noise_aware.mean_noise`), and u Sigma for minibatches, u the
            variance of sampling; in all nowhere more than the prior's covariance. Precisions that
            are diagonal or shared leave the posterior's correlations unknown: then the noise of
            every step is added up, contracted by the prior only, which bounds it, and the plain
            variances are those of a mean field.
        :raises ConfigurationError: no step was taken yet.
        """
        known = self._approximation
        _, plain = known.moments(False)
        mean, covariance = known.moments(noise_aware)
        reasons = doubts(known, self.clipped_fraction)
        return Posterior(known.problem.guide.latents, mean, covariance, plain=plain, doubts=reasons)

    def state_dict(self) -> dict[str, Any]:
        """Factors, step control, step count and accountant, to go on from.

        Otherwise as :meth:`DPSVI.state_dict`. The result itself is in the guide's parameters.

        :raises ConfigurationError: no step was taken yet.
        """
        if self._known is None:
            raise ConfigurationError("There is no state before the first step.")
        own = self._approximation.state() | ({"plan": vars(self._plan)} if self._plan else {})
        return self._state() | {"settings": self._shaping_settings()} | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state: as :meth:`DPSVI.load_state_dict`, and raises the same.

        Before the first step it is taken up there.
        """
        self._require_state(state, _WHITENED_STATE if self._automatic else _STATE)
        for name, value in self._shaping_settings().items():
            if state["settings"].get(name) != value:
                raise ConfigurationError(f"{name} differs from that of the saved run.")
        known = self._known
        if known is not None:
            known.require_same_latents(state)
        self._load_state(state)
        if known is None:
            self._loaded = state
        else:
            self._known = known.resumed(state, known.posterior.eta.device)
            known.problem.guide.write(*self._approximation.moments(self.noise_aware))

    def _shaping_settings(self) -> dict[str, Any]:
        """Without the same ones, a state means something else."""
        if self._automatic:
            return {"max_factor_norm": None}
        return {
            "max_factor_norm": self._bound,
            "precision": self.precision,
            "precision_weight": self._weight,
            "centred": self.centred,
        }

    def _shown(self) -> dict[str, Any]:
        moments, precision = self.moments, self.precision
        if self._known is not None:
            moments = self._known.problem.moments.name
            precision = self._known.structure.name
        return {"moments": moments, "precision": precision} | super()._shown()

    def _warnings(self) -> list[Warning]:
        warnings, known = super()._warnings(), self._approximation
        if isinstance(known, Approximation) and not known.control.settled:
            count, judged = known.control.unsettled, known.control.judged
            warnings.append(ConvergenceWarning(_UNSETTLED.format(count=count, judged=judged)))
        hidden, dim = known.hidden(), len(known.problem.places)
        if self.noise_multiplier > 0 and 2 * hidden > dim:
            warnings.append(ConvergenceWarning(_HIDDEN.format(hidden=hidden, dim=dim)))
        return warnings

    def _build(self, records: Records, sampler: RecordSampler) -> PreparedSites:
        started, before = initialised(self.guide), set(pyro.get_param_store().keys())
        problem = EPProblem.build(
            self.model, self.guide, records, self.moments, self.microbatch_size
        )
        known = self._known
        if known is not None and not torch.equal(problem.places, known.problem.places):
            raise ModelError("The latents that records see changed between two steps.")
        if started or before & problem.guide.names:
            self._note_earlier_values()
        if known is not None:
            approximation = replace(known, problem=problem)
        elif self._automatic:
            approximation = self._planned(problem, records.plate.size, sampler)
        else:
            approximation = Approximation.start(
                problem,
                precision=self.precision,
                weight=self._weight,
                centred=self.centred,
                steered=self.damping is None,
                num_steps=self.num_steps,
            )
        if self._loaded is not None:
            approximation.require_same_latents(self._loaded)
            approximation = approximation.resumed(self._loaded, records.device)
        self._known, self._loaded = approximation, None
        sites = (WhitenedSum if self._automatic else SiteSum)(
            problem=problem,
            structure=approximation.structure,
            centred=self.centred,
            weight=self._weight,
            has_bit=self._bit is not None or (self._automatic and self._noise_multiplier != 0),
            microbatch_size=self.microbatch_size,
        )
        if self._automatic:
            return PreparedSites(records, sampler, problem, sites)
        trace = partial(sites.trace, approximation.posterior, self._sum_type, sampler.usual_size)
        self._traced(trace, problem.likelihood.term)
        return PreparedSites(records, sampler, problem, sites)

    def _planned(
        self, problem: EPProblem, size: int, sampler: RecordSampler
    ) -> WhitenedApproximation:
        """Lay out the budget, which tells the number of steps."""
        steps, sigma = self.num_steps, self._noise_multiplier
        if self._loaded is not None:
            noise = self._loaded["plan"]["noise"]
        elif sigma is None:
            noise = self.accountant.noise_multiplier(num_steps=1, sample_rate=1.0, sampling="full")
        else:
            noise = sigma / math.sqrt(steps or 30)
        self._plan = ReleasePlan(len(problem.places), size, noise)
        self.num_steps = steps or self._plan.num_steps
        return WhitenedApproximation.start(problem, size, exact=sigma == 0)

    def _is_current(self, prepared: PreparedSites) -> bool:
        return super()._is_current(prepared) and prepared.problem.guide.is_current()

    def _blocks(self) -> list[Block]:
        """The blocks of the joint release: sites, and the bit or the histogram of norms."""
        known = self._approximation
        size = len(known.problem.places) + known.structure.size
        if isinstance(known, Approximation):
            sites = Block(size, self._bound, self._share)
            return [sites, *([self._bit] if self._bit else [])]
        if known.frame is None:
            return [Block(SIZE, 1.0)]
        if known.frame.bound == math.inf:
            return [Block(size, math.inf)]
        return [Block(size, known.frame.bound, 1.0 - SHARE), Block(SIZE, 1.0, SHARE)]

    def _updated(
        self, released: list[Tensor], at: Any, damping: float | None, rate: float
    ) -> tuple[float, Approximation | WhitenedApproximation]:
        """What comes of a release, and by how much it moves."""
        known, sigma = self._approximation, self.noise_multiplier / rate
        if isinstance(known, Approximation):
            noise = sigma * self._bound / math.sqrt(self._share) if sigma > 0 else 0.0
            return known.updated(released[0], at, damping=damping, noise=noise, sample_rate=rate)
        assert self._plan is not None
        if known.frame is None:
            return 0.0, known.first(released[0], sigma, self._plan)
        share = 1.0 - SHARE
        noise = sigma * known.frame.bound / math.sqrt(share) if sigma > 0 else 0.0
        counts = released[1] if len(released) > 1 else None
        cavity, _ = at
        return known.updated(
            released[0],
            counts,
            cavity,
            self._plan,
            noise=noise,
            counts_sd=sigma / math.sqrt(SHARE),
            rate=rate,
        )

    def _fixed_damping(self) -> float | None:
        if not callable(self.damping):
            return self.damping
        damping = value_at("damping", self.damping, self._steps)
        require_number("damping(step)", damping, above=0.0, below=1.0, closed=True)
        return damping

    @property
    def _others(self) -> tuple[Any, ...]:
        return (self.damping,)

    def _exact(self) -> dict[str, Callable]:
        return {"gradient_norms": self._exact_norms}

    @torch.no_grad()
    def _exact_norms(
        self, prepared: PreparedSites, batches: Iterable[Tensor], stream: np.random.Generator
    ) -> Tensor:
        """Norms of the records' sites before they are clipped, (N,)."""
        at = self._approximation.at(prepared.records.plate.size)
        with private_rng(stream):
            return torch.cat([prepared.sites.norms(at, chosen) for chosen in batches])
