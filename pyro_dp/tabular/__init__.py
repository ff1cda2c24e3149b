"""Convert data frames to tensors for Pyro models and back (extra ``tabular``)."""

from pyro_dp.utils.errors import ConfigurationError

try:
    import pandas  # noqa: F401
except ImportError:
    raise ConfigurationError(
        "pyro_dp.tabular needs pandas, which is not installed: pip install 'pyro-dp[tabular]'."
    ) from None

from pyro_dp.tabular.column import Column
from pyro_dp.tabular.encoded import Encoded
from pyro_dp.tabular.levels import Binary, Category
from pyro_dp.tabular.ranges import Count, Date, Number
from pyro_dp.tabular.regression import PrivateGLM, Regression
from pyro_dp.tabular.schema import Schema
from pyro_dp.tabular.synthesizer import Synthesizer

__all__ = [
    "Binary",
    "Category",
    "Column",
    "Count",
    "Date",
    "Encoded",
    "Number",
    "PrivateGLM",
    "Regression",
    "Schema",
    "Synthesizer",
]
