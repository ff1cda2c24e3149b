"""The synthesizer's model: a mixture of independent columns, fitted to noisy margins.

The margins of a mixture are sums over its components of products of two tables. Among mixtures of a
fixed number of components, the fit seeks the posterior mode for the margins. Their noise is
Gaussian, with a public size. Each table has a Dirichlet prior worth one row, around the level's own
margin. So margins stay consistent with each other and are never negative, and noise is averaged
over all margins that a table takes part in. (Liu, Vietri & Wu 2021, arXiv 2106.07153, fit product
distributions to noisy margins by gradients, for any number of columns. They use a network and
choose margins one after the other.)

A single fit of few components has sharp components, which imply more about three columns together
than the margins do. Several fits from different starts agree in the margins and differ in these
details. Their average is smoother. (Boosted trees were trained on synthetic rows of RAND
HIE and Fair's survey at epsilon 1. Their area under the curve is 0.606 and 0.677 for one fit, and
0.634 and 0.706 for five. All constants were chosen on these two data sets, and none on those in
benchmarks/synthetic.py.)

With little noise, early stopping dominates the misfit. So there are 400 to 1,600 steps, in
proportion to the rows over the noise of a cell. (At epsilon 10 and 100 the total
variation on RAND HIE falls from 0.0058 and 0.0055 to 0.0031 and 0.0027. At epsilon 1 there is no
gain.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn import functional

from pyro_dp.tabular.cells import Cells
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_count

_STEPS = 400
_MOST_TIMES = 4.0
_NOISY = 1000.0  # ratio of rows to a cell's noise up to which these steps suffice
_STEP_SIZE = 0.1
_DECAY = (0.9, 0.99)
_SPREAD = 0.5  # standard deviation of the logits at the start
_PRIOR = 1.0  # rows
_LEAST_NOISE = 0.5  # counts are whole
_MOST_CELLS = 2**24
_MOST_NUMBERS = 2**27  # in all tables


@dataclass(frozen=True, eq=False)
class Mixture:
    """A mixture whose components have independent columns, with one table each."""

    weights: np.ndarray  # (K,)
    tables: list[np.ndarray]  # one for each column, (K, size): rows that sum to 1


def fitted(
    counts: Tensor, noise: float, cells: Cells, components: int, members: int, total: float
) -> Mixture:
    """Fit a mixture to released counts.

    :param counts: the released vector of :class:`Cells`.
    :param noise: standard deviation in each count.
    :param members: number of fits that are averaged.
    :param total: number of rows.
    :returns: a mixture of members x levels x components.
    """
    problem = _Problem(counts.detach().cpu(), max(noise, _LEAST_NOISE), cells, total)
    # A fixed seed: the same release has the same start, and torch's generator stays unused.
    generator = torch.Generator().manual_seed(0)
    size = (members, cells.levels, components)
    logits = problem.log_base[:, None] + _SPREAD * torch.randn(
        *size, problem.width, generator=generator, dtype=torch.float32
    )
    weights = problem.log_share[:, None].expand(size).clone()
    free = [logits.requires_grad_(), weights.requires_grad_()]
    optimizer = torch.optim.Adam(free, lr=_STEP_SIZE, betas=_DECAY)
    times = max(1.0, total / max(noise, _LEAST_NOISE) / _NOISY)
    steps = round(_STEPS * min(_MOST_TIMES, times))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with torch.enable_grad():
        for _ in range(steps):
            optimizer.zero_grad()
            problem.loss(*problem.mixture(logits, weights)).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        share, logs = problem.mixture(logits, weights)
    return problem.joined(share / members, logs.exp())


class _Problem:
    """The loss of a mixture: one matrix of all margins for each level."""

    def __init__(self, counts: Tensor, noise: float, cells: Cells, total: float):
        self.cells = cells
        self.sizes = [cells.sizes[j] for j in cells.others]
        self.width = sum(self.sizes)
        place, counted = _places(cells)
        levels = cells.in_levels(counts)
        # In units of the noise, to avoid overflow at any noise.
        self.target = (levels[:, place] * counted / noise).float()  # (levels, width, width)
        self.scale = (counted * (total / noise)).float()
        singles = levels[:, place.diagonal()].clamp(min=noise).split(self.sizes, dim=1)
        base = torch.cat([each / each.sum(dim=1, keepdim=True) for each in singles], dim=1)
        self.base, self.log_base = base.float(), base.log().float()
        own = torch.stack([each.sum(dim=1) for each in singles]).mean(dim=0)
        self.log_share = (own / own.sum()).log().float()
        column = torch.repeat_interleave(torch.tensor(self.sizes))
        self.same = column[:, None] == column

    def mixture(self, logits: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, which sum to 1 in each member, and log tables."""
        parts = logits.split(self.sizes, dim=-1)
        logs = torch.cat([part.log_softmax(dim=-1) for part in parts], dim=-1)
        return weights.flatten(1).softmax(dim=1).view_as(weights), logs

    def loss(self, share: Tensor, logs: Tensor) -> Tensor:
        tables = logs.exp()
        weighted = tables * share.unsqueeze(-1)
        both = weighted.mT @ tables  # (members, levels, width, width)
        margins = torch.where(self.same, torch.diag_embed(weighted.sum(dim=2)), both)
        misfit = 0.5 * (self.scale * margins - self.target).square().sum()
        prior = _PRIOR * (self.base[:, None] * logs).sum()
        return (misfit - prior) / self.width

    def joined(self, share: Tensor, tables: Tensor) -> Mixture:
        """The mixture of all members and levels, in double precision. In each component the tied
        column has a single level."""
        level = torch.arange(self.cells.levels)[:, None].expand(share.shape).flatten().numpy()
        parts = iter(tables.flatten(0, 2).double().split(self.sizes, dim=1))
        found = []
        for j, size in enumerate(self.cells.sizes):
            if j == self.cells.tied:
                found.append(np.eye(size)[level])
            else:
                table = next(parts).numpy()
                found.append(table / table.sum(axis=1, keepdims=True))
        weights = share.flatten().double().numpy()
        return Mixture(weights / weights.sum(), found)


