"""An encoded frame: tensors by name for a model, with the rows of a unit in slots."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp.tabular.column import Column
from pyro_dp.tabular.series import kind
from pyro_dp.utils.errors import CURATOR, SchemaError

ROW_OBSERVED = "row_observed"  # beside the columns, where a unit has several rows


class Encoded(dict[str, Tensor]):
    """A frame as :meth:`~pyro_dp.tabular.Schema.encode` returns it: ``data["age"]`` in a model.

    It is one argument of ``run``. A model sees an ordinary dictionary of the rows of its records.
    Names, dtypes and shapes depend on the schema and the number of units alone. **The numbers are
    data**, as secret as the frame.

    :param schema: the :class:`~pyro_dp.tabular.Schema` of the frame.
    :param tensors: tensors by name, each with a row per unit.

    >>> visits = pd.DataFrame({"person": ["a", "b", "a"], "cost": [10.0, 20.0, 30.0]})
    >>> schema = Schema({"cost": Number(0, 100)}, unit="person", max_rows=2)
    >>> schema.encode(visits)  # then: svi.run(encoded)
    Encoded(cost: (2, 2), row_observed: (2, 2))
    """

    def __init__(self, schema: Any, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.schema = schema

    @property
    def units(self) -> int:
        """Number of units N, which is public."""
        return len(next(iter(self.values())))

    def __repr__(self) -> str:
        """Shapes without data."""
        return f"Encoded({', '.join(f'{k}: {tuple(v.shape)}' for k, v in self.items())})"

    def __reduce__(self) -> Any:
        return type(self), (self.schema, dict(self))


def arrays(
    encoded: Mapping[str, Any], columns: Mapping[str, Column], slots: int | None
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """Values and masks of observed values of each column, and the mask of slots with a row.

    :param slots: number of slots of a unit; None if tensors have one dimension.
    :raises SchemaError: a tensor is missing, is not finite, or has the wrong shape.
    """
    dims = 1 if slots is None else 2
    found: dict[str, np.ndarray] = {}
    for name, column in columns.items():
        for key in [name, f"{name}_observed"] if column.missing else [name]:
            found[key] = _array(encoded, key, dims)
    shape = next(iter(found.values())).shape
    ones = np.ones(shape, dtype=bool)
    rows = ones if slots is None else _array(encoded, ROW_OBSERVED, dims).astype(bool)
    found[ROW_OBSERVED] = rows
    for key, array in found.items():
        if array.shape != shape or array.shape[1:] != (slots,)[: dims - 1]:
            raise SchemaError(f"{key!r} has shape {array.shape}, which is not the schema's.")
    return {
        name: (found[name], found[f"{name}_observed"].astype(bool) if column.missing else ones)
        for name, column in columns.items()
    }, rows


def _array(encoded: Mapping[str, Any], key: str, dims: int) -> np.ndarray:
    if not isinstance(encoded.get(key), Tensor):
        raise SchemaError(f"{key!r} is missing among the tensors: schema.encode(frame) makes it.")
    array: np.ndarray = encoded[key].detach().cpu().numpy()
    if array.ndim != dims or not np.isfinite(array).all():
        raise SchemaError(f"{key!r} must have {dims} dimensions, and finite numbers.")
    return array


pytree.register_pytree_node(
    Encoded,
    lambda encoded: (list(encoded.values()), tuple(encoded)),
    lambda tensors, names: dict(zip(names, tensors, strict=True)),
    serialized_type_name="pyro_dp.tabular.Encoded",
)


@dataclass(frozen=True, eq=False)
class Slots:
    """The position of each row.

    Units are in order of their first row. A unit keeps its first ``max_rows`` rows, in the order
    of the frame. This rule reads no value, and no other unit.
    """

    units: int  # number of units
    max_rows: int
    rows: np.ndarray  # indices of the kept rows, (kept,)
    unit: np.ndarray  # unit of each kept row, (kept,)
    slot: np.ndarray  # slot of each kept row, (kept,)

    @classmethod
    def of(cls, series: pd.Series, name: str, max_rows: int) -> "Slots":
        """:raises SchemaError: a row has no unit, or units cannot be distinguished."""
        unit, found = _factorized(series, name)
        slot = pd.Series(unit).groupby(unit, sort=False).cumcount().to_numpy()
        rows = np.flatnonzero(slot < max_rows)
        return cls(found, max_rows, rows, unit[rows], slot[rows])

    def place(self, values: np.ndarray, fill: Any) -> np.ndarray:
        """Move values (rows of the frame,) to slots (units, max_rows). Empty slots get the fill."""
        placed = np.full((self.units, self.max_rows), fill, dtype=values.dtype)
        placed[self.unit, self.slot] = values[self.rows]
        return placed

    def of_first(self, values: np.ndarray) -> np.ndarray:
        """Replace the value of each kept row by that of its unit's first row, (rows of the frame,).

        This also holds if they differ, because an error would reveal it.
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
