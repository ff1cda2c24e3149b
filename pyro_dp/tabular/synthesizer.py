"""Synthesizer: private synthetic data from a frame and its schema.

The counts of components, and of codes within each, differ from their expectations by less than one.
Independent draws would add sampling noise to that of the release. Their assignment to rows is
random. Each row by itself has the mixture's distribution.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import norm
from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.mechanism.contributions import Block
from pyro_dp.mechanism.iterative import IterativeMechanism, whole_step
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.mechanism.settings import FullBatch, Noise, old_names_explained
from pyro_dp.tabular.cells import CellCounts, Cells
from pyro_dp.tabular.column import possible_codes
from pyro_dp.tabular.margin_mixture import Mixture, fitted, require_size
from pyro_dp.tabular.schema import Schema
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_count, require_number

_MEMBERS = 5
_AT_A_TIME = 4096  # units that are counted at a time
_REDRAWS = 100
_NUMBERS = ("count", "lower", "upper")
_NO_INTERVAL = (
    "margin: pass one column or two, whose counts were released with noise of a stated size. "
    "Other results from synthetic rows (three columns, coefficients, means of subgroups) also "
    "have the model's error, which nobody can state. Intervals by the rules of multiple "
    "imputation held 44% of the time where 95% was claimed. For coefficients fit the private "
    "data by PrivateGLM."
)
_NOTE = (
    "Synthetic rows were made from a release in this ledger. Intervals hold for the released "
    "counts (Synthesizer.margin) and for nothing else. Analyses of synthetic rows also have the "
    "model's error. Intervals by the rules of multiple imputation held 44% of the time where "
    "95% was claimed."
)


class _MarginRelease(IterativeMechanism):
    """Releases the counts: a step of VIPS whose statistics depend on no posterior."""

    _method = "Synthesizer (VIPS)"

    @whole_step
    def step(self, codes: Tensor, cells: Cells) -> float:
        """Set :attr:`counts`, (size,), to private counts of units (N, ...)."""
        clipped = self._releases.sum_type([Block(cells.size, cells.bound)])
        batches = codes.split(clipped.most_records(cells.size, _AT_A_TIME) or _AT_A_TIME)
        clipped.add_each(lambda units: [CellCounts(cells.of(units), cells.size)], batches)
        (self.counts,) = self._release(clipped, RecordSampler("full", len(codes), 1.0))
        return math.nan


@dataclass(frozen=True, eq=False)
class _Fit:
    """The release, and the mixture fitted to it."""

    counts: Tensor  # the vector of Cells
    noise: float  # standard deviation in each count
    units: int
    mixture: Mixture


class Synthesizer:
    """Synthetic rows with the margins of private ones: ``Synthesizer(...).fit(df).sample(n)``.

    :meth:`fit` makes *one* release: the counts of all codes and of all pairs of codes of two
    columns. With ``keep``, it counts within each level of one column. A
    mixture of independent columns is fitted to these counts
    (:mod:`pyro_dp.tabular.margin_mixture`), and the rows are drawn from it. Numbers are uniform
    within their bins. Rows that the schema declares impossible are redrawn.

    **Guarantee.** All results are computed from the release. The accountant's (epsilon, delta)
    covers it for one record, under both neighbouring relations. A record is a row, or with a unit
    column a person with all of their rows. A person's part of the counts has norm at most max_rows
    sqrt(P), for P margins (:mod:`pyro_dp.tabular.cells`, with the proof). The choice of margins and
    the length of the fit are public: nothing is chosen by looking at the data.

    **Not protected.** The number of units; the schema and all settings; the frame's errors, which
    are for the curator. Only the first ``max_rows`` rows of a person count.

    **What it keeps and what it does not.** Margins of one and two columns are kept, up to noise.
    Joint effects of three columns are lost, unless they follow from these or involve the kept
    column. Rows of one person share the columns that the schema declares as ``constant``. Otherwise
    they are independent. So synthetic persons have the right number of rows, but do not age from
    row to row.

    **Uncertainty.** Only :meth:`margin` gives intervals, for released counts. No rule for several
    synthetic sets includes the model's error.

    :param schema: the frames' schema.
    :param accountant: keeps the ledger and the budget.
    :param components: number of mixture components for each level of the kept column, in each of
        five averaged fits.
    :param keep: ``[("income", "*")]``: the column whose relations to all others matter most, such
        as the outcome of later regressions. All pairs are counted in any case.
    :param noise: sigma of the release, in units of the bound, or a :class:`Noise`. The rows of
        :meth:`sample` are public, and drawn by torch's global generator.
    :raises ConfigurationError: a setting is out of range.

    >>> frame = pd.DataFrame({"region": ["north", "south"] * 1000, "smokes": [True, False] * 1000})
    >>> schema = Schema({"region": Category(("north", "south")), "smokes": Binary()})
    >>> twin = Synthesizer(schema, accountant=accountant, components=2, noise=Noise(source=0))
    >>> rows = twin.fit(frame).sample(1000)
    >>> bool((rows["smokes"] == (rows["region"] == "north")).mean() > 0.9)
    True
    """

    @old_names_explained()
    def __init__(
        self,
        schema: Schema,
        *,
        accountant: PrivacyAccountant,
        components: int = 30,
        keep: Sequence[tuple[str, str]] = (),
        noise: Noise | float | None = None,
    ):
        if not isinstance(schema, Schema):
            raise ConfigurationError("schema must be a pyro_dp.tabular.Schema.")
        self.schema = schema
        self.accountant: PrivacyAccountant | None = accountant
        self.keep = _kept(keep, schema)
        tied = None if self.keep is None else schema.names.index(self.keep)
        self._cells = Cells(tuple(schema.sizes), tied, schema.max_rows)
        require_size(self._cells, components, _MEMBERS)
        self._components = components
        self._noise = Noise.read(noise)
        self._inference()  # checks the settings
        self._found: _Fit | None = None

    def fit(self, frame: pd.DataFrame) -> "Synthesizer":
        """Release the counts, and fit the mixture to them. Another call is another release.

        :raises SchemaError: the frame does not fit; nothing was spent.
        :raises PrivacyBudgetExceeded: the release does not fit the budget; nothing was spent.
        """
        inference, cells = self._inference(), self._cells
        codes = self.schema.codes(frame)
        inference.run(torch.from_numpy(codes), cells, progress=False)
        for note in (self.schema.note, _NOTE):
            inference.accountant.note(note)
        counts, noise = inference.counts, inference.noise_multiplier * cells.bound
        rows = _num_rows(counts, cells, len(codes))
        mixture = fitted(counts, noise, cells, self._components, _MEMBERS, rows)
        self._found = _Fit(counts, noise, len(codes), mixture)
        return self

    def sample(self, n: int | None = None) -> pd.DataFrame:
        """Synthetic rows, with the schema's names, dtypes and order. They cost nothing.

        :param n: number of rows, or of units with a unit column; ``None`` for as many as were
            fitted.
        :raises ConfigurationError: there is no fit yet, or nearly all rows are impossible by the
            schema.
        """
        number = self._fit().units if n is None else require_count("n", n)
        rng = np.random.default_rng(int(torch.randint(2**62, ())))
        return self.schema.from_codes(self._codes(number, rng), rng)

    def sample_sets(self, m: int, n: int | None = None) -> list[pd.DataFrame]:
        """Draw m sets as in :meth:`sample`. They come from the same release, so their spread does
        not measure uncertainty.
        """
        return [self.sample(n) for _ in range(require_count("m", m))]

    def margin(self, *columns: str, level: float = 0.95) -> pd.DataFrame:
        """Released counts of one or two columns, with intervals.

        Each interval covers the count in the private frame (its first ``max_rows`` rows of each
        person) with probability ``level``. It says nothing about a larger population.

        :returns: a row for each code or pair of codes: labels, ``count``, ``lower``, ``upper``.
            Counts may be negative, so they and their sums are unbiased. Intervals end at zero.
        :raises ConfigurationError: more than two columns, with the reason; or there is no fit.
        """
        released = self._fit().counts
        level = require_number("level", level, above=0.0, below=1.0)
        unknown = [name for name in columns if name not in self.schema.names]
        if unknown or not columns or len(set(columns)) < len(columns):
            raise ConfigurationError("margin: pass one or two different columns of the schema.")
        if len(columns) > 2:
            raise ConfigurationError(_NO_INTERVAL)
        chosen = [self.schema.names.index(name) for name in columns]
        counts, added = self._cells.margin(released, tuple(sorted(chosen)))
        found = (counts if chosen == sorted(chosen) else counts.T).flatten().numpy()
        half = self._half_width(level, added)
        ends = [np.maximum(found + shift, 0.0) for shift in (-half, half)]
        numbers = pd.DataFrame(dict(zip(_NUMBERS, [found, *ends], strict=True)))
        labels = itertools.product(*(self.schema.columns[name].code_labels for name in columns))
        return pd.concat([pd.DataFrame(list(labels), columns=list(columns)), numbers], axis=1)

    def __repr__(self) -> str:
        keep = [] if self.keep is None else [(self.keep, "*")]
        state = "not fitted"
        if self._found is not None:
            half = self._half_width(0.95, self._cells.levels)
            of = "" if self.keep is None else f", except those of {self.keep},"
            state = f"fitted: released counts{of} have 95% intervals of +-{half:,.0f}"
        return (
            f"Synthesizer({len(self.schema.columns)} columns, "
            f"components={self._components}, keep={keep!r}, {state})"
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copied ledger could be spent twice, and a seed reveals the noise.
        return vars(self) | {"accountant": None, "_noise": Noise(self._noise.multiplier)}

    def _inference(self) -> _MarginRelease:
        if self.accountant is None:
            raise ConfigurationError("A copy of a Synthesizer has no accountant: make a new one.")
        return _MarginRelease(
            accountant=self.accountant,
            num_steps=1,
            bound=self._cells.bound,
            noise=self._noise,
            sampling=FullBatch(),
        )

    def _fit(self) -> _Fit:
        if self._found is None:
            raise ConfigurationError("This Synthesizer is not fitted yet: call fit() first.")
        return self._found

    def _half_width(self, level: float, added: int) -> float:
        """Half width of the interval of a count that is the sum of ``added`` released cells."""
        return float(norm.ppf((1 + level) / 2) * self._fit().noise * math.sqrt(added))

    def _codes(self, number: int, rng: np.random.Generator) -> np.ndarray:
        found, schema = self._fit(), self.schema
        if schema.unit is None:
            return possible_rows(found.mixture, number, rng, schema)
        per_unit = np.ones(number, dtype=np.int64)
        if schema.max_rows > 1:
            counts = self._cells.row_numbers(found.counts).clamp(min=0.0).numpy()
            even = np.full(len(counts), 1 / len(counts))
            shares = counts / counts.sum() if counts.sum() > 0 else even
            per_unit = 1 + systematic(shares, number, rng)
        codes = np.full((number, schema.max_rows, len(schema.columns)), -1, dtype=np.int64)
        used = np.arange(schema.max_rows) < per_unit[:, None]
        codes[used] = unit_rows(found.mixture, per_unit, rng, schema)
        return codes


def _num_rows(counts: Tensor, cells: Cells, units: int) -> float:
    """Estimated number of rows of all units."""
    if cells.rows == 1:
        return float(units)
    each = [cells.margin(counts, (j,))[0].sum().item() for j in cells.others]
    return min(max(sum(each) / len(each), float(units)), float(units * cells.rows))


def _kept(keep: Any, schema: Schema) -> str | None:
    """The name of the kept column."""
    if isinstance(keep, (tuple, list)) and not keep:
        return None
    match keep:
        case [(str(name), "*")] if name in schema.columns:
            return name
    raise ConfigurationError(
        "keep must be [(column, '*')], or empty: one column of the schema, with all others. "
        "Choose the outcome of several. (All pairs of columns are counted in any case.)"
    )


def all_margins(synthesizer: Synthesizer) -> pd.DataFrame:
    """Margins of all columns and all pairs of columns, in one long frame.

    :returns: ``column_1``, ``value_1``, ``column_2``, ``value_2``, ``count``, ``lower``, ``upper``,
        to one decimal. The second pair is empty for margins of one column.
    """
    found = []
    for number in (1, 2):
        values = ["value_1", "value_2"][:number]
        for columns in itertools.combinations(synthesizer.schema.names, number):
            names = {"column_1": columns[0], "column_2": columns[1] if number == 2 else ""}
            table = synthesizer.margin(*columns).set_axis([*values, *_NUMBERS], axis=1)
            found.append(table.assign(**names))
    order = ["column_1", "value_1", "column_2", "value_2", *_NUMBERS]
    return pd.concat(found, ignore_index=True)[order].round(dict.fromkeys(_NUMBERS, 1))


def systematic(probabilities: np.ndarray, number: int, rng: np.random.Generator) -> np.ndarray:
    """Systematic draws (number,) in random order. Each count differs from its expectation by less
    than one."""
    edges = np.cumsum(probabilities)
    points = (np.arange(number) + rng.random()) / max(number, 1)
    drawn = np.searchsorted(edges / edges[-1], points, side="right")
    return rng.permutation(drawn.clip(max=len(probabilities) - 1))


def drawn_rows(mixture: Mixture, number: int, rng: np.random.Generator) -> np.ndarray:
    """Draw codes (number, columns) from a mixture, in random order."""
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
    """Draw codes (rows, columns) of units with these numbers of rows, one unit after the other.

    Rows of a unit are independent, conditional on its constant columns. The first one is a draw
    from the mixture, and the others are draws conditional on its constant columns. So each row by
    itself has the mixture's distribution. If no possible row is found, the first one is repeated.
    """
    if not schema.constant:
        return possible_rows(mixture, int(per_unit.sum()), rng, schema)
    constant = [schema.names.index(name) for name in schema.constant]
    unit = np.repeat(np.arange(len(per_unit)), per_unit)
    first = possible_rows(mixture, len(per_unit), rng, schema)
    codes = first[unit]
    others = np.flatnonzero(np.diff(unit, prepend=-1) == 0)
    _redraw(
        codes, others, lambda left: _conditional(mixture, first[unit[left]], constant, rng), schema
    )
    return codes


def _conditional(
    mixture: Mixture, rows: np.ndarray, constant: list[int], rng: np.random.Generator
) -> np.ndarray:
    """Redraw the columns of rows that are not constant, conditional on the constant ones."""
    kinds, kind = np.unique(rows[:, constant], axis=0, return_inverse=True)
    kind, component = kind.reshape(-1), np.zeros(len(rows), dtype=np.int64)
    for index, codes in enumerate(kinds):
        share = mixture.weights.copy()
        for j, code in zip(constant, codes, strict=True):
            share *= mixture.tables[j][:, code]
        alike = kind == index
        component[alike] = systematic(share / share.sum(), int(alike.sum()), rng)
    found = rows.copy()
    for k in np.unique(component):
        members = np.flatnonzero(component == k)
        for j, table in enumerate(mixture.tables):
            if j not in constant:
                found[members, j] = systematic(table[k], len(members), rng)
    return found


def possible_rows(
    mixture: Mixture, number: int, rng: np.random.Generator, schema: Schema
) -> np.ndarray:
    """As :func:`drawn_rows`, with impossible rows redrawn.

    :raises ConfigurationError: nearly all draws of the mixture are impossible.
    """
    codes = drawn_rows(mixture, number, rng)
    again = np.flatnonzero(~possible_codes(codes, schema.impossible, schema.columns))
    if len(_redraw(codes, again, lambda left: drawn_rows(mixture, len(left), rng), schema)):
        raise ConfigurationError(
            f"impossible: after {_REDRAWS} draws some rows still have no possible value. The rules "
            "exclude nearly all rows that the release allows: check them."
        )
    return codes


def _redraw(
    codes: np.ndarray, left: np.ndarray, draw: Callable[[np.ndarray], np.ndarray], schema: Schema
) -> np.ndarray:
    """Redraw these rows until they are possible, and return those that are still impossible."""
    for _ in range(_REDRAWS):
        if not len(left):
            break
        drawn = draw(left)
        fits = possible_codes(drawn, schema.impossible, schema.columns)
        codes[left[fits]] = drawn[fits]
        left = left[~fits]
    return left
