"""Ledgers, journals and states that older versions wrote load still, and their runs go on."""

import shutil
from pathlib import Path

import pyro
import pytest
import torch
from saved_runs import MADE, STEPS, data

from pyro_dp import PrivacyAccountant
from pyro_dp.accounting.ledger import SECURE, SEEDED

FOLDER = Path(__file__).parents[1] / "saved"
pytestmark = pytest.mark.every_case


def equal(found, expected):
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() >= expected.keys() and all(
            equal(found[key], value) for key, value in expected.items()
        )
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(equal, found, expected))
    return found == expected


@pytest.mark.parametrize("name", [*MADE, "dpsgld"])
def test_a_ledger_loads(name):
    """One ledger is of a method that has left the package."""
    accountant = PrivacyAccountant(epsilon=2.0, delta=1e-5)
    accountant.load(FOLDER / f"{name}.ledger.json")
    assert accountant.num_releases == STEPS // 2 + (name == "vips")
    assert 0.0 < accountant.get_epsilon() < 2.0


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_a_run_goes_on_from_its_journal_and_state(name, tmp_path):
    path = shutil.copy(FOLDER / f"{name}.journal", tmp_path)
    accountant = PrivacyAccountant(epsilon=2.0, delta=1e-5)
    accountant.journal(path)
    known = accountant.ledger
    pyro.set_rng_seed(0)
    inference = MADE[name](accountant)
    state = torch.load(FOLDER / f"{name}.state.pt", weights_only=True)
    inference.load_state_dict(state)
    if name != "dpsep":  # which takes it up in the first step
        again = inference.state_dict()
        state["accountant"].pop("notes")  # there are more now: of this run
        state.pop("optimizer", None)  # Pyro's waits for the first step
        assert equal(again, state)
    while inference._steps < STEPS:
        inference.step(*data())
    assert accountant.num_releases == sum(count for _, count in known) + STEPS // 2
    assert accountant.get_epsilon() <= 2.0


def loaded(name, kind, tmp_path):
    path = shutil.copy(FOLDER / f"{name}.{kind}", tmp_path)
    accountant = PrivacyAccountant(epsilon=2.0, delta=1e-5)
    if kind == "journal":
        accountant.journal(path).close()
    else:
        accountant.load(path)
    return accountant


@pytest.mark.parametrize("kind", ["ledger.json", "journal"])
def test_what_runs_were_and_what_a_ledger_is_about_load(kind, tmp_path):
    accountant = loaded("described", kind, tmp_path)
    assert accountant.description.stated() == {"title": "A study", "unit": "a person", "units": 60}
    (one, first), (other, second) = accountant.runs()
    assert (one.method, one.generator, other.generator) == ("DPSEP", "secure", "ordinary")
    assert first.counts == second.counts and first.counts.total() == 2
    assert set(first.bounds.values()) == {(1.0, 1.0)} and first.clipped is not None
    assert first.clipped != second.clipped


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ledger.json", "journal"])
@pytest.mark.parametrize("name, note", [("dpsvi", SEEDED), ("described", SECURE)])
def test_notes_of_older_versions_are_read_in_todays_words(name, note, kind, tmp_path):
    accountant = loaded(name, kind, tmp_path)
    assert accountant.notes == (note,)
    assert "At least one run " in accountant.report()  # was seeded, or in secure mode
