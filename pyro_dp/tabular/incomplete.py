"""Covariates with missing values: their possible values, and their dependence on the others.

A row with a missing covariate counts with its average likelihood over all possible values. Each
value is weighted by its probability, conditional on the covariates that are never missing. The
model of these probabilities is fitted along, from all rows. So no row is dropped. Estimates hold if
missingness depends on observed values, the outcome included (missing at random).

Levels are summed over one by one. A number is a Gaussian conditional on the others, summed over at
the nodes of Gauss and Legendre between its declared bounds. Its mean is in units of its standard
deviation: in these units noise hides no more of it than of other coefficients.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pyro_dp.tabular.column import Column
from pyro_dp.tabular.levels import LevelColumn
from pyro_dp.tabular.ranges import RangeColumn
from pyro_dp.utils.errors import ConfigurationError

_NODES = 9
_MOST = 64


@dataclass(frozen=True, eq=False)
class Incomplete:
    """A covariate that is declared with missing values."""

    name: str
    values: np.ndarray  # possible ones, as encoded, (V,)
    weights: np.ndarray | None  # logarithms of the quadrature's, (V,); None: it has levels
    scale: tuple[float, float]  # centre and half width in which the model sees it

    @classmethod
    def of(cls, name: str, column: Column) -> "Incomplete":
        if isinstance(column, LevelColumn):
            return cls(name, np.arange(len(column.all_levels)), None, (0.0, 1.0))
        assert isinstance(column, RangeColumn)
        low, high = column.bounds
        nodes, weights = np.polynomial.legendre.leggauss(_NODES)
        scale = ((low + high) / 2, (high - low) / 2)
        return cls(name, scale[0] + scale[1] * nodes, np.log(weights), scale)

    @property
    def nodes(self) -> np.ndarray:
        """The values as the model sees them."""
        return (self.values - self.scale[0]) / self.scale[1]


def combinations(incomplete: Sequence[Incomplete]) -> list[tuple[int, ...]]:
    """Which value each covariate has, in all combinations; one, (), if there are none."""
    number = int(np.prod([len(each.values) for each in incomplete]))
    if number > _MOST:
        raise ConfigurationError(
            f"Covariates {', '.join(repr(each.name) for each in incomplete)} may be missing, "
            f"and have {number} combinations of values, more than {_MOST}. Declare fewer levels, "
            "or fewer of them with missing=True. (The others can have a level for missing "
            "values.)"
        )
    return list(itertools.product(*(range(len(each.values)) for each in incomplete)))


def filled(
    rows: Mapping[str, np.ndarray],
    observed: Mapping[str, np.ndarray],
    incomplete: Sequence[Incomplete],
    chosen: Sequence[int],
) -> dict[str, np.ndarray]:
    """Rows as encoded, (rows,) each, in which missing values have the chosen values."""
    found = dict(rows)
    for each, place in zip(incomplete, chosen, strict=True):
        found[each.name] = np.where(observed[each.name], rows[each.name], each.values[[place]])
    return found
