"""Declarations: columns, bins, derived columns, structural zeros; as code and as JSON."""

import datetime
import json
import re

import numpy as np
import pandas as pd
import pytest

from pyro_dp import ConfigurationError, NotPrivateWarning, SchemaError, tabular
from pyro_dp.tabular import Binary, Category, Column, Count, Date, Number, Schema

ALL = [
    Number(0, 100),
    Number(-1.5, 2.5, bins=(-1.5, 0, 2.5), missing=True, dtype="Float64"),
    Number(0, 100, dtype="int64"),
    Count(0, 20),
    Count(-5, 1000, bins=7, missing=True),
    Count(0, 20, bins=(0, 1, 5, 20), missing=True, dtype="float64"),
    Category(("a b", "c"), other=True),
    Category((3, 1, 2), missing=True),
    Category((3, 1, 2), missing=True),
    Category(("lo", "hi"), ordered=True),
    Category(("a", "b"), missing=True, dtype="string"),
    Binary(),
    Binary((0, 1), missing=True),
    Binary(("m", "f"), dtype="object"),
    Date("2020-01-01", "2020-12-31", bins=4),
    Date("2020-01-01", "2020-12-31", bins=("2020-01-01", "2020-03-01", "2020-12-31"), missing=True),
    Date("2020-01-01", "2020-12-31", dtype="datetime64[ns, Europe/Berlin]", missing=True),
    Date("2020-01-01", "2020-12-31", dtype="date32[day][pyarrow]", missing=True),
]


@pytest.mark.parametrize("column", ALL, ids=repr)
def test_every_code_has_a_value_and_a_label(column):
    rng = np.random.default_rng(0)
    assert isinstance(column, Column)
    codes = np.repeat(np.arange(column.size), 50)
    values, observed = column.draw(codes, rng)
    assert np.array_equal(column.codes(values, observed), codes)
    assert len(set(column.code_labels)) == column.size
    assert observed.all() == (not column.missing)
    series = column.decode(values, observed)
    assert series.isna().tolist() == (~observed).tolist()
    again, seen = column.encode(series, "x")
    assert np.array_equal(again, np.rint(values) if column.dtype == "int64" else values)
    assert np.array_equal(seen, observed)
    if column.discrete:
        assert pd.Series(values[observed]).nunique() == column.size - column.missing


@pytest.mark.parametrize("column", ALL, ids=repr)
def test_columns_are_code_and_json(column):
    names = {name: getattr(tabular, name) for name in tabular.__all__}
    assert eval(repr(column), names) == column
    schema = Schema({"x": column})
    assert eval(repr(schema), names) == schema
    assert Schema.from_json(schema.to_json()) == schema


def test_draws_fill_their_bin():
    """Uniform: the mean of 4,000 is off by 6 standard deviations once in 5e8."""
    rng = np.random.default_rng(0)
    for column, middle in (
        (Number(0, 10, bins=(0, 4, 10)), 7.0),
        (Count(0, 10, bins=(0, 4, 10)), 7.0),
        (Date("2020-01-01", "2020-01-11", bins=("2020-01-01", "2020-01-05", "2020-01-11")), 7.0),
    ):
        values, _ = column.draw(np.ones(4000, dtype=int), rng)
        sd = values.std() / np.sqrt(4000)
        assert abs(values.mean() - middle) < 6 * sd
        assert values.min() >= 4 and values.max() <= 10


