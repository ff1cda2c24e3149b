"""Flower's app at each holder: a relay that sees the holder's messages, and no data.

A process starts for each message. So it loads one module alone from the installed package. With
torch and Pyro a round would take seconds more.
"""

import runpy
from importlib.util import find_spec

(package,) = find_spec("pyro_dp").submodule_search_locations
app = runpy.run_path(f"{package}/mechanism/flower_relay.py")["client_app"]()
