"""Fuzzed cases, the same ones in every run: a typed error or a valid run, and nothing unrecorded.

benchmarks/fuzz.py runs more of them, at random.
"""

import itertools
import math

import fuzz_contract
import pytest
import torch
from dpem import DPEM
from fuzz_cases import FAMILIES
from fuzz_contract import SENTINEL, Case, Violation, Watch, check, require_finite
from hypothesis import HealthCheck, given, seed, settings
from sums import exact_sums

from pyro_dp import ModelError, PrivacyAccountant, SubsampledGaussian
from pyro_dp.mechanism.iterative import IterativeMechanism
from pyro_dp.records.sandbox import guarded

# The traced and the calibrated ones take a second each.
CASES = {
    "DPSVI": 90,
    "PaperDPSVI": 40,
    "DPSVI, traced": 4,
    "DPSEP": 40,
    "VIPS": 100,
    "PrivacyAccountant": 300,
    "calibration": 8,
    "settings": 300,
}


@pytest.mark.one_in(8)
@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_contract(family):
    """Check as many cases of a family as CASES says, from a fixed seed."""
    outcomes, count = [], CASES[family]

    @seed(0)
    @settings(
        max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(FAMILIES[family][0])
    def run(case):
        outcomes.append(check(case))

    run()
    assert len(outcomes) >= count
    # Cases that are all refused would show little.
    assert outcomes.count("valid") >= 0.1 * len(outcomes)


def _hang(watch):
    for _ in itertools.count():
        pass


def _swallow_and_hang(watch):
    try:
        _hang(watch)
    except Exception:
        _hang(watch)


def _raising(error):
    def run(watch):
        raise error

    return run


def _not_finite(watch):
    require_finite([("loc", torch.tensor([0.0, math.nan]))])


def _stepped(watch, steps=1):
    accountant = watch.watch(PrivacyAccountant())
    scales = {"radius": 1.0, "start_variance": 0.5, "least_variance": 1e-4}
    settings = {"accountant": accountant, "num_steps": steps, "noise": 1.0}
    em = DPEM(torch.eye(2), **scales, **settings)
    for _ in range(steps):
        watch.step(lambda: em.step(torch.zeros(3, 2)))


def _recorded_only(watch):
    watch.watch(PrivacyAccountant()).record(SubsampledGaussian(1.0))


def _leaking_from_behind(watch):
    try:
        raise ValueError(f"{[SENTINEL]}")
    except ValueError:
        raise ModelError("a value") from None


BROKEN = {
    "hang": [_hang, _swallow_and_hang],
    "crash": [_raising(RuntimeError()), _raising(TypeError("unhashable type"))],
    "not finite": [_not_finite],
    "unrecorded": [_recorded_only],
    "leak": [
        _raising(ModelError(f"the largest is {torch.tensor(SENTINEL)}")),
        _leaking_from_behind,
    ],
}


def _case(run):
    class Planted(Case):
        def run(self, watch: Watch) -> None:
            run(watch)

    return Planted(settings={})


@pytest.mark.parametrize("kind, run", [(kind, run) for kind in BROKEN for run in BROKEN[kind]])
def test_contract_catches(monkeypatch, kind, run):
    monkeypatch.setattr(fuzz_contract, "SECONDS", 0.05)
    with pytest.raises(Violation) as caught:
        check(_case(run))
    assert caught.value.kind == kind


def test_contract_catches_a_release_that_is_not_recorded(monkeypatch):
    assert check(_case(_stepped)) == "valid"
    monkeypatch.setattr(PrivacyAccountant, "record", lambda self, event: None)
    with pytest.raises(Violation, match="1 releases, 0 in the ledger"):
        check(_case(_stepped))


def test_contract_catches_a_step_without_release(monkeypatch):
    def kept(self, clipped, *given):
        return list(exact_sums(clipped))

    monkeypatch.setattr(IterativeMechanism, "_release", kept)
    with pytest.raises(Violation, match="a step made 0 releases"):
        check(_case(_stepped))


def test_guarded_leaves_no_text_behind():
    """The causes of the new error, which a logger may show, have no text either."""

    def user():
        with guarded("Running the model"):
            try:
                raise KeyError(SENTINEL)
            except KeyError as error:
                raise ValueError(f"it was {error}") from error

    with pytest.raises(ModelError, match="KeyError|ValueError") as caught:
        user()
    fuzz_contract.require_no_data(caught.value)
