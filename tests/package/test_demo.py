"""The demo's command line, and that its reference is the exact posterior."""

import os
import re
import warnings
from decimal import Decimal
from pathlib import Path
from xml.etree import ElementTree

import pyro
import pytest
import torch

from pyro_dp import PrivacyAccountant, SubsampledGaussian
from pyro_dp import __main__ as demo
from pyro_dp.infer.posterior.posterior import Status
from pyro_dp.utils.display import up

pytest.importorskip("matplotlib")

SAVED = Path(__file__).parents[1] / "saved"
CHECK = Status("check", "the last step was long", "steps")


@pytest.fixture(scope="module")
def data():
    pytest.importorskip("statsmodels")
    return demo.load()


@pytest.mark.slow
def test_demo(tmp_path, monkeypatch, capsys, as_users_run_it):
    """Table, spending, picture and report."""
    pytest.importorskip("statsmodels")
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    assert demo.main(["--epsilon", "2", "--seed", "0"]) == 0
    captured = capsys.readouterr()
    printed = captured.out
    assert "Fitting" not in captured.err  # there is no terminal
    for text in (
        "20,190",
        "chronic diseases",
        "budget of 2.",
        "factor of 7.39",
        "pyro_dp_demo.png",
    ):
        assert text in printed
    assert max(map(len, printed.splitlines())) <= 100
    assert "without privacy" in printed and "The data of this demo are public." in printed
    assert "1.506 +- 0.090" in printed and "1.857 +- 0.083" in printed  # the exact posterior
    assert (tmp_path / "pyro_dp_demo.png").read_bytes().startswith(b"\x89PNG")
    report = (tmp_path / "pyro_dp_report.html").read_text()
    for text in ("Who sees a doctor?", "a person-year", "20,190", "DPSVI"):
        assert text in report


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


def made_up():
    """The second of ten private intervals misses the exact mean."""
    private_mean = torch.tensor([0.3, 0.3] + [0.0] * 8)
    private_sd = torch.tensor([0.16, 0.15] + [1.0] * 8)  # the means are 1.875 and 2 sd apart
    return (torch.zeros(10), torch.full((10,), 0.1)), (private_mean, private_sd)


def test_table():
    """Distances are in sds of the exact posterior."""
    lines = demo.table(*made_up()).splitlines()
    assert [line.endswith("misses") for line in lines[1:11]] == [False, True] + [False] * 8
    assert "3.0 sd" in lines[1] and "3.0 sd" in lines[2] and "0.0 sd" in lines[3]
    assert lines[13].startswith("9 of 10")


def test_spending():
    """The parts add up, and no word needs a glossary."""
    accountant = demo.PrivacyAccountant(1.0, 1e-5)
    accountant.record(SubsampledGaussian(8.0), 3)
    accountant.note("It was quick.")
    lines = demo.spending(accountant, 1.0).splitlines()
    spent, left = (Decimal(re.search(r"0\.\d+", line)[0]) for line in (lines[0], lines[2]))
    assert spent + left == 1 and 0 <= float(spent) - accountant.get_epsilon() < 1e-4
    assert "of the budget of 1." in lines[0] and "published 3 sums" in lines[1]
    assert lines[3:] == ["Note: It was quick."]


def test_answer():
    row = demo.NAMES.index("log coinsurance rate")
    mean, sd = torch.zeros(len(demo.NAMES)), torch.ones(len(demo.NAMES))
    for value, text in ((-2.0, "yes. .* below"), (1.9, "unclear"), (2.0, "no. .* above")):
        mean[row] = value
        assert re.search(text, demo.answer((mean, sd)))


@pytest.mark.long
@pytest.mark.parametrize("status", [Status(), CHECK], ids=str)
def test_all_private_markers_are_hollow_or_none(tmp_path, status):
    figure = demo.draw(*made_up(), status, "title", tmp_path / "demo.png")
    axes, hollow = figure.axes[0], []
    for drawn in axes.containers:
        line = drawn.lines[0]
        if line.get_markerfacecolor() == axes.get_facecolor():
            hollow += [round(float(row)) for row in line.get_ydata()]
            assert "(hollow: check)" in drawn.get_label()
    assert sorted(hollow) == ([] if status.is_ok else list(range(10)))


