"""Several owners fit one posterior, and show each other only what is released.

Each holder of data makes a :class:`Federation` over a channel, and passes it to an inference as its
``cluster``. Channels are :class:`ShamirSums`, by which nobody sees an upload, and
:class:`AtTrustedAggregator`, whose aggregator does.
"""

from pyro_dp.mechanism.aggregator_channel import AtTrustedAggregator, Line
from pyro_dp.mechanism.federation import Channel, Federation
from pyro_dp.mechanism.shamir_sums import ShamirSums
from pyro_dp.mechanism.trusted_aggregator import TrustedAggregator

__all__ = [
    "AtTrustedAggregator",
    "Channel",
    "Federation",
    "Line",
    "ShamirSums",
    "TrustedAggregator",
]
