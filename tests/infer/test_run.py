"""Runs of inferences for Pyro models, beyond the contract.

The promises of all runs are in run_contract.py.
"""

import math
import re
import sys
import warnings
from types import SimpleNamespace

import pyro
import pytest
import torch
from problems import handwritten_guide, logistic, new_paper_dpsvi, regression_data, values
from pyro import distributions as dist
from pyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal
from run_contract import ctrl_c, same

from pyro_dp import (
    DPSEP,
    DPSVI,
    VIPS,
    ConfigurationError,
    ConvergenceWarning,
    ModelError,
    Noise,
    PaperDPSEP,
    PaperDPSVI,
    PrivacyAccountant,
    PrivacyWarning,
    RunResult,
)
from pyro_dp.infer.svi.optimizers import PublicOptimizer
from pyro_dp.mechanism.clipped_fraction import ClippedFraction
from pyro_dp.mechanism.peers import Alone
from pyro_dp.mechanism.run_result import DONE, ReleasedStep
from pyro_dp.utils.interrupts import Interrupts
from pyro_dp.vips import LogisticRegression


def scheduled(num_steps=6, **options):
    optim = pyro.optim.ExponentialLR(
        {"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.1}, "gamma": 0.5}
    )
    return new_paper_dpsvi(logistic, handwritten_guide, optim=optim, num_steps=num_steps, **options)


def rates(svi):
    (rate,) = {each.optimizer.param_groups[0]["lr"] for each in svi.optim.optim_objs.values()}
    return rate


def test_a_scheduler_has_stepped_when_callbacks_are_called():
    svi, found = scheduled(), []
    svi.run(*regression_data(), progress=False, callbacks=[lambda step: found.append(rates(svi))])
    assert found == pytest.approx([0.1 * 0.5**n for n in range(1, 7)])


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.parametrize("make", [DPSVI, DPSEP, VIPS])
def test_a_callback_that_holds_the_data_is_refused(make):
    """It could stop the run by the data. It may hold inferences and released numbers."""
    data, accountant, found = regression_data(), PrivacyAccountant(epsilon=5.0), []
    if make is VIPS:
        inference = VIPS(LogisticRegression(3), accountant=accountant, num_steps=3)
    else:
        inference = make(logistic, AutoNormal(logistic), accountant=accountant)

    def fits(step):
        return bool((data[0] @ torch.ones(2)).abs().mean() > 1.0)

    for _ in range(2):
        with pytest.raises(ModelError, match="callbacks: Variable 'data'.*of steps would reveal"):
            inference.run(*data, progress=False, callbacks=[fits])
        assert accountant.num_releases == 0
    look = lambda step: found.append(inference.accountant.get_epsilon())  # noqa: E731
    inference.run(*data, progress=False, callbacks=[look, lambda step: step.step == 1])
    assert len(found) == 1
    if inference.last_run.stopped != DONE:
        with pytest.raises(ModelError, match="callbacks"):
            inference.run(*data, progress=False, callbacks=[fits])


@pytest.mark.long
@pytest.mark.parametrize("stage", ["step", "step_scheduler"])
def test_ctrl_c_waits_for_optimizer_and_scheduler(stage, monkeypatch):
    """Parameters, history and step size are those of an uninterrupted run."""
    data, original = regression_data(), getattr(PublicOptimizer, stage)

    def interrupted(*args, **kwargs):
        ctrl_c()
        return original(*args, **kwargs)

    states = []
    for interrupts in (False, True):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        svi = scheduled(noise=Noise(1.0, source=0))
        svi.step(*data)
        with monkeypatch.context() as patch:
            if interrupts:
                patch.setattr(PublicOptimizer, stage, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    svi.run(*data, progress=False)
            else:
                svi.run(*data, progress=False, callbacks=[lambda step: True])
        state = svi.state_dict()
        state["accountant"]["notes"] = state["accountant"]["runs"] = []
        state["reservation"] = state["accountant"]["reserved"] = None
        states.append((state, values(), rates(svi)))
    assert same(*states)


@pytest.mark.every_commit
@pytest.mark.slow
def test_an_exception_in_the_optimizer_finds_its_release_kept(monkeypatch):
    """The step is counted, the regression has its gradient, and the run goes on."""

    def fails(*args, **kwargs):
        raise KeyboardInterrupt

    svi, data = scheduled(100, noise=None, accountant=PrivacyAccountant(1.0)), regression_data()
    svi.step(*data)
    with monkeypatch.context() as patch:
        patch.setattr(PublicOptimizer, "step", fails)
        with pytest.raises(KeyboardInterrupt):
            svi.run(*data, progress=False)
    assert svi._steps == svi.accountant.num_releases == 2
    assert svi.run(*data, progress=False).steps == 98
    assert 0.995 < svi.accountant.get_epsilon() <= 1.0


@pytest.mark.slow
def test_a_run_that_is_stopped_leaves_what_it_found_in_the_guide():
    """The guide holds the result so far, and the run goes on from there."""
    data, guide = regression_data(), AutoMultivariateNormal(logistic)
    svi = DPSVI(
        logistic,
        guide,
        accountant=PrivacyAccountant(),
        noise=Noise(1.0, source=0),
        num_steps=60,
    )
    with pytest.warns(ConvergenceWarning, match="The guide holds the last iterate"):
        svi.run(*data, progress=False, callbacks=[lambda step: step.step == 10])
    found = svi.posterior()
    torch.testing.assert_close(guide.median()["w"], found.mean)
    svi.run(*data, progress=False)
    assert not torch.equal(svi.posterior().mean, found.mean)
    torch.testing.assert_close(guide.median()["w"], svi.posterior().mean)


# The result by itself.


def result(values=(3.0, 2.0, 1.0), bound=1.5, clipped=True):
    made = RunResult("DPSVI", "private loss (nats)", 2, 9)
    for place, value in enumerate(values):
        fraction = ClippedFraction(0.1 * place, 0.01) if clipped else None
        inference = SimpleNamespace(accountant=PrivacyAccountant(), clipped_fraction=fraction)
        step = ReleasedStep(3 + place, 9, value, bound, 2.0, 3.0, inference)
        made.add(step, 0.5)
    return made


def test_a_result_is_a_sequence_of_what_is_a_number():
    made = result((3.0, math.nan, 1.0))
    assert list(made) == [3.0, 1.0] and made[-1] == 1.0 and made[:1] == [3.0] and sum(made) == 4.0
    assert (made.steps, len(made)) == (3, 2) and not result((math.nan,))
    assert list(made.clipped) == [3, 4, 5]


def test_a_result_prints_as_a_few_lines():
    made = result()
    made.seconds, made.stopped = 1.6, "a callback stopped it"
    assert repr(made).splitlines() == [
        "DPSVI: 5 of 9 steps, a callback stopped it",
        "  Gaussian noise: multiplier 2, bound 1.5, 3 in a coordinate of the sum",
        "  clipped: 20% +- 1.0%",
        "  private loss (nats): 3 first, 1 last",
        "  1.6 s, 500 ms a step",
    ]
    title, *cells = re.findall(">([^<]+)</(?:caption|t[dh])>", made._repr_html_())
    assert title == "DPSVI: 5 of 9 steps, a callback stopped it"
    assert dict(zip(cells[::2], cells[1::2], strict=True)) == {
        "Gaussian noise": "multiplier 2, bound 1.5, 3 in a coordinate of the sum",
        "clipped": "20% +- 1.0%",
        "private loss (nats)": "3 first, 1 last",
    }  # but no times, which are not private
    assert repr(RunResult("DPSVI", "loss", 0, 9)) == "DPSVI: 0 of 9 steps, it is not finished"


def test_a_result_draws_what_there_is():
    pytest.importorskip("matplotlib")
    loss, bound, clipped = result().plot().axes
    assert [axes.get_ylabel() for axes in (loss, bound, clipped)] == [
        "private loss (nats)",
        "bound C",
        "clipped fraction",
    ]
    (line,) = loss.lines
    assert list(line.get_xdata()) == [3, 4, 5] and list(line.get_ydata()) == [3.0, 2.0, 1.0]
    (axes,) = result((math.nan,), clipped=False).plot().axes
    assert axes.get_ylabel() == "bound C"
    (axes,) = RunResult("DPSVI", "loss", 0, 9).plot().axes
    assert not axes.lines


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r"result\.plot\(\) needs matplotlib"):
        result().plot()


# Ctrl-C by itself.


def test_a_second_ctrl_c_does_not_wait():
    """It waits only if the work must be finished."""
    interrupts, reached = Interrupts(), []
    with pytest.raises(KeyboardInterrupt), interrupts.within():
        ctrl_c()
        reached.append(1)
        ctrl_c()
        reached.append(2)
    with pytest.raises(KeyboardInterrupt), interrupts.within():
        interrupts.hold()
        ctrl_c()
        ctrl_c()
        interrupts.check()
        reached.append(3)
    assert reached == [1, 3]
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()  # as before


def test_ctrl_c_comes_at_a_check():
    interrupts, reached = Interrupts(), []
    with pytest.raises(KeyboardInterrupt), interrupts.within():
        with interrupts.within():  # a part of the work
            ctrl_c()
        reached.append(1)
        interrupts.check()
        reached.append(2)
    with interrupts.within():
        interrupts.check()
    assert reached == [1]


@pytest.mark.long
def test_a_large_delta_is_told_before_anything_is_released():
    """A mechanism that publishes one record has a delta of 1 / N. The report warns, too."""
    data = regression_data()
    size = len(data[0])
    accountant = PrivacyAccountant(delta=1.0 / size)
    svi = new_paper_dpsvi(logistic, handwritten_guide, accountant=accountant, num_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        with pytest.raises(PrivacyWarning, match="1 / N"):
            svi.run(*data, progress=False)
    assert accountant.num_releases == 0
    with pytest.warns(PrivacyWarning) as told:
        svi.run(*data, progress=False)
    assert len(told) == 1 and accountant.num_releases == 2
    assert f"N = {size}" in accountant.report()
    quiet = PrivacyAccountant(delta=0.99 / size)
    new_paper_dpsvi(logistic, handwritten_guide, accountant=quiet, num_steps=2).run(
        *data, progress=False
    )
    assert "1 / N" not in quiet.report()


@pytest.mark.parametrize("kind", [PaperDPSVI, PaperDPSEP])
def test_constants_of_a_model_are_compared_across_ranks(monkeypatch, kind):
    seen = []
    monkeypatch.setattr(Alone, "add_up", lambda *given: seen.append(given[-1]))

    def scaled(x, scale):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)) as i:
            pyro.sample("x", dist.Normal(w * scale.mean(), 1.0), obs=x[i])

    scale = torch.arange(3.0)
    own = dict(accountant=PrivacyAccountant(), num_steps=1, noise=1.0, clip=1.0)
    optim = (pyro.optim.Adam({"lr": 0.1}),) if kind is PaperDPSVI else ()
    kind(scaled, AutoDiagonalNormal(scaled), *optim, **own).step(torch.zeros(20), scale)
    assert any(torch.equal(each, scale) for each in seen[0] if each.shape == scale.shape)
