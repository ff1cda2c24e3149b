"""A frame becomes tensors and comes back; a person's rows are one record."""

import pickle
import re

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyro.infer.autoguide import AutoMultivariateNormal

from pyro_dp import DPSVI, ConfigurationError, PrivacyAccountant, PrivacyWarning, SchemaError
from pyro_dp.tabular import Binary, Category, Count, Date, Number, Schema

COLUMNS = {
    "age": Number(0, 100, missing=True),
    "weekly visits": Count(0, 50, bins=(0, 1, 5, 50), missing=True),
    "sex": Binary(("m", "f")),
    "job": Category(("office clerk", "nurse"), other=True, missing=True),
    "smokes": Binary(missing=True),
    "region": Category((1, 2, 3)),
    "born": Date("1900-01-01", "2020-12-31", missing=True),
    "grade": Category(("low", "mid", "high"), ordered=True),
}


def frame(**other):
    found = {
        "age": [1.5, np.nan, 30.0, 99.0],
        "weekly visits": pd.array([1, None, 7, 3], dtype="Int64"),
        "sex": pd.Series(["m", "f", "f", "m"], dtype="str"),
        "job": pd.Series(["nurse", None, "other", "office clerk"], dtype="str"),
        "smokes": pd.array([True, None, False, True], dtype="boolean"),
        "region": [1, 2, 3, 1],
        "born": np.array(["1990-03-01", "NaT", "1900-01-01", "2020-12-31"], dtype="M8[s]"),
        "grade": pd.Categorical(
            ["low", "high", "mid", "low"], categories=["low", "mid", "high"], ordered=True
        ),
    }
    return pd.DataFrame(found | other)


def same(one, other):
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


def test_there_and_back():
    schema = Schema(COLUMNS)
    pd.testing.assert_frame_equal(schema.decode(schema.encode(frame())), frame(), check_exact=True)


def test_what_a_model_reads():
    encoded = Schema(COLUMNS).encode(frame())
    assert encoded.units == 4
    observed = ["age", "weekly visits", "job", "smokes", "born"]
    assert {*encoded} == {*COLUMNS} | {f"{name}_observed" for name in observed}
    assert encoded["age"].tolist() == [1.5, 0.0, 30.0, 99.0]
    assert encoded["age_observed"].tolist() == [True, False, True, True]
    assert encoded["weekly visits"].tolist() == [1, 0, 7, 3]
    assert encoded["sex"].tolist() == [0, 1, 1, 0]
    assert encoded["job"].tolist() == [1, 0, 2, 0]
    assert encoded["born"].tolist() == [32931.0, 0.0, 0.0, 44194.0]
    assert encoded["grade"].dtype == torch.int64
    torch.set_default_dtype(torch.float32)
    assert Schema(COLUMNS).encode(frame())["age"].dtype == torch.float32


def test_order_of_columns_and_index_do_not_matter():
    schema = Schema(COLUMNS)
    other = frame()[list(reversed(COLUMNS))].set_index(pd.Index([5, 5, 1, 0]))
    same(schema.encode(other), schema.encode(frame()))


def test_nothing_shows_numbers_of_the_data():
    encoded = Schema(COLUMNS).encode(frame())
    assert "99" not in repr(encoded) and "(4,)" in repr(encoded)
    same(pickle.loads(pickle.dumps(encoded)), encoded)


MANY = Schema(COLUMNS, unit="person", max_rows=2)


def test_bounds_beyond_the_dtype_are_refused_for_all_data():
    """Otherwise the error would depend on whether the data reach the bound."""
    schema, own = Schema({"mass": Number(0, 1e39)}), pd.DataFrame({"mass": [1.0, 2.0]})
    schema.encode(own)  # in float64
    torch.set_default_dtype(torch.float32)
    with pytest.raises(ConfigurationError, match="'mass' has bounds beyond 3.4e.38.*set_default"):
        schema.encode(own)
    Schema({"mass": Number(0, 3e38)}).encode(own)


