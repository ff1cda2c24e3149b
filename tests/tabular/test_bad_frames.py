"""Frames as they come: a typed error that names the column and shows no value, or what is written
down in docs/schema.md."""

import decimal
import re
import traceback

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from pyro_dp import SchemaError
from pyro_dp.tabular import Binary, Category, Count, Date, Number, Schema

SECRET = "Jane S3cret"  # in no text of an error
NUMBER = 987654321
SCHEMA = Schema(
    {
        "age": Number(0, 100),
        "visits": Count(0, 50),
        "ill": Binary(),
        "job": Category(("clerk", "nurse")),
        "town": Category(("A", "B"), other=True, missing=True),
        "born": Date("1900-01-01", "2020-12-31"),
        "income": Number(0, 1e6, missing=True),
    },
    unit="person",
    max_rows=2,
)


def frame(**other):
    found = {
        "person": ["a", "b", "a"],
        "age": [1.0, 2.0, 3.0],
        "visits": [1, 2, 3],
        "ill": [True, False, True],
        "job": ["clerk", "nurse", "clerk"],
        "town": ["A", "B", "A"],
        "born": pd.to_datetime(["1990-01-01", "1991-01-01", "1992-01-01"]),
        "income": [1.0, 2.0, 3.0],
    }
    return pd.DataFrame(found | other)


def objects(*values):
    return pd.Series(values, dtype=object)


class Unfriendly:
    """A class of the user's own, whose text is a value."""

    def __repr__(self):
        return SECRET

    def __eq__(self, other):
        raise ValueError(SECRET)

    def __hash__(self):
        raise TypeError(SECRET)


class Unsorted:
    def __hash__(self):
        raise ValueError(SECRET)


def twice():
    one = frame()
    return pd.concat([one, one[["age"]]], axis=1)


def headless():
    """A file that was read without its head: the first person became names of columns."""
    return frame().rename(columns={"job": SECRET, "town": NUMBER})


def stacked():
    return pd.concat({"a": frame()}, axis=1)


