"""The mixture that is fitted to margins, and the rows that are drawn from it."""

import itertools

import numpy as np
import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal, init_to_sample

from pyro_dp import DPSVI, ConfigurationError, PrivacyAccountant
from pyro_dp.tabular import Category, Schema
from pyro_dp.tabular.cells import CellCounts, Cells
from pyro_dp.tabular.margin_mixture import Mixture, fitted, row_model
from pyro_dp.tabular.synthesizer import drawn_rows, possible_rows, systematic

SIZES = (3, 4, 2, 3)
SIZE = 4000


def truth(seed=0):
    """A mixture of four components."""
    random = np.random.default_rng(seed)
    tables = [random.dirichlet(np.full(size, 0.7), 4) for size in SIZES]
    return Mixture(random.dirichlet(np.full(4, 3.0)), tables)


def margin(rows, columns):
    shape = [SIZES[j] for j in columns]
    places = np.ravel_multi_index(rows[:, columns].T, shape)
    return np.bincount(places, minlength=np.prod(shape)) / len(rows)


def margin_of(mixture, columns):
    total = mixture.weights
    for j in columns:
        total = total[..., None] * mixture.tables[j].reshape(
            len(mixture.weights), *[1] * (total.ndim - 1), -1
        )
    return total.sum(axis=0).flatten()


def counts_of(rows, cells):
    counts = CellCounts(cells.of(torch.from_numpy(rows)), cells.size)
    return counts.weighted_sum(torch.ones(len(rows), 1))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [None, 2])
def test_margins_are_met_without_noise(tied):
    """All of two columns, and within each level of the tied one: to half a percent."""
    rows, cells = drawn_rows(truth(), SIZE, np.random.default_rng(0)), Cells(SIZES, tied)
    mixture = fitted(counts_of(rows, cells), 0.0, cells, 8, 2, SIZE)
    assert len(mixture.weights) == 16 * cells.levels
    pairs = list(itertools.combinations(range(4), 2))
    for columns in [*pairs, *([(0, 1, 2), (1, 2, 3)] if tied == 2 else [])]:
        off = abs(margin_of(mixture, columns) - margin(rows, list(columns))).sum() / 2
        assert off < 0.005


@pytest.mark.slow
def test_a_ridge_is_met_where_there_is_little_noise():
    """Two numbers with correlation .89 in 20 bins: 400 steps leave 0.026 of total variation."""
    edges, cells = torch.linspace(-2.5, 2.5, 19), Cells((20, 20))
    x = torch.randn(20_000, 2, generator=torch.Generator().manual_seed(0))
    x[:, 1] = 0.89 * x[:, 0] + (1 - 0.89**2) ** 0.5 * x[:, 1]
    codes = torch.bucketize(x, edges)
    counts = CellCounts(cells.of(codes), cells.size).weighted_sum(torch.ones(len(codes), 1))
    mixture = fitted(counts, 0.2, cells, 20, 1, len(codes))
    both = np.einsum("k,ki,kj->ij", mixture.weights, *mixture.tables)
    exact = cells.margin(counts, (0, 1))[0].numpy() / len(codes)
    assert abs(both - exact).sum() / 2 < 0.015


@pytest.mark.long
@pytest.mark.every_commit
def test_noise_is_averaged():
    """Fitted pairs are nearer to the truth than released ones are: here at 0.6 of the distance."""
    rows, cells = drawn_rows(truth(), SIZE, np.random.default_rng(0)), Cells(SIZES, 2)
    noisy = counts_of(rows, cells) + 60 * torch.randn(cells.size)
    mixture = fitted(noisy, 60.0, cells, 8, 3, SIZE)
    off = {"fitted": 0.0, "released": 0.0}
    for columns in itertools.combinations(range(4), 2):
        exact = margin(rows, list(columns))
        off["fitted"] += abs(margin_of(mixture, columns) - exact).sum()
        released = cells.margin(noisy, columns)[0].flatten().numpy() / SIZE
        off["released"] += abs(released - exact).sum()
    assert off["fitted"] < 0.75 * off["released"]


