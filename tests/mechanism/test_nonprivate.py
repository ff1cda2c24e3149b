"""Numbers of an inference without noise: the ledger is marked first, the run not disturbed."""

import inspect
import math
import warnings
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import logistic
from pyro import poutine
from pyro.infer.autoguide import AutoNormal
from saved_runs import data
from sums import exact_sums

from pyro_dp import (
    DPSEP,
    VIPS,
    ConfigurationError,
    Execution,
    FullBatch,
    ModelError,
    Noise,
    NotPrivateWarning,
    PaperDPSEP,
    PaperDPSVI,
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    PrivacyError,
    nonprivate,
)
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.vips import LogisticRegression


def looked():
    return pytest.warns(NotPrivateWarning, match="The privacy guarantee ends")


NOISE = Noise(1.0, source=1)


def svi(accountant=None, **settings):
    pyro.clear_param_store()
    settings = dict(num_steps=4, noise=NOISE, sampling=FullBatch()) | settings
    accountant = accountant or PrivacyAccountant()
    optim = pyro.optim.Adam({"lr": 0.1})
    return PaperDPSVI(logistic, AutoNormal(logistic), optim, accountant=accountant, **settings)


def sep(accountant=None, kind=DPSEP, **settings):
    pyro.clear_param_store()
    settings = {"noise": NOISE} | settings | ({"num_steps": 4} if kind is PaperDPSEP else {})
    accountant = accountant or PrivacyAccountant()
    return kind(logistic, AutoNormal(logistic), accountant=accountant, **settings)


def vips(accountant=None, **settings):
    settings = dict(num_steps=4, noise=NOISE) | settings
    accountant = accountant or PrivacyAccountant()
    return VIPS(LogisticRegression(dim=2), accountant=accountant, **settings)


def by_hand(guide, x, y):
    """Loss and gradients of the records at the guide's next draw of the weights."""
    state = torch.get_rng_state()
    trace = poutine.trace(guide).get_trace(x, y)
    torch.set_rng_state(state)
    w = trace.nodes["w"]["value"].detach()
    p = torch.sigmoid(x @ w)
    prior = dist.Normal(0.0, 1.0).log_prob(w).sum()
    log_q = trace.nodes["w_unconstrained"]["fn"].log_prob(w).sum()
    likelihood = dist.Bernoulli(p).log_prob(y).sum()
    return (log_q - prior - likelihood).item(), (p - y).unsqueeze(1) * x


@pytest.mark.long
@pytest.mark.parametrize("execution", [None, Execution(7), Execution(jit="trace")], ids=str)
def test_loss_and_norms_of_dpsvi(execution):
    x, y = data()
    inference = svi(clip=0.01, execution=execution)
    inference.run(x, y, progress=False)
    expected, gradients = by_hand(inference.guide, x, y)
    with looked() as caught:
        assert nonprivate(inference).loss(x, y) == pytest.approx(expected)
    assert [Path(each.filename).name for each in caught] == [Path(__file__).name]
    with looked():
        norms = nonprivate(inference).gradient_norms(x, y)
    torch.testing.assert_close(norms, gradients.norm(dim=1))
    assert norms.max() > 0.01  # before they are clipped


@pytest.mark.every_commit
@pytest.mark.slow
def test_norms_of_sites():
    """At the mean m of a wide cavity, of (eta - Lambda m, kappa Lambda)."""
    x, y = data()
    inference = sep(kind=PaperDPSEP, noise=Noise(0, source=1), clip=math.inf)
    inference.run(x, y, progress=False)
    with looked():
        norms = nonprivate(inference).gradient_norms(x, y)
    assert norms.shape == (60,)
    # Without noise and clipping a step releases the sum of the sites: check one record's alone.
    known, prepared = inference._fit.approximation, inference._kept.prepared
    clipped, stream = ClippedSum(known.blocks), np.random.default_rng(0)
    prepared.sites.add(clipped, known.at(60), torch.tensor([5]), stream)
    assert norms[5] == pytest.approx(torch.linalg.vector_norm(exact_sums(clipped)[0]).item())
    again = sep(kind=PaperDPSEP, clip=1e-3, execution=Execution(7))
    with looked():
        assert (nonprivate(again).gradient_norms(x, y) > 1e-3).any()


