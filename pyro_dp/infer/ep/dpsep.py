"""DPSEP: differentially private stochastic expectation propagation without tuning parameters.

A look is one private release of score and curvature at a public point. Earlier looks decide the
next point (:mod:`pyro_dp.infer.ep.ep_state`). Each look takes a part of the budget, and their
number is not fixed. :mod:`pyro_dp.infer.ep.paper_dpsep` is the algorithm of the paper.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import Event, SubsampledGaussian
from pyro_dp.accounting.origins import ADAPTIVE
from pyro_dp.infer.ep.deterministic_sites import DeterministicSites
from pyro_dp.infer.ep.ep_state import EPState
from pyro_dp.infer.ep.look_plan import LEAST_SHARE, MOST_LOOKS, MOST_WITHOUT_NOISE
from pyro_dp.infer.ep.paper_dpsep import PaperDPSEP
from pyro_dp.infer.ep.problem import EPProblem
from pyro_dp.infer.ep.stochastic_ep import Fit, StochasticEP
from pyro_dp.infer.posterior.evidence import Evidence
from pyro_dp.infer.posterior.evidence_parts import Cost, Part
from pyro_dp.infer.posterior.forecast import Forecasted
from pyro_dp.infer.posterior.looks import roots
from pyro_dp.infer.posterior.posterior import (
    CHECK,
    CLIPPING,
    DO_NOT_PUBLISH,
    MODEL,
    NOISE,
    STEPS,
    Posterior,
    Status,
)
from pyro_dp.mechanism.clipped_fraction import ClippedFraction, ClippedFractions
from pyro_dp.mechanism.messages import Flag, Share
from pyro_dp.mechanism.peers import Alone
from pyro_dp.mechanism.releases import Releases
from pyro_dp.mechanism.reservation import Steps
from pyro_dp.mechanism.settings import Execution, FullBatch, Noise, old_names_explained
from pyro_dp.records.global_draw import Latent
from pyro_dp.utils.errors import ConfigurationError, PrivacyBudgetExceeded
from pyro_dp.utils.linalg import cholesky, dense, restricted

_LITTLE = 0.8  # an interval this close to the prior's width counts as the prior's
_FAR_AWAY = 4.0  # longest trusted last step, in squared standard deviations per direction
_LARGEST_NOISE = 1.5  # a matrix's noise, relative to its mean
_TOO_NARROW = 1.5  # variance of the estimate, relative to the posterior's
_APART = 0.7  # interval of a mixture's latents, relative to the prior's; wider ones are no Gaussian
_UNFIT = 0.5  # units that far below the mean would still fall
_NARROW = 100.0  # information relative to the prior's, in which a hidden curvature matters
_NOT_CONCAVE = "the log likelihood is not concave in {count} of {dim} directions at the last look"
_UNSCALED = (
    "noise hides the curvature in {count} of {dim} directions, whose units were not found: "
    "intervals there may be far too narrow"
)
_COINCIDE = (
    "components may coincide, because the data say little in a direction: there the interval is "
    "{width:.2f} times as wide as the prior's"
)
_CURVED = (
    "records see products or sums of curves of the {dim} latents, and the evidence is quadratic. "
    "Name what they see by pyro.deterministic, outside the plate"
)
_OVERDISPERSED = (
    "outcomes vary at least {dispersion:.1f} times as much as the model says, and intervals may be "
    "{ratio:.1f} times too narrow"
)


def status(state: EPState) -> Status:
    """Whether the posterior's intervals can be published, by released numbers."""
    seen, pooled = state.seen, state.seen.pooled
    if pooled is None:
        return Status(DO_NOT_PUBLISH, "there was no look at the data yet", STEPS)
    places = state.problem.places
    prior = dense(state.prior.precision).diagonal()[places]
    variances = state.aware.covariance.diagonal()[places]
    remains = (variances * prior).sqrt().median().item()
    if remains > _LITTLE:
        reason = f"the data said little: intervals are {remains:.2f} times as wide as the prior's"
        return Status(DO_NOT_PUBLISH, reason, NOISE)
    mean = state.posterior.mean[places]
    move = mean - seen.looks[-1].point
    precision = state.prior_seen() + pooled.information(mean)
    step = (move @ precision @ move).item() / state.plan.dim
    if step > _FAR_AWAY or not state.finished:
        reason = f"the mean still moved by {math.sqrt(step):.1f} standard deviations in the end"
        return Status(CHECK, reason, STEPS)
    if count := _num_convex(state):
        return Status(CHECK, _NOT_CONCAVE.format(count=count, dim=state.plan.dim), STEPS)
    if count := _num_unscaled(state):
        return Status(CHECK, _UNSCALED.format(count=count, dim=state.plan.dim), STEPS)
    search = pooled.relative(pooled.nonquadratic_error(mean), mean)
    clipping = pooled.relative(state.squared_bias * pooled.geometry, mean)
    if search + clipping > 1:
        shift = f"the mean by {math.sqrt(search + clipping):.1f} standard deviations"
        if clipping > search:
            return Status(CHECK, f"clipping may shift {shift}", CLIPPING)
        return Status(CHECK, f"the search may have missed {shift}", STEPS)
    dispersion = state.dispersion
    varies = 1 + (dispersion - 1) * pooled.relative(pooled.curvature, mean)
    if varies > _TOO_NARROW:
        ratios = {"dispersion": dispersion, "ratio": math.sqrt(varies)}
        return Status(CHECK, _OVERDISPERSED.format(**ratios), MODEL)
    if state.problem.moments.clusters and (width := _widest(state)) > _APART:
        return Status(CHECK, _COINCIDE.format(width=width), STEPS)
    if state.problem.moments.turns and state.plan.multiplier > 0:
        return Status(CHECK, _CURVED.format(dim=state.plan.dim), STEPS)
    return Status()


