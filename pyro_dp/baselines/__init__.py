"""What the papers compare against, to measure DPSVI and DPSEP by.

:class:`DPEM` and :class:`DPSGLD` are private. :class:`EP` is not, and its ledger says so.
"""

from pyro_dp.baselines.dpem import DPEM
from pyro_dp.baselines.dpsgld import DPSGLD
from pyro_dp.baselines.ep import EP

__all__ = ["DPEM", "DPSGLD", "EP"]
