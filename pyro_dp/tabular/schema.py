"""A schema: the columns of a frame as they were declared, and what is made of a frame by them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pyro_dp.tabular.column import Column
from pyro_dp.tabular.encoded import Encoded
from pyro_dp.tabular.series import CURATOR
from pyro_dp.tabular.slots import Slots
from pyro_dp.utils.errors import ConfigurationError, SchemaError
from pyro_dp.utils.validation import require_count

ROW_OBSERVED = "row_observed"
T = TypeVar("T")
_Read = dict[str, tuple[np.ndarray, np.ndarray]]


class Schema:
    """Columns by name, and whose rows they are: all of it public, declared before the data is seen.

    Guarantee: the record of a unit in what :meth:`encode` returns depends on the schema and on the
    rows of that unit alone, and names, dtypes and shapes on the schema and the number of units. So
    a mechanism that protects one record protects a person with all of their rows.

    Not protected: errors, which depend on the data where they say so, and are for the curator; and
    whatever was put into the schema after a look at the data.

    :param columns: in the order in which they come back.
    :param unit: name of the column that says whose row it is; the protected unit. None: each row
        is a unit, which is right only where nobody has two.
    :param max_rows: so many rows of a unit are kept, the first ones of the frame.
    :raises ConfigurationError: names clash, or ``max_rows`` has no ``unit``.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        *,
        unit: str | None = None,
        max_rows: int = 1,
    ) -> None:
        self.columns: dict[str, Column] = dict(columns)
        self.unit = unit
        self.max_rows = require_count("max_rows", max_rows)
        self._check()

    @property
    def names(self) -> list[str]:
        """Of the declared columns, in order."""
        return list(self.columns)

    @property
    def sizes(self) -> list[int]:
        """How many codes each column has."""
        return [column.size for column in self.columns.values()]

    def encode(self, frame: pd.DataFrame) -> Encoded:
        """
        :param frame: with all declared columns and the unit's, in any order, and no others.
        :returns: for each column its values, (units,), or with a unit column (units, max_rows):
            floats of torch's default dtype of a ``Number`` and a ``Date`` (days since its
            ``lower``); int64 of a ``Count``, and of a ``Category`` and a ``Binary`` as codes. With
            missing values, ``name_observed`` says where there are any, and the value elsewhere is
            the column's public ``fill``. With a unit column, ``row_observed`` says which slots
            hold a row.
        :raises SchemaError: the frame does not fit; the text names the column, and shows no value.
        """
        read, slots = self._read(frame)
        tensors: dict[str, Tensor] = {}
        for name, (values, observed) in read.items():
            column = self.columns[name]
            if slots:
                values = slots.place(values, column.fill)
                observed = slots.place(observed, False)
            floats = values.dtype.kind == "f"
            tensors[name] = torch.tensor(
                values, dtype=torch.get_default_dtype() if floats else torch.int64
            )
            if column.missing:
                tensors[f"{name}_observed"] = torch.tensor(observed)
        if slots:
            full = np.ones(len(frame), dtype=bool)
            tensors[ROW_OBSERVED] = torch.tensor(slots.place(full, False))
        return Encoded(self, tensors)

    def decode(self, encoded: Mapping[str, Tensor]) -> pd.DataFrame:
        """The frame of what :meth:`encode` returned, or of tensors of its form.

        :returns: names and dtypes as declared, a row for each row that is observed; with a unit
            column this comes first, and numbers the units 0, 1, ....
        :raises SchemaError: a tensor is missing, or has another shape.
        """
        arrays, rows = self._arrays(encoded)
        series = {
            name: column.decode(*(each[rows] for each in arrays[name]))
            for name, column in self.columns.items()
        }
        frame = pd.DataFrame(series, columns=self.names)
        if self.unit is not None:
            frame.insert(0, self.unit, np.nonzero(rows)[0])
        return frame

    def codes(self, data: pd.DataFrame | Mapping[str, Tensor]) -> np.ndarray:
        """
        :param data: a frame, or an encoded one.
        :returns: int64, (units, columns), each column in [0, size); with a unit column (units,
            max_rows, columns), and -1 in all columns of a slot without a row.
        :raises SchemaError: as of :meth:`encode`.
        """
        if isinstance(data, pd.DataFrame):
            read, slots = self._read(data)
            found = [self.columns[name].codes(*each) for name, each in read.items()]
            return np.stack([slots.place(x, -1) for x in found] if slots else found, axis=-1)
        arrays, rows = self._arrays(data)
        found = [column.codes(*arrays[name]) for name, column in self.columns.items()]
        return np.where(rows[..., None], np.stack(found, axis=-1), -1)

    def from_codes(self, codes: np.ndarray, rng: np.random.Generator) -> pd.DataFrame:
        """A frame whose :meth:`codes` these are, with values uniform within their bins.

        :param codes: as :meth:`codes` gives them.
        :raises SchemaError: another shape, or no codes.
        """
        codes = np.asarray(codes)
        dims = 2 if self.unit is None else 3
        if codes.ndim != dims or codes.shape[-1] != len(self.columns) or codes.dtype.kind != "i":
            raise SchemaError(
                f"from_codes() needs integers of {dims} dimensions, the last one with "
                f"{len(self.columns)} columns."
            )
        rows = (codes >= 0).all(axis=-1)
        if (codes >= self.sizes).any() or (self.unit is None and not rows.all()):
            raise SchemaError("from_codes(): there are numbers that are no codes of their column.")
        series = {
            name: column.decode(*column.draw(codes[rows][:, j], rng))
            for j, (name, column) in enumerate(self.columns.items())
        }
        frame = pd.DataFrame(series, columns=self.names)
        if self.unit is not None:
            frame.insert(0, self.unit, np.nonzero(rows)[0])
        return frame

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self._fields() == other._fields()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """As code that makes it again."""
        lines = [f"        {name!r}: {column!r}," for name, column in self.columns.items()]
        settings = [f"    unit={self.unit!r},", f"    max_rows={self.max_rows},"]
        settings = settings if self.unit is not None else []
        return "\n".join(["Schema(", "    {", *lines, "    },", *settings, ")"])

    def _fields(self) -> Any:
        return list(self.columns.items()), self.unit, self.max_rows

    def _check(self) -> None:
        if not self.columns:
            raise ConfigurationError("A schema needs a column.")
        for name, column in self.columns.items():
            if not isinstance(name, str) or not name:
                raise ConfigurationError("Names of columns must be text, and not empty.")
            if not isinstance(column, Column):
                raise ConfigurationError(
                    f"Column {name!r} is a {type(column).__name__}: declare it as Number, Count, "
                    "Category, Binary or Date."
                )
        if self.unit is None and self.max_rows > 1:
            raise ConfigurationError("max_rows > 1 needs unit, the column that says whose row.")
        if self.unit is not None and (not isinstance(self.unit, str) or self.unit in self.columns):
            raise ConfigurationError("unit must be the name of a column that is not declared.")
        made = [f"{name}_observed" for name, each in self.columns.items() if each.missing]
        made += [ROW_OBSERVED] if self.unit is not None else []
        clash = [name for name in made if name in self.columns]
        if clash or len(set(made)) < len(made):
            raise ConfigurationError(
                f"{(clash or made)[0]!r} is the name of what encode() adds: rename the column."
            )

    def _read(self, frame: Any) -> tuple[_Read, Slots | None]:
        """Values of each column, and where its rows go."""
        self._require_columns(frame)
        read = {name: _guarded(name, frame, each.encode) for name, each in self.columns.items()}
        if self.unit is None:
            return read, None
        of_unit = partial(Slots.of, max_rows=self.max_rows)
        return read, _guarded(self.unit, frame, of_unit)

    def _require_columns(self, frame: Any) -> None:
        """Names of columns that are not declared are not shown: a file without a head has values
        of its first person there."""
        if not isinstance(frame, pd.DataFrame):
            raise SchemaError(
                f"A schema reads a frame of pandas, not a {type(frame).__name__}: pass a DataFrame."
            )
        wanted = [*([] if self.unit is None else [self.unit]), *self.names]
        found = list(frame.columns)
        lacking = [name for name in wanted if name not in found]
        if lacking:
            raise SchemaError(f"The frame lacks column {', '.join(map(repr, lacking))}.")
        twice = [name for name in wanted if found.count(name) > 1]
        if twice:
            raise SchemaError(
                f"The frame has column {twice[0]!r} more than once: which one is meant?"
            )
        extra = [str(place) for place, name in enumerate(found) if name not in wanted]
        if extra:
            names = "schema.names" if self.unit is None else "[schema.unit, *schema.names]"
            raise SchemaError(
                f"The frame has columns that the schema does not name, at position "
                f"{', '.join(extra[:10])} (their names may be data, and are not shown): declare "
                f"them, or pass df[{names}]."
            )
        if not len(frame):
            raise SchemaError("The frame has no rows.")

    def _arrays(self, encoded: Mapping[str, Tensor]) -> tuple[_Read, np.ndarray]:
        """Values, and where they are observed, of each column; and which slots hold a row."""
        dims = 1 if self.unit is None else 2
        found: dict[str, np.ndarray] = {}
        for name, column in self.columns.items():
            for key in [name, f"{name}_observed"] if column.missing else [name]:
                found[key] = self._array(encoded, key, dims)
        shape = found[self.names[0]].shape
        rows = np.ones(shape, dtype=bool)
        if self.unit is not None:
            rows = found[ROW_OBSERVED] = self._array(encoded, ROW_OBSERVED, dims).astype(bool)
        for key, array in found.items():
            if array.shape != shape or (dims == 2 and shape[1] != self.max_rows):
                raise SchemaError(f"{key!r} has shape {array.shape}, which is not the schema's.")
        ones = np.ones(shape, dtype=bool)
        return {
            name: (found[name], found.get(f"{name}_observed", ones).astype(bool))
            if column.missing
            else (found[name], ones)
            for name, column in self.columns.items()
        }, rows

    def _array(self, encoded: Mapping[str, Tensor], key: str, dims: int) -> np.ndarray:
        if key not in encoded:
            raise SchemaError(f"{key!r} is missing: decode what schema.encode(frame) returned.")
        array = torch.as_tensor(encoded[key]).detach().cpu().numpy()
        if array.ndim != dims:
            raise SchemaError(f"{key!r} must have {dims} dimensions, not {array.ndim}.")
        return array


def _guarded(name: str, frame: pd.DataFrame, read: Callable[[pd.Series, str], T]) -> T:
    """:raises SchemaError: whatever else was raised, whose text may show a value."""
    try:
        return read(frame[name], name)
    except SchemaError:
        raise
    except Exception as error:
        raise SchemaError(
            f"Column {name!r} cannot be read: pandas raised {type(error).__name__}. Pass it in a "
            f"plain dtype (float64, int64, bool, str, datetime64[ns]). {CURATOR}"
        ) from None
