"""The synthesizer's model: a mixture of independent columns, learnt from noisy margins by VIPS."""

from collections.abc import Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import Distribution
from torch import Tensor

from pyro_dp.tabular.cells import CellCounts, Cells
from pyro_dp.tabular.margin_fit import Mixture, fitted
from pyro_dp.tabular.row_mixture import RowMixture
from pyro_dp.utils.errors import ConfigurationError, ModelError
from pyro_dp.utils.validation import require_count
from pyro_dp.vips.conjugate_model import ConjugateModel, Draws, Parts, Statistic, reviewed

_MOST_CELLS = 2**24
_MOST_NUMBERS = 2**27  # in all tables


@reviewed
class MarginMixture(ConjugateModel):
    """Rows of codes from a mixture with Dirichlet priors::

        weights  ~ Dirichlet(1, ..., 1)                   K components
        table_jk ~ Dirichlet(1, ..., 1)                   j = 1..columns, k = 1..K
        assignment_r  ~ Categorical(weights)              r = 1..rows of a unit
        code_rj  ~ Categorical(table_jk)                  k = assignment_r

    With a tied column each component belongs to one of its levels, and has no table of it.

    Its statistics are all 1- and 2-way margins within each level of the tied column: their
    sensitivity is in :mod:`pyro_dp.tabular.cells`. They are static: VIPS releases them once, with
    the whole budget, and the M-step (:mod:`pyro_dp.tabular.margin_fit`) finds the mixture to which
    they belong. There is no E-step: a mixture of 30 components that was learnt by ten of them, with
    a part of the budget, made rows no better on RAND HIE and Fair's survey, neither where the fit
    began at it (20% of the budget) nor where it drew the kept column (30% and 50%), and the margins
    lacked what it had cost.

    The marginals that this model gives to VIPS are those of as many rows as there were, without the
    noise's uncertainty: they are where the synthesizer's rows come from, and no intervals.

    Data: ``codes``, whole numbers: (N, columns), or (N, rows, columns) with -1 in empty slots.

    :param sizes: codes of each column.
    :param components: of each level and member.
    :param tied: a column; None: there is one level.
    :param rows: of a unit, at most.
    :param members: how many fits are averaged.
    :raises ConfigurationError: there is nothing beside the tied column, or there are too many cells
        to count, or components to hold.
    """

    def __init__(
        self,
        sizes: list[int],
        components: int,
        *,
        tied: int | None = None,
        rows: int = 1,
        members: int = 1,
    ):
        self.cells = Cells(tuple(sizes), tied, require_count("rows", rows))
        self.components = require_count("components", components)
        self.members = require_count("members", members)
        if not self.cells.others:
            raise ConfigurationError("keep: a schema needs a column beside the one that is kept.")
        if self.cells.size > _MOST_CELLS:
            raise ConfigurationError(
                f"The columns have {self.cells.size:,} pairs of codes, and at most "
                f"{_MOST_CELLS:,} are counted: declare fewer bins, or drop a column with many "
                "levels."
            )
        width = sum(self.cells.sizes[j] for j in self.cells.others)
        if self.members * self.cells.levels * self.components * width > _MOST_NUMBERS:
            raise ConfigurationError(
                f"components: {self.components} for each of {self.cells.levels} levels need too "
                f"much memory. Choose fewer."
            )

    @property
    def statistics(self) -> Mapping[str, Statistic]:
        return {"margins": Statistic((self.cells.size,), self.cells.bound, static=True)}

    def check(self, *data: Tensor) -> None:
        sizes, rows = self.cells.sizes, self.cells.rows
        if len(data) != 1:
            raise ModelError("MarginMixture takes the argument codes.")
        (codes,) = data
        shapes = [(rows, len(sizes))] + ([(len(sizes),)] if rows == 1 else [])
        if tuple(codes.shape[1:]) not in shapes:
            raise ModelError(f"codes must be of shape (N, {rows}, {len(sizes)}).")
        known = (codes >= 0) & (codes < torch.tensor(sizes, device=codes.device))
        empty = (codes == -1).all(dim=-1)
        if codes.is_floating_point() or not (known.all(dim=-1) | empty).all():
            raise ModelError(
                "codes must be whole numbers, each below the size of its column. (This message "
                "depends on the data: it is for the curator only.)"
            )

    def static_statistics(self, codes: Tensor) -> Parts:
        return {"margins": CellCounts(self.cells.of(codes), self.cells.size)}

    def expected_statistics(self, posterior: Any, draws: Draws, *rows: Any, **named: Any) -> Parts:
        return {}

    def posterior(
        self, statistics: Mapping[str, Tensor], noise: Mapping[str, float], size: int
    ) -> "MarginPosterior":
        return MarginPosterior(self, statistics["margins"], noise["margins"], size)

    def marginals(self, posterior: "MarginPosterior") -> dict[str, Distribution]:
        mixture, rows = posterior.mixture(), posterior.rows
        found: dict[str, Distribution] = {
            "weights": dist.Dirichlet(1 + rows * torch.from_numpy(mixture.weights))
        }
        weights = torch.from_numpy(mixture.weights).unsqueeze(1)
        for j in self.cells.others:
            counts = rows * weights * torch.from_numpy(mixture.tables[j])
            found[f"table_{j}"] = dist.Dirichlet(1 + counts).to_event(1)
        return found

    def guide(self, posterior: "MarginPosterior") -> None:
        for site, marginal in self.marginals(posterior).items():
            pyro.sample(site, marginal)

    def model(self, codes: Tensor) -> None:
        """The Pyro model, with assignments summed out."""
        number = self.members * self.cells.levels * self.components
        ones = torch.ones(number, dtype=torch.get_default_dtype(), device=codes.device)
        weights = pyro.sample("weights", dist.Dirichlet(ones))
        tables: list[Tensor] = []
        for j, size in enumerate(self.cells.sizes):
            if j == self.cells.tied:
                level = torch.arange(number, device=codes.device) // self.components % size
                tables.append(torch.eye(size).to(ones)[level])
            else:
                prior = dist.Dirichlet(ones.new_ones(number, size)).to_event(1)
                tables.append(pyro.sample(f"table_{j}", prior))
        rows = codes.shape[1] if codes.dim() == 3 else None
        with pyro.plate("data", len(codes)) as idx:
            pyro.sample("codes", RowMixture(weights, tables, rows), obs=codes[idx])


class MarginPosterior:
    """The release, and the mixture that fits it, computed on demand.

    :ivar rows: estimated number of rows of all units.
    """

    def __init__(self, model: MarginMixture, counts: Tensor, noise: float, units: int):
        self.model, self.counts, self.noise, self.units = model, counts, noise, units
        self._mixture: Mixture | None = None

    @property
    def rows(self) -> float:
        cells = self.model.cells
        if cells.rows == 1:
            return float(self.units)
        each = [cells.margin(self.counts, (j,))[0].sum().item() for j in cells.others]
        mean = sum(each) / len(each)
        return min(max(mean, float(self.units)), float(self.units * cells.rows))

    def mixture(self) -> Mixture:
        if self._mixture is None:
            model = self.model
            self._mixture = fitted(
                self.counts, self.noise, model.cells, model.components, model.members, self.rows
            )
        return self._mixture