@pytest.mark.slow
def test_pictures_for_light_and_dark_pages(tmp_path):
    """Well-formed SVG with its text as text, and the same in each run."""
    heading, found = demo.title(1.0, 1e-5, 20_190), []
    for name, dark in (("light", False), ("again", False), ("dark", True)):
        path = tmp_path / f"{name}.svg"
        demo.draw(*made_up(), CHECK, heading, path, dark)
        found.append(path.read_text())
        root = ElementTree.fromstring(found[-1])
        assert root.find("{*}title").text.startswith("Who sees a doctor? 20,190 person-years")
        texts = {each.text for each in root.findall(".//{*}text")}
        assert {*demo.NAMES, "private posterior (hollow: check)"} <= texts
    assert found[0] == found[1] != found[2]


@pytest.mark.slow
def test_a_posterior_that_is_not_to_be_published(tmp_path, capsys):
    """At a budget at which noise hides most."""
    torch.set_default_dtype(torch.float32)
    output = tmp_path / "demo.svg"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert demo.main(["--epsilon", "0.01", "--seed", "0", "--output", str(output)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Status: do not publish: " in printed
    assert "(hollow: do not publish)" in output.read_text()


@pytest.mark.slow
def test_warnings_are_wrapped(data, tmp_path, monkeypatch, capsys):
    fit = demo.fit

    def warns(*arguments):
        warnings.warn("Much was cut off. " * 20, stacklevel=2)
        return fit(*arguments)

    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(demo, "fit", warns)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert demo.main(["--seed", "0", "--output", str(tmp_path / "demo.png")]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Warning: Much was cut off.") and max(map(len, lines)) <= 100


@pytest.mark.slow
def test_dpsvi_arrives(data):
    """At epsilon = 8, where noise hides little, near the exact means."""
    torch.set_default_dtype(torch.float32)
    mean, sd = demo.exact(*data)
    found = demo.fit(*data, demo.PrivacyAccountant(8.0), seed=0)
    assert ((found.mean - mean).abs() / sd).max() < 1.5
    assert (found.stddev / sd - 1).abs().max() < 0.2
    assert demo.covers((mean, sd), (found.mean, found.stddev)).all()


def refused(arguments, capsys):
    """The error with which the command stops."""
    with pytest.raises(SystemExit) as stopped:
        demo.main(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [("--epsilon", "-1"), ("--epsilon", "much"), ("--delta", "2"), ("--seed", "-3")],
)
def test_bad_arguments(option, value, capsys):
    assert option.strip("-") in refused([option, value], capsys)


@pytest.fixture
def no_fit(monkeypatch):
    """Wrong arguments stop the demo before it reads data or spends budget."""
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
    printed = refused(["--output", str(tmp_path / output)], capsys)
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
    assert "argument --output: no permission" in refused(["--output", str(picture)], capsys)


@pytest.mark.long
def test_output_that_fails_late(data, tmp_path, monkeypatch, capsys):
    """A full disk is reported after the table."""

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


@pytest.mark.parametrize("name", ["dpsvi", "dpsep"])
def test_a_saved_ledger_is_checked(name, capsys):
    """By the accountant and by dp_accounting, which agree to a part in 200."""
    pytest.importorskip("dp_accounting")
    assert demo.main(["check", str(SAVED / f"{name}.ledger.json")]) == 0
    ours, theirs = re.search(
        r"epsilon so far: ([\d.]+).*dp_accounting: epsilon = ([\d.]+)",
        capsys.readouterr().out,
        re.DOTALL,
    ).groups()
    assert float(theirs) == pytest.approx(float(ours), rel=5e-3)


def test_a_journal_is_checked_while_a_run_has_it(tmp_path, capsys):
    """Its last line is torn, as in a run that writes. The file stays as it is."""
    pytest.importorskip("fcntl")
    path, accountant = tmp_path / "journal", PrivacyAccountant(3.0, 1e-5)
    with accountant.journal(path) as journal:
        accountant.record(SubsampledGaussian(4.0, 1.0, "full"), 2)
        path.write_bytes(path.read_bytes() + b"0123 [0,")
        before = path.read_bytes()
        assert demo.main(["check", str(path)]) == 0
        found = capsys.readouterr().out
        assert path.read_bytes() == before
        assert up(accountant.get_epsilon()) in found and journal.digest in found


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 1}', None])
def test_what_is_no_ledger_is_refused(text, tmp_path, capsys):
    path = tmp_path / "ledger.json"
    if text is not None:
        path.write_text(text)
    assert demo.main(["check", str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("check: ") and not captured.out
