"""A schema declares the columns of a frame, and encodes frames as tensors."""

import dataclasses
import json
import os
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from pyro.infer.autoguide import AutoGuide, AutoNormal, init_to_sample
from torch import Tensor

from pyro_dp.tabular.column import (
    LARGEST,
    Column,
    possible_codes,
    possible_values,
    require_rules,
    zeros,
)
from pyro_dp.tabular.encoded import ROW_OBSERVED, Encoded, Slots, arrays
from pyro_dp.tabular.expressions import evaluated, require_derived
from pyro_dp.tabular.levels import Binary, Category
from pyro_dp.tabular.margin_mixture import row_model
from pyro_dp.tabular.ranges import Count, Date, Number, RangeColumn
from pyro_dp.tabular.suggest import drafted
from pyro_dp.utils.errors import CURATOR, ConfigurationError, SchemaError
from pyro_dp.utils.files import write_text
from pyro_dp.utils.validation import require_count

T = TypeVar("T")
_REDRAWS = 100
_SHOWN = 10
_LONGEST = 1000  # characters of all columns in a note
_VERSION = 1
_KINDS: dict[str, type[Column]] = {
    kind.__name__: kind for kind in (Number, Count, Category, Binary, Date)
}
_SETTINGS = ("unit", "max_rows", "constant", "derived", "impossible")
_NO_SCHEMA = "This text is not a schema that schema.to_json() wrote"
_SUBCLASS = (
    "Schema cannot have subclasses: a new method could read all rows at once, and a saved schema "
    "would lose it. Write a function that returns a Schema instead."
)
_Read = dict[str, tuple[np.ndarray, np.ndarray]]