def test_numbers_with_moments_of_their_own():
    """Only finite numbers count, and bounds do not hide the moments."""
    age = np.linspace(20.0, 80.0, 500)
    scores = (age - age.mean()) / age.std()
    schema = Schema({"score": Number(-1, 1, missing=True)})
    for found in (scores, np.append(scores, [np.nan, np.inf])):
        for read in (schema.encode, schema.codes):
            with pytest.warns(PrivacyWarning, match="Column 'score' has .*curator"):
                read(pd.DataFrame({"score": found}))
    schema.encode(pd.DataFrame({"score": scores[1:]}))
    schema.encode(pd.DataFrame({"score": [np.nan, np.nan]}))


def persons():
    return frame(person=["b", "a", "b", "b"])


def test_rows_of_a_unit_are_slots_of_one_record():
    encoded = MANY.encode(persons())
    assert encoded.units == 2  # in order of their first row; the third row of b is cut
    assert encoded["row_observed"].tolist() == [[True, True], [True, False]]
    assert encoded["age"].tolist() == [[1.5, 30.0], [0.0, 0.0]]
    assert encoded["region"].tolist() == [[0, 2], [1, 0]]
    back = MANY.decode(encoded)
    assert back["person"].tolist() == [0, 0, 1] and list(back) == ["person", *COLUMNS]
    pd.testing.assert_frame_equal(
        back.drop(columns="person"), frame().iloc[[0, 2, 1]].reset_index(drop=True)
    )


@pytest.mark.parametrize(
    "ids",
    [
        [7, 3, 7, 7],
        pd.Categorical(["b", "a", "b", "b"], categories=["z", "a", "b"]),
        pd.array(["b", "a", "b", "b"], dtype="string"),
        pd.Series(["b", "a", "b", "b"], dtype=object),
        pd.to_datetime(["2020-01-02", "2020-01-01", "2020-01-02", "2020-01-02"]),
        pd.Series(["b", "a", "b", "b"]).astype("string[pyarrow]"),
    ],
    ids=lambda ids: str(getattr(ids, "dtype", "list")),
)
def test_ids_of_units_may_be_of_any_dtype(ids):
    same(MANY.encode(frame(person=ids)), MANY.encode(persons()))


rows = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.one_of(st.none(), st.floats(allow_nan=False)),
        st.one_of(st.none(), st.integers(-(2**62), 2**62)),
        st.sampled_from(["m", "f"]),
        st.one_of(st.none(), st.text(max_size=3), st.sampled_from(["nurse", "office clerk"])),
    ),
    min_size=2,
    max_size=12,
)
FEW = Schema(
    {name: COLUMNS[name] for name in ("age", "weekly visits", "sex", "job")},
    unit="person",
    max_rows=2,
    constant=("age", "sex"),
)


def few(drawn):
    person, age, visits, sex, job = zip(*drawn, strict=True)
    return pd.DataFrame(
        {
            "person": person,
            "age": pd.array(age, dtype="Float64"),
            "weekly visits": pd.array(visits, dtype="Int64"),
            "sex": pd.Series(sex, dtype="str"),
            "job": pd.Series(job, dtype=object),
        }
    )


@pytest.mark.slow
@pytest.mark.every_commit
@given(rows, rows)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_neighbouring_frames_differ_in_one_record(one, theirs):
    """All rows of person 0 exchanged for others, or taken out: no other record moves."""
    one = [(9, 1.0, 1, "m", None), *one]  # somebody is there
    others = [row for row in one if row[0] != 0]
    whole, without = FEW.encode(few(one)), FEW.encode(few(others))
    exchanged = FEW.encode(few([*others, *((0, *row[1:]) for row in theirs)]))

    def order(drawn):
        return list(dict.fromkeys(row[0] for row in drawn))

    assert list(whole) == list(without) == list(exchanged)
    place = order(one)
    keep = [place.index(person) for person in order(others)]
    for name in whole:
        assert torch.equal(whole[name][keep], without[name])
        assert torch.equal(exchanged[name][:-1], without[name])
        assert whole[name].shape[1:] == (2,) and whole[name].dtype == without[name].dtype
    assert exchanged.units == without.units + 1


