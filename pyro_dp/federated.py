"""Several owners fit one posterior, and show each other only what is released.

Each holder of data makes a :class:`Federation` over a line to the :class:`TrustedAggregator`, and
passes it to an inference as its ``cluster``.
"""

from pyro_dp.mechanism.federation import Federation, Line
from pyro_dp.mechanism.trusted_aggregator import TrustedAggregator

__all__ = ["Federation", "Line", "TrustedAggregator"]