def _places(cells: Cells) -> tuple[Tensor, Tensor]:
    """Two matrices over pairs of codes, (width, width) each. One holds the cell of
    each pair within a level. The other is 1 for the pair that represents a released cell."""
    sizes = [cells.sizes[j] for j in cells.others]
    starts = dict(zip(cells.others, np.cumsum([0, *sizes]), strict=False))
    width = sum(sizes)
    place, counted = np.zeros((width, width), dtype=np.int64), np.zeros((width, width))
    for columns, start in cells.starts.items():
        one, two = (cells.sizes[j] for j in (columns[0], columns[-1]))
        rows, others = (
            slice(starts[j], starts[j] + cells.sizes[j]) for j in (columns[0], columns[-1])
        )
        if len(columns) == 1:
            place[rows, others] = start + np.arange(one)
            counted[rows, others] = np.eye(one)
        else:
            place[rows, others] = start + np.arange(one * two).reshape(one, two)
            counted[rows, others] = 1.0
    return torch.from_numpy(place), torch.from_numpy(counted)


def require_size(cells: Cells, components: int, members: int) -> None:
    """:raises ConfigurationError: there is no column besides the tied one, or there are too many
    cells or components."""
    require_count("components", components)
    if not cells.others:
        raise ConfigurationError("keep: a schema needs a column beside the one that is kept.")
    if cells.size > _MOST_CELLS:
        raise ConfigurationError(
            f"The columns have {cells.size:,} pairs of codes, and at most {_MOST_CELLS:,} are "
            "counted: declare fewer bins, or drop a column with many levels."
        )
    _require_room(components, cells.levels, members * sum(cells.sizes[j] for j in cells.others))


def _require_room(components: int, levels: int, width: int) -> None:
    if levels * components * width > _MOST_NUMBERS:
        raise ConfigurationError(
            f"components: {components} for each of {levels} levels need too much memory. Choose "
            "fewer."
        )


def row_model(sizes: Sequence[int], components: int) -> Callable[[Tensor], None]:
    """A Pyro model of rows of codes, from a mixture whose assignments are summed out::

        weights  ~ Dirichlet(1, ..., 1)                   K components
        table_jk ~ Dirichlet(1, ..., 1)                   j = 1..columns, k = 1..K
        assignment_r  ~ Categorical(weights)              r = 1..rows of a unit
        code_rj  ~ Categorical(table_jk)                  k = assignment_r

    Data: ``codes``, whole numbers: (N, columns), or (N, rows, columns) with -1 in empty slots.

    :param sizes: codes of each column.
    """
    _require_room(require_count("components", components), 1, sum(sizes))

    def model(codes: Tensor) -> None:
        ones = torch.ones(components, dtype=torch.get_default_dtype(), device=codes.device)
        weights = pyro.sample("weights", dist.Dirichlet(ones))
        # A single distribution for all columns: codes beyond a column's size have probability 0.
        padded = []
        for j, size in enumerate(sizes):
            prior = dist.Dirichlet(ones.new_ones(components, size)).to_event(1)
            table = pyro.sample(f"table_{j}", prior)
            padded.append(functional.pad(table, (0, max(sizes) - size)))
        row = dist.Categorical(torch.stack(padded, dim=1)).to_event(1)
        mixture = dist.MixtureSameFamily(dist.Categorical(weights), row)
        with pyro.plate("data", len(codes)) as idx:
            own = codes[idx]
            if own.dim() == 3:  # empty slots are masked
                mixture = mixture.mask(own[..., 0] >= 0).to_event(1)
            pyro.sample("codes", mixture, obs=own.clamp(min=0))

    return model