DAYS = ["1990-01-01", "1991-01-01", "1992-01-01"]
REFUSED = {
    "no frame": (lambda: frame().to_dict(), "DataFrame"),
    "a series": (lambda: frame()["age"], "DataFrame"),
    "an array": (lambda: frame().to_numpy(), "DataFrame"),
    "empty": (lambda: frame().iloc[:0], "no rows"),
    "nothing at all": (lambda: pd.DataFrame(), "'age'"),
    "a column lacks": (lambda: frame().drop(columns="visits"), "'visits'"),
    "the unit lacks": (lambda: frame().drop(columns="person"), "'person'"),
    "unknown column": (lambda: frame(**{SECRET: 1}), "position 8"),
    "many unknown columns": (lambda: frame(**{f"{SECRET}{i}": 1 for i in range(20)}), "8, 9"),
    "name in other letters": (lambda: frame().rename(columns={"age": "Age"}), "'age'"),
    "read without its head": (headless, "'job', 'town'"),
    "columns of two levels": (stacked, "'person'"),
    "duplicate names": (twice, "'age'"),
    "numbers as text": (lambda: frame(age=["1", "2", SECRET]), "pd.to_numeric(df['age']"),
    "numbers as objects": (lambda: frame(age=objects(1, None, NUMBER)), "'age'"),
    "huge integers": (lambda: frame(visits=objects(1, 2, 10**30)), "'visits'"),
    "decimals as objects": (lambda: frame(age=objects(*map(decimal.Decimal, "123"))), "'age'"),
    "booleans for numbers": (lambda: frame(age=[True, False, True]), "Binary"),
    "complex numbers": (lambda: frame(age=[1j, 2j, 3j]), "'age'"),
    "categories for numbers": (
        lambda: frame(age=pd.Categorical([1, 2, NUMBER])),
        "df['age'].astype",
    ),
    "dates for numbers": (lambda: frame(age=pd.to_datetime(DAYS)), "Date"),
    "time spans": (
        lambda: frame(age=pd.to_timedelta([1, 2, 3], unit="D")),
        "df['age'].dt.total_seconds()",
    ),
    "intervals": (lambda: frame(age=pd.interval_range(0, 3)), "'age'"),
    "missing number": (lambda: frame(age=[1.0, np.nan, 3.0]), "'age' has missing"),
    "all missing": (lambda: frame(age=[np.nan] * 3), "'age' has missing"),
    "missing count": (lambda: frame(visits=pd.array([1, None, 3], dtype="Int64")), "'visits'"),
    "missing level": (lambda: frame(job=["clerk", None, "nurse"]), "'job' has missing"),
    "all levels missing": (lambda: frame(job=objects(None, None, None)), "'job' has missing"),
    "unknown level": (lambda: frame(job=["clerk", SECRET, "nurse"]), "'job' has values"),
    "missing date": (lambda: frame(born=pd.to_datetime([*DAYS[:2], None])), "'born'"),
    "dates as text": (lambda: frame(born=DAYS), "df['born'].astype(str).str[:10]"),
    "dates as objects": (lambda: frame(born=pd.Series(pd.to_datetime(DAYS)).dt.date), "'born'"),
    "periods": (lambda: frame(born=pd.period_range("2020", periods=3, freq="D")), "'born'"),
    "integers for booleans": (lambda: frame(ill=[0, 1, 1]), "levels=(0, 1)"),
    "text for booleans": (lambda: frame(ill=["yes", "no", SECRET]), "'ill'"),
    "text objects for booleans": (lambda: frame(ill=objects("yes", "no", SECRET)), "'ill'"),
    "categories of numbers for text": (lambda: frame(job=pd.Categorical([1, 2, NUMBER])), "'job'"),
    "an integer among booleans": (lambda: frame(ill=objects(True, 1, False)), "'ill' has values"),
    "numbers for text": (lambda: frame(job=[1, 2, NUMBER]), "'job'"),
    "objects of no level's type": (lambda: frame(job=objects(1, 2, NUMBER)), "'job'"),
    "lists": (lambda: frame(job=objects(["clerk"], [SECRET], ["nurse"])), "'job'"),
    "objects of one's own": (lambda: frame(job=objects(*(Unfriendly(),) * 3)), "'job'"),
    "unit is missing": (lambda: frame(person=["a", None, "b"]), "'person'"),
    "unit is NaN": (lambda: frame(person=[1.0, np.nan, 2.0]), "'person'"),
    "unit of mixed types": (lambda: frame(person=objects("1", 1, "2")), "'person'"),
    "unit of lists": (lambda: frame(person=objects(["a"], [SECRET], ["b"])), "'person'"),
    "unit of one's own": (lambda: frame(person=objects(*(Unfriendly(),) * 3)), "'person'"),
    "unit that pandas fails on": (
        lambda: frame(person=objects(*(Unsorted(),) * 3)),
        "pandas raised ValueError",
    ),
    "unit of categories that mix": (
        lambda: frame(person=pd.Categorical(["1", 1, "2"], categories=["1", 1, "2"])),
        "'person'",
    ),
}


@pytest.mark.parametrize("days", [pd.Series(pd.to_datetime(DAYS)).dt.date, pd.Series(DAYS)])
def test_the_advice_for_dates_works(days):
    df = frame(born=days)
    with pytest.raises(SchemaError) as error:
        SCHEMA.encode(df)
    advice = re.search(r"pass (.*)\.$", str(error.value))[1]
    SCHEMA.encode(df.assign(born=eval(advice, {"pd": pd, "df": df})))


@pytest.mark.parametrize("case", REFUSED)
def test_a_typed_error_names_the_column(case):
    make, named = REFUSED[case]
    bad = make()
    with pytest.raises(SchemaError) as error:
        SCHEMA.encode(bad)
    assert named in str(error.value)
    shown = "".join(traceback.format_exception(error.value))
    for value in ("S3cret", str(NUMBER), "10**30", str(10**30), "1990"):
        assert value not in shown, value
    with pytest.raises(SchemaError) as again:
        SCHEMA.codes(bad)
    assert str(again.value) == str(error.value) or not isinstance(bad, pd.DataFrame)


