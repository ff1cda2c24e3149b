"""Released counts with their intervals, as a frame."""

import itertools
import math
from collections.abc import Callable, Sequence

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
    :param level: the intervals' level.
    :returns: a row for each code, or pair of codes.
    """
    cells = posterior.model.cells
    places = [schema.names.index(name) for name in columns]
    counts, added = cells.margin(posterior.counts, tuple(sorted(places)))
    counts = counts if places == sorted(places) else counts.T
    half = half_width(posterior, level, added)
    labels = list(itertools.product(*(schema.columns[name].code_labels for name in columns)))
    table = pd.DataFrame(labels, columns=list(columns))
    table["count"] = counts.flatten().numpy()
    table["lower"] = np.maximum(table["count"] - half, 0.0)
    table["upper"] = np.maximum(table["count"] + half, 0.0)
    return table


def half_width(posterior: MarginPosterior, level: float, added: int) -> float:
    """Half width of the interval of a count that sums ``added`` released cells."""
    return float(norm.ppf((1 + level) / 2) * posterior.noise * math.sqrt(added))


def all_margins(schema: Schema, margin: Callable[..., pd.DataFrame]) -> pd.DataFrame:
    """Margins of all columns, and then of all pairs, in one long frame.

    :param margin: a function of one name or two, as :func:`margin_table` gives it.
    :returns: ``column_1``, ``value_1``, ``column_2``, ``value_2``, ``count``, ``lower``, ``upper``,
        to one decimal; the second pair is empty where there is one column.
    """
    found = []
    for of in (1, 2):
        for columns in itertools.combinations(schema.names, of):
            table = margin(*columns).reset_index(drop=True)
            names = {"column_1": columns[0], "column_2": columns[1] if of == 2 else ""}
            values = table[list(columns)].set_axis([f"value_{i + 1}" for i in range(of)], axis=1)
            rest = table[["count", "lower", "upper"]]
            found.append(pd.concat([values, rest], axis=1).assign(**names))
    order = ["column_1", "value_1", "column_2", "value_2", "count", "lower", "upper"]
    return pd.concat(found, ignore_index=True)[order].round({"count": 1, "lower": 1, "upper": 1})