def test_norms_of_statistics():
    x, y = data()
    x = 3 * x  # beyond the model's radius
    inference = vips()
    inference.run(x, y, progress=False)
    with looked():
        norms = nonprivate(inference).gradient_norms(x, y)
    assert norms.keys() == inference.model.statistics.keys()
    for name, statistic in inference.model.statistics.items():
        assert norms[name].shape == (60,)
        assert norms[name].max() <= statistic.bound * (1 + 1e-9)
    rows = x / x.norm(dim=1, keepdim=True).clamp(min=1.0)
    found = [each for each in norms.values() if torch.allclose(each, rows.norm(dim=1) / 2)]
    assert len(found) == 1


LOOKS = [(svi, "loss"), (svi, "gradient_norms"), (sep, "gradient_norms"), (vips, "gradient_norms")]


@pytest.mark.long
@pytest.mark.parametrize("make, what", LOOKS)
def test_the_ledger_is_marked_before_anything_is_read(make, what, monkeypatch):
    x, y = data()
    accountant = PrivacyAccountant(epsilon=100.0)
    inference = make(accountant)
    inference.step(x, y)

    class Stop(Exception):
        pass

    def stop(*args, **kwargs):
        raise Stop

    with monkeypatch.context() as patched:
        patched.setattr(type(inference._releases.randomness), "stream", stop)
        with looked(), pytest.raises(Stop):
            getattr(nonprivate(inference), what)(x, y)
    look = accountant.ledger[-1].event
    assert type(inference).__name__ in look.what
    assert "after 1 steps" in look.what
    assert look.time
    assert accountant.get_epsilon() == math.inf
    assert "There is no privacy guarantee" in accountant.report()
    with pytest.raises(PrivacyBudgetExceeded):
        inference.step(x, y)


@pytest.mark.long
@pytest.mark.parametrize("make, what", LOOKS)
def test_looks_do_not_disturb_the_run(make, what):
    """Equal public draws, parameters and results, before, between and after steps."""
    x, y = data()
    results = []
    for looks in (False, True):
        pyro.set_rng_seed(3)
        np.random.seed(3)
        inference = make(noise=Noise(0.0, source=1))
        steps = []
        for _ in range(3):
            if looks:
                with looked():
                    getattr(nonprivate(inference), what)(x, y)
            steps.append(inference.step(x, y))
        state = {name: value.detach().clone() for name, value in pyro.get_param_store().items()}
        results.append((steps, state, torch.rand(3), np.random.uniform()))
    (steps, state, draw, number), (steps_2, state_2, draw_2, number_2) = results
    np.testing.assert_equal(steps, steps_2)
    torch.testing.assert_close(state, state_2, rtol=0, atol=0)
    assert torch.equal(draw, draw_2)
    assert number == number_2


@pytest.mark.long
@pytest.mark.parametrize("make, what", LOOKS)
def test_after_the_last_calibrated_step(make, what):
    x, y = data()
    inference = make(PrivacyAccountant(epsilon=5.0), noise=Noise(source=1))
    inference.run(x, y, progress=False)
    with looked():
        getattr(nonprivate(inference), what)(x, y)


@pytest.mark.parametrize("make, what", LOOKS)
def test_data_that_do_not_fit_are_not_read(make, what):
    x, y = data()
    inference = make()
    x[3] = math.nan
    with pytest.raises(ModelError):
        getattr(nonprivate(inference), what)(x, y)
    assert inference.accountant.num_releases == 0


def test_what_cannot_be_read():
    for inference in (sep(), vips()):
        with pytest.raises(ConfigurationError, match=f"not from a {type(inference).__name__}"):
            nonprivate(inference).loss(*data())
        assert inference.accountant.num_releases == 0
    with pytest.raises(ConfigurationError, match="inference"):
        nonprivate("svi")


def test_warnings_as_errors_come_after_the_mark_and_before_the_read():
    inference = svi()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            nonprivate(inference).loss(*data())
    assert inference.accountant.get_epsilon() == math.inf


def test_the_way_to_the_door_is_shown():
    with pytest.raises(PrivacyError, match="nonprivate"):
        svi().evaluate_loss(*data())
    public = [n for n, _ in inspect.getmembers(PaperDPSVI, callable) if not n.startswith("_")]
    assert not [n for n in public if "norm" in n or n == "loss"]
