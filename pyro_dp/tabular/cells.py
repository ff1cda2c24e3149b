r"""The released counts: all one- and two-column margins, within each level of one column.

**Sensitivity.** Let P be the number of margins in one level: one for each column except the tied
one, and one for each pair of these. A row lies in one cell of each of the P margins of its own
level, and in no cell of other levels. So its indicator x has P ones, and norm sqrt(P). The part of
a unit with rows 1..m, m <= ``rows``, is their sum, and by the triangle inequality

    \|x_1 + ... + x_m\| <= \|x_1\| + ... + \|x_m\| = m sqrt(P) <= rows sqrt(P),

with equality for a unit of ``rows`` equal rows. So the bound is linear in the number of rows, and
it is tight. If units may have several rows, one more cell counts each unit by its number of rows.
Then the bound is sqrt(rows^2 P + 1). Adding or removing a unit moves the sum by at most the bound,
and replacing one by at most twice the bound.
"""

import functools
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cells:
    """Positions of the counts in the released vector; all public."""

    sizes: tuple[int, ...]  # codes of each column
    tied: int | None = None  # all margins are counted within each level of this column
    rows: int = 1  # most rows of a unit

    @property
    def levels(self) -> int:
        return 1 if self.tied is None else self.sizes[self.tied]

    @property
    def others(self) -> list[int]:
        """Indices of the columns except the tied one."""
        return [j for j in range(len(self.sizes)) if j != self.tied]

    @functools.cached_property
    def starts(self) -> dict[tuple[int, ...], int]:
        """The first cell of each margin within a level, by its ascending columns."""
        found, start = {}, 0
        for number in (1, 2):
            for columns in itertools.combinations(self.others, number):
                found[columns] = start
                start += math.prod(self.sizes[j] for j in columns)
        return found

    @functools.cached_property
    def per_level(self) -> int:
        """Number of cells of one level."""
        sizes = [self.sizes[j] for j in self.others]
        return sum(sizes) + sum(a * b for a, b in itertools.combinations(sizes, 2))

    @property
    def size(self) -> int:
        """Length of the vector. If units may have several rows, its last ``rows`` cells count units
        by their number of rows."""
        return self.levels * self.per_level + (self.rows if self.rows > 1 else 0)

    @property
    def bound(self) -> float:
        """The largest norm of one unit's part."""
        squared = self.rows**2 * len(self.starts)
        return math.sqrt(squared + 1 if self.rows > 1 else squared)

    def of(self, codes: Tensor) -> Tensor:
        """The cells in which each unit is counted, (B, cells), with -1 for empty slots.

        :param codes: (B, columns), or (B, rows, columns) with -1 in empty slots.
        """
        rows = codes.reshape(len(codes), -1, len(self.sizes)).long()
        level = rows[:, :, self.tied] if self.tied is not None else torch.zeros_like(rows[:, :, 0])
        found = []
        for columns, start in self.starts.items():
            cell = torch.zeros_like(level)
            for j in columns:
                cell = cell * self.sizes[j] + rows[:, :, j]
            found.append(level * self.per_level + start + cell)
        used = rows[:, :, 0] >= 0
        cells = torch.where(used.unsqueeze(2), torch.stack(found, dim=2), -1).flatten(1)
        if self.rows == 1:
            return cells
        number = used.sum(dim=1, keepdim=True)
        last = torch.where(number > 0, self.levels * self.per_level + number - 1, -1)
        return torch.cat([cells, last], dim=1)

    def in_levels(self, vector: Tensor) -> Tensor:
        """The counts by level, (levels, cells of a level)."""
        return vector[: self.levels * self.per_level].reshape(self.levels, self.per_level)

    def row_numbers(self, vector: Tensor) -> Tensor:
        """How many units have 1, 2, ... rows, (rows,)."""
        return vector[self.levels * self.per_level :]

    def margin(self, vector: Tensor, columns: tuple[int, ...]) -> tuple[Tensor, int]:
        """The counts of one or two columns, as sums of cells.

        :param columns: ascending.
        :returns: counts in the shape of the columns' sizes, and the number of cells in each sum.
        """
        inside = tuple(j for j in columns if j != self.tied)
        added = 1
        if not inside:  # the margin of any other column sums to the level's rows
            inside = (min(self.others, key=lambda j: self.sizes[j]),)
            added = self.sizes[inside[0]]
        start, shape = self.starts[inside], [self.sizes[j] for j in inside]
        cells = self.in_levels(vector)[:, start : start + math.prod(shape)]
        counts = cells.reshape(self.levels, *shape)
        if self.tied not in columns:
            return counts.sum(dim=0), self.levels
        if len(columns) == 1:
            return counts.sum(dim=1), added
        return (counts if columns[0] == self.tied else counts.T), 1


@dataclass(frozen=True, eq=False)
class CellCounts:
    """How often each record is counted in each cell.

    One of :class:`~pyro_dp.mechanism.contributions.Contributions`: a record has some hundred cells
    of tens of thousands.
    """

    cells: Tensor  # (B, T), with -1 for none; cells may repeat
    size: int  # number of cells

    def norms(self) -> Tensor:
        used = self.cells >= 0
        records = torch.arange(len(self.cells), device=self.cells.device).unsqueeze(1)
        keys = (records * self.size + self.cells)[used]
        found, counts = torch.unique(keys, return_counts=True)
        squares = torch.zeros(len(self.cells), dtype=torch.float64, device=self.cells.device)
        squares.index_add_(0, found // self.size, counts.double().square())
        return squares.sqrt().unsqueeze(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self._summed(weights.double())

    def dense(self) -> Tensor:
        total = torch.zeros(len(self.cells), self.size, dtype=torch.float64)
        total = total.to(self.cells.device)
        used = self.cells >= 0
        return total.scatter_add_(1, self.cells.clamp(min=0), used.double())

    def whole_sum(self, weights: Tensor, fused: bool) -> Tensor:
        # A count c of weight w is rounded to c trunc(w): towards zero, and at most c units.
        return self._summed(weights.trunc().long())

    def _summed(self, weights: Tensor) -> Tensor:
        used = (self.cells >= 0) & (weights > 0)
        total = torch.zeros(self.size, dtype=weights.dtype, device=self.cells.device)
        return total.index_add_(0, self.cells[used], weights.expand_as(self.cells)[used])
