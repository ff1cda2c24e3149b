"""The rules of docs/writing.md find its bad sentences."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("proselint")
sys.path.insert(0, str(Path(__file__).parents[1]))
import prose

PAIRS = re.findall(
    r"^# (.*)\n- (.*)\n\+ (.*)$", (prose.ROOT / "docs/writing.md").read_text(), re.MULTILINE
)
FRONT = ("README.md", "docs/index.md")


def rules(text, tmp_path, name="page.md"):
    path = tmp_path / name
    path.write_text(text)
    return {found.rule for found in prose.violations(path)}


@pytest.mark.long
def test_each_pair_is_judged_rightly(tmp_path):
    assert len(PAIRS) == 12
    for rule, bad, good in PAIRS:
        found = rules(bad, tmp_path)
        assert rule in found or (rule == "long sentence" and any("words" in one for one in found))
        assert not rules(good, tmp_path)


def test_code_is_no_prose(tmp_path):
    assert not rules("Run it:\n\n```\nno x is no y, such that z of which a\n```\n", tmp_path)
    assert not rules("`such that`, $x \\text{ of which}$", tmp_path)
    doctest = '"""It fails.\n\n>>> f()\nTraceback (most recent call last):\n    ...\nA: b: c\n\n'
    assert not rules(f'{doctest}It ends."""', tmp_path, name="code.py")
    assert rules(f'{doctest}A: b: c."""', tmp_path, name="code.py") == {"chain of colons"}
    source = 'def f():\n    """Do it.\n\n    Example::\n\n        such that\n    """\n'
    assert not rules(source, tmp_path, "module.py")
    assert rules("# such that\n" + source, tmp_path, "module.py") == {"such that"}


def test_texts_of_the_package_are_read(tmp_path, monkeypatch):
    """An error, in parts and with a value in it, at the line where it begins."""
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "pyro_dp").mkdir()
    path = tmp_path / "pyro_dp" / "module.py"
    path.write_text('\n\nERROR = (\n    f"Site {name} must be "\n    "such that it sums."\n)\n')
    [found] = prose.violations(path)
    assert found == (4, "such that", "Site Code must be such that it sums.")


def test_a_violation_fails(tmp_path, monkeypatch, capsys):
    """The whole project is `make lint`'s."""
    page = tmp_path / "page.md"
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["prose.py"])
    page.write_text("It sums.\n")
    assert prose.main() == 0
    page.write_text("It is such that it sums.\n")
    assert prose.main() == 1
    assert "page.md:1: such that: It is such that it sums." in capsys.readouterr().out


@pytest.mark.parametrize("name", FRONT)
def test_front_pages_are_short(name):
    text = " ".join(passage.text for passage in prose.passages(prose.ROOT / name))
    assert prose.words(text) <= 400