DOCUMENTED = {
    "out of bounds": ("age", [-5.0, 1e308, 50.0], [0.0, 100.0, 50.0]),
    "infinities": ("age", [-np.inf, np.inf, 50.0], [0.0, 100.0, 50.0]),
    "half precision": ("age", np.array([1, 2, 3], dtype=np.float16), [1.0, 2.0, 3.0]),
    "integers for numbers": ("age", [1, 2, 3], [1.0, 2.0, 3.0]),
    "integers beyond floats": ("age", [2**63 - 1, -(2**63), 2], [100.0, 0.0, 2.0]),
    "unsigned integers beyond int64": (
        "visits",
        np.array([2**64 - 1, 2, 3], dtype=np.uint64),
        [50, 2, 3],
    ),
    "counts as floats": ("visits", [1.0, 2.4, 2.6], [1, 2, 3]),
    "counts out of bounds": ("visits", [-7, 10**18, 3], [0, 50, 3]),
    "counts of infinities": ("visits", [np.inf, -np.inf, 3.0], [50, 0, 3]),
    "nullable": ("visits", pd.array([1, 2, 3], dtype="UInt8"), [1, 2, 3]),
    "arrow integers": ("visits", pd.Series([1, 2, 3]).astype("int64[pyarrow]"), [1, 2, 3]),
    "arrow decimals": (
        "age",
        pd.Series([1, 2, 3]).astype(pd.ArrowDtype(pa.decimal128(30, 2))),
        [1.0, 2.0, 3.0],
    ),
    "sparse": ("visits", pd.arrays.SparseArray([0, 0, 3]), [0, 0, 3]),
    "all missing, as declared": ("income", [np.nan] * 3, [0.0, 0.0, 0.0]),
    "missing in a nullable column": ("income", pd.array([1, None, 3], dtype="Int64"), [1, 0, 3]),
    "boolean objects": ("ill", objects(True, False, np.True_), [1, 0, 1]),
    "arrow booleans": ("ill", pd.Series([True, False, True]).astype("bool[pyarrow]"), [1, 0, 1]),
    "unknown level": ("town", ["A", SECRET, "B"], [0, 2, 1]),
    "spaces count": ("town", ["A", " A", "A "], [0, 2, 2]),
    "mixed types": ("town", objects("A", 1, None), [0, 2, 0]),
    "categories": ("town", pd.Categorical(["B", "A", "C"]), [1, 0, 2]),
    "arrow text": ("town", pd.Series(["A", None, "x"]).astype("string[pyarrow]"), [0, 0, 2]),
    "arrow dictionary": (
        "town",
        pd.Series(["A", None, "x"]).astype(pd.ArrowDtype(pa.dictionary(pa.int32(), pa.string()))),
        [0, 0, 2],
    ),
    "time of day": ("born", pd.to_datetime(["1900-01-02 23:59"] * 3), [1.0] * 3),
    "time zone, the date on its wall": (
        "born",
        pd.to_datetime(["1950-01-01 00:30"] * 3).tz_localize("Asia/Tokyo"),
        [18262.0] * 3,
    ),
    "dates out of bounds": (
        "born",
        np.array(["0001-01-01", "9999-12-31", "1900-01-01"], dtype="M8[s]"),
        [0.0, 44194.0, 0.0],
    ),
    "arrow dates": (
        "born",
        pd.Series(pd.to_datetime(["1900-01-03"] * 3)).astype("date32[day][pyarrow]"),
        [2.0] * 3,
    ),
    "arrow timestamps": (
        "born",
        pd.Series(pd.to_datetime(["1900-01-03"] * 3)).astype("timestamp[ns, UTC][pyarrow]"),
        [2.0] * 3,
    ),
}


@pytest.mark.parametrize("case", DOCUMENTED)
def test_what_is_taken(case):
    name, values, wanted = DOCUMENTED[case]
    encoded = SCHEMA.encode(frame(**{name: values}, person=["a", "b", "c"]))
    assert encoded[name][:, 0].tolist() == wanted
    if name in ("income", "town"):
        there = (~pd.isna(pd.Series(values))).tolist()
        assert encoded[f"{name}_observed"][:, 0].tolist() == there
    back = SCHEMA.decode(encoded)
    assert back[name].dtype == SCHEMA.decode(SCHEMA.encode(frame()))[name].dtype


def test_one_row():
    encoded = SCHEMA.encode(frame().iloc[:1])
    assert encoded.units == 1 and encoded["row_observed"].tolist() == [[True, False]]
    assert len(SCHEMA.decode(encoded)) == 1


def test_derived_columns_of_a_frame_are_not_read():
    schema = Schema({"age": Number(0, 100)}, derived={"months": "age * 12"})
    one = schema.encode(pd.DataFrame({"age": [1.0], "months": [SECRET]}))
    assert torch.equal(one["age"], torch.tensor([1.0]))
    assert schema.decode(one)["months"].tolist() == [12.0]


def test_a_frame_is_not_changed():
    given = frame()
    SCHEMA.encode(given)
    pd.testing.assert_frame_equal(given, frame())
