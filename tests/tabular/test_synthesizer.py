"""Synthesizer: releases and their cost, synthetic frames, intervals."""

import itertools
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import norm

from pyro_dp import (
    ConfigurationError,
    Noise,
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    SchemaError,
    SubsampledGaussian,
)
from pyro_dp.tabular import Binary, Category, Count, Number, Schema, Synthesizer, margin_mixture
from pyro_dp.tabular.cells import CellCounts
from pyro_dp.tabular.synthesizer import all_margins

SIZE = 500
KEEP = [("sick", "*")]
MARITAL = ("single", "married", "widowed")


@pytest.fixture(autouse=True)
def _short_fits(monkeypatch):
    """Tests here do not depend on the quality of fits, except where they say so."""
    monkeypatch.setattr(margin_mixture, "_STEPS", 60)


def schema(**settings):
    columns = {
        "age": Number(0.0, 100.0, bins=10),
        "marital": Category(MARITAL),
        "visits": Count(0, 4, missing=True),
        "sick": Binary(("no", "yes")),
    }
    return Schema(columns, **settings)


def frame(size=SIZE, seed=0):
    random = np.random.default_rng(seed)
    age = random.uniform(0, 100, size)
    sick = random.random(size) < 0.2 + 0.006 * age
    visits = random.poisson(0.5 + 2.0 * sick).clip(max=4)
    return pd.DataFrame(
        {
            "age": age,
            "marital": np.array(MARITAL)[(age // 34).astype(int)],
            "visits": pd.Series(visits, dtype="Int64").mask(random.random(size) < 0.1),
            "sick": np.where(sick, "yes", "no"),
        }
    )


def fitted(data=None, of=None, epsilon=1.0, noise=None, source=0, **settings):
    settings = {"keep": KEEP, "components": 3, "noise": Noise(noise, source=source)} | settings
    accountant = PrivacyAccountant(epsilon if noise is None else None)
    made = Synthesizer(of or schema(), accountant=accountant, **settings)
    return made.fit(frame() if data is None else data)


def released(synthesizer):
    """The vector that was released."""
    return synthesizer._found.counts


def exact(synthesizer, data):
    """The same without noise."""
    cells, codes = synthesizer._cells, torch.from_numpy(synthesizer.schema.codes(data))
    return CellCounts(cells.of(codes), cells.size).weighted_sum(torch.ones(len(codes), 1))


def persons(units=200, seed=0):
    """One to three rows of each, in random order."""
    random = np.random.default_rng(seed)
    numbers = random.integers(1, 4, units)
    data = frame(int(numbers.sum()), seed)
    data.insert(0, "id", np.repeat(np.arange(units), numbers))
    return data.iloc[random.permutation(len(data))].reset_index(drop=True)


class TestFrames:
    def test_are_as_the_schema_says(self):
        one, other = fitted().sample(70), frame()
        assert len(one) == 70
        assert list(one.columns) == list(other.columns)
        assert dict(one.dtypes) == dict(schema().decode(schema().encode(other)).dtypes)
        assert one["age"].between(0.0, 100.0).all()
        assert one["visits"].isna().any()
        assert set(one["marital"]) <= set(MARITAL)

    def test_draws(self):
        """As many as were fitted. Sets differ, and the public seed repeats them."""
        made = fitted()
        assert len(made.sample()) == SIZE
        torch.manual_seed(3)
        one, two = made.sample_sets(2, 50)
        assert not one.equals(two)
        torch.manual_seed(3)
        pd.testing.assert_frame_equal(made.sample(50), one)

    def test_impossible_and_derived(self):
        of = schema(
            impossible=[{"age": (0, 40), "marital": ["widowed"]}], derived={"decades": "age / 10"}
        )
        one = fitted(of=of).sample(300)
        assert not ((one["age"] <= 40) & (one["marital"] == "widowed")).any()
        assert (one["marital"] == "widowed").any()
        np.testing.assert_allclose(one["decades"], one["age"] / 10)

    def test_of_persons(self):
        """Ids from 0, and numbers of rows as they were released: without noise as they are."""
        of, data = schema(unit="id", max_rows=3), persons()
        synthesizer = fitted(data, of, noise=0.0)
        assert of.note in synthesizer.accountant.notes and "the first 3 count" in of.note
        made = synthesizer.sample()
        assert list(made.columns) == list(data.columns)
        numbers = [x.groupby("id").size().value_counts().sort_index() for x in (made, data)]
        assert abs(numbers[0] - numbers[1]).max() <= 1
        assert made["id"].nunique() == 200

    @pytest.mark.parametrize("settings", [dict(noise=1e30), dict(keep=())])
    def test_however_much_noise_and_without_keep(self, settings):
        one = fitted(**settings).sample(30)
        assert len(one) == 30 and one["age"].notna().all()

    def test_of_one_column(self):
        of = Schema({"sick": Binary(("no", "yes"))})
        one = fitted(frame()[["sick"]], of, keep=()).sample(40)
        assert set(one["sick"]) == {"no", "yes"}


class TestPrivacy:
    def test_one_release_for_the_budget(self):
        made = fitted(epsilon=2.0)
        (entry,) = made.accountant.ledger
        assert type(entry.event) is SubsampledGaussian and entry.count == 1
        assert entry.event.sample_rate == 1.0
        assert 1.99 < made.accountant.get_epsilon() <= 2.0
        report = made.accountant.report()
        assert "synthetic rows: released counts" in report and "44%" in report
        (origin,) = {origin for origin, _ in made.accountant.runs()}
        assert origin.method == "Synthesizer (VIPS)"  # as journals have it

    @pytest.mark.parametrize("source", [0, "system"])
    def test_noise_has_the_size_that_is_accounted(self, source):
        """With 5,000 cells, seven standard deviations of the variance are 0.14."""
        of = Schema({name: Category(tuple(range(41))) for name in "abc"})
        data = pd.DataFrame(np.zeros((3, 3), dtype=int), columns=list("abc"))
        made = fitted(data, of, noise=2.0, source=source, keep=(), components=1)
        sd = 2.0 * np.sqrt(6)  # three columns, three pairs
        assert made._found.noise == pytest.approx(sd)
        noise = (released(made) - exact(made, data)) / sd
        assert len(noise) == 3 * 41 + 3 * 41**2
        variance = noise.square().mean().item()
        assert abs(variance - 1) < 0.14
        for wrong in (2 / 3, 3 / 2):
            assert abs(wrong**2 * variance - 1) > 0.14
        assert abs(noise.mean().item()) < 7 / np.sqrt(len(noise))

    def test_a_person_is_one_record(self):
        """Neighbouring frames, the same noise: all rows of a person move the release by the bound
        at most, and nothing else that is public differs."""
        of, data = schema(unit="id", max_rows=3), persons()
        alike = pd.concat([data[data["id"] != 7], data[data["id"] == 8].iloc[[0] * 9].assign(id=7)])
        others = persons()
        found = []
        for each in (alike, others):
            made = fitted(each, of, noise=1.0)
            found.append((released(made), made._found.noise, made.accountant.ledger))
        bound = made._cells.bound
        assert bound == pytest.approx(np.sqrt(3**2 * 6 + 1))
        moved = (found[0][0] - found[1][0]).norm().item()
        assert 0 < moved <= 2 * bound
        assert found[0][1:] == found[1][1:]

    def test_rows_beyond_the_first_count_nothing(self):
        of = schema(unit="id", max_rows=2)
        data = persons()
        first = data.groupby("id", sort=False).head(2)
        one, two = (fitted(each, of, noise=1.0) for each in (data, first))
        assert torch.equal(released(one), released(two))

    @pytest.mark.long
    @pytest.mark.every_commit
    def test_a_second_fit_is_a_second_release(self):
        made = fitted(epsilon=1.0)
        with pytest.raises(PrivacyBudgetExceeded):
            made.fit(frame())
        free = fitted(noise=1.0)
        free.fit(frame())
        assert free.accountant.num_releases == 2

    def test_a_frame_that_does_not_fit_costs_nothing(self):
        made = Synthesizer(schema(), accountant=PrivacyAccountant(1.0))
        with pytest.raises(SchemaError):
            made.fit(frame().drop(columns="age"))
        assert made.accountant.num_releases == 0

    def test_rows_need_no_data(self):
        made = fitted()
        spent = made.accountant.get_epsilon()
        made.sample(10), made.sample_sets(2, 10), made.margin("age")
        assert made.accountant.get_epsilon() == spent

    def test_a_copy_has_no_ledger(self):
        copy = pickle.loads(pickle.dumps(fitted()))
        assert len(copy.sample(20)) == 20
        assert copy.accountant is None
        with pytest.raises(ConfigurationError, match="no accountant"):
            copy.fit(frame())


class TestIntervals:
    COLUMNS = [
        *itertools.combinations(("age", "marital", "visits", "sick"), 2),
        ("sick",),
        ("age",),
    ]

    @pytest.mark.long
    @pytest.mark.every_commit
    def test_are_as_wide_as_the_noise_of_their_sum(self):
        """Two levels of the kept column are added, or none; its own counts add those of the column
        with the fewest codes, three."""
        made = fitted(frame(5000), noise=0.1)
        for columns in self.COLUMNS:
            added = 3 if columns == ("sick",) else 1 if "sick" in columns else 2
            half = 0.1 * np.sqrt(6) * np.sqrt(added) * norm.ppf(0.95)
            largest = made.margin(*columns, level=0.9).nlargest(1, "count").iloc[0]
            assert largest["upper"] - largest["count"] == pytest.approx(half)
            assert largest["count"] - largest["lower"] == pytest.approx(half)
        made = fitted(frame(5000), noise=100.0)
        half = 100 * np.sqrt(6) * np.sqrt(2) * norm.ppf(0.975)
        assert f"except those of sick, have 95% intervals of +-{half:.0f}" in repr(made)

    @pytest.mark.long
    def test_labels(self):
        table = fitted().margin("sick", "marital")
        assert list(table.columns) == ["sick", "marital", "count", "lower", "upper"]
        assert list(table["marital"][:3]) == list(MARITAL)
        one = fitted(noise=0.0).margin("sick", "marital")
        data = frame()
        expected = [
            ((data["sick"] == a) & (data["marital"] == b)).sum()
            for a, b in zip(one["sick"], one["marital"], strict=True)
        ]
        np.testing.assert_allclose(one["count"], expected)
        np.testing.assert_allclose(one["lower"], expected)

    def test_a_column_may_be_called_count(self):
        """Its labels stay, beside the released counts."""
        of = Schema({"count": Category(("few", "many")), "upper": Binary()})
        data = pd.DataFrame({"count": ["few"] * 30 + ["many"] * 70, "upper": [True] * 100})
        made = fitted(data, of, noise=0.0, keep=())
        table = made.margin("count")
        assert list(table.columns) == ["count", "count", "lower", "upper"]
        assert table.iloc[:, 0].tolist() == ["few", "many"]
        np.testing.assert_allclose(table.iloc[:, 1], [30, 70])
        found = all_margins(made)
        assert (
            found["value_1"].tolist()
            == ["few", "many", "False", "True"] + ["few"] * 2 + ["many"] * 2
        )
        np.testing.assert_allclose(found["count"], [30, 70, 0, 100, 0, 30, 0, 70])

    @pytest.mark.parametrize(
        ("columns", "said"),
        [
            (("age", "sick", "marital"), "44%"),
            ((), "margin"),
            (("height",), "margin"),
            ((["age", "sick"],), "margin"),
            (("age", "age"), "margin"),
        ],
    )
    def test_of_other_columns_there_are_none(self, columns, said):
        with pytest.raises(ConfigurationError, match=said):
            fitted().margin(*columns)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (dict(keep=[("height", "*")]), "keep"),
        (dict(keep=[("age", "sick")]), "keep"),
        (dict(keep="sick"), "keep"),
        (dict(keep=["sick"]), "keep"),
        (dict(keep=[("sick", "*"), ("age", "*")]), "keep"),
        (dict(schema={}), "Schema"),
        (dict(accountant=None), "accountant"),
        (dict(components=0), "components"),
        (dict(components=10**9), "Choose fewer"),
        (dict(schema=Schema({"sick": Binary()}), keep=KEEP), "beside the one"),
        (dict(schema=Schema({x: Number(0.0, 1.0, bins=4000) for x in "abc"})), "fewer bins"),
    ],
)
def test_refused(settings, said):
    with pytest.raises(ConfigurationError, match=said):
        Synthesizer(**dict(schema=schema(), accountant=PrivacyAccountant(1.0)) | settings)


def test_before_the_fit():
    made = Synthesizer(schema(), accountant=PrivacyAccountant(1.0))
    assert "not fitted" in repr(made)
    for ask in (made.sample, lambda: made.margin("age")):
        with pytest.raises(ConfigurationError, match="not fitted"):
            ask()
