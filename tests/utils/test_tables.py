"""Displays in notebooks: texts stay texts, tables have captions, colours are the theme's.

A column of numbers has one number of decimals.
"""

import math

import pytest

from pyro_dp.utils.display import facts, numbers, remarks, table

BAD = "<script>alert('x')</script> & \"y\""
SAFE = "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; &quot;y&quot;"


def test_texts_are_escaped():
    whole = table(BAD, (BAD, BAD), [(BAD, BAD)]) + facts(BAD, [(BAD, BAD)]) + remarks([BAD])
    assert whole.count(SAFE) == 9 and "<script" not in whole


def test_tables_can_be_heard():
    found = table("c", ("", "a", "b"), [("x", "1", "2"), ("y", "3", "4")])
    assert "<caption" in found and ">c</caption>" in found
    assert found.count('scope="col"') == 2 and found.count('scope="row"') == 2
    assert "<th></th>" not in found
    assert facts("c", [("x", "1")]).count('scope="row"') == 1
    assert table("nothing", ("a", "b"), []).count("<tr>") == 0


def test_colours_are_those_of_the_theme():
    whole = table("c", ("a", "b"), [("x", "1")]) + facts("c", [("x", "1")])
    assert set(whole.split("color:")[1:]) and all(
        each.startswith("inherit") for each in whole.split("color:")[1:]
    )
    assert "background" not in whole


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.2, 0.25], ["0.200", "0.250"]),
        ([0.245, 0.0586, -0.375], ["0.2450", "0.0586", "-0.3750"]),
        ([0.0314, 0.000556], ["0.031400", "0.000556"]),
        ([20_480.0, 12.5, -3.04], ["20480.0", "12.5", "-3.0"]),
        ([9.999, -0.0, math.inf, math.nan], ["10.00", "0.00", "inf", "nan"]),
        ([0.0, 0.0], ["0.00", "0.00"]),
        ([], []),
    ],
)
def test_a_column_has_one_number_of_decimals(values, texts):
    assert numbers(values) == texts


def test_magnitudes_that_differ_much_have_digits_of_their_own():
    assert numbers([250.0, 0.0002, 0.0]) == ["250", "0.000200", "0.00"]
    assert numbers([3e-9, 2e8]) == ["3.00e-09", "2.00e+08"]
