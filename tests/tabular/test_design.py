"""Formulae: rows of a matrix follow from the row and the schema, whatever the other rows are."""

import numpy as np
import pytest

from pyro_dp import ConfigurationError
from pyro_dp.tabular import Binary, Category, Count, Date, Number
from pyro_dp.tabular.design import Design, Formula

COLUMNS = {
    "visits": Count(0, 50),
    "age": Number(20, 80),
    "year": Number(2000, 2010),
    "chronic": Binary(),
    "income": Category(("low", "mid", "high"), other=True),
    "since": Date("2020-01-01", "2020-12-31"),
    "net worth": Number(-5, 5),
}


def design(right_side):
    return Design(Formula.read(f"visits ~ {right_side}", COLUMNS).terms, COLUMNS)


def rows(count=50, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "age": rng.uniform(20, 80, count),
        "year": rng.uniform(2000, 2010, count),
        "chronic": rng.integers(2, size=count),
        "income": rng.integers(4, size=count),
        "since": rng.integers(366, size=count).astype(float),
        "net worth": rng.uniform(-5, 5, count),
    }


FORMULAE = [
    "age + chronic * income",
    "chronic * year + `net worth`",
    "chronic + chronic:year",
    "0 + income:age",
    "log(age) + I(age ** 2) + C(income, contr.sum) * since",
    "C(income, contr.treatment(base='high')) + minimum(age, 65) + I((age > 40) * year)",
    "(age + year + chronic) ** 2 - age:year",
    "1",
]


@pytest.mark.parametrize("right_side", FORMULAE)
def test_a_row_depends_on_itself(right_side):
    """Alone, beside others, and in a frame that lacks levels, a row is the same."""
    found, all_rows = design(right_side), rows()
    together = found.matrix(all_rows)
    assert together.shape == (50, len(found.names)) == (50, len(set(found.names)))
    for place in range(5):
        alone = found.matrix({name: each[[place]] for name, each in all_rows.items()})
        np.testing.assert_array_equal(alone, together[[place]])


@pytest.mark.parametrize("right_side", FORMULAE)
def test_the_way_back(right_side):
    """The model's sum is that of the user's columns."""
    from formulaic import model_matrix

    found, drawn = design(right_side), rows(200)
    b = np.random.default_rng(1).normal(size=len(found.names))
    raw = dict.fromkeys(found.scaled, (0.0, 1.0))
    theirs = found._matrix(drawn, raw)
    if right_side != "1" and "(" not in right_side:
        theirs = model_matrix(right_side, found._frame(drawn, raw)).to_numpy()
    np.testing.assert_allclose(theirs @ (found.to_user @ b), found.matrix(drawn) @ b, atol=1e-6)


def test_numbers_are_scaled_by_their_bounds():
    found = design("age + chronic * year")
    assert found.scaled == {"age": (50.0, 30.0), "year": (2005.0, 5.0)}
    assert np.abs(found.matrix(rows(1000))).max() <= 1
    # Without the terms that an interaction holds there is nothing that would take a centre up.
    assert design("chronic + chronic:year - 1").scaled["year"][0] in (0.0, 2005.0)
    assert design("0 + income:age").scaled == {"age": (0.0, 80.0)}


def test_a_sum_may_be_long():
    """A formula that 0.3 saved has no limit of depth, as derived columns have."""
    summed = design(f"I({' + '.join(250 * ['age'])})").matrix(rows())
    np.testing.assert_allclose(summed, design("age").matrix(rows()), atol=1e-12)


def test_levels_of_the_schema():
    names = design("income").names
    assert names == ["Intercept", "income[T.mid]", "income[T.high]", "income[T.other]"]
    assert design("C(income, contr.sum)").names[1:] == [
        f"C(income, contr.sum)[S.{level}]" for level in ("low", "mid", "high")
    ]


