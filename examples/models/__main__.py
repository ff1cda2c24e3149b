"""Each example's fits, and the page of all: `python examples/models`."""

import importlib

import page
from comparison import compare

for name in page.SEEN:
    compare(importlib.import_module(name))
page.write()