def test_labels_say_what_a_bin_holds():
    assert Number(0, 1, bins=2, missing=True).code_labels == ["[0, 0.5)", "[0.5, 1]", "missing"]
    assert Count(0, 20, bins=(0, 1, 5, 20)).code_labels == ["0", "1 to 4", "5 to 20"]
    assert Date("2020-01-01", "2020-01-04", bins=2).code_labels == [
        "2020-01-01 to 2020-01-02",
        "2020-01-03 to 2020-01-04",
    ]
    assert Category(("a",), other=True, missing=True).code_labels == ["a", "other", "missing"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Number(1, 0), "below"),
        (lambda: Number(0, float("nan")), "upper"),
        (lambda: Number(0, float("inf")), "upper"),
        (lambda: Number(0, 1, bins=0), "bins"),
        (lambda: Number(0, 1, bins=(0, 2)), "bins"),
        (lambda: Number(0, 1, bins=(0, 0.5, 0.5, 1)), "must increase"),
        (lambda: Number(0, 1, missing=1), "missing"),
        (lambda: Number(0, 1, dtype="str"), "dtype"),
        (lambda: Number(0, 1, dtype="nonsense"), "dtype"),
        (lambda: Number(0, 1, missing=True, dtype="int64"), "Int64"),
        (lambda: Number(0, 300, dtype="int8"), "dtype"),
        (lambda: Count(0.5, 2), "Number"),
        (lambda: Count(0, 300), "bins"),
        (lambda: Count(0, 3, bins=9), "fewer"),
        (lambda: Count(0, 9, bins=(0, 1.5, 9)), "whole"),
        (lambda: Count(0, 2**60, bins=3), "2**53"),
        (lambda: Count(0, 300, bins=3, dtype="uint8"), "dtype"),
        (lambda: Count(3, 3), "below"),
        (lambda: Date("2020", "2021-01-01"), "lower must be a date"),
        (lambda: Date("2021-01-01", "2020-01-01"), "before"),
        (lambda: Date("2020-01-01", "2020-01-03"), "fewer"),
        (lambda: Date("2020-01-01", "2020-12-31", dtype="float64"), "dtype"),
        (lambda: Category("abc"), "tuple"),
        (lambda: Category(()), "levels"),
        (lambda: Category(("a", 1)), "all text"),
        (lambda: Category(("a", "a")), "different"),
        (lambda: Category((["a"],)), "all text"),
        (lambda: Category(("a", "other"), other=True), "other"),
        (lambda: Category(("a",), other="no"), "other"),
        (lambda: Category(("a",), dtype="float64"), "dtype"),
        (lambda: Category((2**60,)), "2**53"),
        (lambda: Category((1, -(2**53))), "2**53"),
        (lambda: Binary((1, 2, 3)), "two"),
        (lambda: Binary(missing=True, dtype="bool"), "boolean"),
    ],
)
def test_wrong_declarations_are_refused(make, said):
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        make()


def test_dates_may_be_dates():
    date = datetime.date
    assert Date(date(2020, 1, 1), date(2020, 12, 31)) == Date("2020-01-01", "2020-12-31")


BASE = {
    "weight": Number(40, 150),
    "height": Number(1, 2),
    "visits": Count(0, 50, missing=True),
    "job": Category(("clerk", "nurse")),
    "smokes": Binary(missing=True),
    "born": Date("1950-01-01", "2000-12-31"),
    "moved": Date("1950-01-01", "2000-12-31"),
}


def people():
    return pd.DataFrame(
        {
            "weight": [50.0, 80.0],
            "height": [1.25, 2.0],
            "visits": pd.array([3, None], dtype="Int64"),
            "job": ["clerk", "nurse"],
            "smokes": pd.array([True, None], dtype="boolean"),
            "born": np.array(["1960-01-01", "1970-01-01"], dtype="M8[s]"),
            "moved": np.array(["1960-01-03", "1960-01-01"], dtype="M8[s]"),
        }
    )


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("weight / (height * height)", [32.0, 20.0]),
        ("weight // 30 + weight % 30 - -1", [22.0, 23.0]),
        ("visits * 2", [6, None]),
        ("weight >= 60 and job == 'nurse'", [False, True]),
        ("not weight < 60 or height < 1.5", [True, True]),
        ("where(smokes, 'yes', 'no or missing')", ["yes", "no or missing"]),
        ("where(weight != 50, weight, 0)", [0.0, 80.0]),
        ("minimum(weight, 60) + maximum(height, 2)", [52.0, 62.0]),
        ("floor(log(exp(abs(height))))", [1.0, 2.0]),
        ("born <= moved", [True, False]),
        ("visits > 1 and smokes", [True, None]),
    ],
)
def test_derived_columns(expression, wanted):
    schema = Schema(BASE, derived={"new": expression, "newer": "new == new"})
    back = schema.decode(schema.encode(people()))
    assert list(back) == [*BASE, "new", "newer"]
    found = [None if pd.isna(x) else x for x in back["new"]]
    assert found == wanted
    drawn = schema.from_codes(schema.codes(people()), np.random.default_rng(0))
    assert list(drawn) == [*BASE, "new", "newer"]


