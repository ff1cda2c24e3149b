"""EP: expectation propagation with a site for every record. Not private.

Minka 2001. The reference that stochastic EP, and so DPSEP, is compared with.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from tqdm.auto import trange

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.looks import mark_look
from pyro_dp.infer.ep.problem import MOMENTS, EPProblem
from pyro_dp.infer.posterior.gaussian import Gaussian
from pyro_dp.records.first_look import first_look
from pyro_dp.records.reading import require_slice_data
from pyro_dp.utils.errors import ConfigurationError, ModelError
from pyro_dp.utils.linalg import dense, inverse
from pyro_dp.utils.validation import require_choice, require_count, require_number


class EP:
    """Expectation propagation with full precisions, all sites updated at once.

    **No guarantee.** Its sites are functions of single records: they, and the guide, are as secret
    as the data. Every :meth:`run` enters a :class:`NonPrivateLook` into the ledger before it reads
    them: epsilon is infinite from then on. It holds N d^2 numbers and is meant for comparison on
    small data.

    :param model: as for :class:`DPSEP`; the same for ``guide``, which holds the result.
    :param accountant: that of these data: its ledger is marked.
    :param num_steps: sweeps of :meth:`run`.
    :param damping: weight of a new site, in (0, 1].
    :param plate: name of the plate of records; found if exactly one plate holds observations.
    :param moments: "auto", "linear" or "stein".
    :param slice_data: as for :class:`DPSEP`.
    :raises ConfigurationError: a setting is out of range.

    >>> import warnings
    >>> import pyro, torch
    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoMultivariateNormal
    >>> from pyro_dp import NotPrivateWarning, PrivacyAccountant
    >>> from pyro_dp.baselines import EP
    >>> def model(y):
    ...     rate = pyro.sample("rate", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("people", len(y)):
    ...         pyro.sample("y", dist.Bernoulli(logits=rate), obs=y)
    >>> guide, accountant = AutoMultivariateNormal(model), PrivacyAccountant()
    >>> ep = EP(model, guide, accountant=accountant, num_steps=5)
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore", NotPrivateWarning)  # these data are made up
    ...     result = ep.run((torch.arange(200) % 2).float())
    >>> accountant.get_epsilon()  # it is not private
    inf
    """

    def __init__(
        self,
        model: Callable,
        guide: Callable,
        *,
        accountant: PrivacyAccountant,
        num_steps: int,
        damping: float = 0.5,
        plate: str | None = None,
        moments: str = "auto",
        slice_data: bool | str = "auto",
    ):
        if not isinstance(accountant, PrivacyAccountant):
            raise ConfigurationError("accountant must be a PrivacyAccountant: EP marks its ledger.")
        require_count("num_steps", num_steps)
        require_number("damping", damping, above=0.0, below=1.0, closed=True)
        require_choice("moments", moments, MOMENTS)
        require_slice_data(slice_data)
        self.model, self.guide, self.accountant = model, guide, accountant
        self.num_steps, self.damping = num_steps, damping
        self.plate, self.moments, self.slice_data = plate, moments, slice_data

    @torch.no_grad()
    def run(self, *args: Any, progress: bool = True, **kwargs: Any) -> MultivariateNormal:
        """Fit the guide, and return the posterior over its unconstrained latents.

        :raises ModelError: model, guide and data do not fit, and nothing was read; or the sites
            diverged.
        """
        records = first_look(
            self.model, self.guide, args, kwargs, plate=self.plate, slice_data=self.slice_data
        )
        plate = records.plate
        problem = EPProblem.build(self.model, self.guide, records, self.moments, None)
        mark_look(self.accountant, f"the posterior of EP of plate {plate.name!r}", stacklevel=3)
        indices = torch.arange(plate.size, device=records.device)
        rows, places = records.rows(indices), problem.places
        mean, covariance = problem.guide.read()
        posterior = Gaussian.from_moments(mean, dense(covariance))
        prior = problem.prior.factor(posterior.mean, posterior.covariance)
        share = (posterior / prior).restricted(places) ** (1 / plate.size)
        count = plate.size
        sites = Gaussian(share.eta.expand(count, -1), share.precision.expand(count, -1, -1))
        try:
            for _ in trange(self.num_steps, desc="EP", disable=not progress):
                means, covariances, proper = _cavities(posterior, sites, places)
                spread = problem.moments.spread(covariances)
                factors = problem.moments.factors(means, spread, indices, rows)
                precision = factors.matrices()
                eta = factors.residual + (precision @ means.unsqueeze(2)).squeeze(2)
                new = sites ** (1 - self.damping) * Gaussian(eta, precision) ** self.damping
                sites = Gaussian(
                    torch.where(proper[:, None], new.eta, sites.eta),
                    torch.where(proper[:, None, None], new.precision, sites.precision),
                )
                total = Gaussian(sites.eta.sum(0), sites.precision.sum(0))
                prior = problem.prior.factor(posterior.mean, posterior.covariance)
                posterior = prior * total.embedded(places, problem.guide.size)
                if not posterior.mean.isfinite().all():
                    raise ArithmeticError
        except (ArithmeticError, torch.linalg.LinAlgError):
            raise ModelError(
                "The sites left the finite numbers: use a smaller damping, or data in other units."
            ) from None
        problem.guide.write(posterior.mean, posterior.covariance)
        return MultivariateNormal(posterior.mean, posterior.covariance)


def _cavities(
    posterior: Gaussian, sites: Gaussian, places: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Means (N, d), covariances (N, d, d) of q / f_n, and whether there is such a Gaussian (N,)."""
    # On the coordinates that records see, the others integrated out.
    marginal = Gaussian.from_moments(
        posterior.mean[places], inverse(posterior.precision)[places.unsqueeze(1), places]
    )
    cavity = marginal / sites
    factor, failed = torch.linalg.cholesky_ex(cavity.precision)
    proper = failed == 0
    identity = torch.eye(len(places)).to(factor)
    factor = torch.where(proper[:, None, None], factor, identity)
    covariances = torch.cholesky_inverse(factor)
    return (covariances @ cavity.eta.unsqueeze(2)).squeeze(2), covariances, proper