@pytest.mark.slow
@pytest.mark.every_commit
@given(rows)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_whatever_the_data_are_records_lie_in_public_bounds(drawn):
    encoded = FEW.encode(few(drawn))
    assert encoded["age"].min() >= 0 and encoded["age"].max() <= 100
    assert encoded["weekly visits"].min() >= 0 and encoded["weekly visits"].max() <= 50
    assert encoded["job"].min() >= 0 and encoded["job"].max() <= 2
    same(FEW.encode(FEW.decode(encoded)), encoded)
    codes = FEW.codes(encoded)
    assert (codes < FEW.sizes).all() and np.array_equal(codes, FEW.codes(few(drawn)))
    assert np.array_equal(codes[..., 0] >= 0, encoded["row_observed"].numpy())
    drawn_anew = FEW.from_codes(codes, np.random.default_rng(0))
    assert np.array_equal(FEW.codes(drawn_anew), codes)
    assert drawn_anew.dtypes.equals(FEW.decode(encoded).dtypes)


def test_shapes_and_dtypes_do_not_depend_on_values():
    """They are the same for missing levels, bounds not reached and wider dtypes."""
    schema = Schema(COLUMNS)
    one = schema.encode(frame())
    other = schema.encode(
        frame(
            age=[5, 6, 7, 8],
            smokes=[True, False, True, True],
            region=[1.0, 1.0, 1.0, 1.0],
            job=pd.Series([None] * 4, dtype="str"),
        )
    )
    assert {k: (v.shape, v.dtype) for k, v in one.items()} == {
        k: (v.shape, v.dtype) for k, v in other.items()
    }
    assert schema.decode(one).dtypes.equals(schema.decode(other).dtypes)


@pytest.mark.long
def test_one_argument_of_a_run():
    """The plate of units, of two rows each at most; the record of the model is a person."""
    rng = np.random.default_rng(0)
    age = rng.uniform(0, 100, 900)
    ill = rng.random(900) < 1 / (1 + np.exp(-(age - 50) / 20))
    data = pd.DataFrame({"person": rng.integers(0, 500, 900), "age": age, "ill": ill})
    schema = Schema({"age": Number(0, 100), "ill": Binary()}, unit="person", max_rows=2)

    def model(data):
        w = pyro.sample("w", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        logits = w[0] + w[1] * (data["age"] - 50) / 50
        with pyro.plate("persons", len(data["age"])):
            seen = dist.Bernoulli(logits=logits).mask(data["row_observed"]).to_event(1)
            pyro.sample("ill", seen, obs=data["ill"].double())

    guide = AutoMultivariateNormal(model)
    accountant = PrivacyAccountant(epsilon=8.0, delta=1e-5)
    svi = DPSVI(model, guide, accountant=accountant, num_steps=20)
    svi.run(schema.encode(data), progress=False)
    assert 0 < accountant.get_epsilon() <= 8
    new = schema.encode(data.assign(age=100 - data["age"])[:99])
    assert svi.predictive(num_samples=20)(new)["ill"].shape == (20, new.units, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "lacks|missing"),
        ({"age": torch.zeros(2, 2)}, "dimensions"),
        ({"age": torch.zeros(3)}, "shape"),
        ({"age": torch.full((4,), torch.nan)}, "finite"),
    ],
)
def test_tensors_of_another_form_are_refused(change, said):
    schema = Schema(COLUMNS)
    tensors = dict(schema.encode(frame())) | change
    if not change:
        del tensors["age"]
    with pytest.raises(SchemaError, match=said):
        schema.decode(tensors)


