"""No leak of the list leaks: refused by name, or bounded as promised. And the judge is tested.

benchmarks/leaks.py writes the verdicts, and the list of docs/leaks.md.
"""

import functools
import importlib.util
import warnings
from pathlib import Path

import pyro
import pytest
import torch
from leak_verdicts import judge, quotes
from leaks import HONEST, LEAKS, STEPS, Case, Leak, patients, points

from pyro_dp import ModelError, PrivacyAccountant
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.contributions import Block
from pyro_dp.mechanism.iterative import IterativeMechanism
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.mechanism.settings import FullBatch, Noise

pd = pytest.importorskip("pandas")
COMMAND = Path(__file__).resolve().parents[2] / "benchmarks" / "leaks.py"


@functools.cache
def command():
    """The module of the command, and the verdicts that it keeps; none in an sdist."""
    spec = importlib.util.spec_from_file_location("leaks_command", COMMAND)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, pd.read_csv(module.RESULTS) if module.RESULTS.exists() else None


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize("name", LEAKS)
def test_no_leak(name):
    """No case leaks, and its verdict is the documented one."""
    verdict = judge(LEAKS[name])
    assert verdict.good, f"{verdict.kind}: {verdict.figures or verdict.text}"
    _, kept = command()
    assert kept is None or kept.set_index("case").now[name].startswith(verdict.kind)


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_honest_models_are_bounded(name):
    verdict = judge(HONEST[name])
    assert verdict.kind == "bounded", verdict
    assert 0.1 < verdict.moved <= 2
    assert verdict.others < 1e-9 and verdict.public == 0


def test_the_list():
    """At least 40, each with a description of one line and words for a refusal."""
    assert len(LEAKS) >= 40
    assert all(leak.names and leak.description.endswith(".") for leak in LEAKS.values())


def test_the_document():
    """The page lists the kept verdicts, which are those of all leaks."""
    module, kept = command()
    if kept is None:
        pytest.skip("an sdist has no results")
    assert kept.case.tolist() == list(LEAKS)
    assert module.listed(kept) in module.DOCUMENT.read_text()


class Planted(IterativeMechanism):
    """An inference that sums clipped rows, with a fault in its step."""

    model = None

    def __init__(self, fault):
        self.fault = fault
        self.kept = 0.0
        super().__init__(
            accountant=PrivacyAccountant(neighboring="replace_one"),
            num_steps=STEPS,
            bound=1.0,
            noise=Noise(1.0, source=0),
            sampling=FullBatch(),
        )

    def step(self, x):
        sampler = RecordSampler("full", len(x), 1.0)
        loc = pyro.param("loc", torch.zeros(2))
        rows = x[self._releases.sample(sampler, self._steps)] - torch.tensor([80.0, 180.0])
        clipped = ClippedSum([Block(2, 1.0)])
        clipped.add(self.fault(self, x, rows))
        (released,) = self._release(clipped, sampler)
        loc.data += 0.001 * released
        return 0.0

    def state_dict(self):
        return {"kept": self.kept}


def planted(fault, **options) -> Leak:
    return Leak("planted", lambda x: Case(Planted(fault), (x,)), points, ("loc",), **options)


def mean_enters(self, x, rows):
    return rows - 0.1 * rows.mean(0)


def memory_enters(self, x, rows):
    return rows - 0.1 * x.mean(0)


def counts_thrice(self, x, rows):
    return torch.cat([rows] * 3)


def keeps_a_number(self, x, rows):
    self.kept = x.mean().item()
    return rows


def moves_public_draws(self, x, rows):
    torch.randn(int(x.max()))
    return rows


def starts_at_the_mean(self, x, rows):
    if not self._steps:
        pyro.get_param_store()["loc"].data = -torch.tensor([x[:, 0].mean(), 0.0])
    return rows


def starts_at_another_row(self, x, rows):
    if not self._steps:
        pyro.get_param_store()["loc"].data = x[4].clone()
    return rows


def quotes_in_an_error(self, x, rows):
    raise ModelError(f"loc: {x[3, 0].item():.3f} is too large.")


def quotes_in_a_warning(self, x, rows):
    warnings.warn(f"{x.amax(0)} is large.", stacklevel=1)
    return rows


def warns_of_a_record(self, x, rows):
    if (rows > 500).any():
        warnings.warn("A row is large.", stacklevel=1)
    return rows


def fails_for_a_record(self, x, rows):
    if self._steps and (x > 500).any():
        raise ModelError("A row is large.")
    return rows


def refuses_a_record(self, x, rows):
    if (x > 500).any():
        raise ModelError("loc: a row is large.")
    return rows


def refuses_without_a_name(self, x, rows):
    raise ModelError("The model, its locations or its data do not fit.")


def crashes(self, x, rows):
    raise TypeError("loc is no tensor.")


FAULTS = {
    mean_enters: "the sum moves",
    memory_enters: "the sum moves",
    counts_thrice: "the sum moves",
    keeps_a_number: "public values move",
    moves_public_draws: "public values move",
    starts_at_the_mean: "public values move, a number of the data is public",
    starts_at_another_row: "a number of the data is public",
    quotes_in_an_error: "an error quotes the data",
    quotes_in_a_warning: "a warning quotes the data",
    warns_of_a_record: "a warning tells",
    fails_for_a_record: "an error tells",
    refuses_a_record: "refused on some data only",
    refuses_without_a_name: "refused, but not by name",
    crashes: "crashes with TypeError",
}


@pytest.mark.every_case
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_leaks_are_found(fault):
    verdict = judge(planted(fault))
    assert verdict.kind == FAULTS[fault], verdict
    assert not verdict.good


def test_without_a_fault():
    assert judge(planted(lambda self, x, rows: rows)).kind == "bounded"


def test_memory_below_the_bound_is_found_without_the_record():
    """The whole batch moves by less than 2C; a batch in which the record is not, by too much."""
    verdict = judge(planted(lambda self, x, rows: rows - 1e-3 * x.mean(0)))
    assert verdict.moved < 2 and verdict.others > 1e-3
    assert verdict.kind == "the sum moves"


def test_errors_about_odd_records_are_for_the_curator():
    verdict = judge(planted(refuses_a_record, curator=True))
    assert verdict.kind == "refused"


@pytest.mark.every_case
@pytest.mark.parametrize(
    "text, quoted",
    [
        ("Site 'x' has 40 rows and 3 columns, see line 1000 of 2024.", False),
        ("lr=0.01, C=1.00, epsilon=0.9998", False),
        ("x is {:.1f}", True),
        ("x is {:.6g}", True),
        ("x is {}", True),
    ],
)
def test_quotes(text, quoted):
    data = patients()
    assert quotes(text.format(data[0][7, 2].item()), data) == quoted
    assert quotes(text.format(data[1].mean().item()), data) == quoted
