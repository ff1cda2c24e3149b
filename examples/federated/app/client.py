"""What Flower runs at each holder: a relay that sees what the holder sends, and no data.

A process starts for each message. So it takes the module alone from the installed package: with
torch and Pyro a round would take seconds more.
"""

import runpy
from importlib.util import find_spec

(package,) = find_spec("pyro_dp").submodule_search_locations
app = runpy.run_path(f"{package}/mechanism/flower_relay.py")["client_app"]()