def _num_convex(state: EPState) -> int:
    """The number of directions in which the posterior's log density is convex at the last look.

    The noise's largest eigenvalue is about sqrt(2 d) times its standard deviation.
    """
    last = state.seen.looks[-1]
    root, _ = roots(last.geometry)
    values = torch.linalg.eigvalsh(root @ (last.curvature + state.prior_seen()) @ root)
    return int((values < -_LARGEST_NOISE * last.curvature_sd * math.sqrt(2 * state.plan.dim)).sum())


def _widest(state: EPState) -> float:
    """The largest ratio, over all directions, of the posterior's standard deviation to the prior's.

    If a mixture's components coincide, or one is empty, the score vanishes and the likelihood is
    flat there. Its mode may be far away, with components apart.
    """
    places, root = state.problem.places, cholesky(state.prior_seen())
    covariance = restricted(state.aware.covariance, places)
    return math.sqrt(torch.linalg.eigvalsh(root.mT @ covariance @ root)[-1].item())


def _num_unscaled(state: EPState) -> int:
    """The number of directions whose curvature the looks hid, because their units did not fit.

    If features differ in size by orders of magnitude, noise in the largest one's units exceeds the
    curvature of the others. Each look makes better units. A direction counts if noise hides its
    curvature, better units would still reduce this noise, and the posterior is narrow nevertheless.
    """
    pooled = state.seen.required_pooled
    root, _ = roots(pooled.geometry)
    values, vectors = torch.linalg.eigh(root @ pooled.curvature @ root)
    along, noise = root @ vectors, pooled.curvature_sd * math.sqrt(state.plan.dim)
    units = values + state.plan.kind.doubted * noise  # which the next look would use
    information = pooled.information(state.posterior.mean[state.problem.places])
    found, prior = ((along * (each @ along)).sum(0) for each in (information, state.prior_seen()))
    unfit = units < _UNFIT * units.mean()
    return int(((values < noise) & unfit & (found > _NARROW * prior)).sum())


_DONE = "The run is finished: read posterior(). A new run needs new budget."
_ALL_LOST = (
    "Nothing remains of the run's budget. {lost} releases in the journal came after the loaded "
    "state, or failed. They are paid for, and their results are lost. The present result can be "
    "used as it is."
)


