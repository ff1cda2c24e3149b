"""DP-SEP as its paper has it: a bound and a damping of your own.

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
from pyro_dp.infer.ep.approximation import Approximation
from pyro_dp.infer.ep.problem import EPProblem
from pyro_dp.infer.ep.site_factors import STRUCTURES
from pyro_dp.infer.ep.site_sum import SiteSum
from pyro_dp.infer.ep.stochastic_ep import StochasticEP
from pyro_dp.infer.posterior.summary import CLIPPING, REMEDIES, Status
from pyro_dp.mechanism.cluster import Cluster
from pyro_dp.mechanism.release_settings import ReleaseSettings
from pyro_dp.utils.validation import (
    require_choice,
    require_count,
    require_flag,
    require_number,
    require_scale,
    value_at,
)


class PaperDPSEP(StochasticEP[Approximation]):
    """DP-SEP of Vinaroz & Park (TMLR 2022, arXiv 2111.13219), for comparisons with papers.

    q = prior * f^N approximates the posterior, with one Gaussian factor f for the average record.
    Each step replaces the likelihood of every sampled record by a Gaussian site that fits it near
    the current posterior. A site has a precision Lambda and a shift eta. The noisy sum of the sites
    moves f. :class:`DPSEP` chooses the bound and the number of steps, and is more precise at small
    budgets.

    **What is released.** A record's part is (eta - Lambda m, kappa Lambda), with m the mean of the
    cavity q / f. The latents' own coordinates are used. Each part is clipped to norm C.

    **Guarantee.** The sequence of posteriors is (epsilon, delta)-differentially private for one
    element of the private plate, for finite data. Its epsilon is ``accountant.get_epsilon()``,
    under the accountant's neighbouring relation. Proof: m, kappa and C are constants after the
    earlier releases. A record adds a vector of norm C at most. The bit of ``report_clipping`` is a
    block of bound 1/2. Both blocks are one Gaussian mechanism of noise multiplier sigma
    (:class:`Block`). Steps compose adaptively.

    **Not protected.** As for :class:`DPSVI`.

    **Uncertainty.** :meth:`posterior` includes the uncertainty of the privacy noise, to first order
    (:func:`~pyro_dp.infer.ep.approximation.mean_noise`). It does not include the bias of clipping.
    With a diagonal or shared precision its plain variances are those of a mean field, and its noise
    is an upper bound.

    **Where it fails.** :meth:`run` ends with a :class:`ConvergenceWarning` if the noise may
    outweigh the records in most directions. Without a ``damping`` it also does so if the step
    control refused most estimates of the last half of the steps. A :class:`ClippingWarning` says
    that many records were clipped.

    :param accountant: as for :class:`DPSEP`, as are model, guide, plate, sample_rate, sampling,
        moments, noise_aware, microbatch_size, slice_data, jit, generator, secure and cluster.
    :param max_factor_norm: C. It should let nearly all records through. For logistic regression the
        bound on the features' norm clips nothing. The smaller epsilon is, the more a smaller C
        pays for its bias. ``math.inf`` needs ``noise_multiplier=0``.
    :param num_steps: number of steps of :meth:`run`. 20 to 50 serve regressions.
    :param noise_multiplier: standard deviation sigma of the noise in units of C, before the bit
        takes its share. ``None``: the smallest that fits the rest of the budget at the first step.
        0: not private.
    :param damping: weight in (0, 1] of a new estimate in f, or a function of the step number that
        returns it. ``None``: 1 until the posterior has arrived, up to noise, then the average of
        all estimates since (:mod:`pyro_dp.infer.ep.step_control`).
    :param precision: structure of Lambda in the release: "full", "diagonal", or "shared" (one
        number for each latent site). ``None``: full up to 1200 latents, else shared.
    :param precision_weight: kappa, the public weight of Lambda. The noise of Lambda is
        sigma C / kappa. ``None``: 2 / C, which makes the result independent of the latents' scale.
    :param centred: release eta - Lambda m, or eta. In the former the noise of Lambda does not move
        the mean.
    :param report_clipping: release :attr:`clipped_fraction`, with a bit that takes 1% of the
        privacy cost.
    :raises ClusterError: another process of the cluster failed, or is lost.
    :raises ConfigurationError: a setting is out of range or does not fit the others.

    >>> import pyro, torch
    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoMultivariateNormal
    >>> from pyro_dp import PaperDPSEP, PrivacyAccountant
    >>> def model(y):
    ...     height = pyro.sample("height", dist.Normal(1.5, 1.0))
    ...     with pyro.plate("people", len(y)):
    ...         pyro.sample("y", dist.Normal(height, 1.0), obs=y)
    >>> accountant = PrivacyAccountant(epsilon=1.0)
    >>> sep = PaperDPSEP(model, AutoMultivariateNormal(model), accountant=accountant,
    ...                  max_factor_norm=3.0, num_steps=20, generator=0)
    >>> result = sep.run(torch.linspace(0.7, 2.7, 2000), progress=False)
    >>> print(f"{sep.posterior().mean.item():.1f}")
    1.7
    """

    _bound_name = "max_factor_norm"
    _remedy = "Use a smaller max_factor_norm or damping, or other units."
    _remedies = REMEDIES | {
        CLIPPING: "Raise max_factor_norm until few are clipped; the noise grows with it."
    }
    _state_names = ("settings", "average", "control", "mean_noise", "gaussians")

    def __init__(
        self,
        model: Callable,
        guide: Callable,
        *,
        accountant: PrivacyAccountant,
        max_factor_norm: float,
        num_steps: int,
        noise_multiplier: float | None = None,
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
        bound = require_scale("max_factor_norm", max_factor_norm, infinite=True)
        require_count("num_steps", num_steps)
        require_flag("centred", centred)
        if precision is not None:
            require_choice("precision", precision, tuple(STRUCTURES))
        if precision_weight is not None:
            require_scale("precision_weight", precision_weight)
        if damping is not None and not callable(damping):
            require_number("damping", damping, above=0.0, below=1.0, closed=True)
        super().__init__(
            model,
            guide,
            ReleaseSettings(
                accountant=accountant,
                num_steps=num_steps,
                noise_multiplier=noise_multiplier,
                bound=bound,
                sample_rate=sample_rate,
                sampling=sampling,
                microbatch_size=microbatch_size,
                generator=generator,
                secure=secure,
                cluster=cluster,
            ),
            plate=plate,
            moments=moments,
            noise_aware=noise_aware,
            slice_data=slice_data,
            jit=jit,
            report_clipping=report_clipping,
        )
        self.precision = precision
        self.damping = damping
        self.centred = centred
        self._weight = precision_weight or (1.0 if bound == math.inf else 2.0 / bound)

    def _status(self) -> Status:
        return self._approximation.status(self.clipped_fraction)

    def _start(self, problem: EPProblem, size: int, *, new: bool) -> Approximation:
        assert self.num_steps is not None
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

    def _site_sum(self, problem: EPProblem, approximation: Approximation) -> SiteSum:
        return SiteSum(
            problem=problem,
            structure=approximation.structure,
            centred=self.centred,
            weight=self._weight,
            num_blocks=approximation.num_blocks,
            microbatch_size=self.microbatch_size,
        )

    def _updated(self) -> Callable[..., tuple[float, Approximation]]:
        damping = self.damping
        if callable(damping):
            damping = value_at("damping", damping, self._steps)
            require_number("damping(step)", damping, above=0.0, below=1.0, closed=True)
        return partial(self._approximation.updated, damping=damping)

    @property
    def _others(self) -> tuple[Any, ...]:
        return (self.damping,)

    def _shaping_settings(self) -> dict[str, Any]:
        return {
            "max_factor_norm": self._bound,
            "precision": self.precision,
            "precision_weight": self._weight,
            "centred": self.centred,
        }

    def _shown(self) -> dict[str, Any]:
        known = self._known
        precision = self.precision if known is None else known.structure.name
        return {"moments": self.moments, "precision": precision} | super()._shown()
