"""DPSEP: differentially private stochastic expectation propagation with nothing to set.

Its looks at the data go where the looks before have pointed (:mod:`pyro_dp.infer.ep.ep_state`).
:mod:`pyro_dp.infer.ep.paper_dpsep` is the algorithm of the paper.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.infer.ep.deterministic_sites import DeterministicSites
from pyro_dp.infer.ep.ep_state import EPState
from pyro_dp.infer.ep.ep_status import status
from pyro_dp.infer.ep.look_plan import MOST_LOOKS, MOST_WITHOUT_NOISE
from pyro_dp.infer.ep.look_shares import LookShares
from pyro_dp.infer.ep.paper_dpsep import PaperDPSEP
from pyro_dp.infer.ep.problem import EPProblem
from pyro_dp.infer.ep.stochastic_ep import Fit, StochasticEP
from pyro_dp.infer.posterior.evidence import Evidence
from pyro_dp.infer.posterior.evidence_parts import Cost, Part
from pyro_dp.infer.posterior.forecast import Forecasted
from pyro_dp.infer.posterior.posterior import Posterior
from pyro_dp.infer.posterior.summary import Status
from pyro_dp.mechanism.clipped_fraction import ClippedFraction, ClippedFractions
from pyro_dp.mechanism.iterative import whole_step
from pyro_dp.mechanism.releases import Releases
from pyro_dp.mechanism.settings import Execution, FullBatch, Noise, old_names_explained
from pyro_dp.records.global_draw import Latent
from pyro_dp.utils.errors import ConfigurationError

_ALL_RECORDS = (
    "DPSEP looks at all records: leave sampling out, or name the plate by FullBatch(plate=...). "
    "PaperDPSEP samples."
)


class FitByLooks(Fit[EPState]):
    """Looks go where the looks before have pointed.

    :param moments: those asked for.
    """

    remedy = "Use other units, or DPSVI."
    differs = "load_state_dict: this state has a {name}. PaperDPSEP takes it."
    state_names = (
        "settings",
        "looks",
        "counts",
        "pooled",
        "frame",
        "plan",
        "gaussians",
        "numbers",
    )

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

    def conclude(self, run: "EPByLooks") -> None:
        """Bring the guide to the posterior, if looks were made at deterministic sites."""
        known = self.known
        if known and known.seen.looks and isinstance(known.problem.guide, DeterministicSites):
            known.problem.guide.fit(run.evidence)


class EPByLooks(StochasticEP[EPState]):
    """The run of :class:`DPSEP`, and of :class:`~pyro_dp.DPSVI` where it makes looks."""

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

    @whole_step
    def step(self, *args: Any, **kwargs: Any) -> float:
        """As :meth:`StochasticEP.step`: one look, or the opening."""
        change = super().step(*args, **kwargs)
        if self._reservation.plan.finished:
            self._fit.conclude(self)
        return change

    def posterior(self, noise_aware: bool = True) -> Posterior:
        """The current posterior over the guide's unconstrained latents, in the guide's order.

        Its ``status`` says whether its intervals can be published.

        :param noise_aware: include the uncertainty of the privacy noise. The total never exceeds
            the prior's covariance.
        :raises ConfigurationError: no step was taken yet.
        """
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

    def _conclude(self, status: str | None = None) -> Sequence[Warning]:
        found = super()._conclude(status)
        self._fit.conclude(self)
        return found

    @property
    def evidence(self) -> Evidence:
        """The likelihood of the latents, from the looks so far, apart from the prior.

        :raises ConfigurationError: there was no look yet.
        """
        known = self._fit.approximation
        if not known.seen.looks:
            raise ConfigurationError("There is no evidence before the first look.")
        sigma, replaces = self.noise_multiplier, self.accountant.neighboring == "replace_one"
        cost = Cost(
            (2.0 if replaces else 1.0) / sigma if sigma else math.inf,
            self.accountant.neighboring,
            self._reservation.name,
            self.accountant.description.unit or "",
        )
        bias, bend = known.squared_bias, known.plan.bend
        part = Part(known.plan.size, known.seen.looks, bias, bend, cost, self._fit.status())
        return Evidence(tuple(_joined(known.problem.guide.latents, known.problem.places)), (part,))

    @property
    def clipped_fraction(self) -> ClippedFraction | None:
        """The fraction of records whose norm is above the bound of the last look.

        It comes from the histograms of norms. The standard error is that of their noise.
        """
        known = self._fit.known
        return None if known is None else known.clipped

    def _planned(self, args: tuple, kwargs: dict) -> int:
        loaded = self._fit.loaded is not None
        if not loaded:
            self._reservation.require_step()
        self._look_at(args, kwargs)
        if loaded and self._reservation.plan.finished:  # taken up, and nothing is left to release
            return self._steps
        return super()._planned(args, kwargs)

    def _shown(self) -> dict[str, Any]:
        shown = super()._shown()
        del shown["num_steps"]  # the most there may be
        return shown


def _joined(latents: Sequence[Latent], places: Tensor) -> list[Latent]:
    """The sites that records inform, one after the other."""
    seen, found, start = set(places.tolist()), [], 0
    for each in latents:
        if each.start in seen:
            stop = start + each.stop - each.start
            found.append(replace(each, start=start, stop=stop))
            start = stop
    return found


class DPSEP(EPByLooks, Forecasted):
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
