"""The counts that a synthesizer releases: where they lie, and how far one person moves them."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch
from releases import Releases

from pyro_dp import FullBatch, Noise, PrivacyAccountant, SubsampledGaussian, audit
from pyro_dp.mechanism.contributions import Rows
from pyro_dp.tabular.cells import CellCounts, Cells
from pyro_dp.tabular.synthesizer import _MarginRelease

SIZES = (3, 2, 4)
SURE = 1 - 1e-8


def people(units, rows, sizes=SIZES, seed=0):
    """Codes (units, rows, columns), the first slots of each unit filled."""
    random = np.random.default_rng(seed)
    codes = np.stack([random.integers(size, size=(units, rows)) for size in sizes], axis=-1)
    codes[np.arange(rows) >= random.integers(1, rows + 1, size=units)[:, None]] = -1
    return torch.from_numpy(codes)


def counted(cells, codes):
    """The vector of a set of units."""
    counts = CellCounts(cells.of(codes), cells.size)
    return counts.weighted_sum(torch.ones(len(codes), 1))


def made_public(cells, codes, noise):
    """The released vector."""
    settings = dict(num_steps=1, bound=cells.bound, noise=noise, sampling=FullBatch())
    inference = _MarginRelease(accountant=PrivacyAccountant(), **settings)
    inference.step(codes, cells)
    return inference.counts


@pytest.mark.parametrize("tied", [None, 0, 1, 2])
@pytest.mark.parametrize("rows", [1, 3])
def test_margins_are_those_of_pandas(tied, rows):
    cells, codes = Cells(SIZES, tied, rows), people(50, rows)
    vector = counted(cells, codes)
    frame = pd.DataFrame(codes.reshape(-1, 3).numpy())
    frame = frame[frame[0] >= 0]
    for of in (1, 2):
        for columns in itertools.combinations(range(3), of):
            expected = np.zeros([SIZES[j] for j in columns])
            for key, group in frame.groupby(list(columns)):
                expected[key] = len(group)
            counts, added = cells.margin(vector, columns)
            np.testing.assert_array_equal(counts.numpy(), expected)
            assert added >= 1
    if rows > 1:
        numbers = (codes[:, :, 0] >= 0).sum(dim=1)
        expected = torch.bincount(numbers, minlength=rows + 1)[1:].double()
        assert torch.equal(cells.row_numbers(vector), expected)


@pytest.mark.parametrize("columns", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_how_many_cells_a_count_is_the_sum_of(columns):
    """By the variance of a sum of independent numbers: 3,000 draws, seven standard deviations."""
    cells = Cells(SIZES, 1)
    draws = torch.randn(3_000, cells.size, generator=torch.Generator().manual_seed(0))
    sums = torch.stack([cells.margin(draw, columns)[0].flatten()[0] for draw in draws])
    assert sums.var().item() == pytest.approx(cells.margin(draws[0], columns)[1], rel=0.18)


class TestSensitivity:
    @pytest.mark.long
    @pytest.mark.every_commit
    @pytest.mark.parametrize("tied", [None, 1])
    @pytest.mark.parametrize("rows", [1, 2, 5])
    def test_no_person_moves_more_than_the_bound(self, tied, rows):
        """Neighbouring data sets of each of 200 persons, and of those who try hardest. Equal rows
        reach the bound."""
        cells = Cells(SIZES, tied, rows)
        margins = 6 if tied is None else 3
        assert cells.bound == pytest.approx(math.sqrt(rows**2 * margins + (rows > 1)))
        assert counted(cells, torch.zeros(1, rows, 3)).norm().item() == pytest.approx(cells.bound)
        alike = torch.zeros(1, rows, 3, dtype=torch.int64)  # all rows equal
        two = alike.clone()
        two[0, rows // 2 :] = 1
        nobody = torch.full((1, rows, 3), -1)
        persons = torch.cat([alike, two, nobody, people(200, rows)])
        others = people(30, rows, seed=1)
        without = counted(cells, others)
        for b in range(len(persons)):
            person = persons[b : b + 1]
            moved = counted(cells, torch.cat([others, person])) - without
            assert moved.norm().item() <= cells.bound * (1 + 1e-12)
            own = CellCounts(cells.of(person), cells.size).norms().item()
            assert own == pytest.approx(moved.norm().item(), abs=1e-12)
            replaced = moved - counted(cells, alike)
            assert replaced.norm().item() <= 2 * cells.bound

    @pytest.mark.parametrize("source", [None, "system"])
    def test_of_the_release(self, monkeypatch, source):
        """Compare the sums that enter it, with and without a person of three equal rows."""
        cells, codes, seen = Cells(SIZES, 1, 3), people(40, 3), Releases(monkeypatch)
        codes[0] = 1
        fewer = codes.clone()
        fewer[0] = -1
        for each in (codes, fewer):
            made_public(cells, each, Noise(1.0, source=source))
        moved = (seen.sums[0][0] - seen.sums[1][0]).norm().item()
        assert moved <= cells.bound
        assert moved == pytest.approx(cells.bound, rel=1e-6)


class TestContributions:
    def test_are_those_of_dense_rows(self):
        cells = Cells(SIZES, 1, 3)
        counts = CellCounts(cells.of(people(40, 3)), cells.size)
        rows, weights = Rows(counts.dense()), torch.rand(40, 1, dtype=torch.float64)
        weights[3] = 0.0
        torch.testing.assert_close(counts.norms(), rows.norms())
        torch.testing.assert_close(counts.weighted_sum(weights), rows.weighted_sum(weights))

    def test_are_rounded_towards_zero(self):
        """No coordinate of a record is longer than the exact one; three units are lost at most."""
        cells = Cells(SIZES, 1, 3)
        weights = 1000 * torch.rand(40, 1, dtype=torch.float64)
        for b, person in enumerate(people(40, 3)):
            counts = CellCounts(cells.of(person[None]), cells.size)
            whole = counts.whole_sum(weights[b : b + 1], False)
            exact = counts.weighted_sum(weights[b : b + 1])
            assert whole.dtype == torch.int64
            assert (whole <= exact).all()
            assert (exact - whole <= 3).all()


@pytest.mark.every_commit
@pytest.mark.long
@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.filterwarnings("ignore::pyro_dp.NotPrivateWarning")
def test_an_audit_shows_less_than_is_claimed(monkeypatch, fault):
    """The canary is a person with ten rows, and the attacker sums what they would add.

    The claim contradicted by chance: 1e-8. With the bound of one row per person, with and without
    are five standard deviations apart, and all guesses are right but with probability 1e-2.
    """
    claim = PrivacyAccountant(2.0)
    sigma = claim.noise_multiplier(num_steps=1, sampling="full")
    claim.record(SubsampledGaussian(sigma, 1.0, "full"))
    if fault:
        monkeypatch.setattr(Cells, "bound", property(lambda self: math.sqrt(len(self.starts))))
        monkeypatch.setattr(CellCounts, "norms", lambda self: torch.ones(len(self.cells), 1))
    cells, person = Cells(SIZES, 1, 10), torch.ones(10, 3, dtype=torch.int64)
    direction = counted(cells, person[None])

    def make_run(codes):
        return made_public(cells, codes, sigma)

    nobody = torch.full((6, 10, 3), -1)
    result = audit(
        make_run,
        (nobody,),
        (person,),
        num_trials=600,
        score=lambda released: (released @ direction).item(),
        claim=claim,
        confidence=SURE,
        seed=0,
        progress=False,
    )
    assert result.contradicts_claim == fault
