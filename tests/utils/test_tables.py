"""What notebooks show: texts stay texts, tables have captions, colours are those of the theme."""

from pyro_dp.utils.tables import facts, remarks, table

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
