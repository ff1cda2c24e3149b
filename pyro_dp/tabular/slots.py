"""Rows of a frame as slots of the unit that they belong to: one record a person."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from pyro_dp.tabular.series import CURATOR, kind
from pyro_dp.utils.errors import SchemaError


@dataclass(frozen=True, eq=False)
class Slots:
    """The position of each row.

    Units are in order of their first row. A unit keeps its first ``max_rows`` rows, in the order
    of the frame: a rule that looks at no value, and at no other unit.

    :param units: how many.
    :param rows: which rows of the frame are kept, (kept,).
    :param unit: each kept row's, (kept,).
    :param slot: each kept row's, (kept,).
    """

    units: int
    max_rows: int
    rows: np.ndarray
    unit: np.ndarray
    slot: np.ndarray

    @classmethod
    def of(cls, series: pd.Series, name: str, max_rows: int) -> "Slots":
        """
        :param series: the unit of each row.
        :raises SchemaError: a row has no unit, or units cannot be distinguished.
        """
        unit, found = _factorized(series, name)
        slot = pd.Series(unit).groupby(unit, sort=False).cumcount().to_numpy()
        rows = np.flatnonzero(slot < max_rows)
        return cls(found, max_rows, rows, unit[rows], slot[rows])

    def place(self, values: np.ndarray, fill: Any) -> np.ndarray:
        """(rows of the frame,) to (units, max_rows), with the fill where a slot is empty."""
        placed = np.full((self.units, self.max_rows), fill, dtype=values.dtype)
        placed[self.unit, self.slot] = values[self.rows]
        return placed

    def of_first(self, values: np.ndarray) -> np.ndarray:
        """(rows of the frame,), in which each row that is kept has the value of its unit's first.

        Also where they differ: a rule that looks at no value, and no error that would tell.
        """
        first = self.rows[self.slot == 0]  # units are in order of these
        found = values.copy()
        found[self.rows] = values[first[self.unit]]
        return found


def _factorized(series: pd.Series, name: str) -> tuple[np.ndarray, int]:
    ids = series.cat.categories if kind(series) == "categories" else series
    if kind(ids) == "Python objects" and ids.map(type).nunique() > 1:
        raise SchemaError(
            f"Unit column {name!r} has ids of several types, or some are missing, so one person "
            f"may count as two. Pass all as text, or all as integers. {CURATOR}"
        )
    try:
        unit, found = pd.factorize(series)
    except TypeError:  # values cannot be compared; its text shows one
        raise SchemaError(
            f"Unit column {name!r} holds objects that are no ids: pass text or integers. {CURATOR}"
        ) from None
    if (unit < 0).any():
        raise SchemaError(
            f"Unit column {name!r} has missing values. Each row needs its unit. {CURATOR}"
        )
    return unit, len(found)
