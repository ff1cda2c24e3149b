"""The hosted workflow calls what exists, on the Pythons that the package lists."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_make_targets_exist():
    called = re.findall(r"\bmake ([\w-]+)", WORKFLOW)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert called and set(called) <= set(targets)


@pytest.mark.every_case
@pytest.mark.parametrize("path", sorted(set(re.findall(r"\.ci/[\w.]+", WORKFLOW))))
def test_scripts_exist(path):
    assert (ROOT / path).exists()
    assert path.endswith(".py") or os.access(ROOT / path, os.X_OK)


def test_it_installs_what_the_readme_says():
    installed = re.findall(r"run: (pip install .*)", WORKFLOW)
    assert installed and set(installed) <= set((ROOT / "README.md").read_text().splitlines())


def test_pythons_are_those_of_the_classifiers():
    (matrix,) = re.findall(r"^ +python: \[(.*)\]$", WORKFLOW, flags=re.MULTILINE)
    project = (ROOT / "pyproject.toml").read_text()
    listed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert re.findall(r'"(.*?)"', matrix) == listed
