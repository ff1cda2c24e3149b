"""DPSEP: differentially private stochastic expectation propagation with nothing to set.

Its looks at the data go where the looks before have pointed (:mod:`pyro_dp.infer.ep.ep_state`).
:mod:`pyro_dp.infer.ep.paper_dpsep` is the algorithm of the paper.
"""

from collections.abc import Callable

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.infer.ep.ep_by_looks import EPByLooks, FitByLooks
from pyro_dp.infer.ep.paper_dpsep import PaperDPSEP
from pyro_dp.infer.posterior.forecast import Forecasted
from pyro_dp.mechanism.settings import Execution, FullBatch, Noise, old_names_explained
from pyro_dp.utils.errors import ConfigurationError

_ALL_RECORDS = (
    "DPSEP looks at all records: leave sampling out, or name the plate by FullBatch(plate=...). "
    "PaperDPSEP samples."
)


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
