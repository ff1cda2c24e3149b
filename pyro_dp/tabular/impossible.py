"""Structural zeros: combinations of values that nobody has, as declared rules.

A rule names columns, each with levels, or with a range (low, high), both ends included; rows on
which all of them hold are impossible. ``None`` among levels stands for missing values.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pyro_dp.tabular.column import Column
from pyro_dp.utils.errors import ConfigurationError

Rule = Mapping[str, Sequence[Any]]
Values = Mapping[str, tuple[np.ndarray, np.ndarray]]


def require_rules(rules: Any, columns: Mapping[str, Column]) -> list[dict[str, tuple]]:
    """The rules, as plain tuples.

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
    """Each rule by codes: which codes of a column lie wholly within it, (size,)."""
    return [{name: columns[name].within(x) for name, x in rule.items()} for rule in rules]


def possible_codes(
    codes: np.ndarray, rules: Sequence[Rule], columns: Mapping[str, Column]
) -> np.ndarray:
    """Whether a row of codes has a possible value, (...,) from (..., columns)."""
    place = {name: j for j, name in enumerate(columns)}
    found = np.ones(codes.shape[:-1], dtype=bool)
    for rule in zeros(rules, columns):
        hit = [mask[codes[..., place[name]]] for name, mask in rule.items()]
        found &= ~np.all(hit, axis=0)
    return found


def possible_values(
    values: Values, rules: Sequence[Rule], columns: Mapping[str, Column]
) -> np.ndarray:
    """Whether a row of values is possible."""
    first, _ = values[next(iter(columns))]
    found = np.ones(first.shape, dtype=bool)
    for rule in rules:
        hit = [columns[name].holds(*values[name], allowed) for name, allowed in rule.items()]
        found &= ~np.all(hit, axis=0)
    return found
