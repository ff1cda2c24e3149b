"""Examples run as printed, README's with its output, and links lead somewhere."""

import math
import re
from pathlib import Path

import pyro
import pytest
import torch

from pyro_dp import Noise

ROOT = Path(__file__).parents[2]
NUMBER = r"-?\d+\.?\d*"
# Effects of variance 1 flatten a logistic curve by this factor (Zeger, Liang & Albert 1988).
WIDER = (1 + (16 * 3**0.5 / (15 * math.pi)) ** 2) ** 0.5
# In reading order: all continue with the data of the first.
PAGES = (
    "docs/dpsvi.md",
    "docs/dpsep.md",
    "docs/evidence.md",
    "docs/explain.md",
    "docs/vips.md",
    "docs/trust.md",
    "docs/data.md",
)
# These begin anew, with a frame.
FRAMES = ("docs/tabular.md", "docs/schema.md", "docs/synthetic.md")
TEXTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]


def examples(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


@pytest.mark.slow
def test_examples(capsys, tmp_path, monkeypatch, as_users_run_it):
    """DPSVI (latents per record, a loss of one's own), DPSEP, VIPS, a journal."""
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    codes = [code for page in PAGES for code in examples(ROOT / page)]
    assert len(codes) == 12
    assert len([line for line in codes[0].splitlines() if line]) <= 20
    pyro.set_rng_seed(0)
    scope = {"Noise": Noise}
    for code in codes:
        pyro.clear_param_store()
        truth = torch.tensor([1.0, -0.5, 0.0, 0.3])
        code = re.sub(r"run\((.*), y\b([^)]*)\)", r"run(\1, y\2, progress=False)", code)
        if "def random_effects" in code:  # a step takes a second for all 20,000 people
            code = code.replace("run(x, y", "run(x[:8000], y[:8000]")
            code = code.replace(
                "accountant=accountant)", "accountant=accountant, noise=Noise(source=0))"
            )
            assert "source=0" in code
            truth *= WIDER
        exec(code, scope)
        assert 0.99 < scope["accountant"].get_epsilon() <= 1.0
        assert "1000" not in capsys.readouterr().err
        w = scope["w"].mean / 2 if "VIPS" in code else scope["guide"].median()["w"]
        if "report" in code:
            assert "0.9" in scope["report"] and (tmp_path / "study.journal").exists()
        assert (w - truth).abs().max() < 0.3


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("page", ["README.md", FRAMES[0]])
def test_the_first_example_prints_what_it_says(page, capsys, as_users_run_it):
    """With a seed for the noise; numbers may differ by a unit of their last digit."""
    torch.set_default_dtype(torch.float32)
    code = examples(ROOT / page)[0]
    (output,) = re.findall(r"```text\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    pyro.clear_param_store()
    code = code.replace("accountant=accountant", "accountant=accountant, noise=Noise(source=0)")
    exec(code, {"Noise": Noise})
    printed = capsys.readouterr().out
    assert re.sub(NUMBER, "", printed).split() == re.sub(NUMBER, "", output).split()
    for one, other in zip(re.findall(NUMBER, printed), re.findall(NUMBER, output), strict=True):
        assert float(one) == pytest.approx(float(other), rel=0.02, abs=0.002)


def test_no_example_is_left_out():
    with_code = {path.relative_to(ROOT).as_posix() for path in TEXTS if examples(path)}
    with_tests = {"docs/autodp.md", "docs/cheat_sheet.md"}
    assert with_code == {"README.md", *PAGES, *FRAMES, *with_tests}


@pytest.mark.every_case
@pytest.mark.slow
def test_the_cheat_sheet(tmp_path, monkeypatch, as_users_run_it):
    """It runs with the data and model of docs/dpsvi.md and the frame of docs/tabular.md."""
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    scope = {}
    first, frame = (examples(ROOT / "docs" / f"{name}.md")[0] for name in ("dpsvi", "tabular"))
    exec(first.split("guide =")[0], scope)
    exec(frame.split("schema =")[0], scope)
    scope["x_new"] = torch.zeros(2, 4)
    for code in examples(ROOT / "docs" / "cheat_sheet.md"):
        exec(code, scope)
    assert scope["accountant"].get_epsilon() <= 1.0 and scope["budget"].get_epsilon() <= 1.0
    assert scope["posterior"].status.is_ok and scope["result"].status.is_ok
    assert scope["draws"]["y"].shape == (100, 2)


@pytest.mark.slow
def test_examples_of_frames(tmp_path, monkeypatch, as_users_run_it):
    """The test shows that they run; tests of tabular check their results."""
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    scope = {}
    for code in (code for page in FRAMES for code in examples(ROOT / page)):
        pyro.clear_param_store()
        exec(code, scope)
        if "accountant" in scope:
            assert 0.99 < scope["accountant"].get_epsilon() <= 1.0
    assert scope["schema"].max_rows == 5


@pytest.mark.every_case
@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.name)
def test_links(text):
    targets = re.findall(r"\]\(([^)\s]+)\)", text.read_text())
    here = [target.split("#")[0] for target in targets if "://" not in target]
    assert not [target for target in here if not (text.parent / target).exists()]
