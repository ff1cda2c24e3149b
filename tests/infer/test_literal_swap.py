"""SVI becomes DPSVI, with optim and loss as they are: loops, bounds, guides and states."""

import math
import warnings

import pyro
import pytest
import torch
from problems import PROBLEMS, handwritten_guide, logistic, regression_data, with_needs
from pyro import poutine
from pyro.infer.autoguide import (
    AutoMultivariateNormal,
)

from pyro_dp import (
    DPSVI,
    Clip,
    ClippingWarning,
    ConfigurationError,
    ConvergenceWarning,
    FullBatch,
    Noise,
    PaperDPSVI,
    PrivacyAccountant,
    PrivacyWarning,
    RowAdam,
)
from pyro_dp.infer.svi.averaged_guide import IterateAverages

NOT_IN = "do not include the privacy noise"


def swapped(model=logistic, guide=None, optim=None, **options):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    settings = dict(accountant=PrivacyAccountant(), noise=Noise(1.0, source=0)) | options
    optim = optim or pyro.optim.Adam({"lr": 0.01})
    return DPSVI(model, guide or AutoMultivariateNormal(model), optim, **settings)


def told(run, kind):
    """Texts of the warnings of one kind."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught if issubclass(each.category, kind)]


# A loop over step().


@pytest.mark.long
def test_a_loop_needs_no_number_of_steps():
    """The first step says once that it returns nan."""
    svi, data = swapped(), regression_data()
    with pytest.warns(PrivacyWarning, match=r"step\(\) returns nan.*Clip") as caught:
        assert math.isnan(svi.step(*data))
    assert caught[0].filename == __file__ and svi.num_steps == 1000
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        assert math.isnan(svi.step(*data))
        swapped(num_steps=2).run(*data, progress=False)
        with_loss = swapped(clip=Clip(loss=1.0))
        with_loss.step(*data)
        assert math.isfinite(with_loss.step(*data))


@pytest.mark.long
def test_a_loop_may_be_too_long():
    svi, data = swapped(num_steps=5), regression_data()
    for _ in range(5):
        svi.step(*data)
    with pytest.raises(ConfigurationError, match=r"num_steps=5 .*num_steps=5000.*svi\.finish\(\)"):
        svi.step(*data)
    assert svi.accountant.num_releases == 5


@pytest.mark.slow
def test_a_loop_averages_at_its_end():
    """The end is that of the plan, or the call of finish()."""
    for steps in (60, 56):
        svi, data = (
            swapped(num_steps=60, optim=pyro.optim.SGD({"lr": 1e-6})),
            regression_data(200),
        )
        for _ in range(steps - 1):
            svi.step(*data)
        assert svi._gradients._moves.concluded == ""
        svi.step(*data)
        if steps < 60:
            svi.finish()
        assert "mean of the last half" in svi._gradients._moves.concluded
        assert svi.accountant.num_releases == steps


@pytest.mark.long
def test_finish_warns_as_run_does():
    svi, data = swapped(num_steps=60), regression_data()
    svi.step(*data)
    with pytest.warns(ConvergenceWarning, match=NOT_IN) as caught:
        svi.finish()
    assert caught[0].filename == __file__


# A bound of one's own.


def fitted(bound, model=logistic, **options):
    """The inference, and its warnings about clipping."""
    options = dict(num_steps=100, sampling=FullBatch()) | options
    svi, data = swapped(model, clip=bound, **options), regression_data(2000)
    return svi, told(lambda: svi.run(*data, progress=False), ClippingWarning)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bound", "words"),
    [
        pytest.param(0.01, "clip=0.01 clips about", marks=pytest.mark.slow),
        (1e3, "far above the records' gradients"),
        (4.0, None),
        pytest.param(None, None, marks=pytest.mark.slow),
    ],
)
def test_a_bound_is_kept_and_judged(as_users_run_it, bound, words):
    svi, texts = fitted(bound)
    status, clipped = svi.posterior().status, svi.clipped_fraction.fraction
    assert len(texts) == (words is not None)
    for text in texts:
        assert words in text and "clip=None" in text and status.cause == "clipping"
        assert text.startswith(f"{status}. Leave clip out")
    if bound is not None:
        assert svi._gradients._moves.policy.bound == svi.clip.bound == bound
        assert clipped > 0.8 if bound == 0.01 else clipped < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("bound", [1.0, None])
def test_a_loss_that_is_a_mean(as_users_run_it, bound):
    """Pyro's advice to scale model and guide by 1/N makes gradients smaller by 1/N."""

    def scaled(x, y):
        with poutine.scale(scale=1 / len(x)):
            logistic(x, y)

    svi, texts = fitted(bound, scaled)
    if bound is None:
        assert texts == [] and svi._gradients._moves.policy.bound < 0.01
    else:
        (text,) = texts
        times = float(text.split("about ")[1].split(" times")[0].replace(",", ""))
        assert 200 < times < 20_000


