"""Displays in notebooks: texts stay texts, tables have captions, colours are the theme's.

A column of numbers has one number of decimals.
"""

import math

import pytest

from pyro_dp.utils.display import numbers
from pyro_dp.utils.markup import Displayed, Facts, Table

BAD = "<script>alert('x')</script> & \"y\""
SAFE = "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; &#34;y&#34;"


class Both(Displayed):
    def _blocks(self):
        table = Table(("", "a", "b"), [("x", "1", "22"), ("y", "3", "4")], "c")
        return [table, Facts([("x", "1")], "f"), "done"]


def test_texts_are_escaped(monkeypatch):
    blocks = [Table((BAD, BAD), [(BAD, BAD)], BAD), Facts([(BAD, BAD)], BAD), BAD]
    monkeypatch.setattr(Both, "_blocks", lambda self: blocks)
    whole = Both()._repr_html_()
    assert whole.count(SAFE) == 9 and "<script" not in whole


def test_text_and_notebooks_say_the_same():
    assert repr(Both()).splitlines() == ["   a   b", "x  1  22", "y  3   4", "f", "  x: 1", "done"]
    found = Both()._repr_html_()
    assert ">c</caption>" in found and ">f</caption>" in found and found.endswith("<p>done</p>")
    assert found.count('scope="col"') == 2 and found.count('scope="row"') == 3
    assert "<th></th>" not in found and found.count("<thead>") == 1


def test_colours_are_those_of_the_theme():
    whole = Both()._repr_html_()
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
