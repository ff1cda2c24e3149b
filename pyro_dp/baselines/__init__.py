"""What the papers compare against, to measure DPSVI and DPSEP by.

:class:`DPEM` and :class:`DPSGLD` are private. :class:`EP` is not, and its ledger says so.
"""

from pyro_dp.baselines.em import DPEM
from pyro_dp.baselines.ep import EP
from pyro_dp.baselines.sgld import DPSGLD

__all__ = ["DPEM", "DPSGLD", "EP"]