class Schema:
    """Columns by name, and the unit that owns the rows. A schema is public, and is declared before
    anybody looks at the data.

    Guarantee: a unit's record in the result of :meth:`encode` depends on the schema and on the rows
    of that unit alone. Names, dtypes and shapes depend on the schema and the number of units. So a
    mechanism that protects one record protects a person with all of their rows.

    Not protected: errors (they may depend on the data, and are for the curator), and declarations
    chosen after a look at the data.

    :param columns: the columns by name, in the order of decoded frames.
    :param unit: name of the column that identifies the owner of a row, which is the protected unit.
        None: each row is a unit, which is right only if nobody has two.
    :param max_rows: a unit keeps this many of its rows, the first ones of the frame. Required with
        ``unit``. The noise grows with this number.
    :param constant: names of columns that are the same in all rows of a unit, such as ``["sex"]``.
        If a unit's rows differ, all get the value of the first row.
    :param derived: expressions of columns, by name, such as ``{"bmi": "weight / height / height"}``
        (:mod:`~pyro_dp.tabular.expressions`). Decoded frames contain them. Encoding
        ignores them.
    :param impossible: rules for rows that must not be synthesised, such as ``[{"age": (0, 14),
        "married": ["yes"]}]``, with levels or a range of each column. Data are not checked.
    :raises ConfigurationError: names clash, ``unit`` or ``max_rows`` lacks the other, or an
        expression or rule has an undeclared name. Also for a subclass of it.

    >>> schema = Schema({"age": Number(18, 100), "region": Category(("north", "south"))})
    >>> encoded = schema.encode(pd.DataFrame({"age": [30, 120], "region": ["south", "north"]}))
    >>> encoded["age"], encoded["region"]  # 120 is clipped
    (tensor([ 30., 100.]), tensor([1, 0]))
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        *,
        unit: str | None = None,
        max_rows: int | None = None,
        constant: Sequence[str] = (),
        derived: Mapping[str, str] | None = None,
        impossible: Sequence[Mapping[str, Sequence[Any]]] = (),
    ) -> None:
        if type(self) is not Schema:
            raise ConfigurationError(_SUBCLASS)
        try:
            self.columns: dict[str, Column] = dict(columns)
        except (TypeError, ValueError):
            raise ConfigurationError(
                "columns must be a dictionary, such as {'age': Number(0, 100)}."
            ) from None
        self.unit = unit
        self.max_rows = _max_rows(max_rows, unit)
        _require_declarations(self.columns, unit, constant)
        self.constant = tuple(constant)
        self.impossible = require_rules(impossible, self.columns)
        self.derived = require_derived(derived, self.columns, unit)
        there = np.ones(1, dtype=bool)  # check derived columns on a row of public values
        row = {name: (np.array([each.fill]), there) for name, each in self.columns.items()}
        self._frame(row, there)

    @classmethod
    def suggest(
        cls, public_df: pd.DataFrame, *, unit: str | None = None, max_rows: int | None = None
    ) -> "Schema":
        """A draft to print as code and edit.

        **It is not private**: bounds and levels are those of the frame. So the frame must be
        public, such as a public sample or last year's publication.

        :param max_rows: most rows of a unit, which is not read from the frame.
        :raises SchemaError: a column has no suitable declaration, or the unit's column is missing.
        """
        return cls(drafted(public_df, unit), unit=unit, max_rows=max_rows)

    @classmethod
    def from_json(cls, text: str) -> "Schema":
        """Read the text of :meth:`to_json`. It contains declarations, and runs no code.

        :raises ConfigurationError: the text is invalid; the error names the column.
        """
        try:
            state = json.loads(text)
        except (TypeError, ValueError, RecursionError):
            raise ConfigurationError("This text is not a schema: it is not JSON.") from None
        if not isinstance(state, dict) or "schema" not in state:
            raise ConfigurationError(f"{_NO_SCHEMA}: it has no entry 'schema'.")
        if state["schema"] != _VERSION:
            raise ConfigurationError(
                f"This schema has version {state['schema']!r}. Version {_VERSION} is needed."
            )
        unknown = set(state) - {"schema", "columns", *_SETTINGS}
        if unknown or not isinstance(state.get("columns"), list):
            raise ConfigurationError(
                f"{_NO_SCHEMA}: it needs a list 'columns', and the only other entries are "
                f"'schema', {', '.join(map(repr, _SETTINGS))}."
            )
        columns: dict[str, Column] = {}
        for name, column in map(_column, state["columns"]):
            if name in columns:
                raise ConfigurationError(f"Column {name!r} is declared twice.")
            columns[name] = column
        return cls(columns, **{name: state[name] for name in _SETTINGS if name in state})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Schema":
        """The schema of a file that :meth:`save` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def to_json(self) -> str:
        listed = [
            {"name": name, "kind": type(column).__name__, **dataclasses.asdict(column)}  # type: ignore[call-overload]
            for name, column in self.columns.items()
        ]
        state = {"schema": _VERSION, "columns": listed, **self._settings()}
        return json.dumps(state, indent=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        write_text(path, self.to_json())

    @property
    def names(self) -> list[str]:
        """Names of the declared columns, in order."""
        return list(self.columns)

    @property
    def sizes(self) -> list[int]:
        """Number of codes of each column."""
        return [column.size for column in self.columns.values()]

    @property
    def protected(self) -> str:
        """The record that a guarantee protects, in words."""
        if self.unit is None:
            return "a row"
        return f"all rows with the same {self.unit}, and only the first {self.max_rows} count"

    @property
    def note(self) -> str:
        """:attr:`protected`, and the assumed bounds and levels, for the ledger of a fit."""
        lost = "anyone with several rows is protected less"
        if self.unit is not None:
            lost = "rows beyond these were left out, and results say nothing about them"
        columns = ", ".join(f"{name}: {column!r}" for name, column in self.columns.items())
        assumed = textwrap.shorten(columns, _LONGEST, placeholder=" ...")
        text = f"By the schema of a run, one record is {self.protected}; {lost}."
        return f"{text} Bounds and levels are public: {assumed}."

    def encode(self, frame: pd.DataFrame) -> Encoded:
        """Tensors of a frame, with one row per unit.

        :param frame: a frame with exactly the declared columns and the unit's, in any order.
        :returns: the values of each column, (units,), or with a unit column (units, max_rows). A
            ``Number`` or ``Date`` (days since its ``lower``) gives floats of torch's default dtype.
            A ``Count``, or the codes of a ``Category`` or ``Binary``, are int64. With missing
            values, ``name_observed`` marks the observed ones, and the others have the column's
            public ``fill``. With a unit column, ``row_observed`` marks the slots that hold a row.
        :raises ConfigurationError: bounds exceed torch's default dtype.
        :raises SchemaError: the frame does not fit; the text names the column, and shows no value.
        """
        read, slots = self._read(frame)
        tensors: dict[str, Tensor] = {}
        for name, (values, observed) in read.items():
            column = self.columns[name]
            if slots:
                values = slots.place(values, column.fill)
                observed = slots.place(observed, False)
            dtype = torch.get_default_dtype() if values.dtype.kind == "f" else torch.int64
            _require_within(name, column, dtype)
            tensors[name] = torch.tensor(values, dtype=dtype)
            if column.missing:
                tensors[f"{name}_observed"] = torch.tensor(observed)
        if slots:
            full = np.ones(len(frame), dtype=bool)
            tensors[ROW_OBSERVED] = torch.tensor(slots.place(full, False))
        return Encoded(self, tensors)

    def decode(self, encoded: Mapping[str, Tensor]) -> pd.DataFrame:
        """The frame of a result of :meth:`encode`, or of similar tensors.

        :returns: columns with the declared names and dtypes, then derived columns, for all observed
            rows. A unit column comes first, and numbers the units 0, 1, ....
        :raises SchemaError: a tensor is missing, or has the wrong shape.
        """
        read, rows = self._arrays(encoded)
        return self._frame({name: (x[rows], seen[rows]) for name, (x, seen) in read.items()}, rows)

    def codes(self, data: pd.DataFrame | Mapping[str, Tensor]) -> np.ndarray:
        """Codes of the bins and levels of all values.

        :param data: a frame, or an encoded one.
        :returns: int64, (units, columns), each column in [0, size). With a unit column (units,
            max_rows, columns), with -1 in all columns of an empty slot.
        :raises SchemaError: as for :meth:`encode`.
        """
        if isinstance(data, Mapping):
            read, rows = self._arrays(data)
            found = [column.codes(*read[name]) for name, column in self.columns.items()]
            codes = np.where(rows[..., None], np.stack(found, axis=-1), -1)
        else:
            read, slots = self._read(data)
            found = [self.columns[name].codes(*each) for name, each in read.items()]
            codes = np.stack([slots.place(x, -1) for x in found] if slots else found, axis=-1)
        return codes

    def from_codes(self, codes: np.ndarray, rng: np.random.Generator) -> pd.DataFrame:
        """A frame with these :meth:`codes`, and values uniform within their bins.

        Values that are ``impossible`` are redrawn, unless all values of their bins are impossible.

        :raises SchemaError: the shape is wrong, or some numbers are no codes.
        """
        codes = np.asarray(codes)
        self._require_codes(codes)
        rows = codes[..., 0] >= 0
        unit = np.nonzero(rows)[0]
        drawn = self._drawn(codes[rows], rng, unit)
        again = np.flatnonzero(possible_codes(codes[rows], self.impossible, self.columns))
        for _ in range(_REDRAWS if self.impossible else 0):
            chosen = {name: (x[again], seen[again]) for name, (x, seen) in drawn.items()}
            again = again[~possible_values(chosen, self.impossible, self.columns)]
            if not len(again):
                break
            if self.constant:  # constant values are redrawn in all rows of a unit
                again = np.flatnonzero(np.isin(unit, unit[again]))
            for name, (values, seen) in self._drawn(codes[rows][again], rng, unit[again]).items():
                drawn[name][0][again], drawn[name][1][again] = values, seen
        return self._frame(drawn, rows)

    def to_pyro(self, components: int = 30) -> tuple[Callable[[Tensor], None], AutoGuide]:
        """The mixture of the :class:`~pyro_dp.tabular.Synthesizer` as a Pyro model, for DPSVI.

        It ignores ``constant`` and ``impossible``, which apply to draws by :meth:`from_codes`. ::

            model, guide = schema.to_pyro()
            DPSVI(model, guide, accountant=accountant).run(torch.from_numpy(schema.codes(df)))

        :returns: a model of codes, with assignments summed out, and a mean-field guide. The guide
            starts at a draw from the prior, because equal components would stay equal.
        """
        model = row_model(self.sizes, components)
        return model, AutoNormal(model, init_loc_fn=init_to_sample)

    def possible(self, data: pd.DataFrame | Mapping[str, Tensor] | np.ndarray) -> np.ndarray:
        """Mark the rows that match no rule of ``impossible``.

        :param data: a frame, an encoded frame, or codes. Codes are impossible if all values of
            their bins are.
        :returns: bool, (units,), or with a unit column (units, max_rows), False in empty slots.
        """
        if isinstance(data, np.ndarray):
            self._require_codes(data)
            return (data[..., 0] >= 0) & possible_codes(data, self.impossible, self.columns)
        encoded = data if isinstance(data, Mapping) else self.encode(data)
        read, rows = self._arrays(encoded)
        return rows & possible_values(read, self.impossible, self.columns)

    @property
    def zeros(self) -> list[dict[str, np.ndarray]]:
        """The rules by codes: for each column of a rule, whether each code lies within it, (size,).

        A row of codes is impossible if, for one rule, all of these are True.
        """
        return zeros(self.impossible, self.columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and repr(self) == repr(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Code that recreates the schema."""
        lines = [f"        {name!r}: {column!r}," for name, column in self.columns.items()]
        stated = {name: value for name, value in self._settings().items() if value}
        if self.unit is None:
            del stated["max_rows"]
        settings = [f"    {name}={value!r}," for name, value in stated.items()]
        return "\n".join(["Schema(", "    {", *lines, "    },", *settings, ")"])

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SETTINGS}

    def _arrays(self, encoded: Mapping[str, Tensor]) -> tuple[_Read, np.ndarray]:
        return arrays(encoded, self.columns, None if self.unit is None else self.max_rows)

    def _drawn(self, codes: np.ndarray, rng: np.random.Generator, unit: np.ndarray) -> _Read:
        """Draw values for codes. Constant columns have the value of their unit's first row."""
        columns = enumerate(self.columns.items())
        found = {name: column.draw(codes[:, j], rng) for j, (name, column) in columns}
        _, first, index = np.unique(unit, return_index=True, return_inverse=True)
        for name in self.constant:
            values, observed = found[name]
            found[name] = values[first][index], observed[first][index]
        return found

    def _frame(self, read: _Read, rows: np.ndarray) -> pd.DataFrame:
        series = {name: column.decode(*read[name]) for name, column in self.columns.items()}
        for name, expression in self.derived.items():
            series[name] = evaluated(name, expression, series)
        frame = pd.DataFrame(series, columns=[*self.names, *self.derived])
        if self.unit is not None:
            frame.insert(0, self.unit, np.nonzero(rows)[0])
        return frame

    def _require_codes(self, codes: np.ndarray) -> None:
        shape = (len(self.columns),) if self.unit is None else (self.max_rows, len(self.columns))
        if codes.dtype.kind != "i" or codes.shape[1:] != shape:
            raise SchemaError(f"Codes must be integers of shape (units, {str(shape)[1:]}.")
        empty = (codes == -1).all(axis=-1, keepdims=True) & (self.unit is not None)
        if not (empty | ((codes >= 0) & (codes < self.sizes))).all():
            raise SchemaError("Codes: some numbers are not codes of their column.")

    def _read(self, frame: Any) -> tuple[_Read, Slots | None]:
        """Values of each column, and the slots of the rows."""
        require_columns(frame, self.names, self.unit, self.derived)
        read = {name: guarded(name, frame, each.encode) for name, each in self.columns.items()}
        if self.unit is None:
            return read, None
        of_unit = partial(Slots.of, max_rows=self.max_rows)
        slots: Slots = guarded(self.unit, frame, of_unit)
        for name in self.constant:
            values, observed = read[name]
            read[name] = slots.of_first(values), slots.of_first(observed)
        return read, slots


def _require_declarations(columns: Mapping[str, Column], unit: Any, constant: Any) -> None:
    if not columns:
        raise ConfigurationError("A schema needs at least one column.")
    for name, column in columns.items():
        if not isinstance(name, str) or not name:
            raise ConfigurationError("Names of columns must be non-empty text.")
        # A user's class could read all rows at once.
        if type(column) not in _KINDS.values():
            raise ConfigurationError(
                f"Column {name!r} is a {type(column).__name__}: declare it as Number, Count, "
                "Category, Binary or Date."
            )
    fits = isinstance(constant, (list, tuple)) and all(isinstance(x, str) for x in constant)
    names = set(constant) if fits else set()
    if not fits or len(names) < len(constant) or names and (unit is None or names - set(columns)):
        raise ConfigurationError(
            "constant must list columns of the schema, each once. It also needs unit, the column "
            "that identifies whose row it is."
        )
    if unit is not None and (not isinstance(unit, str) or unit in columns):
        raise ConfigurationError(
            "unit must name a column that is not declared. It identifies whose row it is, and is "
            "never released. Remove it from the columns."
        )
    made = [f"{name}_observed" for name, each in columns.items() if each.missing]
    made += [ROW_OBSERVED] if unit is not None else []
    clash = [name for name in made if name in columns]
    if clash or len(set(made)) < len(made):
        raise ConfigurationError(
            f"encode() adds a column {(clash or made)[0]!r}: rename the declared column."
        )


def _require_within(name: str, column: Column, dtype: torch.dtype) -> None:
    """:raises ConfigurationError: the dtype cannot hold all numbers within the bounds."""
    limit = torch.finfo(dtype).max if dtype.is_floating_point else LARGEST
    if isinstance(column, RangeColumn) and max(map(abs, column.bounds)) > limit:
        raise ConfigurationError(
            f"Column {name!r} has bounds beyond {limit:.2g}, the largest {dtype}. Declare "
            "it in larger units, or write torch.set_default_dtype(torch.float64)."
        )


def _max_rows(max_rows: int | None, unit: Any) -> int:
    """Most rows of a unit; 1 if each row is a unit."""
    if max_rows is None and unit is not None:
        raise ConfigurationError(
            f"unit={unit!r} needs max_rows, the number of rows that count for each unit. Further "
            "rows are left out, and noise grows with max_rows. State a number that covers nearly "
            "everybody, from public knowledge."
        )
    if max_rows is not None and unit is None and max_rows != 1:
        raise ConfigurationError("max_rows needs unit, the column that identifies whose row it is.")
    return 1 if max_rows is None else require_count("max_rows", max_rows)


def require_columns(
    frame: Any, names: Sequence[str], unit: str | None, unread: Collection[str]
) -> None:
    """Require each declared column once, and no others except the unread ones.

    Errors hide the names of undeclared columns. If a file was read without its header, these names
    are the values of its first person.
    """
    if not isinstance(frame, pd.DataFrame):
        raise SchemaError(f"A schema reads a pandas DataFrame, not a {type(frame).__name__}.")
    wanted = list(names) if unit is None else [unit, *names]
    found = list(frame.columns)
    lacking = [name for name in wanted if name not in found]
    if lacking:
        raise SchemaError(f"The frame lacks column {', '.join(map(repr, lacking))}.")
    twice = [name for name in wanted if found.count(name) > 1]
    if twice:
        raise SchemaError(
            f"The frame has column {twice[0]!r} more than once. Keep one of them: "
            "df.loc[:, ~df.columns.duplicated()]."
        )
    extra = [i for i, name in enumerate(found) if name not in wanted and name not in unread]
    if extra:
        places = ", ".join(map(str, extra[:_SHOWN])) + (", ..." if len(extra) > _SHOWN else "")
        listed = "schema.names" if unit is None else "[schema.unit, *schema.names]"
        whose = (
            " If one of them identifies whose row it is, pass it as the schema's unit. Otherwise, "
            "a person with several rows is not protected."
        )
        raise SchemaError(
            f"The frame has columns that the schema lacks, at position {places}. Declare "
            f"them, or pass df[{listed}].{whose if unit is None else ''} (Their names may be data, "
            "so only positions are listed.)"
        )
    if not len(frame):
        raise SchemaError("The frame has no rows.")


def guarded(name: str, frame: pd.DataFrame, read: Callable[[pd.Series, str], T]) -> T:
    """Read a column. :raises SchemaError: instead of a pandas error, which may show a value."""
    try:
        return read(frame[name], name)
    except SchemaError:
        raise
    except Exception as error:
        raise SchemaError(
            f"Column {name!r} cannot be read: pandas raised {type(error).__name__}. Pass it in a "
            f"plain dtype (float64, int64, bool, str, datetime64[ns]). {CURATOR}"
        ) from None


def _column(entry: Any) -> tuple[str, Column]:
    if not isinstance(entry, dict) or not {"name", "kind"} <= entry.keys():
        raise ConfigurationError(f"{_NO_SCHEMA}: a column lacks 'name' or 'kind'.")
    fields = dict(entry)
    name, kind = fields.pop("name"), fields.pop("kind")
    if not isinstance(name, str) or not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigurationError(f"Column {name!r}: kind must be one of {', '.join(_KINDS)}.")
    try:
        return name, _KINDS[kind](**fields)
    except TypeError:
        raise ConfigurationError(
            f"Column {name!r} has settings that {kind} does not take."
        ) from None
    except ConfigurationError as error:
        raise ConfigurationError(f"Column {name!r}: {error}") from None