def test_codes_that_are_none_are_refused():
    schema, rng = Schema(COLUMNS), np.random.default_rng(0)
    codes = schema.codes(frame())
    for wrong in (codes[:, :3], codes + 50, codes - 1, codes[None], codes.astype(float)):
        with pytest.raises(SchemaError, match="Codes"):
            schema.from_codes(wrong, rng)
    with pytest.raises(SchemaError, match="Codes"):
        MANY.from_codes(np.where(np.arange(8) == 3, -1, MANY.codes(persons())), rng)


@pytest.mark.parametrize(
    ("columns", "settings", "said"),
    [
        ({}, {}, "needs at least one column"),
        (["age", "visits"], {}, "must be a dictionary"),
        ({"": Number(0, 1)}, {}, "non-empty"),
        ({3: Number(0, 1)}, {}, "text"),
        ({"a": Number}, {}, "'a' is a ABCMeta"),
        ({"a": type("Scaled", (Number,), {})(0, 1)}, {}, "'a' is a Scaled"),
        ({"a": Number(0, 1)}, {"max_rows": 2}, "unit"),
        ({"a": Number(0, 1)}, {"max_rows": 0, "unit": "b"}, "max_rows"),
        ({"a": Number(0, 1)}, {"unit": "b"}, "unit='b' needs max_rows"),
        ({"a": Number(0, 1)}, {"unit": "a", "max_rows": 1}, "not declared"),
        ({"a": Number(0, 1, missing=True), "a_observed": Binary()}, {}, "a_observed"),
        ({"row_observed": Number(0, 1)}, {"unit": "a", "max_rows": 1}, "row_observed"),
    ],
)
def test_a_schema_that_contradicts_itself_is_refused(columns, settings, said):
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        Schema(columns, **settings)


@pytest.mark.parametrize(
    "column",
    [
        Count(18, 100, bins=(18, 30, 45, 65, 100)),
        Number(18, 100, bins=(18, 30, 45, 65, 100), dtype="int64"),
        Number(17.5, 100.5, bins=9, dtype="int64"),
        Number(18, 100, bins=(18, 18.4, 18.6, 100), dtype="Int64", missing=True),
    ],
)
def test_whole_numbers_come_back_whole_and_in_their_bins(column):
    schema = Schema.from_json(Schema({"age": column}).to_json())
    rng = np.random.default_rng(0)
    ages = pd.DataFrame({"age": pd.Series(rng.integers(18, 101, 5000), dtype=column.dtype)})
    codes = schema.codes(ages)
    back = schema.from_codes(codes, rng)
    assert back.dtypes.equals(ages.dtypes)
    assert (schema.codes(back) == codes).all()
    # 5000 rows miss one of the 83 ages with probability exp(-60) or less.
    assert set(back["age"]) == set(range(18, 101))


@pytest.mark.parametrize(
    ("column", "decimals"),
    [
        (Number(0, 1), 5),
        (Number(18, 100), 3),
        (Number(-1e6, 1e6), 0),
        (Number(0, 3, bins=(0, 0.1, 3)), 4),
        (Number(1e9, 1e9 + 1), 5),  # nearly all the digits of a float
        (Number(1e300 / 3, 1e300 / 2), None),
        (Number(0, 1e-300), None),
    ],
)
def test_numbers_that_are_drawn_have_few_decimals_and_lie_in_their_bins(column, decimals):
    schema = Schema({"x": column})
    codes = np.repeat(np.arange(column.size), 200)[:, None]
    drawn = schema.from_codes(codes, np.random.default_rng(0))
    assert (schema.codes(drawn) == codes).all() and drawn["x"].nunique() > 0.8 * len(codes)
    if decimals is not None:
        assert (drawn["x"] == drawn["x"].round(decimals)).all()


def test_a_schema_has_no_subclasses():
    """Their methods could mix rows, and a saved one would come back as a plain schema."""
    with pytest.raises(ConfigurationError, match="a function that returns a Schema"):
        type("Own", (Schema,), {})({"age": Number(0, 100)})
