"""Errors of wrong first attempts help, and runs that are not ok say so: docs/errors.md."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from first_attempts import ATTEMPTS
from first_warnings import RUNS, people

COMMAND = Path(__file__).parents[2] / "benchmarks" / "errors.py"


def without_numbers(text):
    """Line numbers move, and last digits of a fit are the machine's."""
    head, tail = text.split("## Warnings and status")
    return re.sub(r"\.py:\d+", ".py:N", head) + re.sub(r"-?\d[\d.]*(?:e-?\d+)?| +", " ", tail)


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.name)
def test_names_what_is_wrong_and_what_to_try(attempt):
    assert attempt.faults() == []


def test_there_are_forty():
    assert len([attempt for attempt in ATTEMPTS if not attempt.works]) >= 40


@pytest.mark.slow
def test_page():
    """The committed page is what the command writes now."""
    spec = importlib.util.spec_from_file_location("errors", COMMAND)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert without_numbers(module.PAGE.read_text()) == without_numbers(module.page())


@pytest.mark.long
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_run_with_a_warning(run):
    given, status, _ = run.outcome
    assert [type(each) for each in given] == list(run.kinds)
    assert run.level is None or status.level == run.level


@pytest.mark.long
def test_people_at_the_bound_are_seen():
    """The page mentions people at the bound, whose part is cut off. The interval holds."""
    (run,) = (each for each in RUNS if each.name == "a_few_at_the_bound")
    frame = people(3000, at_the_bound=60)
    rows = np.column_stack([np.ones(3000), frame.age, frame.ill]).astype(float)
    found = np.array([1.0, 0.0, 0.0])
    for _ in range(20):  # Newton steps of the Poisson likelihood
        rate = np.exp(rows @ found)
        found += np.linalg.solve((rows.T * rate) @ rows, rows.T @ (frame.visits - rate))
    lower, upper = map(float, run.outcome[2].split("Intercept")[1].split()[1:3])
    assert f"{found[0]:.2f}" in run.do and lower < found[0] < upper
