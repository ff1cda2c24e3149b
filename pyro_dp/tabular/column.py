"""The declaration of a frame's column, with bins and rules. Everything declared is public.

Nothing is learnt from data. Bounds, levels, bins and fills of missing values come from the
declaration. Values out of bounds are clipped, and nothing counts how often.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from pyro_dp.tabular import series as of_pandas
from pyro_dp.utils.errors import CURATOR, ConfigurationError, SchemaError
from pyro_dp.utils.validation import require_flag

_MISSING = (
    "Column {name!r} has missing values, and its schema declares none. Declare it with "
    "missing=True, or fill them by a rule that was fixed before the data. " + CURATOR
)
LARGEST = 2**53  # floats represent all whole numbers up to it
Rule = Mapping[str, Sequence[Any]]
Values = Mapping[str, tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Bins:
    """Bin i is [edges[i], edges[i + 1]). The last bin includes its end."""

    edges: tuple[float, ...]  # for whole numbers the last one is the largest plus one
    labels: tuple[str, ...]
    whole: bool  # whether the numbers are whole
    draws_whole: bool = False  # draw whole numbers, in bins that have some

    @property
    def size(self) -> int:
        return len(self.edges) - 1

    @cached_property
    def _edges(self) -> np.ndarray:
        return np.array(self.edges, dtype=np.int64 if self.whole else np.float64)

    def codes(self, values: np.ndarray) -> np.ndarray:
        """The bin of each value. Values below are in the first bin, values above in the last."""
        return np.searchsorted(self._edges[1:-1], values, side="right").astype(np.int64)

    def draw(self, codes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A value for each code, uniform within its bin. Decimals are few, but give the narrowest
        bin about a thousand values."""
        low, high = self._edges[codes], self._edges[codes + 1]
        if self.whole:
            return rng.integers(low, high)
        drawn = np.minimum(low + rng.random(codes.shape) * (high - low), high)
        shift = 1.0 if self.draws_whole else self._shift
        # Plain rounding would give half of a bin's first number to the bin before.
        first, stop = np.ceil(self._edges[:-1] * shift), np.ceil(self._edges[1:] * shift)
        stop[-1] = np.floor(self._edges[-1] * shift) + 1
        some = (first < stop)[codes] & (abs(first) + abs(stop) < 2.0**52)[codes]
        drawn[some] = rng.integers(first[codes[some]], stop[codes[some]]) / shift
        return np.clip(drawn, low, high)

    @cached_property
    def _shift(self) -> float:
        """The power of ten that turns the kept decimals into whole numbers."""
        wanted = np.ceil(3 - np.log10(np.diff(self._edges).min()))
        return float(10.0 ** np.clip(wanted, 0.0, 15.0))

    def within(self, low: float, high: float) -> np.ndarray:
        """Whether each bin lies wholly in [low, high], (size,)."""
        ends = self._edges[1:] - 1 if self.whole else self._edges[1:]
        return (self._edges[:-1] >= low) & (ends <= high)


