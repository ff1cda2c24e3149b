"""The settings that every step-wise private inference has, checked."""

import math
from dataclasses import dataclass

import torch

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.mechanism.cluster import Cluster
from pyro_dp.mechanism.federation import Federation
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_choice, require_count, require_flag, require_number


@dataclass(frozen=True, kw_only=True)
class ReleaseSettings:
    """The sampling of records, the noise of each release, and the keeper of the ledger.

    They mean what they mean for :class:`DPSVI`.

    :param bound: the largest norm of one record's part of the first release.
    :param plans: whether the first step chooses ``num_steps``, where it is None.
    :raises ConfigurationError: a setting is out of range or does not fit the others.
    """

    accountant: PrivacyAccountant
    num_steps: int | None
    noise_multiplier: float | None
    bound: float
    sample_rate: float | None
    sampling: str
    microbatch_size: int | None
    generator: torch.Generator | int | None
    secure: bool
    plans: bool = False
    cluster: Cluster | Federation | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.accountant, PrivacyAccountant):
            raise ConfigurationError("accountant must be a PrivacyAccountant.")
        # As Python's own integers: torch takes no others for sizes.
        for name in ("num_steps", "microbatch_size"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, require_count(name, getattr(self, name)))
        require_flag("secure", self.secure)
        require_choice("sampling", self.sampling, ("poisson", "fixed", "full"))
        if self.sampling == "fixed" and self.accountant.neighboring != "replace_one":
            raise ConfigurationError(
                "sampling='fixed' hides no change of the number of records: use "
                "PrivacyAccountant(neighboring='replace_one'), or sampling='poisson'."
            )
        if not isinstance(self.cluster, Cluster | Federation | None):
            raise ConfigurationError(
                "cluster must be a pyro_dp.Cluster, a pyro_dp.federated.Federation, or None."
            )
        if isinstance(self.cluster, Federation) and not self.secure:
            raise ConfigurationError(
                "A Federation adds up integers: pass secure=True. (Shares of floating-point noise "
                "would tell what they should hide.)"
            )
        if self.cluster is not None and self.sampling == "fixed":
            raise ConfigurationError(
                "sampling='fixed' needs all records in one process, and in a cluster each process "
                "draws from its own. Use sampling='poisson', or 'full'."
            )
        if self.sample_rate is not None:
            name = "sample_rate, the expected fraction of the records in a step,"
            rate = require_number(name, self.sample_rate, above=0.0, below=1.0, closed=True)
            object.__setattr__(self, "sample_rate", rate)
            if self.sampling == "full" and self.sample_rate != 1.0:
                raise ConfigurationError("sample_rate must be 1 or None with sampling='full'.")
        sigma = self.noise_multiplier
        if sigma is None:
            if self.accountant.epsilon is None:
                raise ConfigurationError(
                    "noise_multiplier=None is calibrated from a budget: give the accountant an "
                    "epsilon, or pass a noise_multiplier."
                )
            if self.num_steps is None and not self.plans:
                raise ConfigurationError(
                    "noise_multiplier=None is calibrated for a number of steps: pass num_steps."
                )
        else:
            require_number("noise_multiplier", sigma, above=0.0, below=math.inf, or_equal=True)
            object.__setattr__(self, "noise_multiplier", float(sigma))
        if self.secure and sigma == 0:
            raise ConfigurationError("secure=True needs noise: noise_multiplier=0 adds none.")
        if self.bound == math.inf and sigma != 0:
            raise ConfigurationError(
                "An infinite bound (max_grad_norm, max_factor_norm) needs noise_multiplier=0: no "
                "noise hides an unbounded record. Choose a finite one."
            )
