"""Flower's app at the aggregator."""

from pyro_dp.federated import TrustedAggregator, server_app

app = server_app(TrustedAggregator(holders=3, dropouts=1, timeout=120))
