"""The README's example runs as printed."""

import re
from pathlib import Path

import pyro
import torch

README = Path(__file__).parent.parent / "README.md"


def test_examples(capsys, tmp_path, monkeypatch, as_users_run_it):
    """DPSVI, DPSEP, VIPS, a run with a journal, then latents per record, on the same data."""
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(examples) == 5
    assert len([line for line in examples[0].splitlines() if line]) <= 20
    scope = {}
    for code in examples:
        pyro.clear_param_store()
        exec(re.sub(r"run\((.*), y\)", r"run(\1, y, progress=False)", code), scope)
        assert 0.99 < scope["accountant"].get_epsilon() <= 1.0
        assert "1000" not in capsys.readouterr().err
        w = scope["w"].mean / 2 if "VIPS" in code else scope["guide"].median()["w"]
        if "report" in code:
            assert "0.9" in scope["report"] and (tmp_path / "study.journal").exists()
        assert (w - torch.tensor([1.0, -0.5, 0.0, 0.3])).abs().max() < 0.3