@pytest.mark.parametrize(
    ("derived", "said"),
    [
        ({"new": "weight +"}, "not an expression"),
        ({"new": "weight.values"}, "not an expression"),
        ({"new": "__import__('os').system('true')"}, "not an expression"),
        ({"new": "weight[0]"}, "not an expression"),
        ({"new": "(lambda: weight)()"}, "not an expression"),
        ({"new": "[x for x in weight]"}, "not an expression"),
        ({"new": "where(weight, *height)"}, "not an expression"),
        ({"new": "abs(weight, out=height)"}, "not an expression"),
        ({"new": "1 < weight < 2"}, "not an expression"),
        ({"new": "weight ** weight"}, "not an expression"),
        ({"new": "(" * 900 + "weight" + ")" * 900}, "not an expression"),
        ({"new": "weight + " * 500 + "1"}, "2000"),
        ({"new": "-" * 1900 + "weight"}, "not an expression"),
        ({"new": 3}, "text"),
        ({"new": "1 + 1"}, "must use a column"),
        ({"new": "weigth * 2"}, "'weigth'"),
        ({"new": "newer", "newer": "weight"}, "'newer'"),
        ({"weight": "height"}, "new column"),
        ({"new": "job * height"}, "dtypes"),
        ({"new": "where(weight)"}, "dtypes"),
        ({"new": "log(weight, height)"}, "not an expression"),  # numpy would write into height
        (["new"], "dictionary"),
    ],
)
def test_what_is_no_expression_is_refused(derived, said):
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        Schema(BASE, derived=derived)


RULES = [
    {"job": ["nurse"], "smokes": [True, None]},
    {"weight": (40, 95), "height": (1.5, 2.0), "job": ["clerk"]},
    {"born": ("1950-01-01", "1975-06-30"), "moved": ("1990-01-01", "2000-12-31")},
]


def test_structural_zeros():
    schema = Schema(BASE, impossible=RULES)
    assert schema.possible(people()).tolist() == [True, False]  # a nurse, of whom it is missing
    rows = pd.concat([people()] * 3, ignore_index=True).iloc[[0, 0, 0, 0]]
    rows = rows.assign(weight=[95.0, 95.1, 95.0, 40.0], height=[1.5, 1.5, 1.49, 1.99])
    rows["moved"] = people()["moved"][0]
    assert schema.possible(rows).tolist() == [False, True, True, False]
    assert schema.possible(schema.encode(rows)).tolist() == [False, True, True, False]
    # By codes: impossible only where all values of the bins are.
    assert schema.possible(schema.codes(rows)).tolist() == [True, True, True, False]
    zeros = schema.zeros
    assert zeros[0]["smokes"].tolist() == [False, True, True]
    assert zeros[1]["weight"].tolist() == [True] * 10 + [False] * 10
    assert zeros[2]["born"].sum() == 9


def test_values_of_possible_codes_are_possible():
    columns = {"age": Number(0, 100, bins=4), "visits": Count(0, 99, bins=4)}
    schema = Schema(columns, impossible=[{"age": (0, 20), "visits": (3, 24)}])
    codes = np.zeros((500, 2), dtype=int)
    assert schema.possible(codes).all()
    drawn = schema.from_codes(codes, np.random.default_rng(0))
    assert schema.possible(drawn).all() and np.array_equal(schema.codes(drawn), codes)
    free = Schema(columns).from_codes(codes, np.random.default_rng(0))
    assert not schema.possible(free).all()
    none = Schema(columns, impossible=[{"age": (0, 100)}])
    assert not none.possible(codes).any() and len(none.from_codes(codes, np.random.default_rng(0)))


def test_empty_slots_are_not_possible():
    schema = Schema(BASE, unit="id", max_rows=2, impossible=RULES)
    data = people().assign(id=[1, 2])
    for form in (data, schema.encode(data), schema.codes(data)):
        assert schema.possible(form).tolist() == [[True, False], [False, False]]


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"job": ["nurse"]}, "list"),
        ([[]], "impossible[0]"),
        ([{}], "impossible[0]"),
        ([{"Job": ["nurse"]}], "'Job'"),
        ([{"job": ["Nurse"]}], "levels"),
        ([{"job": "nurse"}], "levels"),
        ([{"job": [None]}], "levels"),
        ([{"job": 3}], "'job'"),
        ([{"weight": (3,)}], "(low, high)"),
        ([{"weight": (3, 2)}], "(low, high)"),
        ([{"weight": 3}], "'weight'"),
        ([{"weight": ("a", "b")}], "number"),
        ([{"born": (1, 2)}], "date"),
    ],
)
def test_what_is_no_rule_is_refused(rules, said):
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        Schema(BASE, impossible=rules)


FULL = Schema(
    BASE,
    unit="id",
    max_rows=5,
    constant=["job"],
    derived={"bmi": "weight / height / height"},
    impossible=RULES,
)