class FitByLooks(Fit[EPState]):
    """Looks move the posterior. Earlier looks decide where the next one is made."""

    remedy = "Use other units, or DPSVI."
    differs = "load_state_dict: this state has a {name}. PaperDPSEP takes it."
    state_names = "settings", "looks", "counts", "pooled", "frame", "plan", "gaussians", "numbers"

    def __init__(self, moments: str):
        # States of PaperDPSEP have a number.
        super().__init__(moments, {"max_factor_norm": None}, ClippedFractions())

    def start(self, problem: EPProblem, size: int, releases: Releases, *, new: bool) -> EPState:
        sigma = releases.in_sums(releases.reservation.agreed(1.0))
        return EPState.start(problem, size, sigma, new=new)

    def learner(self, step: int, sample_rate: float) -> Callable[..., tuple[float, EPState]]:
        return self.approximation.learned

    def status(self) -> Status:
        return status(self.approximation)

    def conclude(self, run: Any) -> None:
        """Fit the guide to the posterior if looks were made at deterministic sites."""
        state = self.current
        if state and state.seen.looks and isinstance(state.problem.guide, DeterministicSites):
            state.problem.guide.fit(run.evidence)


class LookShares(Steps):
    """The looks' shares of the budget, from the state of the run."""

    kind = ADAPTIVE
    whole = True  # also in a loop: Theorem 1 needs mu beforehand

    def __init__(self, fit: Fit[EPState], *own: Any):
        super().__init__(*own)
        self._fit = fit
        self._behind = False  # the state is older than the ledger

    @property
    def bound(self) -> float:
        state = self._fit.current
        if state is None:  # ranks of a cluster that have looked compare theirs
            saved = (self._fit.loaded or {}).get("frame")
            return saved["bound"] if isinstance(saved, Mapping) else math.inf
        return math.inf if state.frame is None else state.frame.bound

    @property
    def finished(self) -> bool:
        return self._fit.current is not None and self._fit.current.finished

    def noise(self, sigma: float) -> float:
        return _noise(sigma, self._fit.approximation.share)

    def releases(self, rate: float, sigma: float) -> Counter[Event]:
        left = 1.0 if self._fit.current is None else 1.0 - self._fit.current.spent
        return Counter({_sum_of_all(sigma, left): 1})

    def reserved(self, rate: float, sigma: float, whole: bool) -> Counter[Event]:
        """Events of the next look, and of all later looks as one release."""
        state = self._fit.approximation
        shares = state.share, 1.0 - state.spent - state.share
        return Counter(_sum_of_all(sigma, share) for share in shares if share > LEAST_SHARE)

    def lose(self) -> None:
        """Count the lost look as spent. Later looks share the rest."""
        state = self._fit.approximation
        spent = min(state.spent + state.share, 1.0)
        self._fit.current = _with_spent(state, spent)

    def load(self, steps: int, lost: int) -> None:
        """Count releases in the ledger that are not in the state as spent."""
        super().load(steps, lost)
        self._behind = lost > 0

    def agree(self, peers: Alone) -> None:
        self._behind = any(each.value for each in peers.exchange(Flag(self._behind)))

    def catch_up(self, lost: int, held: Callable[[], float], peers: Alone) -> None:
        """Continue with the largest spent share of all ranks."""
        if not self._behind:
            return
        state = self._fit.approximation
        left = held() if lost else 1.0
        if left <= LEAST_SHARE:
            raise PrivacyBudgetExceeded(_ALL_LOST.format(lost=lost))
        spent = max(state.spent, 1.0 - left)
        spent = max(each.value for each in peers.exchange(Share(spent)))
        self._fit.current, self._behind = _with_spent(state, spent), False

    def require_step(self, noise_multiplier: float | None, calibrates: bool) -> None:
        if self.finished and noise_multiplier != 0:
            raise PrivacyBudgetExceeded(_DONE)


def _with_spent(state: EPState, spent: float) -> EPState:
    return replace(state, spent=spent, share=min(state.share, 1.0 - spent))


