"""Wrong first attempts of new users get errors that help, and docs/errors.md shows them."""

import importlib.util
import re
from pathlib import Path

import pytest
from first_attempts import ATTEMPTS

COMMAND = Path(__file__).parents[2] / "benchmarks" / "errors.py"


def without_line_numbers(text):
    return re.sub(r"\.py:\d+", ".py:N", text)


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.name)
def test_names_what_is_wrong_and_what_to_try(attempt):
    assert attempt.faults() == []


def test_there_are_forty():
    assert len([attempt for attempt in ATTEMPTS if not attempt.works]) >= 40


def test_page():
    """The committed page is what the command writes now."""
    spec = importlib.util.spec_from_file_location("errors", COMMAND)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert without_line_numbers(module.PAGE.read_text()) == without_line_numbers(module.page())