# Other guides.


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sigma"), [("VAE", 1.0), ("PyroModule", 1.0), ("AutoDelta", 0.1)])
def test_other_guides_hold_means_of_iterates(monkeypatch, name, sigma):
    """Settled parameters get means, and others the last iterate. One warning says so."""
    problem, iterates, add = PROBLEMS[name](), [], IterateAverages.add

    def spy(self, step, parameters, *others):
        iterates.append({name: leaf.detach().clone() for name, leaf in parameters.items()})
        add(self, step, parameters, *others)

    monkeypatch.setattr(IterateAverages, "add", spy)
    options = dict(num_steps=80, noise=Noise(sigma, source=0), sampling=FullBatch())
    options = with_needs(problem.needs, options)
    svi = swapped(problem.model, problem.guide, pyro.optim.Adam({"lr": 0.3}), **options)
    texts = told(lambda: svi.run(*problem.data, progress=False), ConvergenceWarning)
    assert len(texts) == 1 and NOT_IN in texts[0]
    averaged = []
    for key, leaf in svi._gradients._kept.prepared.parameters.items():
        mean = torch.stack([each[key] for each in iterates[-40:]]).mean(0)
        averaged.append(torch.allclose(leaf, mean, rtol=1e-9))
        assert averaged[-1] or torch.equal(leaf, iterates[-1][key])
    held = "the mean of the last half of the iterates" if any(averaged) else "the last iterate"
    if any(averaged) and not all(averaged):
        held += f" for {sum(averaged)} of {len(averaged)} parameters"
    assert f"The guide holds {held}" in texts[0]
    assert all(averaged) == (name == "AutoDelta")


# States.


@pytest.mark.long
def test_states_of_the_paper_and_of_the_plan_are_not_mixed():
    """States of PaperDPSVI and of version 0.1 with an optim have no plan."""
    data, optim = regression_data(), pyro.optim.Adam({"lr": 0.01})
    planned, settings = swapped(num_steps=5), dict(noise=1.0, num_steps=5)
    planned.step(*data)
    old = planned.state_dict()
    del old["num_steps"]
    pyro.clear_param_store()
    accountant = PrivacyAccountant()
    paper = PaperDPSVI(logistic, handwritten_guide, optim, accountant=accountant, **settings)
    paper.step(*data)
    for state in (old, paper.state_dict()):
        with pytest.raises(ConfigurationError, match="no plan.*PaperDPSVI takes"):
            swapped(num_steps=5).load_state_dict(state)
    pyro.clear_param_store()
    settings |= dict(num_steps=9, accountant=PrivacyAccountant())
    longer = PaperDPSVI(logistic, handwritten_guide, pyro.optim.Adam({"lr": 0.01}), **settings)
    with pytest.raises(ConfigurationError, match="has a plan. DPSVI takes it"):
        longer.load_state_dict(planned.state_dict())
    longer.load_state_dict(paper.state_dict())
    assert longer.run(*data, progress=False).steps == 8


# The paper's algorithm.


def test_the_paper_chooses_no_optimizer():
    for optim in (None, RowAdam()):
        with pytest.raises(ConfigurationError, match="needs an optim"):
            PaperDPSVI(logistic, handwritten_guide, optim, accountant=PrivacyAccountant())
