"""Recognise numbers of the data, such as rows, means and standard deviations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy
import torch
from torch import Tensor

from pyro_dp.records.column import Column
from pyro_dp.utils.errors import CURATOR, PrivacyWarning, warn_user

_STANDARD = 1e-5  # rounding of a mean and a standard deviation
_STANDARDISED = (
    "{label} has numbers of mean 0 and standard deviation 1. If it was standardised by its own "
    "moments, each record moved all others, and epsilon does not cover that. Use public constants "
    "or a DPStandardScaler. " + CURATOR
)
_CHANCE = 1e-4  # probability that an innocent number looks like one of the data
_CACHED = 2**16  # numbers
_MOST_FOR_MEDIANS = 2**22  # numbers: a median needs all of them at once


class DataNumbers:
    """Statistics of columns, which are read once, when needed, some megabytes at a time.

    Negative and inverse statistics also count: code may multiply rows by 1 / sd.
    """

    def __init__(self, columns: Sequence[Column]):
        self._columns = [x for x in columns if len(x) > 1]

    def found_in(self, value: Tensor) -> str | None:
        """The kind of data that a value contains, such as "rows" or "means"; ``None`` if none.

        Matches that may be chance do not count.
        """
        if value.is_complex():
            value = torch.view_as_real(value.resolve_conj())
        if not value.is_floating_point() or value.numel() == 0 or value.is_meta or value.is_sparse:
            return None
        value = value.detach().cpu()
        telling = _telling(value.flatten()).abs_() if self._columns else value.new_empty(0)
        if not len(telling):
            return None
        possible = [
            (what, numbers, most)
            for what, numbers, rounding in self._statistics
            if not _by_chance(telling, numbers, most := max(rounding, _rounding(value.dtype)))
        ]
        if possible:
            telling = telling.sort().values
        for what, numbers, most in possible:
            if any(_holds_all(telling, each, most) for each in (numbers, 1 / numbers)):
                return what
        floats = [column for column in self._columns if column.dtype.is_floating_point]
        return "rows" if any(holds_rows(value, column) for column in floats) else None

    @cached_property
    def _statistics(self) -> list[tuple[str, Tensor, float]]:
        """Each kind, its numbers that are not round, and their relative rounding error."""
        return [
            (what, _telling(numbers.flatten().cpu()).abs(), _rounding(column.dtype))
            for column in self._columns
            for what, numbers in _statistics_of(column)
        ]


class Scale:
    """Detects columns of mean 0 and standard deviation 1, which are read a part at a time.

    :param label: the columns' name in the warning.
    """

    def __init__(self, label: str):
        self._label, self._count = label, 0
        self._sum = self._squares = self._apart = torch.zeros(())

    def add(self, rows: Tensor) -> None:
        """:param rows: (B, ...), of floats."""
        self._count += len(rows)
        self._sum = self._sum + rows.sum(0).double()
        squares = rows.square()
        self._squares = self._squares + squares.sum(0).double()
        # Codes of groups, -1 and 1, may have these moments by design.
        self._apart = self._apart + (squares[:1] - 1).abs().sum(0)

    def warn(self) -> None:
        """Warn the curator if the columns have these moments.

        The ledger does not mention it: without one record, the moments would be different.
        """
        if self._count < 3:
            return
        mean = self._sum / self._count
        spread = self._squares / self._count - mean.square()
        sds = [(spread * self._count / (self._count - k)).sqrt() for k in (0, 1)]
        one = torch.stack([(sd - 1).abs() for sd in sds]).amin(0) <= _STANDARD
        if (one & (mean.abs() <= _STANDARD) & (self._apart > _STANDARD)).any():
            warn_user(PrivacyWarning(_STANDARDISED.format(label=self._label)))


@dataclass
class _Moments:
    """Moments of blocks of rows, merged in float64 (Chan, Golub & LeVeque 1979)."""

    count: int = 0
    mean: Tensor = torch.tensor(0.0)
    squares: Tensor = torch.tensor(0.0)  # sum of squared deviations from the mean
    least: Tensor = torch.tensor(math.inf)
    most: Tensor = torch.tensor(-math.inf)

    def add(self, rows: Tensor) -> None:
        count, mean = len(rows), rows.mean(0)
        away, total = mean - self.mean, self.count + count
        within = (rows - mean).square_().sum(0)
        self.squares = self.squares + within + away.square() * (self.count * count / total)
        self.mean = self.mean + away * (count / total)
        self.count = total
        self.least = torch.minimum(self.least, rows.amin(0))
        self.most = torch.maximum(self.most, rows.amax(0))

    def variance(self, correction: int = 1) -> Tensor:
        return self.squares / (self.count - correction)


def _statistics_of(column: Column) -> list[tuple[str, Tensor]]:
    moments = _Moments()
    for rows in column.blocks():
        moments.add(rows.detach().double())
    mean = moments.mean.mean()
    # The sum of squares of all numbers: within columns, and between them.
    numbers = moments.count * moments.mean.numel()
    squares = moments.squares.sum() + moments.count * (moments.mean - mean).square().sum()
    found = [
        ("means", moments.mean),
        ("standard deviations", moments.variance().sqrt()),
        ("standard deviations", moments.variance(0).sqrt()),
        ("variances", moments.variance()),
        ("smallest values", moments.least),
        ("largest values", moments.most),
        ("the mean", mean),
        ("the standard deviation", (squares / (numbers - 1)).sqrt()),
    ]
    if numbers <= _MOST_FOR_MEDIANS:
        table = torch.cat(list(column.blocks())).detach().double().cpu().numpy()
        low, high = (len(table) - 1) // 2, len(table) // 2
        ordered = torch.from_numpy(np.partition(table, (low, high), axis=0))
        found += [("medians", ordered[low]), ("medians", (ordered[low] + ordered[high]) / 2)]
    return found


def holds_rows(value: Tensor, column: Column, *, shared: bool = False) -> bool:
    """Whether the value contains rows of the column, and not by chance.

    :param shared: count matches as chance if new records may have as many. The probability for one
        is the share of the column's rows that are not unique (Good 1953). This matters for tables
        of whole numbers, also scaled ones.
    """
    width, exact = column.row_shape.numel(), column.dtype == torch.float64
    if len(column.shape) > 2 or (len(column.shape) == 2 and value.shape[-1:] != (width,)):
        return False
    wanted = value.reshape(-1, width).to(column.dtype)
    wanted = wanted[_is_telling(wanted).all(dim=1)][:64].to(column.device)
    if not len(wanted):
        return False
    seen = torch.zeros(len(wanted), dtype=torch.bool, device=column.device)
    for rows in column.blocks():
        rows = rows.detach().reshape(-1, width)
        for i, row in enumerate(wanted):
            # Most rows differ in their first number.
            similar = rows[:, 0] == row[0]
            if not seen[i] and similar.any():
                seen[i] = (rows[similar] == row).all(dim=1).any()
    found = int(seen.sum())
    by_chance = min(1.0, len(wanted) * len(column) * (2.0**-50 if exact else 2.0**-20))
    if found == 0 or by_chance ** (found * width) >= _CHANCE:
        return False
    if not shared:
        return True
    return bool(scipy.stats.binom.sf(found - 1, len(wanted), _shared(column, width)) < _CHANCE)


def _shared(column: Column, width: int) -> float:
    """The share of the first block's rows that are not unique."""
    rows = next(column.blocks()).detach().reshape(-1, width)
    _, counts = rows.unique(dim=0, return_counts=True)
    return 1 - int((counts == 1).sum()) / len(rows)