@pytest.mark.parametrize(
    ("formula", "said"),
    [
        ("visits ~ center(age)", r"center\(\).*Write the column itself"),
        ("visits ~ scale(age) + chronic", r"scale\(\)"),
        ("visits ~ poly(age, 2)", r"poly\(\).*age \*\* 2"),
        ("visits ~ bs(age, df=4)", r"bs\(\).*knots"),
        ("visits ~ cr(age, df=4)", r"cr\(\).*knots"),
        ("visits ~ lag(age)", r"lag\(\).*another row"),
        ("visits ~ hashed(income)", r"hashed\(\).*declare the levels"),
        ("visits ~ I(age - age.mean())", r"mean\(\)"),
        ("visits ~ np.mean(age)", r"mean\(\)"),
        ("visits ~ np.log(age)", r"Write log\(\.\.\.\)"),
        ("visits ~ I(age.values)", "computed row by row"),
        ("visits ~ I([a for a in age])", "computed row by row"),
        ("visits ~ I(age @ age / 1e6 + age)", "computed row by row"),
        ("visits ~ I(age + (40 in age))", "computed row by row"),
        ("visits ~ I(20 < age < 40)", "computed row by row"),
        ("visits ~ wealth", "'wealth', which is not in the schema"),
        ("visits ~ log(wealth)", "'wealth', which is not in the schema"),
        ("wealth ~ age", "'wealth', which is not in the schema"),
        ("log(visits) ~ age", r"'log\(visits\)' must be a column"),
        ("visits ~ I(age + income)", "computes with column 'income'"),
        ("visits ~ C(age)", r"'age' has numbers"),
        ("visits ~ C(income, foo)", "Contrasts are"),
        ("visits ~ log(`net worth`)", "whose names are Python names"),
        ("visits ~ log(year - 2005)", "not finite"),
        ("visits ~ age + I(2 * age)", "linear combinations"),
        ("visits ~ income + C(income, contr.sum)", "linear combinations"),
        ("visits ~ I(age - age)", "same for all rows"),
        ("visits ~ age + (1 | chronic)", "group='column'"),
        ("visits ~ age | chronic", "group='column'"),
        ("visits ~ factor(income)", "write the name of the column"),
        ("visits + age ~ chronic", "one outcome"),
        ("~ age", "one outcome"),
        ("visits ~ .", "Name the columns"),
        ("visits ~ age +", "cannot be read"),
        ("visits ~ visits", "both sides"),
        ("visits ~ 2:age", r"I\(\.\.\.\) only"),
        ("visits ~ I(age > 'x')", "numbers only"),
        ("visits ~ maximum(age)", "cannot be computed"),
        ("visits ~ maximum(age, 30, year)", r"Write maximum\(\.\.\., \.\.\.\)"),
        ("visits ~ log(age, year)", r"Write log\(\.\.\.\)"),
        ("visits ~ I(~age)", "cannot be computed"),
        ("visits ~ C(income, levels=['low', 'high'])", "the schema declares the levels"),
        ("visits ~ 0", "needs a term"),
        (7, "must be text"),
    ],
)
def test_refused(formula, said):
    with pytest.raises(ConfigurationError, match=said):
        Design(Formula.read(formula, COLUMNS).terms, COLUMNS)


@pytest.mark.parametrize("right_side", ["I(income > 0)", "I(income == 0)", "I(share >= 1)"])
def test_a_number_that_differs_only_at_a_bound(right_side):
    columns = {"visits": Count(0, 50), "income": Number(0, 1e6), "share": Number(0, 1)}
    found = Design(Formula.read(f"visits ~ {right_side}", columns).terms, columns)
    assert np.isfinite(found.to_user).all()


def test_a_bar_within_an_expression_is_no_grouped_term():
    found = design("I((age > 65) | (year < 2002))").matrix({k: rows()[k] for k in ("age", "year")})
    assert set(np.unique(found[:, 1])) == {-1.0, 1.0}


def test_a_number_that_no_public_row_tells():
    columns = {"visits": Count(0, 50), "income": Number(0, 1e6)}
    with pytest.raises(ConfigurationError, match="linear combinations"):
        Design((("I((income > 0) * (income < 300))",),), columns)


def test_a_number_that_is_not_finite_between_the_points_of_the_grid():
    """A row there has the end of the range that the schema implies."""
    found = design("I(1 / (age - 20.007))")
    made = found.matrix({"age": np.array([20.007, 20.0070001, 50.0])})
    assert np.isfinite(made).all() and np.abs(made).max() <= 1
