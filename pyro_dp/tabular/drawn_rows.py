"""Rows of codes from a mixture, whose counts are as near to its probabilities as whole numbers are.

Independent draws would add sampling noise to that of the release. Here the counts of components,
and of codes within each, are within one of their expectations. Their assignment to rows is random.
Each row by itself has the mixture's distribution.
"""

import numpy as np

from pyro_dp.tabular.impossible import possible_codes
from pyro_dp.tabular.margin_mixture import Mixture
from pyro_dp.tabular.schema import Schema
from pyro_dp.utils.errors import ConfigurationError

_REDRAWS = 100


def systematic(probabilities: np.ndarray, number: int, rng: np.random.Generator) -> np.ndarray:
    """Draws whose counts differ from ``number`` times the probabilities by less than one, in random
    order: (number,)."""
    edges = np.cumsum(probabilities)
    points = (np.arange(number) + rng.random()) / max(number, 1)
    drawn = np.searchsorted(edges / edges[-1], points, side="right")
    return rng.permutation(drawn.clip(max=len(probabilities) - 1))


def drawn_rows(mixture: Mixture, number: int, rng: np.random.Generator) -> np.ndarray:
    """Codes (number, columns), in random order."""
    component = np.sort(systematic(mixture.weights, number, rng))
    first = np.searchsorted(component, np.arange(len(mixture.weights) + 1))
    codes = np.zeros((number, len(mixture.tables)), dtype=np.int64)
    for k, (start, end) in enumerate(zip(first[:-1], first[1:], strict=True)):
        for j, table in enumerate(mixture.tables):
            codes[start:end, j] = systematic(table[k], end - start, rng)
    return rng.permutation(codes)


def unit_rows(
    mixture: Mixture, per_unit: np.ndarray, rng: np.random.Generator, schema: Schema
) -> np.ndarray:
    """Codes (rows, columns) of units with so many rows each, one unit after the other.

    Rows of a unit are independent, conditional on its constant columns. The first one is a draw
    from the mixture, and the others are draws conditional on its constant columns. So each row by
    itself has the mixture's distribution. A row for which that leaves nothing possible is the first
    one again.
    """
    if not schema.constant:
        return possible_rows(mixture, int(per_unit.sum()), rng, schema)
    constant = [schema.names.index(name) for name in schema.constant]
    unit = np.repeat(np.arange(len(per_unit)), per_unit)
    first = possible_rows(mixture, len(per_unit), rng, schema)
    codes = first[unit]
    left = np.flatnonzero(np.diff(unit, prepend=-1) == 0)
    for _ in range(_REDRAWS):
        drawn = _given(mixture, first[unit[left]], constant, rng)
        fits = possible_codes(drawn, schema.impossible, schema.columns)
        codes[left[fits]] = drawn[fits]
        left = left[~fits]
        if not len(left):
            break
    return codes


def _given(
    mixture: Mixture, rows: np.ndarray, constant: list[int], rng: np.random.Generator
) -> np.ndarray:
    """Rows whose other columns are drawn conditional on the constant ones of these."""
    kinds, kind = np.unique(rows[:, constant], axis=0, return_inverse=True)
    kind, component = kind.reshape(-1), np.zeros(len(rows), dtype=np.int64)
    for place, codes in enumerate(kinds):
        share = mixture.weights.copy()
        for j, code in zip(constant, codes, strict=True):
            share *= mixture.tables[j][:, code]
        own = kind == place
        component[own] = systematic(share / share.sum(), int(own.sum()), rng)
    found = rows.copy()
    for k in np.unique(component):
        own = np.flatnonzero(component == k)
        for j, table in enumerate(mixture.tables):
            if j not in constant:
                found[own, j] = systematic(table[k], len(own), rng)
    return found


def possible_rows(
    mixture: Mixture,
    number: int,
    rng: np.random.Generator,
    schema: Schema,
) -> np.ndarray:
    """As :func:`drawn_rows`, with rows that the schema says are impossible drawn anew.

    :raises ConfigurationError: nearly all draws of the mixture are impossible.
    """
    rules = (schema.impossible, schema.columns)
    codes = drawn_rows(mixture, number, rng)
    again = np.flatnonzero(~possible_codes(codes, *rules))
    for _ in range(_REDRAWS):
        if not len(again):
            return codes
        codes[again] = drawn_rows(mixture, len(again), rng)
        again = again[~possible_codes(codes[again], *rules)]
    raise ConfigurationError(
        f"impossible: after {_REDRAWS} draws some rows still have no possible value. The rules "
        "exclude nearly all rows that the release allows: check them."
    )