def _noise(sigma: float, share: float) -> float:
    """The noise multiplier of a release with this share of the budget."""
    return sigma / math.sqrt(max(share, LEAST_SHARE))


def _sum_of_all(sigma: float, share: float) -> SubsampledGaussian:
    return SubsampledGaussian(_noise(sigma, share), 1.0, "full")


class EPByLooks(StochasticEP[EPState]):
    """A run of looks, for :class:`DPSEP` and :class:`~pyro_dp.DPSVI`."""

    _fit: FitByLooks

    def __init__(
        self,
        model: Callable,
        guide: Callable,
        *,
        fit: FitByLooks,
        noise: Noise | float | None,
        **settings: Any,
    ):
        noise = Noise.read(noise)
        super().__init__(
            model,
            guide,
            fit=fit,
            plan=partial(LookShares, fit),
            num_steps=1 + MOST_LOOKS if noise.multiplier != 0 else MOST_WITHOUT_NOISE,
            bound=1.0,
            noise=noise,
            **settings,
        )

    def posterior(self, noise_aware: bool = True) -> Posterior:
        sites = self._fit.approximation.problem.guide
        if not isinstance(sites, DeterministicSites):
            return super().posterior(noise_aware)
        found = sites.posterior(self.evidence)
        return found if noise_aware else found.plain

    def _noise_parts(self) -> Mapping[str, Tensor]:
        parts = super()._noise_parts()
        if isinstance(self._fit.approximation.problem.guide, DeterministicSites):
            return {name: part.mean() for name, part in parts.items()}  # over the sites
        return parts

    @property
    def evidence(self) -> Evidence:
        """The likelihood of the latents, from the looks so far, apart from the prior.

        :raises ConfigurationError: there was no look yet.
        """
        state = self._fit.approximation
        if not state.seen.looks:
            raise ConfigurationError("There is no evidence before the first look.")
        sigma, replaces = self.noise_multiplier, self.accountant.neighboring == "replace_one"
        cost = Cost(
            (2.0 if replaces else 1.0) / sigma if sigma else math.inf,
            self.accountant.neighboring,
            self._reservation.name,
            self.accountant.description.unit or "",
        )
        bias, bend = state.squared_bias, state.plan.bend
        part = Part(state.plan.size, state.seen.looks, bias, bend, cost, self._fit.status())
        return Evidence(tuple(_joined(state.problem.guide.latents, state.problem.places)), (part,))

    @property
    def clipped_fraction(self) -> ClippedFraction | None:
        """The fraction of records whose norm exceeds the last look's bound.

        The histograms of norms give it. The standard error is that of their noise.
        """
        state = self._fit.current
        return None if state is None else state.clipped

    def _planned(self, args: tuple, kwargs: dict) -> int:
        loaded = self._fit.loaded is not None
        if not loaded:
            self._reservation.require_step()
        self._look_at(args, kwargs)
        if loaded and self._reservation.plan.finished:  # the loaded run is complete
            return self._steps
        return super()._planned(args, kwargs)

    def _shown(self) -> dict[str, Any]:
        shown = super()._shown()
        del shown["num_steps"]  # only an upper limit
        return shown


def _joined(latents: Sequence[Latent], places: Tensor) -> list[Latent]:
    """The latents at these indices, renumbered from 0."""
    seen, found, start = set(places.tolist()), [], 0
    for each in latents:
        if each.start in seen:
            stop = start + each.stop - each.start
            found.append(replace(each, start=start, stop=stop))
            start = stop
    return found


_ALL_RECORDS = (
    "DPSEP looks at all records: leave sampling out, or name the plate by FullBatch(plate=...). "
    "PaperDPSEP samples."
)