@pytest.mark.every_commit
@pytest.mark.long
def test_is_a_function_of_what_was_released():
    rows, cells = drawn_rows(truth(), 200, np.random.default_rng(0)), Cells(SIZES, 2)
    counts = counts_of(rows, cells) - 30.0  # some negative
    before = torch.get_rng_state()
    one, two = (fitted(counts, 20.0, cells, 3, 2, 200) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(one.weights, two.weights)
    for table in one.tables:
        assert (table >= 0).all()
        np.testing.assert_allclose(table.sum(axis=1), 1.0)
    assert set(np.unique(one.tables[2])) == {0.0, 1.0}  # the tied column


class TestRows:
    def test_counts_are_those_expected(self):
        probabilities = np.random.default_rng(0).dirichlet(np.ones(7))
        drawn = systematic(probabilities, 1000, np.random.default_rng(1))
        off = abs(np.bincount(drawn, minlength=7) - 1000 * probabilities)
        assert off.max() < 1

    def test_each_row_has_the_distribution(self):
        """Check one of three draws, 4,000 times: six standard deviations are 0.05."""
        random = np.random.default_rng(0)
        probabilities = np.array([0.5, 0.3, 0.2])
        drawn = [systematic(probabilities, 3, random)[1] for _ in range(4000)]
        assert abs(np.bincount(drawn, minlength=3) / 4000 - probabilities).max() < 0.05

    def test_margins_are_those_of_the_mixture(self):
        rows = drawn_rows(truth(), SIZE, np.random.default_rng(0))
        assert rows.shape == (SIZE, 4)
        for j in range(4):
            off = abs(margin(rows, [j]) - margin_of(truth(), (j,)))
            assert off.max() < 8 / SIZE
        for columns in itertools.combinations(range(4), 2):
            off = abs(margin(rows, list(columns)) - margin_of(truth(), columns))
            assert off.sum() / 2 < 0.03

    def schema(self, impossible):
        columns = {
            name: Category(tuple(range(size))) for name, size in zip("abcd", SIZES, strict=True)
        }
        return Schema(columns, impossible=impossible)

    def test_impossible_ones_are_drawn_anew(self):
        schema = self.schema([{"a": [0], "b": [1, 2]}])
        rows = possible_rows(truth(), SIZE, np.random.default_rng(0), schema)
        assert not ((rows[:, 0] == 0) & np.isin(rows[:, 1], [1, 2])).any()
        assert (rows[:, 0] == 0).any()

    def test_rules_that_leave_nothing(self):
        schema = self.schema([{"a": [0, 1, 2]}])
        with pytest.raises(ConfigurationError, match="impossible"):
            possible_rows(truth(), 10, np.random.default_rng(0), schema)


class TestPyroModel:
    def test_density(self):
        """By sums over components, row by row; an empty slot counts nothing."""
        mixture = truth()
        rows = drawn_rows(mixture, 6, np.random.default_rng(0))
        each = [
            sum(
                w * np.prod([t[k, x] for t, x in zip(mixture.tables, row, strict=True)])
                for k, w in enumerate(mixture.weights)
            )
            for row in rows
        ]
        known = {f"table_{j}": torch.tensor(table) for j, table in enumerate(mixture.tables)}
        known["weights"] = torch.tensor(mixture.weights)

        def density(codes):
            model = row_model(SIZES, len(mixture.weights))
            trace = poutine.trace(poutine.condition(model, known)).get_trace(codes)
            trace.compute_log_prob()
            return trace.nodes["codes"]["log_prob"]

        torch.testing.assert_close(density(torch.tensor(rows)), torch.tensor(each).log())
        slots = torch.tensor(rows.reshape(2, 3, 4))
        slots[1, 2] = -1
        expected = torch.tensor([np.log(each[:3]).sum(), np.log(each[3:5]).sum()])
        torch.testing.assert_close(density(slots), expected)

    @pytest.mark.slow
    def test_runs_in_dpsvi(self):
        schema = TestRows().schema([])
        model, guide = schema.to_pyro(components=3)
        codes = torch.from_numpy(drawn_rows(truth(), 100, np.random.default_rng(0)))
        svi = DPSVI(model, guide, accountant=PrivacyAccountant(1.0), num_steps=3, sampling=0.5)
        svi.run(codes, progress=False)
        assert isinstance(guide, AutoNormal)
        assert guide.init_loc_fn is init_to_sample
        assert all(value.isfinite().all() for value in pyro.get_param_store().values())
