"""DPSEP: differentially private stochastic expectation propagation with nothing to set.

Its releases are whitened by what was released before (:mod:`pyro_dp.infer.ep.whitened`).
:mod:`pyro_dp.infer.ep.paper_dpsep` is the algorithm of the paper.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.infer.ep.paper_dpsep import PaperDPSEP
from pyro_dp.infer.ep.problem import EPProblem
from pyro_dp.infer.ep.release_plan import FEWEST_STEPS, ReleasePlan
from pyro_dp.infer.ep.stochastic_ep import StochasticEP
from pyro_dp.infer.ep.whitened import WhitenedApproximation
from pyro_dp.infer.ep.whitened_sum import WhitenedSum
from pyro_dp.mechanism.clipped_fraction import ClippedFraction
from pyro_dp.mechanism.cluster import Cluster
from pyro_dp.mechanism.release_settings import ReleaseSettings
from pyro_dp.utils.errors import ClippingWarning
from pyro_dp.utils.moved_arguments import arguments_moved_to

_BIASED = (
    "Clipping may move the posterior by as much as its intervals are wide (clipped: {clipped}). "
    "Do not rely on these intervals; posterior().doubtful names them. A larger epsilon, more "
    "records, or features without extreme values would help."
)


class DPSEP(StochasticEP[WhitenedApproximation]):
    """Differentially private stochastic expectation propagation: the guide is the result.

    ``DPSEP(model, guide, accountant=accountant)`` needs nothing else. The posterior is approximated
    by q = prior * f^N, with one Gaussian factor f for the average record. Each step replaces the
    likelihood of every sampled record by a Gaussian site that fits it near the current posterior.
    At the mean m, a site has a residual r = eta - Lambda m and a precision Lambda. The sum of the
    sites is released with noise. All releases so far make q together, each weighted by its noise
    (:mod:`pyro_dp.infer.ep.evidence`). After each step the guide's parameters hold it:
    ``Predictive``, ``guide.median()`` and ``guide.quantiles()`` work.

    **What is released.** A record's part is (W r, kappa W Lambda W), of norm C at most. W is the
    inverse root of the curvature that was released before: the noise has the shape of the
    posterior. C, kappa and the number of steps follow from the budget, N and the number of latents.
    C and kappa also follow from a histogram of the parts' norms, which joins each release. The
    first step releases the histogram alone (:mod:`pyro_dp.infer.ep.release_plan`). A weight
    shortens larger parts. It is the same for all outcomes if the family has finitely many
    (Bernoulli, categorical). Otherwise it takes outcomes to be within two standard deviations. A
    weight that does not look at the outcome does not bias the estimate if the model holds (Künsch,
    Stefanski & Carroll 1989). Parts that are still larger are clipped.

    **Guarantee.** The sequence of posteriors is (epsilon, delta)-differentially private for one
    element of the private plate, for finite data. Its epsilon is ``accountant.get_epsilon()``,
    under the accountant's neighbouring relation. Proof: after the earlier releases, W, kappa and C
    are constants. A record adds to the first block a vector of norm C at most. This holds for any
    W, kappa, weight and outcome, as the block is clipped last. It adds to the second block a one in
    one of 160 bins, of norm 1. The noise multipliers are sigma / sqrt(.95) and sigma / sqrt(.05),
    in units of C and 1. Together both blocks are one Gaussian mechanism of noise multiplier sigma
    (:class:`Block`). The first step is one by itself. sigma and the number of steps are set before
    the first release; steps compose adaptively.

    **Not protected.** As for :class:`DPSVI`.

    **Uncertainty.** :meth:`posterior` includes the uncertainty of the privacy noise, to first
    order. It does not include the bias of clipping. That bias matters if the model does not hold
    and few records have much leverage. A posterior that is not Gaussian is not covered either. If
    the noise hides all information, the posterior falls back to the prior. ``posterior().doubtful``
    names the coefficients that clipping or noise may spoil.

    **Where it fails.** :meth:`run` ends with a :class:`ConvergenceWarning` if the noise may
    outweigh the records in most directions. It also does so if the last step was longer than the
    intervals are wide. A :class:`ClippingWarning` says that clipping may move the posterior by as
    much as the intervals are wide. Hierarchies with unknown scales fail more often than other
    models: :class:`DPSVI` serves them better.

    :class:`PaperDPSEP` is the algorithm of the paper, with a bound of your own.

    :param model: Pyro model; the records are the elements of a ``pyro.plate`` that holds all
        observations. Discrete latents of a record are summed out if they are marked with
        ``infer={"enumerate": "parallel"}``. The plate can hold no other latents.
    :param guide: ``AutoNormal``, ``AutoDiagonalNormal``, ``AutoMultivariateNormal``,
        ``AutoLowRankMultivariateNormal``, or a hand-written one of ``Normal`` and
        ``MultivariateNormal`` sites. Its initial values are the first q.
    :param accountant: as for :class:`DPSVI`, as are plate, sampling, microbatch_size, slice_data,
        generator and secure.
    :param num_steps: number of steps of :meth:`run`. ``None``: from the budget, N and the number of
        latents, 13 to 51.
    :param noise_multiplier: standard deviation sigma of the noise in units of C. ``None``: the
        smallest that fits what remains of the budget at the first step. 0: not private, and nothing
        is cut off.
    :param sample_rate: expected fraction of the records in a step, in (0, 1]. Full batches use the
        budget best.
    :param moments: "auto" takes "linear" if it applies, else "stein". ``repr`` shows the choice. If
        an observation depends on the latents through one or two numbers per element, "linear"
        applies. It is exact for generalised linear models. Otherwise "stein" takes any twice
        differentiable likelihood.
    :param noise_aware: whether the guide holds the noise-aware posterior or the plain one.
    :param jit: "none" runs Pyro code in every step. "trace" traces a graph of the sites once.
        Machine code comes from "compile", which needs a C++ compiler. A few dozen steps on full
        batches gain little. Tracing takes a second or two, compiling up to a minute. Generalised
        linear models gain nothing (:mod:`pyro_dp.infer.ep.linear_sites`).
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

    _remedy = "Use other units, or DPSVI."
    _differs = "load_state_dict: this state has a {name}. PaperDPSEP takes it."
    _state_names = (
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

    @arguments_moved_to(PaperDPSEP)
    def __init__(
        self,
        model: Callable,
        guide: Callable,
        *,
        accountant: PrivacyAccountant,
        num_steps: int | None = None,
        noise_multiplier: float | None = None,
        plate: str | None = None,
        sample_rate: float = 1.0,
        sampling: str = "poisson",
        moments: str = "auto",
        noise_aware: bool = True,
        microbatch_size: int | None = None,
        slice_data: bool | str = "auto",
        jit: str = "none",
        generator: torch.Generator | int | None = None,
        secure: bool = False,
        cluster: Cluster | None = None,
    ):
        super().__init__(
            model,
            guide,
            ReleaseSettings.among(locals() | {"plans": True}, bound=1.0),
            plate=plate,
            moments=moments,
            noise_aware=noise_aware,
            slice_data=slice_data,
            jit=jit,
        )

    @property
    def clipped_fraction(self) -> ClippedFraction | None:
        """The fraction of records whose norm is above the bound of the last step.

        It comes from the histograms of norms. The standard error is that of their noise.
        """
        return None if self._known is None else self._known.clipped

    @property
    def _biased(self) -> bool:
        return self._approximation.is_biased

    def _next_bound(self) -> float:
        frame = self._approximation.frame
        return math.inf if frame is None else frame.bound

    def _planned(self, args: tuple, kwargs: dict) -> int:
        self._prepare(args, kwargs)  # which chooses num_steps
        return super()._planned(args, kwargs)

    def _start(self, problem: EPProblem, size: int) -> WhitenedApproximation:
        plan = self._plan(len(problem.places), size)
        self.num_steps = self.num_steps or plan.num_steps
        return WhitenedApproximation.start(problem, size, plan)

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

    def _site_sum(self, problem: EPProblem, approximation: WhitenedApproximation) -> WhitenedSum:
        return WhitenedSum(
            problem=problem,
            structure=approximation.structure,
            num_blocks=approximation.num_blocks,
            microbatch_size=self.microbatch_size,
        )

    def _shaping_settings(self) -> dict[str, Any]:
        return {"max_factor_norm": None}  # states of PaperDPSEP have a number

    def _warnings(self) -> list[Warning]:
        warnings = super()._warnings()
        if self._biased:
            warnings.insert(0, ClippingWarning(_BIASED.format(clipped=self.clipped_fraction)))
        return warnings
