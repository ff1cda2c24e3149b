"""All releases, and their cost. Nothing here touches data.

:class:`PrivacyAccountant` keeps the ledger and the budget; events are the entries of a ledger.
"""

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import ApproximateDP, NonPrivateLook, SubsampledGaussian

__all__ = ["ApproximateDP", "NonPrivateLook", "PrivacyAccountant", "SubsampledGaussian"]
