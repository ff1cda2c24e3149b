"""The demo's command line."""

import pytest
import torch

from pyro_dp import __main__ as demo


@pytest.mark.parametrize("method", ["dpsvi", "dpsep"])
def test_demo(tmp_path, monkeypatch, capsys, method):
    """A short run: table, ledger and picture."""
    pytest.importorskip("statsmodels")
    pytest.importorskip("matplotlib")
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(demo, "STEPS", 3)
    monkeypatch.setattr(demo, "STEPS_SEP", 3)
    picture = tmp_path / "demo.png"
    arguments = ["--method", method, "--epsilon", "0.5", "--seed", "0", "--output", str(picture)]
    assert demo.main(arguments) == 0
    printed = capsys.readouterr().out
    for text in ("20,190 person-years", "chronic diseases", "poisson", "0.5", str(picture)):
        assert text in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--epsilon", "-1"], "epsilon"),
        (["--epsilon", "much"], "epsilon"),
        (["--delta", "2"], "delta"),
        (["--seed", "-3"], "seed"),
        (["--output", "no/such/folder/picture.png"], "no/such/folder"),
    ],
)
def test_bad_arguments(arguments, named, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(arguments)
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--help"])
    assert stopped.value.code == 0
    assert "--delta" in capsys.readouterr().out