class Column(abc.ABC):
    """One column of a :class:`~pyro_dp.tabular.Schema`: how to read, write and code it.

    :ivar missing: whether values may be missing.
    :ivar dtype: pandas dtype of the result of :meth:`decode`.
    :ivar discrete: whether each code is a single value.
    :ivar fill: value that replaces missing ones; it is public.

    >>> isinstance(Binary(), Column), isinstance(Count(0, 5), Column)
    (True, True)
    """

    missing: bool
    dtype: str
    _dtypes: ClassVar[tuple[str, ...]] = ("numbers",)

    def encode(self, series: pd.Series, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The values of a series as numbers.

        :param name: name of the column, for errors.
        :returns: values, (rows,), float64 for a :class:`Number` or :class:`Date`, else int64;
            and whether each is observed, (rows,), bool. Row b depends on row b of the series alone.
        :raises SchemaError: the series is of the wrong kind, or has missing values or levels that
            are not declared.
        """
        values, observed = self._read(series, name)
        if not self.missing and not observed.all():
            raise SchemaError(_MISSING.format(name=name))
        return np.where(observed, values, self.fill), observed

    def decode(self, values: np.ndarray, observed: np.ndarray) -> pd.Series:
        """A series of the declared dtype, with unobserved values missing."""
        return self._write(self._bounded(np.where(observed, values, self.fill)), observed)

    def codes(self, values: np.ndarray, observed: np.ndarray) -> np.ndarray:
        """The bin or level of each value, int64 in [0, size). A missing value has the last code."""
        found = self._bins.codes(self._bounded(np.where(observed, values, self.fill)))
        return np.where(observed, found, self.size - 1) if self.missing else found

    def draw(self, codes: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """A value for each code, uniform within its bin, and whether it is observed."""
        observed = codes < self.size - self.missing
        values = self._bins.draw(np.where(observed, codes, 0), rng)
        return np.where(observed, values, self.fill), observed

    @property
    def size(self) -> int:
        """Number of codes, including the one of missing values."""
        return self._bins.size + self.missing

    @property
    def code_labels(self) -> list[str]:
        """The label of each code."""
        return [*self._bins.labels, *["missing"] * self.missing]

    @property
    def discrete(self) -> bool:
        return True

    @property
    @abc.abstractmethod
    def fill(self) -> float: ...

    @abc.abstractmethod
    def within(self, allowed: Any) -> np.ndarray:
        """Whether each code lies wholly within levels or a range (low, high), (size,)."""

    def holds(self, values: np.ndarray, observed: np.ndarray, allowed: Any) -> np.ndarray:
        """Whether each value is among levels or in a range (low, high); for rules."""
        return self.within(allowed)[self.codes(values, observed)]

    @property
    @abc.abstractmethod
    def _bins(self) -> Bins: ...

    @abc.abstractmethod
    def _read(self, series: pd.Series, name: str) -> tuple[np.ndarray, np.ndarray]: ...

    @abc.abstractmethod
    def _bounded(self, values: np.ndarray) -> np.ndarray: ...

    @abc.abstractmethod
    def _write(self, values: np.ndarray, observed: np.ndarray) -> pd.Series: ...

    def _declare(self, probe: np.ndarray) -> None:
        """Check the common arguments. The dtype must represent the values of the probe."""
        object.__setattr__(self, "missing", require_flag("missing", self.missing))
        if not isinstance(self.dtype, str):
            raise ConfigurationError("dtype must be the name of a dtype of pandas, as text.")
        object.__setattr__(self, "dtype", self.dtype or self._default_dtype)
        of_pandas.require_dtype(self.dtype, self._dtypes, self.missing, probe)
        self._bins  # noqa: B018 (checks them)

    def __repr__(self) -> str:
        """Code that recreates the column, without default arguments."""
        arguments = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.default is dataclasses.MISSING:
                arguments.append(repr(value))
                continue
            default = self._default_dtype if field.name == "dtype" else field.default
            if repr(value) != repr(default):  # (0, 1) equals (False, True)
                arguments.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"

    @property
    @abc.abstractmethod
    def _default_dtype(self) -> str: ...


def require_rules(rules: Any, columns: Mapping[str, Column]) -> list[dict[str, tuple]]:
    """Check the rules of impossible rows, and return them with plain tuples.

    A rule gives levels, or a closed range (low, high), for some columns. Rows that match all of
    these are impossible. ``None`` among levels stands for missing values.

    :raises ConfigurationError: a rule has an unknown column or level, or no valid range.
    """
    if isinstance(rules, (str, Mapping)) or not isinstance(rules, Sequence):
        raise ConfigurationError("impossible must be a list of rules, {column: levels or range}.")
    found = []
    for i, rule in enumerate(rules):
        if not isinstance(rule, Mapping) or not rule:
            raise ConfigurationError(f"impossible[{i}] must be {{column: levels or range, ...}}.")
        for name, allowed in rule.items():
            if name not in columns:
                raise ConfigurationError(f"impossible[{i}]: {name!r} is no declared column.")
            try:
                columns[name].within(allowed)
            except (ConfigurationError, TypeError, ValueError) as error:
                reason = str(error) if isinstance(error, ConfigurationError) else "no such values."
                raise ConfigurationError(f"impossible[{i}], column {name!r}: {reason}") from None
        found.append({name: tuple(map(_plain, allowed)) for name, allowed in rule.items()})
    return found


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def zeros(rules: Sequence[Rule], columns: Mapping[str, Column]) -> list[dict[str, np.ndarray]]:
    """By rule and column: whether each code lies wholly within the rule, (size,)."""
    return [{name: columns[name].within(x) for name, x in rule.items()} for rule in rules]


def possible_codes(
    codes: np.ndarray, rules: Sequence[Rule], columns: Mapping[str, Column]
) -> np.ndarray:
    """Whether each row of codes has a possible value, (...,) from (..., columns)."""
    index = {name: j for j, name in enumerate(columns)}
    found = np.ones(codes.shape[:-1], dtype=bool)
    for rule in zeros(rules, columns):
        hit = [mask[codes[..., index[name]]] for name, mask in rule.items()]
        found &= ~np.all(hit, axis=0)
    return found


def possible_values(
    values: Values, rules: Sequence[Rule], columns: Mapping[str, Column]
) -> np.ndarray:
    """Whether each row of values is possible."""
    first, _ = values[next(iter(columns))]
    found = np.ones(first.shape, dtype=bool)
    for rule in rules:
        hit = [columns[name].holds(*values[name], allowed) for name, allowed in rule.items()]
        found &= ~np.all(hit, axis=0)
    return found
