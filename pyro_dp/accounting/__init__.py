"""The ledger of all releases, and their privacy cost. Nothing here uses data.

:class:`PrivacyAccountant` keeps the ledger and the budget. Events are the entries of a ledger.
"""

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import ApproximateDP, NonPrivateLook, SubsampledGaussian

__all__ = ["ApproximateDP", "NonPrivateLook", "PrivacyAccountant", "SubsampledGaussian"]
