"""Several data owners fit one posterior, and show each other only releases.

Each owner makes a :class:`Federation` over a channel, and passes it to an inference by
``Execution(peers=...)``. With :class:`ShamirSums` nobody sees an upload. With
:class:`AtTrustedAggregator` the aggregator does. :class:`FlowerLine` connects to an aggregator over
Flower, with the apps of :func:`server_app` and :func:`client_app`.
"""

from pyro_dp.mechanism.federation import Channel, Federation
from pyro_dp.mechanism.flower import FlowerLine, server_app
from pyro_dp.mechanism.flower_relay import client_app
from pyro_dp.mechanism.shamir_sums import ShamirSums
from pyro_dp.mechanism.trusted_aggregator import AtTrustedAggregator, TrustedAggregator

__all__ = [
    "AtTrustedAggregator",
    "Channel",
    "Federation",
    "FlowerLine",
    "ShamirSums",
    "TrustedAggregator",
    "client_app",
    "server_app",
]