class DPSEP(EPByLooks, Forecasted):
    """Differentially private stochastic expectation propagation: the guide is the result.

    The posterior is q = prior * evidence. A run makes some ten *looks* at the data. In each look
    every record's likelihood is replaced by a Gaussian site that fits it near the current
    posterior. At the mean m, a site has a score s and a curvature H. Their sums are released with
    noise. The evidence pools all looks so far, weighted by noise and distance
    (:mod:`pyro_dp.infer.posterior.looks`). After each look the guide's parameters hold q.

    **What is released.** The opening is a histogram of the norms of the records' scores. A look has
    the sums of w (W s, kappa W H W, tau), of norm C at most per record, and another histogram. W is
    the inverse root of the posterior's precision, so the noise has the posterior's shape. The
    weight w = min(1, C / b) shortens larger parts. If the family has finitely many outcomes
    (Bernoulli, categorical), b is the largest norm for any outcome. Such a weight does not bias the
    estimate if the model holds (Künsch, Stefanski & Carroll 1989). The last coordinate measures the
    mean weight. W, C, kappa and the share of the budget follow from earlier looks
    (:mod:`pyro_dp.infer.ep.look_plan`).

    **Guarantee.** The sequence of posteriors is (epsilon, delta)-differentially private for one
    element of the private plate, for finite data. Its epsilon is ``accountant.get_epsilon()``,
    under the accountant's neighbouring relation. All looks together are mu-GDP, with 1 / mu the
    ``noise_multiplier`` (twice mu under ``replace_one``). docs/proofs/evidence.md proves this,
    although each look's noise depends on earlier looks. The first look reserves the whole of mu^2,
    and nothing is returned.

    **Not protected.** As for :class:`DPSVI`.

    **Uncertainty.** :meth:`posterior` includes the noise of scores and curvature, and an estimate
    of the information lost by clipping. A posterior that is not Gaussian is not covered. If the
    noise hides all information, the posterior falls back to the prior. Then ``posterior().status``
    reports it, and :meth:`run` issues a :class:`ConvergenceWarning` or :class:`ClippingWarning`.

    **Products of latents.** For a horseshoe or non-centred effects, name the product by
    ``pyro.deterministic``, outside the plate. If records depend on a latent only through this site,
    looks are made at the site. The posterior of the latents is the model's prior times this
    evidence (:mod:`pyro_dp.infer.ep.deterministic_sites`).

    :param model: Pyro model; the records are the elements of a ``pyro.plate`` that holds all
        observations. Discrete latents of a record are summed out if they are marked with
        ``infer={"enumerate": "parallel"}``. One or two continuous ones are integrated out
        (:mod:`pyro_dp.records.quadrature`), and the guide leaves them out.
    :param guide: ``AutoNormal``, ``AutoDiagonalNormal``, ``AutoMultivariateNormal``,
        ``AutoLowRankMultivariateNormal``, or a hand-written one of ``Normal`` and
        ``MultivariateNormal`` sites. Its initial values are the first q. For generalised linear
        models, a default autoguide starts at the prior's mean instead.
    :param accountant: as for :class:`DPSVI`.
    :param noise: a multiplier or a :class:`Noise`. The multiplier is 1 / mu: all looks together are
        one Gaussian mechanism of this noise multiplier. 0: not private, and nothing is cut off.
    :param moments: "auto" takes "linear" if it applies, else "stein". ``repr`` shows the choice.
        "linear" applies if each element of an observation depends on the latents through one or two
        numbers. It is exact for generalised linear models. "stein" applies to any twice
        differentiable likelihood.
    :param sampling: all looks are at all records. ``FullBatch(plate="people")`` names the plate.
    :param execution: an :class:`Execution`. Its microbatches, jit and peers serve as they do for
        gradient steps (:mod:`pyro_dp.infer.ep.linear_sites`).
    :raises ClusterError: another process of the cluster failed, or is lost.
    :raises ConfigurationError: a setting is out of range or does not fit the others.

    >>> sep = DPSEP(model, guide, accountant=accountant, noise=Noise(source=0))
    >>> result = sep.run(heights, progress=False)
    >>> print(f"{sep.posterior().mean.item():.2f}, {sep.posterior().status}")
    1.70, ok
    """

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
            fit=FitByLooks(moments),
            accountant=accountant,
            noise=noise,
            sampling=sampling,
            execution=execution,
        )
