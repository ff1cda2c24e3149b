"""Pyro's models, swapped: each example runs as its harness runs it, and the page is up to date."""

import importlib
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pd = pytest.importorskip("pandas")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "models"
FEW = 300
HARNESS = {"__main__", "comparison", "page", "pictures", "seen"}
EXAMPLES = sorted({path.stem for path in FOLDER.glob("*.py")} - HARNESS)


@pytest.fixture(scope="module")
def module():
    """Imports a file of the folder by its name, as the files do among each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module


@pytest.mark.one_in(12)
@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, module, monkeypatch, tmp_path, capsys):
    """Fits of two steps: each has a number, a row of the file, and a part in the picture."""
    if name in ("logistic_regression", "vae"):
        pytest.importorskip("statsmodels" if name == "logistic_regression" else "sklearn")
    torch.set_default_dtype(torch.float32)
    comparison, example = module("comparison"), module(name)
    monkeypatch.setattr(comparison, "RESULTS", tmp_path / "examples.csv")
    monkeypatch.setattr(comparison, "FIGURES", tmp_path)
    # Another epsilon is but another number.
    tried = {fit: each for fit, each in comparison.PRIVATE.items() if each == 1.0}
    monkeypatch.setattr(comparison, "PRIVATE", tried)
    few = tuple(each[:FEW] for each in comparison.drawn_data(example))
    monkeypatch.setattr(comparison, "drawn_data", lambda _: few)
    threads = torch.get_num_threads()
    comparison.compare(example, evaluations=1, num_steps=2)
    torch.set_num_threads(threads)
    rows = pd.read_csv(tmp_path / "examples.csv")
    assert rows.fit.tolist() == comparison.labels(example)
    assert set(rows.example) == {name} and set(rows.N) == {FEW}
    assert rows.elbo.abs().max() < 1e9
    assert capsys.readouterr().out.count("ELBO") == len(rows)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_row_takes_the_place_of_the_last_one(module, monkeypatch, tmp_path):
    comparison = module("comparison")
    monkeypatch.setattr(comparison, "RESULTS", tmp_path / "examples.csv")
    for name, elbo in (("vae", -2.0), ("baseball", -1.0), ("vae", -3.0)):
        comparison.keep(module(name), {"SVI": elbo}, 10)
    rows = pd.read_csv(tmp_path / "examples.csv")
    assert rows.elbo.tolist() == [-1.0, -3.0]


def test_twelve_short_files(module):
    assert len(EXAMPLES) == 12
    assert sorted(module("page").SEEN) == EXAMPLES
    for name in EXAMPLES:
        text = (FOLDER / f"{name}.py").read_text()
        assert len(text.splitlines()) < 80


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_swap_is_literal(name, module):
    """SVI becomes DPSVI, an accountant is added, and nothing else changes."""
    swapped, example = module("page").swapped, module(name)
    before = swapped(example.svi)
    assert before.startswith("SVI(model, guide, optim, Trace")
    assert swapped(example.dpsvi) == f"DP{before[:-1]}, accountant=accountant)"


def test_the_page_is_what_its_command_writes(module):
    """The page has a row, a small picture and a description of each example."""
    page = module("page")
    if not page.RESULTS.exists():
        pytest.skip("an sdist has no results")
    written = page.PAGE.read_text()
    assert written == page.text(pd.read_csv(page.RESULTS))
    pictures = re.findall(r"!\[([^]]+)\]\((figures/examples/\w+\.png)\)", written)
    assert len(pictures) == 12
    for words, path in pictures:
        assert len(words) > 60
        assert (ROOT / "docs" / path).stat().st_size < 60_000
    assert all(len(seen.sentences) > 60 for seen in page.SEEN.values())
    assert {path.stem for path in (ROOT / "docs/figures/examples").iterdir()} == set(EXAMPLES)
