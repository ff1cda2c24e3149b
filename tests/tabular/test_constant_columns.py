"""Columns that are the same in all rows of a person: when read, and when made up."""

import numpy as np
import pandas as pd
import pytest

from pyro_dp import ConfigurationError, Noise, PrivacyAccountant
from pyro_dp.tabular import Binary, Category, Count, Number, Schema, Synthesizer
from pyro_dp.tabular.margin_mixture import Mixture
from pyro_dp.tabular.synthesizer import unit_rows

COLUMNS = {
    "sex": Category(("m", "f")),
    "height": Number(140, 200, bins=6, missing=True),
    "visits": Count(0, 5),
    "smokes": Binary(),
}
SETTINGS = dict(unit="person", max_rows=3, constant=["sex", "height"])
SCHEMA = Schema(COLUMNS, **SETTINGS)


def frame(units=400, seed=0):
    """Visits go with sex. Heights do too, and one in ten is missing."""
    rng = np.random.default_rng(seed)
    person = np.repeat(np.arange(units), rng.integers(1, 4, units))
    sex = rng.choice(["m", "f"], units)
    height = np.where(sex == "m", 178.0, 165.0) + rng.normal(0, 5, units)
    height[rng.random(units) < 0.1] = np.nan
    visits = rng.poisson(np.where(sex[person] == "m", 0.5, 2.5))
    return pd.DataFrame(
        {
            "person": person,
            "sex": sex[person],
            "height": height[person],
            "visits": visits.clip(max=5),
            "smokes": rng.random(len(person)) < 0.3,
        }
    )


def test_rows_that_differ_have_what_the_first_one_has():
    """The first row decides, without an error: missing there is missing in all rows."""
    data = pd.DataFrame(
        {
            "person": ["b", "a", "b", "a", "b", "b"],
            "sex": ["m", "f", "f", "m", "f", "m"],
            "height": [np.nan, 170.0, 180.0, np.nan, 150.0, 160.0],
            "visits": [0, 1, 2, 3, 4, 5],
            "smokes": [True, False, False, True, True, False],
        }
    )
    encoded = SCHEMA.encode(data)
    assert encoded["sex"].tolist() == [[0, 0, 0], [1, 1, 0]]
    assert encoded["height"].tolist() == [[140.0, 140.0, 140.0], [170.0, 170.0, 140.0]]
    assert encoded["height_observed"].tolist() == [[False] * 3, [True, True, False]]
    assert encoded["visits"].tolist() == [[0, 2, 4], [1, 3, 0]]
    assert (SCHEMA.codes(encoded) == SCHEMA.codes(data)).all()
    back = SCHEMA.decode(encoded)
    assert (back.groupby("person")["sex"].nunique() == 1).all()


@pytest.mark.parametrize(
    "change",
    [
        dict(constant="sex"),
        dict(constant=["sex", "sex"]),
        dict(constant=["wealth"]),
        dict(constant=[3]),
        dict(constant=["person"]),
        dict(unit=None, max_rows=1),
    ],
)
def test_refused(change):
    with pytest.raises(ConfigurationError, match="constant must"):
        Schema(COLUMNS, **(SETTINGS | change))


def made(schema=SCHEMA, **settings):
    accountant, noise = PrivacyAccountant(1e6), Noise(source=0)
    twin = Synthesizer(schema, accountant=accountant, noise=noise, **settings)
    return twin.fit(frame()).sample(2000)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [(), [("sex", "*")], [("visits", "*")]])
def test_synthetic_persons_keep_what_is_constant(keep):
    """And no margin of rows is lost by it: 400 persons, 2000 synthetic ones."""
    rows, data = made(keep=keep), frame()
    assert (rows.groupby("person")["sex"].nunique() == 1).all()
    assert (rows.groupby("person")["height"].nunique(dropna=False) == 1).all()
    assert (rows.groupby("person")["visits"].nunique() > 1).any()
    for each in (data, rows):
        each["tall"] = each["height"] > 170
    for pair in (["sex", "visits"], ["sex", "tall"], ["tall", "smokes"]):
        shares = [each.value_counts(pair, normalize=True) for each in (data, rows)]
        assert shares[0].sub(shares[1], fill_value=0.0).abs().sum() / 2 < 0.05


@pytest.mark.long
def test_rows_that_nobody_has_are_not_made_up_for_a_persons_other_rows():
    rules = [{"sex": ["m"], "visits": (2, 5)}, {"height": (150, 163)}]
    schema = Schema(COLUMNS, **SETTINGS, impossible=rules)
    rows = made(schema)
    assert schema.possible(rows).sum() == len(rows)
    assert (rows.groupby("person")["height"].nunique(dropna=False) == 1).all()


def test_each_row_has_the_mixtures_distribution():
    """60,000 rows, 1, 2 or 3 of a unit, agree to 0.015: 6 standard errors of a share, as a unit's
    rows go together. Rows drawn independently of each other would not keep a person."""
    rng = np.random.default_rng(1)
    tables = [rng.dirichlet(np.full(size, 0.7), 4) for size in SCHEMA.sizes]
    mixture = Mixture(rng.dirichlet(np.full(4, 3.0)), tables)
    per_unit = rng.integers(1, 4, 30_000)
    rows = unit_rows(mixture, per_unit, rng, SCHEMA)
    unit = np.repeat(np.arange(30_000), per_unit)
    assert len(rows) == per_unit.sum()
    same = rows[1:][np.diff(unit) == 0] == rows[:-1][np.diff(unit) == 0]
    assert same[:, :2].all() and not same[:, 2:].all()
    for chosen in (np.diff(unit, prepend=-1) == 1, np.diff(unit, append=-1) == 0):
        for i, j in [(0, 1), (0, 2), (1, 3), (2, 3)]:
            found = np.zeros((SCHEMA.sizes[i], SCHEMA.sizes[j]))
            np.add.at(found, (rows[chosen, i], rows[chosen, j]), 1 / chosen.sum())
            exact = np.einsum("k,ki,kj->ij", mixture.weights, tables[i], tables[j])
            assert abs(found - exact).max() < 0.015
