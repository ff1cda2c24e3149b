"""The demo's command line, and that its reference is the exact posterior."""

import os
import warnings

import pyro
import pytest
import torch

from pyro_dp import __main__ as demo

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def data():
    pytest.importorskip("statsmodels")
    return demo.load()


@pytest.mark.parametrize(("method", "event"), [("dpsvi", "poisson"), ("dpsep", "full")])
def test_demo(tmp_path, capsys, as_users_run_it, method, event):
    """Table, ledger, picture and report."""
    pytest.importorskip("statsmodels")
    torch.set_default_dtype(torch.float32)
    picture = tmp_path / "demo.png"
    arguments = ["--method", method, "--epsilon", "2", "--seed", "0", "--output", str(picture)]
    assert demo.main(arguments) == 0
    printed = capsys.readouterr().out
    for text in ("20,190 person-years", "chronic diseases", event, "epsilon", str(picture)):
        assert text in printed
    assert "without\nprivacy" in printed and "public research data" in printed
    assert "1.506 +- 0.090" in printed and "1.857 +- 0.083" in printed  # the exact posterior
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = (tmp_path / "pyro_dp_report.html").read_text()
    for text in ("Who sees a doctor?", "a person-year", "20,190", method.upper()):
        assert text in report


def test_dpsep_is_the_default():
    assert demo.parse([]).method == "dpsep"


def test_the_reference_is_the_posterior(data):
    """Newton by automatic differentiation of the Pyro model itself finds the same."""
    x, y = (each.double() for each in data)

    def log_joint(weights):
        model = pyro.condition(demo.model, {"weights": weights})
        return pyro.poutine.trace(model).get_trace(x, y).log_prob_sum()

    mode = torch.zeros(10)
    for _ in range(12):
        precision = -torch.autograd.functional.hessian(log_joint, mode)
        mode = mode + torch.linalg.solve(
            precision, torch.autograd.functional.jacobian(log_joint, mode)
        )
    mean, sd = demo.exact(*data)
    assert (mean - mode).abs().max() < 1e-9
    assert (sd - torch.linalg.inv(precision).diagonal().sqrt()).abs().max() < 1e-9
    # 20,190 terms of about 1e-16 each, no more.
    assert torch.autograd.functional.jacobian(log_joint, mean).abs().max() < 1e-9


def test_table_says_what_was_missed():
    """In sds of the exact posterior, whatever the private one's are."""
    exact = torch.zeros(10), torch.full((10,), 0.1)
    private_mean = torch.tensor([0.3, 0.3] + [0.0] * 8)
    private_sd = torch.tensor([0.16, 0.15] + [1.0] * 8)  # 1.875 and 2 sds
    lines = demo.table(exact, (private_mean, private_sd)).splitlines()
    assert [line.endswith("misses") for line in lines[1:11]] == [False, True] + [False] * 8
    assert "3.0 sd" in lines[1] and "3.0 sd" in lines[2] and "0.0 sd" in lines[3]
    assert "9 of 10" in lines[11]


def test_what_is_doubtful_is_said(tmp_path, capsys):
    """At a budget at which noise hides most."""
    torch.set_default_dtype(torch.float32)
    arguments = ["--epsilon", "0.01", "--seed", "0", "--output", str(tmp_path / "demo.png")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert demo.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "Not to be relied on: intercept, log coinsurance rate" in printed
    assert "the noise is more than" in printed


def test_dpsep_arrives(data):
    """At epsilon = 8, where noise hides little, near the exact means."""
    torch.set_default_dtype(torch.float32)
    mean, sd = demo.exact(*data)
    found = demo.fit("dpsep", *data, demo.PrivacyAccountant(8.0), seed=0)
    assert ((found.mean - mean).abs() / sd).max() < 1.5
    assert (found.stddev / sd - 1).abs().max() < 0.2
    assert demo.covers((mean, sd), (found.mean, found.stddev)).all()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--epsilon", "-1"], "epsilon"),
        (["--epsilon", "much"], "epsilon"),
        (["--delta", "2"], "delta"),
        (["--seed", "-3"], "seed"),
    ],
)
def test_bad_arguments(arguments, named, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(arguments)
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


@pytest.fixture
def no_fit(monkeypatch):
    """Nothing is read or spent before the arguments are known to be right."""
    for name in ("load", "fit"):
        monkeypatch.setattr(demo, name, lambda *_: pytest.fail("too late"))


@pytest.mark.parametrize(
    ("output", "named"),
    [
        ("", "is a folder"),
        ("nowhere/picture.png", "there is no folder"),
        ("picture.docx", "use one of"),
        ("picture", "use one of"),
        ("picture.", "use one of"),
    ],
)
def test_bad_output(no_fit, tmp_path, capsys, output, named):
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--output", str(tmp_path / output)])
    assert stopped.value.code == 2
    printed = capsys.readouterr().err
    assert "argument --output" in printed and named in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("exists", [False, True])
def test_output_without_permission(no_fit, tmp_path, monkeypatch, capsys, exists):
    """The file's permission, or its folder's. (The superuser may write anything.)"""
    picture = tmp_path / "picture.png"
    if exists:
        picture.touch()
    asked = picture if exists else tmp_path
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (asked, os.W_OK))
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--output", str(picture)])
    assert stopped.value.code == 2
    assert "argument --output: no permission" in capsys.readouterr().err


def test_output_that_fails_late(data, tmp_path, monkeypatch, capsys):
    """A full disk is told as what it is, after the table."""

    def full(*_):
        raise OSError(28, "No space left on device")

    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(demo, "draw", full)
    assert demo.main(["--output", str(tmp_path / "picture.png")]) == 1
    printed = capsys.readouterr()
    assert "chronic diseases" in printed.out and "Picture" not in printed.out
    assert "--output" in printed.err and "No space left" in printed.err


def test_without_extra_packages(monkeypatch, capsys):
    def missing():
        raise ImportError

    monkeypatch.setattr(demo, "load", missing)
    assert demo.main([]) == 1
    assert "pyro-dp[demo]" in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--help"])
    assert stopped.value.code == 0
    assert "--delta" in capsys.readouterr().out
