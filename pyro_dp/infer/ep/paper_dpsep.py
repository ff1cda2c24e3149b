"""DP-SEP of the paper, with a bound and a damping that you choose.

It is Algorithm 3 of Vinaroz & Park 2022 (arXiv 2111.13219), for any Pyro model. Unlike
the paper, it centres the releases (:mod:`pyro_dp.infer.ep.site_factors`), samples all records in
every step, and averages the estimates. The paper moves q by gamma / N per record. The
signal-to-noise ratio of such a step is that of one record.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.infer.ep.approximation import Approximation, AverageFactor, StepControl
from pyro_dp.infer.ep.problem import EPProblem
from pyro_dp.infer.ep.site_factors import LARGEST_FULL, STRUCTURES
from pyro_dp.infer.ep.stochastic_ep import Fit, StochasticEP
from pyro_dp.infer.posterior.forecast import Forecasted
from pyro_dp.infer.posterior.posterior import CLIPPING, REMEDIES, Status
from pyro_dp.mechanism.clipped_fraction import SHARE, ClippedFractions
from pyro_dp.mechanism.contributions import Block
from pyro_dp.mechanism.releases import Releases
from pyro_dp.mechanism.settings import (
    Clip,
    Execution,
    Factors,
    Noise,
    Sampling,
    old_names_explained,
)
from pyro_dp.utils.linalg import Gaussian, dense
from pyro_dp.utils.validation import require_count, require_number, require_scale, value_at


class FitByFactors(Fit[Approximation]):
    """Released estimates move an average factor."""

    remedy = "Use a smaller clip or damping, or other units."
    remedies = REMEDIES | {CLIPPING: "Raise clip until few are clipped; the noise grows with it."}
    state_names = ("settings", "average", "control", "mean_noise", "gaussians")

    def __init__(
        self,
        factors: Factors,
        bound: float,
        report: bool,
        damping: float | Callable[[int], float] | None,
    ):
        self.factors, self.damping = factors, damping
        shaping = {
            "max_factor_norm": bound,
            "precision": factors.precision,
            "precision_weight": factors.weight_at(bound),
            "centred": factors.centred,
        }
        fractions = ClippedFractions(*[SHARE] * (report and bound < math.inf))
        super().__init__(factors.moments, shaping, fractions)

    def start(
        self, problem: EPProblem, size: int, releases: Releases, *, new: bool
    ) -> Approximation:
        """The guide's initial values are the first q, and f^N = q / prior."""
        plan, places, bits = releases.reservation.plan, problem.places, self.fractions.blocks
        assert plan.num_steps is not None
        usual = "full" if sum(problem.widths) <= LARGEST_FULL else "shared"
        structure = STRUCTURES[self.factors.precision or usual](problem.widths)
        mean, covariance = problem.guide.read()
        covariance = dense(covariance)
        covariance = covariance if structure.name == "full" else covariance.diagonal()
        posterior = Gaussian.from_moments(mean, covariance)
        prior = problem.prior.factor(mean, posterior.covariance)
        factor, moments = (posterior / prior).restricted(places), problem.moments
        floor = dense(posterior.precision).diagonal().mean().item() if moments.careful else 0.0
        share = 1.0 - sum(each.share for each in bits)
        first = Approximation(
            problem=problem,
            blocks=(Block(len(places) + structure.size, plan.bound, share), *bits),
            weight=self.factors.weight_at(plan.bound),
            centred=self.factors.centred,
            steered=self.damping is None,
            average=AverageFactor(structure, factor, mean[places]),
            control=StepControl(plan.num_steps, moments.curved, floor),
            posterior=posterior,
            prior=prior,
            factor=factor,
            mean_noise=torch.zeros_like(mean),
        )
        return first.advanced()

    def learner(self, step: int, sample_rate: float) -> Callable[..., tuple[float, Approximation]]:
        damping = self.damping
        if callable(damping):
            damping = value_at("damping", damping, step)
            require_number("damping(step)", damping, above=0.0, below=1.0, closed=True)
        return partial(self.approximation.updated, damping=damping, sample_rate=sample_rate)

    def status(self) -> Status:
        return self.approximation.status(self.fractions.mean())


