"""DPSEP: differentially private stochastic expectation propagation with nothing to set.

Its looks at the data go where the looks before have pointed (:mod:`pyro_dp.infer.ep.ep_state`).
:mod:`pyro_dp.infer.ep.paper_dpsep` is the algorithm of the paper.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import Event, SubsampledGaussian
from pyro_dp.accounting.origins import ADAPTIVE
from pyro_dp.infer.ep.deterministic_sites import DeterministicSites
from pyro_dp.infer.ep.ep_state import EPState
from pyro_dp.infer.ep.ep_status import status
from pyro_dp.infer.ep.look_plan import MOST_LOOKS, MOST_WITHOUT_NOISE
from pyro_dp.infer.ep.paper_dpsep import PaperDPSEP
from pyro_dp.infer.ep.problem import EPProblem
from pyro_dp.infer.ep.site_sum import WhitenedSum
from pyro_dp.infer.ep.stochastic_ep import PreparedSites, StochasticEP
from pyro_dp.infer.posterior.evidence import Cost, Evidence, Part
from pyro_dp.infer.posterior.posterior import Posterior
from pyro_dp.infer.posterior.summary import Status
from pyro_dp.mechanism.clipped_fraction import ClippedFraction
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.iterative import whole_step
from pyro_dp.mechanism.messages import Flag, Share
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.mechanism.settings import Execution, FullBatch, Noise, old_names_explained
from pyro_dp.records.global_draw import Latent
from pyro_dp.utils.errors import ConfigurationError, PrivacyBudgetExceeded

_LEAST_SHARE = 1e-9  # a smaller share of the budget is rounding
_ALL_RECORDS = (
    "DPSEP looks at all records: leave sampling out, or name the plate by FullBatch(plate=...). "
    "PaperDPSEP samples."
)
_DONE = "The run is finished: read posterior(). A new run needs new budget."
_ALL_LOST = (
    "Nothing remains of the run's budget. {lost} releases in the journal came after the loaded "
    "state, or failed. They are paid for, and their results are lost. The present result can be "
    "used as it is."
)


class DPSEP(StochasticEP[EPState]):
    """Differentially private stochastic expectation propagation: the guide is the result.

    The posterior is q = prior * evidence. A run makes some ten *looks* at the data. In each look
    every record's likelihood is replaced by a Gaussian site that fits it near the current
    posterior. At the mean m, a site has a score s and a curvature H. Their sums are released with
    noise. All looks so far make the evidence, each weighted by its noise and its distance
    (:mod:`pyro_dp.infer.posterior.looks`). After each look the guide's parameters hold q.

    **What is released.** The opening is a histogram of the norms of the records' scores. A look has
    the sums of w (W s, kappa W H W, tau), of norm C at most per record, and another histogram. W is
    the inverse root of the posterior's precision, so the noise has the posterior's shape. The
    weight w = min(1, C / b) shortens larger parts. If the family has finitely many outcomes
    (Bernoulli, categorical), b is the largest norm for any outcome. Such a weight does not bias the
    estimate if the model holds (Künsch, Stefanski & Carroll 1989). The last coordinate measures the
    mean weight. W, C, kappa and the share of the budget follow from the looks before
    (:mod:`pyro_dp.infer.ep.look_plan`).

    **Guarantee.** The sequence of posteriors is (epsilon, delta)-differentially private for one
    element of the private plate, for finite data. Its epsilon is ``accountant.get_epsilon()``,
    under the accountant's neighbouring relation. All looks together are mu-GDP, with 1 / mu the
    ``noise_multiplier`` (twice mu under ``replace_one``). That holds although each look's noise
    follows from the looks before: docs/proofs/evidence.md has the proof. The first look reserves
    the whole of mu^2, and nothing is returned.

    **Not protected.** As for :class:`DPSVI`.

    **Uncertainty.** :meth:`posterior` includes the noise of scores and curvature, and an estimate
    of the information lost by clipping. A posterior that is not Gaussian is not covered. If the
    noise hides all information, the posterior falls back to the prior. ``posterior().status`` says
    so, and :meth:`run` ends with a :class:`ConvergenceWarning` or a :class:`ClippingWarning`.

    **Products of latents.** A horseshoe or non-centred effects name the product by
    ``pyro.deterministic``, outside the plate. If that site hides a latent from the records, looks
    are made at the site. The posterior of the latents is the model's own prior times this evidence
    (:mod:`pyro_dp.infer.ep.deterministic_sites`).

    :param model: Pyro model; the records are the elements of a ``pyro.plate`` that holds all
        observations. Discrete latents of a record are summed out if they are marked with
        ``infer={"enumerate": "parallel"}``. One or two continuous ones are integrated out
        (:mod:`pyro_dp.records.quadrature`), and the guide leaves them out.
    :param guide: ``AutoNormal``, ``AutoDiagonalNormal``, ``AutoMultivariateNormal``,
        ``AutoLowRankMultivariateNormal``, or a hand-written one of ``Normal`` and
        ``MultivariateNormal`` sites. Its initial values are the first q. If an autoguide starts by
        default and the model is a generalised linear one, the prior's mean is.
    :param accountant: as for :class:`DPSVI`.
    :param noise: a multiplier or a :class:`Noise`. The multiplier is 1 / mu: all looks together are
        one Gaussian mechanism of this noise multiplier. 0: not private, and nothing is cut off.
    :param moments: "auto" takes "linear" if it applies, else "stein". ``repr`` shows the choice. If
        an observation depends on the latents through one or two numbers per element, "linear"
        applies. It is exact for generalised linear models. Otherwise "stein" takes any twice
        differentiable likelihood.
    :param sampling: all looks are at all records. ``FullBatch(plate="people")`` names the plate.
    :param execution: an :class:`Execution`. Its microbatches, jit and peers serve as they do for
        gradient steps (:mod:`pyro_dp.infer.ep.linear_sites`).
    :raises ClusterError: another process of the cluster failed, or is lost.
    :raises ConfigurationError: a setting is out of range or does not fit the others.

    >>> import pyro, torch
    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoMultivariateNormal
    >>> from pyro_dp import DPSEP, Noise, PrivacyAccountant
    >>> def model(y):
    ...     height = pyro.sample("height", dist.Normal(1.5, 1.0))
    ...     with pyro.plate("people", len(y)):
    ...         pyro.sample("y", dist.Normal(height, 0.1), obs=y)
    >>> accountant = PrivacyAccountant(epsilon=1.0)
    >>> guide, noise = AutoMultivariateNormal(model), Noise(source=0)
    >>> sep = DPSEP(model, guide, accountant=accountant, noise=noise)
    >>> result = sep.run(torch.linspace(1.5, 1.9, 1000), progress=False)
    >>> print(f"{sep.posterior().mean.item():.2f}, {sep.posterior().status}")
    1.70, ok
    """

    _plan_kind = ADAPTIVE
    _remedy = "Use other units, or DPSVI."
    _differs = "load_state_dict: this state has a {name}. PaperDPSEP takes it."
    _state_names = (
        "settings",
        "looks",
        "counts",
        "pooled",
        "frame",
        "plan",
        "gaussians",
        "numbers",
    )

    @old_names_explained(PaperDPSEP, plate="sampling=FullBatch(plate={})")
    def __init__(
        self,
        model: Callable,
        guide: Callable,
        *,
        accountant: PrivacyAccountant,
        moments: str = "auto",
        noise: Noise | float | None = None,
        sampling: FullBatch | None = None,
        execution: Execution | None = None,
    ):
        sampling = FullBatch() if sampling is None else sampling
        if not isinstance(sampling, FullBatch):
            raise ConfigurationError(_ALL_RECORDS)
        super().__init__(
            model,
            guide,
            moments=moments,
            accountant=accountant,
            bound=1.0,
            noise=noise,
            sampling=sampling,
            execution=execution,
            plans=True,
        )
        self.num_steps = 1 + MOST_LOOKS if self.noise.multiplier != 0 else MOST_WITHOUT_NOISE
        self._reservation.whole = True  # also in a loop: Theorem 1 needs mu beforehand
        self._behind = False  # its state is older than the ledger

    @whole_step
    def step(self, *args: Any, **kwargs: Any) -> float:
        """As :meth:`StochasticEP.step`: one look, or the opening."""
        change = super().step(*args, **kwargs)
        if self._finished:
            self._fit()
        return change

    def posterior(self, noise_aware: bool = True) -> Posterior:
        """The current posterior over the guide's unconstrained latents, in the guide's order.

        Its ``status`` says whether its intervals can be published.

        :param noise_aware: include the uncertainty of the privacy noise. The total never exceeds
            the prior's covariance.
        :raises ConfigurationError: no step was taken yet.
        """
        sites = self._approximation.problem.guide
        if not isinstance(sites, DeterministicSites):
            return super().posterior(noise_aware)
        found = sites.posterior(self.evidence)
        return found if noise_aware else found.plain

    def _noise_parts(self) -> Mapping[str, Tensor]:
        parts = super()._noise_parts()
        if isinstance(self._approximation.problem.guide, DeterministicSites):
            return {name: part.mean() for name, part in parts.items()}  # over the sites
        return parts

    def _fit(self) -> float:
        """Bring the guide to the posterior, if looks were made at deterministic sites.

        :returns: distance of their means, in standard deviations.
        """
        sites = self._approximation.problem.guide if self._known and self._known.looks else None
        if isinstance(sites, DeterministicSites):
            return sites.fit(self.evidence)
        return 0.0

    def _conclude(self, status: str | None = None) -> None:
        super()._conclude(status)
        self._fit()

    @property
    def evidence(self) -> Evidence:
        """The likelihood of the latents, from the looks so far, apart from the prior.

        :raises ConfigurationError: there was no look yet.
        """
        known = self._approximation
        if not known.looks:
            raise ConfigurationError("There is no evidence before the first look.")
        sigma, replaces = self.noise_multiplier, self.accountant.neighboring == "replace_one"
        cost = Cost(
            (2.0 if replaces else 1.0) / sigma if sigma else math.inf,
            self.accountant.neighboring,
            self._reservation.name,
            self.accountant.description.unit or "",
        )
        bias, bend = known.squared_bias, known.plan.bend
        part = Part(known.plan.size, known.looks, bias, bend, cost, self._status())
        return Evidence(tuple(_joined(known.problem.guide.latents, known.problem.places)), (part,))

    @property
    def clipped_fraction(self) -> ClippedFraction | None:
        """The fraction of records whose norm is above the bound of the last look.

        It comes from the histograms of norms. The standard error is that of their noise.
        """
        return None if self._known is None else self._known.clipped

    def _status(self) -> Status:
        return status(self._approximation)

    @property
    def _finished(self) -> bool:
        return self._known is not None and self._known.finished

    def _next_bound(self) -> float:
        if self._known is None:  # a rank of a cluster that has looked compares its own
            saved = (self._loaded or {}).get("frame")
            return saved["bound"] if isinstance(saved, Mapping) else math.inf
        frame = self._known.frame
        return math.inf if frame is None else frame.bound

    def _prepare(self, args: tuple, kwargs: dict) -> PreparedSites:
        prepared = super()._prepare(args, kwargs)
        self._refuse_steps_beyond_calibration()  # a state taken up here may have no look left
        return prepared

    def _planned(self, args: tuple, kwargs: dict) -> int:
        loaded = self._loaded is not None
        (self._look_at if loaded else self._prepare)(args, kwargs)
        if loaded and self._finished:  # the state is taken up, and nothing is left to release
            return self._steps
        return super()._planned(args, kwargs)

    def _start(self, problem: EPProblem, size: int, *, new: bool) -> EPState:
        sigma = self._releases.in_sums(self._reservation.agreed(1.0))
        return EPState.start(problem, size, sigma, new=new)

    def _site_sum(self, problem: EPProblem, approximation: EPState) -> WhitenedSum:
        return WhitenedSum(
            problem=problem,
            structure=approximation.structure,
            num_blocks=approximation.num_blocks,
            microbatch_size=self.execution.microbatch_size,
        )

    def _clipped_sum(self, prepared: Any, at: Any, indices: Any, position: int) -> ClippedSum:
        if self._approximation.frame is None:
            prepared = replace(prepared, sites=prepared.sites.opening())
        return super()._clipped_sum(prepared, at, indices, position)

    def _updated(self) -> Callable[..., tuple[float, EPState]]:
        if self._behind:
            self._catch_up()
        known = self._approximation
        share = max(known.share, _LEAST_SHARE)

        def updated(
            released: Sequence[Tensor], at: Any, *, multiplier: float, sample_rate: float
        ) -> tuple[float, EPState]:
            return known.learned(released, at, multiplier / math.sqrt(share))

        return updated

    def _release(
        self, clipped: ClippedSum, sampler: RecordSampler, noise_multiplier: float | None = None
    ) -> list[Tensor]:
        """A look, which takes its share of the budget."""
        sigma = _noise(self._reservation.calibrate(1.0), self._approximation.share)
        released = super()._release(clipped, sampler, sigma)
        self._steps += 1
        return released

    def _to_release(self, rate: float, sigma: float) -> Counter[Event]:
        left = 1.0 if self._known is None else 1.0 - self._known.spent
        return Counter({_sum_of_all(sigma, left): 1})

    def _to_reserve(self, rate: float) -> Counter[Event]:
        """The next look, and all later ones as one release."""
        sigma, known = self._reservation.calibrate(rate), self._approximation
        shares = known.share, 1.0 - known.spent - known.share
        return Counter(_sum_of_all(sigma, share) for share in shares if share > _LEAST_SHARE)

    def _lose_release(self) -> None:
        """Count the lost look as spent. The looks to come share the rest."""
        self._reservation.lost += 1
        known = self._approximation
        spent = min(known.spent + known.share, 1.0)
        self._known = replace(known, spent=spent, share=min(known.share, 1.0 - spent))

    def _load_state(self, state: dict[str, Any]) -> None:
        """mu is that of the whole run. Releases in the ledger beyond the state are spent."""
        super()._load_state(state)
        ours = self._reservation
        ours.noise_multiplier, ours.whole = state["noise_multiplier"], True
        self._behind = ours.lost > 0

    def _looks_anew(self, needed: bool) -> bool:
        anew = super()._looks_anew(needed)
        if anew:
            flags = self._releases.peers.exchange(Flag(self._behind))
            self._behind = any(each.value for each in flags)
        return anew

    def _catch_up(self) -> None:
        """Catch up with the ledger, which has releases after the loaded state.

        Ranks go on with the largest share that one of them has spent.
        """
        known, ours, spent = self._approximation, self._reservation, self._approximation.spent
        if ours.lost:
            left = ours.held(ours.calibrate(1.0))
            if left <= _LEAST_SHARE:
                raise PrivacyBudgetExceeded(_ALL_LOST.format(lost=ours.lost))
            spent = max(spent, 1.0 - left)
        spent = max(each.value for each in self._releases.peers.exchange(Share(spent)))
        share = min(known.share, 1.0 - spent)
        self._known, self._behind = replace(known, spent=spent, share=share), False

    def _refuse_steps_beyond_calibration(self) -> None:
        if self._finished and self._reservation.noise_multiplier != 0:
            raise PrivacyBudgetExceeded(_DONE)

    def _shown(self) -> dict[str, Any]:
        shown = super()._shown()
        del shown["num_steps"]  # the most there may be
        return shown

    def _shaping_settings(self) -> dict[str, Any]:
        return {"max_factor_norm": None}  # states of PaperDPSEP have a number


def _noise(sigma: float, share: float) -> float:
    """Noise multiplier of a release that takes this share of the budget."""
    return sigma / math.sqrt(max(share, _LEAST_SHARE))


def _sum_of_all(sigma: float, share: float) -> SubsampledGaussian:
    return SubsampledGaussian(_noise(sigma, share), 1.0, "full")


def _joined(latents: Sequence[Latent], places: Tensor) -> list[Latent]:
    """The sites that records inform, one after the other."""
    seen, found, start = set(places.tolist()), [], 0
    for each in latents:
        if each.start in seen:
            stop = start + each.stop - each.start
            found.append(replace(each, start=start, stop=stop))
            start = stop
    return found
