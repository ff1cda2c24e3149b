"""Private Bayesian inference for Pyro models."""

from pyro_dp.accounting import PrivacyAccountant, SubsampledGaussian
from pyro_dp.errors import ConfigurationError, ModelError, PrivacyBudgetExceeded, PrivacyError
from pyro_dp.mechanisms import AdaptiveClip
from pyro_dp.sep import DPSEP
from pyro_dp.svi import DPSVI

__all__ = [
    "AdaptiveClip",
    "ConfigurationError",
    "DPSEP",
    "DPSVI",
    "ModelError",
    "PrivacyAccountant",
    "PrivacyBudgetExceeded",
    "PrivacyError",
    "SubsampledGaussian",
]
