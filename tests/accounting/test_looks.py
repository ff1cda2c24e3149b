"""Calls whose results are not private say so once, at the caller's line, before reading.

Marks in the ledger are in test_nonprivate.py.
"""

import inspect
import warnings
from pathlib import Path

import pyro.distributions as dist
import pytest
import torch

from pyro_dp import NotPrivateWarning, audit, audit_one_run, nonprivate
from pyro_dp.vips import LatentDirichletAllocation, SigmoidBeliefNetwork

LDA = LatentDirichletAllocation(2, 3)
TOPICS = {"topics": dist.Dirichlet(torch.ones(2, 3)).to_event(1)}
COUNTS = torch.ones(4, 3)
NETWORK = SigmoidBeliefNetwork(12, 2)
WEIGHTS = {
    "weights": dist.Delta(torch.zeros(12, 2)),
    "biases": dist.Delta(torch.zeros(12)),
    "hidden_biases": dist.Delta(torch.zeros(2)),
}
DATA = (torch.zeros(200, 1),)


RUNS = []  # their data


def first(rows):
    RUNS.append(rows)
    return rows[:50, 0]


CALLS = {
    "perplexity": lambda: LDA.perplexity(TOPICS, COUNTS),
    "topic_weights": lambda: LDA.topic_weights(TOPICS, COUNTS),
    "pixel_accuracy": lambda: NETWORK.pixel_accuracy(WEIGHTS, torch.ones(5, 12)),
    "audit": lambda: audit(first, DATA, ([1.0],), num_trials=1000, progress=False),
    "audit_one_run": lambda: audit_one_run(first, DATA, (torch.ones(50, 1),), torch.clone),
}


@pytest.mark.parametrize("name", CALLS)
def test_says_once_where_it_was_called(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CALLS[name]()
    (said,) = caught  # also of an audit's thousand runs
    assert said.category is NotPrivateWarning
    text = str(said.message)
    assert text.startswith(f"{name}() adds no noise") and "Use " in text
    assert text.count(".") <= 2
    assert Path(said.filename).name == Path(__file__).name


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_told_where_warnings_are_errors(name):
    """An audit stops before its first run."""
    RUNS.clear()
    with pytest.raises(NotPrivateWarning, match=name):
        CALLS[name]()
    assert not RUNS


def test_what_says_so_says_it_in_its_documentation():
    """The documentation of nonprivate lists all of them."""
    methods = [LDA.perplexity, LDA.topic_weights, NETWORK.pixel_accuracy]
    listed = inspect.getmodule(nonprivate).__doc__
    for function in (audit, *methods):
        assert "NotPrivateWarning" in function.__doc__
    for name in CALLS:
        assert name in listed
