"""DPSEP: differentially private stochastic expectation propagation.

Algorithm 3 of Vinaroz & Park (DP-SEP, TMLR 2022, arXiv 2111.13219) for any Pyro model with a plate
of individuals and a guide that is Gaussian in unconstrained space. Stochastic EP: Li,
Hernández-Lobato & Turner 2015 (arXiv 1506.04132).

Where this differs from the paper: sites are exact rather than sampled
(:mod:`pyro_dp.infer.ep.tilted_sites`), and what is released is centred
(:mod:`pyro_dp.infer.ep.site_factors`) and, without a bound of the user's, whitened
(:mod:`pyro_dp.infer.ep.whitened`). All records take part in every step, and releases are averaged.
The paper moves q by gamma / N per record: there the signal-to-noise ratio of one step is that of
one record.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from pyro_dp.infer.ep.release_plan import FEWEST_STEPS, ReleasePlan
from pyro_dp.infer.ep.site_factors import STRUCTURES
from pyro_dp.infer.ep.site_sum import SiteSum
from pyro_dp.infer.ep.whitened import WhitenedApproximation
from pyro_dp.infer.ep.whitened_sum import WhitenedSum
from pyro_dp.infer.posterior.forecasted import Forecasted
from pyro_dp.infer.posterior.posterior import Posterior
from pyro_dp.mechanism.clipped_fraction import ClippedFraction
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.cluster import Cluster
from pyro_dp.mechanism.iterative import whole_step
from pyro_dp.mechanism.release_settings import ReleaseSettings
from pyro_dp.mechanism.sampling import Indices, RecordSampler
from pyro_dp.records.initial_values import initialised
from pyro_dp.records.records import Prepared, Records
from pyro_dp.utils.errors import (
    ClippingWarning,
    ConfigurationError,
    ConvergenceWarning,
    ModelError,
)
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
    "The posterior did not settle, so do not use it: {why}. Try DPSVI, other coordinates (such "
    "as non-centred ones of a hierarchy), or more steps."
)
_BIASED = (
    "Clipping may move the posterior by as much as its intervals are wide (clipped: {clipped}). "
    "Do not rely on these intervals; posterior().doubtful names them. A larger epsilon, more "
    "records, or features without extreme values would help."
)
_HIDDEN = (
    "The privacy noise may outweigh the data in {hidden} of {dim} directions. Intervals are "
    "wide there. If the noise is far larger, they come from the prior. posterior().doubtful "
    "names the coordinates. Fewer latents, more records or a larger epsilon would help."
)


@dataclass(frozen=True, eq=False)
class PreparedSites(Prepared):
    """
    :param problem: guide, prior and likelihood.
    :param sites: computes the releases.
    """

    problem: EPProblem
    sites: SiteSum


class DPSEP(PrivateInference[PreparedSites], Forecasted):
    """Differentially private stochastic expectation propagation: the guide is the result.

    ``DPSEP(model, guide, accountant=accountant)`` needs nothing else. The posterior is approximated
    by q = prior * f^N, with one Gaussian factor f for the average record. In each step every
    sampled record's likelihood is replaced, near q, by a Gaussian site with precision Lambda and
    residual r = eta - Lambda m at the mean m; their sum is released with noise, and q is what all
    releases so far say together, each with its noise (:mod:`pyro_dp.infer.ep.evidence`). After each
    step the guide's parameters hold it: ``Predictive``, ``guide.median()`` and
    ``guide.quantiles()`` work.

    **What is released.** A record's part is (W r, kappa W Lambda W), of norm C at most. W is the
    inverse root of the curvature that was released before: the noise has the shape of the
    posterior. C, kappa and the number of steps follow from the budget, N, the number of latents,
    and a histogram of the parts' norms that joins each release; the first step releases it alone
    (:mod:`pyro_dp.infer.ep.release_plan`). Larger parts are made shorter by a weight that is the
    same for all outcomes where the family has finitely many (Bernoulli, categorical), or that takes
    outcomes to be within two standard deviations: a weight that does not look at the outcome draws
    the estimate to no side where the model holds (Künsch, Stefanski & Carroll 1989); what is larger
    still is clipped.

    **Guarantee.** The sequence of posteriors is (epsilon, delta)-differentially private for one
    element of the private plate, with epsilon = ``accountant.get_epsilon()`` under the accountant's
    neighbouring relation, for finite data. Proof: given the releases before, W, kappa and C are
    constants. A record adds to the first block a vector of norm C at most, whatever W, kappa, its
    weight and its outcome are, as the block is clipped last; and to the second a one in one of 160
    bins, of norm 1. With noise multipliers sigma / sqrt(.95) and sigma / sqrt(.05) in units of C
    and 1 both are one Gaussian mechanism of noise multiplier sigma (:class:`Block`); the first step
    is one by itself. sigma and the number of steps are set before the first release; steps compose
    adaptively.

    **Not protected.** As for :class:`DPSVI`.

    **Uncertainty.** :meth:`posterior` counts in the uncertainty that the privacy noise adds, to
    first order in the noise. That does not make up for what is cut off, which biases the mean where
    the model does not hold and few records have much leverage; nor for a posterior that is not
    Gaussian. Where the noise hides all information the posterior falls back to the prior.
    ``posterior().doubtful`` names the coefficients of which either is so.

    **Where it fails.** At its end :meth:`run` warns, by what was released: with a
    :class:`ConvergenceWarning` where in most directions the noise may be more than what the records
    say, or where the last step was longer than the intervals are wide, and with a
    :class:`ClippingWarning` where what was cut off may move the posterior by as much as it is wide.
    With a ``max_factor_norm``, the first also where most estimates of the last half of the steps
    were left aside by the step control, or made where the gradient stood out of the noise (not with
    a ``damping`` of one's own). Hierarchies with unknown scales are such models more often than
    others: :class:`DPSVI` serves them better.

    **With a max_factor_norm** of one's own, for experts, it is the algorithm of the paper: parts
    are (eta - Lambda m, kappa Lambda) in the latents' own coordinates, all are clipped to C, and
    estimates are averaged once the posterior has arrived (:mod:`pyro_dp.infer.ep.step_control`).

    :param model: Pyro model; the records are the elements of a ``pyro.plate`` that holds all
        observations. Discrete latents of a record are summed out where they are marked with
        ``infer={"enumerate": "parallel"}``; it can have no other latents inside the plate.
    :param guide: ``AutoNormal``, ``AutoDiagonalNormal``, ``AutoMultivariateNormal``,
        ``AutoLowRankMultivariateNormal``, or a hand-written one of ``Normal`` and
        ``MultivariateNormal`` sites. Its initial values are the first q.
    :param accountant: as for :class:`DPSVI`, as are plate, sampling, microbatch_size, slice_data,
        generator, secure and report_clipping.
    :param num_steps: number of steps of :meth:`run`. ``None``: from the budget, N and the number of
        latents, 13 to 51; it is needed with a ``max_factor_norm``, where 20 to 50 serve
        regressions.
    :param noise_multiplier: standard deviation sigma of the noise in units of C, but for what
        ``report_clipping`` takes of the cost. ``None``: the
        smallest that fits what remains of the budget at the first step. 0: not private, and nothing
        is cut off.
    :param max_factor_norm: ``None``: none is needed. Else C, to which the norm of a record's (eta_n
        - Lambda_n m, kappa Lambda_n) is clipped, in all steps. Clipping acts on residuals: it
        should let nearly all records through. For logistic regression a C equal to the bound on the
        features' norm cuts nothing; the smaller epsilon, the more a smaller C is worth its bias.
        ``math.inf`` needs ``noise_multiplier=0``.
    :param damping: with a ``max_factor_norm`` only, as are precision, precision_weight and
        ``centred=False``: weight in (0, 1] of a new estimate in f, or a function of the step number
        that gives it. ``None``: 1 until the posterior has arrived, up to noise, then the average of
        all estimates since; with a step control that judges what was released.
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
    :param jit: of no effect where sites come of one product (generalised linear models with full
        precisions, see :mod:`pyro_dp.infer.ep.linear_sites`). "none": Pyro code in every step;
        "trace": sites come from a graph that is traced once; "compile": the same, as machine code
        (needs a C++ compiler). A few dozen steps on full batches gain little: tracing takes a
        second or two, compiling up to a minute.
    :param cluster: processes that share the work, each with its own records: :class:`Cluster`; or
        owners who do not show them to each other: :class:`pyro_dp.federated.Federation`.
    :raises ClusterError: another process of the cluster failed, or is lost.
    :raises ConfigurationError: a setting is out of range or does not fit the others.

    >>> import pyro, torch
    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoMultivariateNormal
    >>> from pyro_dp import DPSEP, PrivacyAccountant
    >>> def model(x, y):
    ...     w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    ...     with pyro.plate("people", len(x)):
    ...         pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)
    >>> made_up = torch.Generator().manual_seed(0)
    >>> x = torch.rand(2000, 2, generator=made_up) * 2 - 1
    >>> y = (torch.rand(2000, generator=made_up) < torch.sigmoid(x[:, 0])).float()
    >>> accountant = PrivacyAccountant(epsilon=1.0)
    >>> sep = DPSEP(model, AutoMultivariateNormal(model), accountant=accountant, generator=0)
    >>> result = sep.run(x, y, progress=False)
    >>> bool((sep.posterior().mean - torch.tensor([1.0, 0.0])).abs().max() < 0.3)  # the truth
    True
    >>> accountant.get_epsilon() <= 1.0
    True
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
        slice_data: bool | str = "auto",
        jit: str = "none",
        generator: torch.Generator | int | None = None,
        secure: bool = False,
        report_clipping: bool = True,
        cluster: Cluster | None = None,
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
            raise ConfigurationError(
                "num_steps is needed with a max_factor_norm: 20 to 50 serve regressions. Without a "
                "max_factor_norm both are chosen."
            )
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
        self._known: Approximation | WhitenedApproximation | None = None  # from the first look on
        self._loaded: dict[str, Any] | None = None  # until the first step

    _bound_name = "max_factor_norm"
    _measure = "change of the factor"

    @whole_step
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
        position, known = self.accountant.position, self._approximation
        at = known.at(prepared.records.plate.size)
        batch = self._draw_records(prepared, position)
        clipped = self._clipped_sum(prepared, at, batch, position)
        released = self._release(clipped, prepared.sampler)
        if self._bit:
            self._add_bit(self._bit, released[1], prepared)
        try:
            rate = prepared.sampler.sample_rate
            change, approximation = known.updated(
                released,
                at,
                damping=damping,
                multiplier=self._noise_in_sums / rate,
                sample_rate=rate,
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

    def _planned(self, args: tuple, kwargs: dict) -> int:
        self._prepare(args, kwargs)  # which chooses num_steps
        return super()._planned(args, kwargs)

    def _next_bound(self) -> float:
        known = self._known
        if isinstance(known, WhitenedApproximation):
            return math.inf if known.frame is None else known.frame.bound
        return super()._next_bound()

    @property
    def clipped_fraction(self) -> ClippedFraction | None:
        """As of :class:`DPSVI`; without ``max_factor_norm`` from the histograms of norms.

        Then it counts records whose norm is above the bound of the last step, and its standard
        error is that of the noise.
        """
        if isinstance(self._known, WhitenedApproximation):
            return self._known.clipped
        return super().clipped_fraction

    @property
    def _biased(self) -> bool:
        """Whether what was cut off of the records may matter."""
        known, clipped = self._approximation, self.clipped_fraction
        if isinstance(known, WhitenedApproximation):
            return known.is_biased
        return clipped is not None and clipped.is_large

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
        reasons = doubts(known, biased=self._biased)
        return Posterior(known.problem.guide.latents, mean, covariance, plain=plain, doubts=reasons)

    @torch.no_grad()
    def _noise_parts(self) -> Mapping[str, Tensor]:
        return self._approximation.noise_parts()

    def _unfinished(self) -> str | None:
        return self._approximation.unfinished

    def state_dict(self) -> dict[str, Any]:
        """Factors, step control, step count and accountant, to go on from.

        Otherwise as :meth:`DPSVI.state_dict`. The result itself is in the guide's parameters.

        :raises ConfigurationError: no step was taken yet.
        """
        if self._known is None:
            raise ConfigurationError("There is no state before the first step.")
        return self._state() | {"settings": self._shaping_settings()} | self._approximation.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state: as :meth:`DPSVI.load_state_dict`, and raises the same.

        Before the first step it is taken up there.
        """
        self._require_state(state, ("settings",))
        for name, value in self._shaping_settings().items():
            if state["settings"].get(name) != value:
                raise ConfigurationError(f"{name} differs from that of the saved run.")
        self._require_state(state, _WHITENED_STATE if self._automatic else _STATE)
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
        if known.unfinished:
            warnings.append(ConvergenceWarning(_UNSETTLED.format(why=known.unfinished)))
        if self._automatic and self._biased:
            warnings.append(ClippingWarning(_BIASED.format(clipped=self.clipped_fraction)))
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
        if known is None:
            approximation = self._start(problem, records.plate.size)
        else:
            approximation = replace(known, problem=problem)
        if self._loaded is not None:
            approximation.require_same_latents(self._loaded)
            approximation = approximation.resumed(self._loaded, records.device)
        self._known, self._loaded = approximation, None
        kind: Any = WhitenedSum if self._automatic else SiteSum
        sites = kind(
            problem=problem,
            structure=approximation.structure,
            centred=self.centred,
            weight=self._weight,
            num_blocks=approximation.num_blocks,
            microbatch_size=self.microbatch_size,
        )
        at = approximation.at(records.plate.size)
        trace = partial(sites.trace, at, self._sum_type, sampler.usual_size)
        self._traced(trace, problem.likelihood.term)
        return PreparedSites(records, sampler, problem, sites)

    def _start(self, problem: EPProblem, size: int) -> Approximation | WhitenedApproximation:
        if self._automatic:
            plan = self._plan(len(problem.places), size)
            self.num_steps = self.num_steps or plan.num_steps
            return WhitenedApproximation.start(problem, size, plan)
        assert self.num_steps is not None  # with a bound it was given
        return Approximation.start(
            problem,
            bound=self._bound,
            bit=self._bit,
            precision=self.precision,
            weight=self._weight,
            centred=self.centred,
            steered=self.damping is None,
            num_steps=self.num_steps,
        )

    def _plan(self, dim: int, size: int) -> ReleasePlan:
        """For what is left of the budget, or was when the loaded state began."""
        if self._loaded is not None:
            return ReleasePlan(**self._loaded["plan"])
        sigma = self._noise_multiplier
        if sigma is not None:
            noise = self._in_sums(sigma) / math.sqrt(self.num_steps or FEWEST_STEPS)
            return ReleasePlan(dim, size, noise)
        sigma = self.accountant.noise_multiplier(num_steps=1, sample_rate=1.0, sampling="full")
        return ReleasePlan(dim, size, self._in_sums(self._agreed(sigma)))

    def _public(self) -> Sequence[Tensor]:
        q = self._approximation.posterior
        return [*super()._public(), q.eta, q.precision]

    def _is_current(self, prepared: PreparedSites) -> bool:
        return super()._is_current(prepared) and prepared.problem.guide.is_current()

    def _clipped_sum(
        self, prepared: PreparedSites, at: Any, indices: Indices, position: int
    ) -> ClippedSum:
        """Sites of these records, clipped and summed, one microbatch after the other."""
        clipped = self._sum_type(self._approximation.blocks, prepared.records.device)
        prepared.sites.add(clipped, at, indices, self._randomness.stream("local", position))
        return clipped

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