def _is_telling(values: Tensor) -> Tensor:
    """Whether a number identifies data: round ones, such as 0, 1, 0.5 or 0.25, do not."""
    scaled = values.double() * 1000
    return scaled.round().sub_(scaled).abs_() > 1e-3  # not if infinite


def _telling(values: Tensor) -> Tensor:
    """The numbers of a vector that are not round, in float64."""
    parts = (part.double() for part in torch.split(values, _CACHED))
    return torch.cat([part[_is_telling(part)] for part in parts])


def _rounding(dtype: torch.dtype) -> float:
    return 1e-9 if dtype == torch.float64 else 1e-5


def _by_chance(values: Tensor, wanted: Tensor, rounding: float) -> bool:
    """Whether all wanted numbers may be among the values by chance."""
    by_chance = min(1.0, len(values) * 2 * rounding)  # the probability for one number
    return not 0 < len(wanted) <= len(values) or by_chance ** len(wanted) > _CHANCE


def _holds_all(values: Tensor, wanted: Tensor, rounding: float) -> bool:
    """Whether each of the wanted numbers is among the values.

    :param values: ascending.
    """
    above = torch.searchsorted(values, wanted).clamp(max=len(values) - 1)
    nearest = torch.stack([values[above], values[(above - 1).clamp(min=0)]])
    return bool(((nearest - wanted).abs().amin(0) <= rounding * wanted.abs()).all())
