"""Errors of wrong first attempts help, and runs that are not ok say so: docs/errors.md."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from first_attempts import ATTEMPTS
from first_warnings import RUNS, people

COMMAND = Path(__file__).parents[2] / "benchmarks" / "errors.py"
_SPEC = importlib.util.spec_from_file_location("errors", COMMAND)
errors = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(errors)
SECTIONS = re.split(r"\n(?=## )", errors.PAGE.read_text())[1:]


def without_numbers(text):
    """Without the last digits of a fit, which are the machine's."""
    return re.sub(r"-?\d[\d.]*(?:e-?\d+)?| +", " ", text.strip())


def without_lines(text):
    """Without line numbers, which move."""
    return re.sub(r"\.py:\d+", ".py:N", text.strip())


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.name)
def test_names_what_is_wrong_and_what_to_try(attempt):
    assert attempt.faults() == []


def test_there_are_forty():
    assert len(ATTEMPTS) >= 40


def test_page_has_all_sections():
    titles = [each.partition("\n")[0] for each in SECTIONS]
    assert titles == [f"## {group}" for group in errors.GROUPS]


@pytest.mark.one_in(11)
@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS, ids=errors.GROUPS)
def test_section(section):
    """The committed one is what the command writes now."""
    group = section.partition("\n")[0].removeprefix("## ")
    shown = without_numbers if section is SECTIONS[-1] else without_lines
    assert shown(section) == shown(errors.section(group))


@pytest.mark.long
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_run_with_a_warning(run):
    given, status, _ = run.outcome
    assert [type(each) for each in given] == list(run.kinds)
    assert run.level is None or status.level == run.level
    message, _ = errors._warned(run)
    assert without_numbers(message) in without_numbers(SECTIONS[-1])


@pytest.mark.slow
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
