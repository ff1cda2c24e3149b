"""What the papers compare against: private methods to measure DPSVI and DPSEP by."""

from pyro_dp.baselines.em import DPEM
from pyro_dp.baselines.sgld import DPSGLD

__all__ = ["DPEM", "DPSGLD"]
