"""A clipping bound that follows the norms, by a bit of each record."""

import math
from dataclasses import dataclass

from pyro_dp.mechanism.blocks import LEAST_BOUND
from pyro_dp.utils.validation import require_number


@dataclass(frozen=True)
class AdaptiveClip:
    """A clipping bound that follows a quantile of the per-record norms.

    Andrew et al. 2021 (arXiv 1905.03871): in each step every record adds the bit [norm <= C],
    centred to +-1/2, to the same release; the noisy fraction b of records within the bound moves
    it, C <- C exp(-learning_rate (b - quantile)).

    :param initial: the bound of the first step.
    :param quantile: fraction of the records that should lie within the bound, in (0, 1).
    :param learning_rate: step size of the geometric update, in (0, 100).
    :param share: part of the privacy cost (of sigma^-2) that the bit takes from the gradient, in
        (0, 1).
    :raises ConfigurationError: a setting is out of range.

    >>> import pyro, torch
    >>> import pyro.distributions as dist
    >>> from pyro.infer import Trace_ELBO
    >>> from pyro.infer.autoguide import AutoNormal
    >>> from pyro_dp import AdaptiveClip, PaperDPSVI, PrivacyAccountant
    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("people", len(y)):
    ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> svi = PaperDPSVI(model, AutoNormal(model), pyro.optim.Adam({"lr": 0.05}), Trace_ELBO(),
    ...                  accountant=PrivacyAccountant(epsilon=1.0), num_steps=20, sample_rate=0.5,
    ...                  max_grad_norm=AdaptiveClip(initial=10.0, quantile=0.8), generator=0)
    >>> result = svi.run(torch.linspace(-1.0, 1.0, 5000), progress=False)
    >>> result.bounds[-1] < 5.0  # it began at 10
    True
    """

    initial: float = 1.0
    quantile: float = 0.5
    learning_rate: float = 0.2
    share: float = 0.01

    def __post_init__(self) -> None:
        uppers = {"initial": math.inf, "learning_rate": 100.0, "quantile": 1.0, "share": 1.0}
        for name, upper in uppers.items():
            require_number(f"AdaptiveClip.{name}", getattr(self, name), above=0.0, below=upper)

    def updated(self, bound: float, within: float) -> float:
        """The next bound, given the released fraction of records ``within`` the present one."""
        # Clamping is post-processing: one unlucky draw cannot throw the bound away.
        change = -self.learning_rate * (min(max(within, 0.0), 1.0) - self.quantile)
        return max(LEAST_BOUND, bound * math.exp(change))
