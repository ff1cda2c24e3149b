"""Released counts with their intervals, as a frame."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.stats import norm

from pyro_dp.tabular.margin_mixture import MarginPosterior
from pyro_dp.tabular.schema import Schema


def margin_table(
    schema: Schema, posterior: MarginPosterior, columns: Sequence[str], level: float
) -> pd.DataFrame:
    """
    :param columns: one or two names.
    :param level: of the intervals.
    :returns: a row for each code, or pair of codes.
    """
    cells = posterior.model.cells
    places = [schema.names.index(name) for name in columns]
    counts, added = cells.margin(posterior.counts, tuple(sorted(places)))
    counts = counts if places == sorted(places) else counts.T
    half = norm.ppf((1 + level) / 2) * posterior.noise * math.sqrt(added)
    labels = list(itertools.product(*(schema.columns[name].code_labels for name in columns)))
    table = pd.DataFrame(labels, columns=list(columns))
    table["count"] = counts.flatten().numpy()
    table["lower"] = np.maximum(table["count"] - half, 0.0)
    table["upper"] = np.maximum(table["count"] + half, 0.0)
    return table