def test_there_and_back_as_code_json_and_file(tmp_path):
    names = {name: getattr(tabular, name) for name in tabular.__all__}
    for again in (eval(repr(FULL), names), Schema.from_json(FULL.to_json())):
        assert again == FULL and again.names == FULL.names and again.impossible == FULL.impossible
    FULL.save(tmp_path / "schema.json")
    assert Schema.load(tmp_path / "schema.json") == FULL
    assert FULL != Schema(BASE) and FULL != 3 and "constant" not in repr(Schema(BASE))


def changed(**other):
    return json.dumps(json.loads(FULL.to_json()) | other)


NUMBER = {"name": "a", "kind": "Number", "lower": 0, "upper": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "JSON"),
        (b"\xff", "JSON"),
        ("[" * 100_000, "JSON"),
        ("[]", "'schema'"),
        ("{}", "'schema'"),
        (changed(schema=2), "version"),
        (changed(colour="red"), "other entries"),
        (changed(columns={}), "other entries"),
        (changed(columns=[]), "needs at least one column"),
        (changed(columns=[3]), "'name'"),
        (changed(columns=[{"name": "a"}]), "'kind'"),
        (changed(columns=[NUMBER | {"kind": "Object"}]), "kind"),
        (changed(columns=[NUMBER | {"kind": []}]), "kind"),
        (changed(columns=[NUMBER | {"name": []}]), "kind"),
        (changed(columns=[NUMBER | {"levels": []}]), "'a'"),
        (changed(columns=[NUMBER | {"lower": 3}]), "Column 'a': lower"),
        (changed(columns=[NUMBER | {"dtype": 3}]), "'a'"),
        (changed(columns=[NUMBER, NUMBER]), "twice"),
        (changed(derived={"a": "__import__('os')"}), "not an expression"),
        (changed(derived=[]), "dictionary"),
        (changed(impossible=3), "impossible"),
        (changed(unit=3), "unit"),
        (changed(max_rows="5"), "max_rows"),
    ],
)
def test_other_json_is_refused(text, said):
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        Schema.from_json(text)


def test_a_draft_of_public_data():
    frame = people().assign(
        income=[1234.5, 98765.4],
        flag=[0, 1],
        rank=pd.Categorical(["lo", "hi"], categories=["lo", "hi"], ordered=True),
        town=pd.Series(["A", np.nan], dtype=object),
        seen=[True, False],
        constant=[7, 7],
        zone=pd.to_datetime(["2020-01-01", "2020-06-01"]).tz_localize("UTC"),
    )
    with pytest.warns(NotPrivateWarning, match="public"):
        schema = Schema.suggest(frame)
    kinds = [type(column).__name__ for column in schema.columns.values()]
    assert kinds[:7] == ["Count", "Number", "Count", "Category", "Binary", "Date", "Date"]
    assert kinds[7:] == ["Number", "Binary", "Category", "Category", "Binary", "Count", "Date"]
    assert schema.columns["income"] == Number(1000, 99000)
    assert not schema.columns["town"].other
    back = schema.decode(schema.encode(frame))
    pd.testing.assert_frame_equal(back, frame, check_categorical=False)
    names = {name: getattr(tabular, name) for name in tabular.__all__}
    assert eval(str(schema), names) == schema


def test_what_no_draft_can_hold_is_named():
    fractions, extreme = pd.Categorical([0.5, 1.5]), [-1e300, 1e300]
    for column in ([None, None], pd.to_timedelta([1, 2]), [[1], [2]], fractions, extreme):
        with pytest.warns(NotPrivateWarning), pytest.raises(SchemaError, match="'odd'"):
            Schema.suggest(pd.DataFrame({"odd": column}))
    with pytest.raises(SchemaError, match="different names"):
        Schema.suggest(pd.DataFrame([[1, 2]], columns=["a", "a"]))
    with pytest.raises(SchemaError, match="lacks column 'id'"):
        Schema.suggest(people(), unit="id")
    with pytest.warns(NotPrivateWarning):
        more = pd.DataFrame({"few": ["a", "other"], "many": ["b", "b"]})
        many = pd.DataFrame({"many": [f"{place:02}" for place in range(60)]})
        few, cut = Schema.suggest(more).columns, Schema.suggest(many).columns["many"]
    assert few["few"].levels == ("a",) and few["few"].other
    assert few["many"].levels == ("b",) and not few["many"].other
    assert cut.other and len(cut.levels) == 50  # the others have no level of their own
    with pytest.warns(NotPrivateWarning):
        drafted = Schema.suggest(people().assign(id=[1, 2]), unit="id", max_rows=3)
    assert drafted.unit == "id" and "id" not in drafted.names