class PaperDPSEP(StochasticEP[Approximation], Forecasted):
    """DP-SEP of Vinaroz & Park (TMLR 2022, arXiv 2111.13219), for comparisons with papers.

    q = prior * f^N approximates the posterior, with one Gaussian factor f for the average record.
    Each step replaces the likelihood of every sampled record by a Gaussian site that fits it near
    the current posterior. A site has a precision Lambda and a shift eta. The noisy sum of the sites
    moves f. :class:`DPSEP` chooses the bound and the number of steps, and is more precise at small
    budgets.

    **What is released.** A record's part is (eta - Lambda m, kappa Lambda), with m the mean of the
    cavity q / f, in the latents' coordinates. Each part is clipped to norm C.

    **Guarantee.** The sequence of posteriors is (epsilon, delta)-differentially private for one
    element of the private plate, for finite data. Its epsilon is ``accountant.get_epsilon()``,
    under the accountant's neighbouring relation. Proof: m, kappa and C are constants after the
    earlier releases. A record adds a vector of norm at most C. The bit that marks a clipped part is
    a block of bound 1/2. Both blocks are one Gaussian mechanism of noise multiplier sigma
    (:class:`Block`). Steps compose adaptively.

    **Not protected.** As for :class:`DPSVI`.

    **Uncertainty.** :meth:`posterior` includes the uncertainty of the privacy noise, to first order
    (:func:`~pyro_dp.infer.ep.approximation.mean_noise`). It does not include the bias of clipping.
    With a diagonal or shared precision its plain variances are those of a mean field, and its noise
    is an upper bound.

    **Where it fails.** :meth:`run` ends with a :class:`ConvergenceWarning` if the noise may
    outweigh the records in most directions. Without a ``damping`` it also does so if the step
    control rejected most estimates in the last half of the steps. A :class:`ClippingWarning` means
    that many records were clipped.

    :param accountant: as for :class:`DPSEP`, as are model, guide and execution.
    :param num_steps: number of steps of :meth:`run`. Use 20 to 50 for regressions.
    :param clip: C, or a :class:`Clip`. C should clip few records. For logistic regression the bound
        on the features' norm clips nothing. At a small epsilon, a smaller C is worth its bias.
        :attr:`clipped_fraction` is released unless ``report=False``.
    :param factors: a :class:`Factors`, or its precision.
    :param damping: weight in (0, 1] of a new estimate in f, or a function of the step number that
        returns it. ``None``: 1 until the gradient is within its noise, then the average of all
        later estimates (:mod:`pyro_dp.infer.ep.approximation`).
    :param noise: a multiplier or a :class:`Noise`. sigma is in units of C, before the bit takes its
        share.
    :param sampling: a sample rate, or an object such as :class:`PoissonSampling`.
    :raises ClusterError: another process of the cluster failed, or is lost.
    :raises ConfigurationError: a setting is out of range or does not fit the others.

    >>> guide = AutoMultivariateNormal(model)
    >>> sep = PaperDPSEP(model, guide, accountant=accountant, num_steps=20, clip=3.0,
    ...                  noise=Noise(source=0))
    >>> result = sep.run(heights, progress=False)
    >>> print(f"{sep.posterior().mean.item():.1f}")
    1.7
    """

    _fit: FitByFactors

    @old_names_explained()
    def __init__(
        self,
        model: Callable,
        guide: Callable,
        *,
        accountant: PrivacyAccountant,
        num_steps: int,
        clip: Clip | float,
        factors: Factors | str | None = None,
        damping: float | Callable[[int], float] | None = None,
        noise: Noise | float | None = None,
        sampling: Sampling | float = 1.0,
        execution: Execution | None = None,
    ):
        self.clip = Clip.read(clip).only("PaperDPSEP", "bound", "report")
        require_count("num_steps", num_steps)
        bound = require_scale("Clip.bound of PaperDPSEP", self.clip.bound, infinite=True)
        if damping is not None and not callable(damping):
            require_number("damping", damping, above=0.0, below=1.0, closed=True)
        read = Factors.read(factors)
        super().__init__(
            model,
            guide,
            fit=FitByFactors(read, bound, self.clip.report, damping),
            accountant=accountant,
            num_steps=num_steps,
            bound=bound,
            noise=noise,
            sampling=sampling,
            execution=execution,
        )

    @property
    def factors(self) -> Factors:
        """Form of the released sites."""
        return self._fit.factors

    @property
    def damping(self) -> float | Callable[[int], float] | None:
        """The weight of a new estimate; None: it is chosen."""
        return self._fit.damping

    @property
    def _others(self) -> tuple[Any, ...]:
        return (self.damping,)

    def _shown(self) -> dict[str, Any]:
        current = self._fit.current
        precision = self.factors.precision if current is None else current.average.structure.name
        return {"moments": self.moments, "precision": precision} | super()._shown()
