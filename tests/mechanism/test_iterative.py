"""What all inferences promise about states that are loaded: ledger, budget, random streams."""

import io

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal

from pyro_dp import DPSEP, DPSVI, VIPS, PrivacyAccountant, PrivacyError
from pyro_dp.baselines import DPEM, DPSGLD
from pyro_dp.mechanism import iterative
from pyro_dp.utils.errors import PrivacyBudgetExceeded
from pyro_dp.vips import LogisticRegression

STEPS = 6
DATA = (torch.linspace(-1.0, 1.0, 40, dtype=torch.float64).unsqueeze(1),)


def model(x):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("people", len(x), subsample_size=20) as idx:
        pyro.sample("x", dist.Normal(mean, 1.0), obs=x[idx, 0])


def svi(**options):
    return DPSVI(model, AutoNormal(model), pyro.optim.Adam({"lr": 0.1}), Trace_ELBO(), **options)


def sep(**options):
    return DPSEP(model, AutoNormal(model), max_factor_norm=2.0, **options)


def sgld(**options):
    return DPSGLD(model, step_size=1e-3, **options)


def em(**options):
    start = torch.tensor([[-0.5], [0.5]], dtype=torch.float64)
    return DPEM(start=start, radius=1.0, sampling="full", **options)


class RegressionOnSign:
    """VIPS with one column of data, as the others have."""

    def __init__(self, **options):
        self._vips = VIPS(LogisticRegression(1), **options)

    def step(self, x):
        return self._vips.step(x, (x[:, 0] > 0).double())

    def run(self, x, **options):
        return self._vips.run(x, (x[:, 0] > 0).double(), **options)

    def __getattr__(self, name):
        return getattr(self._vips, name)


METHODS = (svi, sep, sgld, em, RegressionOnSign)


def made(method, accountant, **options):
    pyro.clear_param_store()
    return method(accountant=accountant, num_steps=STEPS, **options)


def saved(inference):
    """A state as it comes back from a file."""
    buffer = io.BytesIO()
    torch.save(inference.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("method", METHODS)
def test_a_calibrated_run_goes_on(method):
    first = made(method, PrivacyAccountant(1.0))
    for _ in range(2):
        first.step(*DATA)
    state = saved(first)
    second = made(method, PrivacyAccountant(1.0))
    second.load_state_dict(state)
    assert second.noise_multiplier == first.noise_multiplier
    second.run(*DATA, progress=False)
    assert 0.995 < second.accountant.get_epsilon() <= 1.0
    with pytest.raises(PrivacyError, match="what was released stays released"):
        second.load_state_dict(state)


@pytest.mark.parametrize("method", METHODS)
def test_a_state_older_than_the_journal(method, tmp_path):
    """Killed at step 4, saved at step 2: the ledger stays, and what is left is shared out anew."""
    accountant = PrivacyAccountant(1.0)
    journal = accountant.journal(tmp_path / "journal")
    first = made(method, accountant)
    for _ in range(2):
        first.step(*DATA)
    state = saved(first)
    for _ in range(2):
        first.step(*DATA)
    journal.close()
    ledger = accountant.ledger

    accountant = PrivacyAccountant(1.0)
    accountant.journal(tmp_path / "journal")
    second = made(method, accountant)
    second.load_state_dict(state)
    assert accountant.ledger == ledger
    assert second.run(*DATA, progress=False) is not None
    assert second.noise_multiplier > first.noise_multiplier
    assert accountant.num_releases == sum(n for _, n in ledger) + STEPS - 2
    assert 0.995 < accountant.get_epsilon() <= 1.0


@pytest.mark.parametrize("method", METHODS)
def test_a_journal_that_has_spent_everything(method, tmp_path):
    accountant = PrivacyAccountant(1.0)
    accountant.journal(tmp_path / "journal")
    inference = made(method, accountant)
    inference.step(*DATA)
    state = saved(inference)
    inference.run(*DATA, progress=False)
    ledger = accountant.ledger
    inference.load_state_dict(state)
    with pytest.raises(PrivacyBudgetExceeded, match=f"{STEPS - 1} releases in the journal"):
        inference.run(*DATA, progress=False)
    assert accountant.ledger == ledger


@pytest.mark.parametrize("method", METHODS)
def test_a_state_newer_than_the_journal_is_refused(method, tmp_path):
    other = made(method, PrivacyAccountant(), noise_multiplier=3.0)
    other.step(*DATA)
    state = saved(other)
    accountant = PrivacyAccountant()
    accountant.journal(tmp_path / "journal")
    inference = made(method, accountant, noise_multiplier=3.0)
    with pytest.raises(PrivacyError, match="older copy"):
        inference.load_state_dict(state)
    assert not accountant.ledger and not inference._steps


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("journal", [False, True])
def test_no_stream_is_used_twice(method, journal, tmp_path, monkeypatch):
    """Also with a seed: a state may be older than what was released with it."""
    drawn, exact = [], iterative.release

    def spy(*args, noise, **named):
        drawn.append(tuple(noise.bit_generator.seed_seq.generate_state(4)))
        return exact(*args, noise=noise, **named)

    monkeypatch.setattr(iterative, "release", spy)

    def new():
        accountant = PrivacyAccountant()
        opened = accountant.journal(tmp_path / "journal") if journal else None
        return made(method, accountant, noise_multiplier=3.0, generator=0), opened

    first, opened = new()
    first.step(*DATA)
    state = saved(first)
    first.step(*DATA)
    for _ in range(2):
        if journal:
            opened.close()
        second, opened = new()
        second.load_state_dict(state)
        second.step(*DATA)
    made(method, PrivacyAccountant(), noise_multiplier=3.0, generator=0).step(*DATA)
    once = 2 if method is RegressionOnSign else 1  # releases of a first step
    assert drawn[-once:] == drawn[:once]  # a run that starts anew repeats
    assert len(set(drawn)) == len(drawn) - once == once + 3
