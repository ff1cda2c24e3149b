"""Widths of intervals before a run: on made-up data, and without touching any ledger."""

import pyro
import pytest
import torch
from problems import linear, logistic
from pyro.infer.autoguide import AutoDelta, AutoIAFNormal, AutoMultivariateNormal
from torch.distributions import biject_to, constraints

from pyro_dp import (
    DPSEP,
    DPSVI,
    VIPS,
    ConfigurationError,
    Forecast,
    FullBatch,
    Posterior,
    PrivacyAccountant,
)
from pyro_dp.infer.posterior.posterior import Status
from pyro_dp.records.global_draw import Latent
from pyro_dp.utils.errors import ModelError

FEW = {"epsilons": (0.3, 30.0), "num_draws": 1, "progress": False}
SHORT = {DPSEP: {}, DPSVI: {"num_steps": 150, "sampling": 1.0}}


def made_up(size=300, dim=2):
    return torch.randn(size, dim), torch.zeros(size)


def forecast(model=logistic, args=None, inference=DPSEP, guide=AutoMultivariateNormal, **options):
    options = FEW | {"settings": SHORT.get(inference)} | options
    args = made_up() if args is None else args
    accountant = PrivacyAccountant(epsilon=1.0)
    return accountant.forecast(model, guide(model), *args, inference=inference, **options)


@pytest.mark.slow
@pytest.mark.parametrize("inference", [DPSEP, DPSVI])
def test_more_budget_is_narrower(inference):
    found = forecast(inference=inference)
    assert found.names == ["w[0]", "w[1]"] and found.epsilons == [0.3, 30.0]
    assert found.widths.shape == (2, 2) and found.ok.shape == (2,) and found.num_draws == 1
    assert (found.widths[0] > found.widths[1]).all()
    assert found.widths[1].log().sub(found.without_noise.log()).abs().max() < 0.3
    times = found.times_as_wide
    torch.testing.assert_close(times[0], (found.widths[0] / found.without_noise).prod().sqrt())
    assert found.ok[1] == 1


@pytest.mark.slow
def test_without_noise_it_is_the_exact_posterior():
    """In a linear model the width does not depend on the outcomes."""
    x, y = made_up()
    found = forecast(linear, (x, y))
    covariance = torch.linalg.inv(torch.eye(2) + x.T @ x / 0.25)
    exact = 2 * 1.959964 * covariance.diagonal().sqrt()
    torch.testing.assert_close(found.without_noise, exact, rtol=1e-4, atol=0.0)
    assert (found.widths[1] < 1.2 * exact).all() and (found.widths > 0.95 * exact).all()


@pytest.mark.slow
def test_nothing_is_charged_or_moved():
    """Ledger, guide, parameter store, generators and arguments do not change."""
    accountant = PrivacyAccountant(epsilon=1.0)
    guide, (x, y) = AutoMultivariateNormal(logistic), made_up()
    pyro.param("theirs", torch.ones(2))
    state, rng, before = accountant.state_dict(), torch.get_rng_state(), y.clone()
    options = FEW | {"epsilons": (1.0,), "inference": DPSEP, "settings": {}}
    found = accountant.forecast(logistic, guide, x, y, **options)
    assert accountant.state_dict() == state and accountant.position == 0
    assert accountant.get_epsilon() == 0.0
    assert guide.prototype_trace is None and not list(guide.parameters())
    assert list(pyro.get_param_store().keys()) == ["theirs"]
    assert torch.equal(torch.get_rng_state(), rng) and torch.equal(y, before)
    # The guide can be used, and the forecast can be had again.
    sep = DPSEP(logistic, guide, accountant=accountant)
    sep.run(x, torch.bernoulli(torch.full((300,), 0.5)), progress=False)
    again = accountant.forecast(logistic, AutoMultivariateNormal(logistic), x, 1 - y, **options)
    assert torch.equal(again.widths, found.widths)  # the budget is spent, outcomes are others
    other = accountant.forecast(
        logistic, AutoMultivariateNormal(logistic), x, y, **options | {"seed": 1}
    )
    assert not torch.equal(other.widths, found.widths)


@pytest.mark.slow
def test_trials_have_the_settings_of_the_accountant():
    trials = []

    class Spied(DPSEP):
        def __init__(self, *args, **options):
            trials.append((options["accountant"], options["noise"].multiplier))
            super().__init__(*args, **options)

    ours = PrivacyAccountant(2.0, 1e-6, neighboring="replace_one", engine="rdp")
    guide = AutoMultivariateNormal(logistic)
    options = FEW | {"num_draws": 2, "settings": {"sampling": FullBatch(plate="data")}}
    found = ours.forecast(logistic, guide, *made_up(100), inference=Spied, **options)
    assert [(each.epsilon, sigma) for each, sigma in trials] == 2 * [
        (None, 0.0),
        (0.3, None),
        (30.0, None),
    ]
    for trial, _ in trials:
        assert (trial.delta, trial.neighboring, trial.engine) == (1e-6, "replace_one", "rdp")
        assert trial.epsilon is None or 0.9 * trial.epsilon < trial.get_epsilon() <= trial.epsilon
    assert found.num_draws == 2 and not ours.ledger


def table(**options):
    return Forecast(
        ["a", "b"],
        [0.1, 1.0],
        torch.tensor([[4.0, 1.0], [2.0, 0.5]]),
        torch.tensor([1.0, 0.5]),
        torch.tensor([1 / 3, 1.0]),
        3,
    )


def test_the_share_of_runs_whose_status_is_ok():
    latent = Latent("w", torch.Size([2]), biject_to(constraints.real), 0, 2)
    good, bad = (
        Posterior([latent], torch.zeros(2), torch.ones(2), status=each)
        for each in (Status(), Status("check", "why", "steps"))
    )
    found = Forecast.of({None: [good] * 4, 0.1: [bad] * 4, 1.0: [good, good, bad, good]})
    assert found.ok.tolist() == [0.0, 0.75] and found.names == ["w[0]", "w[1]"]


def test_it_reads():
    assert repr(table()).splitlines() == [
        "Expected widths of 95% intervals, from 3 draws of the prior predictive:",
        "epsilon         0.1      1  without noise",
        "a              4.00  2.000          1.000",
        "b              1.00  0.500          0.500",
        "times as wide  2.83   1.41               ",
        "status ok       33%   100%               ",
    ]
    assert table()._repr_html_().count("<tr>") == 5
    many = torch.ones(1, 40), torch.ones(40), torch.ones(1)
    text = repr(Forecast([f"w[{n}]" for n in range(40)], [1.0], *many, 1)).splitlines()
    assert "from 1 draw of" in text[0] and text[-1] == "... and 10 more: forecast.widths"


def test_a_picture():
    pytest.importorskip("matplotlib")
    (axes,) = table().plot().axes
    curve, limit, *_ = axes.lines
    assert list(curve.get_ydata()) == [4.0, 2.0] and list(curve.get_xdata()) == [0.1, 1.0]
    assert list(limit.get_ydata()) == [1.0, 1.0] and limit.get_linestyle() == "--"
    assert axes.get_xscale() == axes.get_yscale() == "log"


@pytest.mark.long
@pytest.mark.parametrize(
    "options, said",
    [
        ({"inference": VIPS}, "inference must be"),
        ({"inference": None}, "inference must be"),
        ({"settings": {"accountant": None}}, "settings: leave out accountant"),
        ({"settings": {"noise": 1.0}}, "settings: leave out noise"),
        ({"settings": 3}, "settings must be"),
        ({"epsilons": ()}, "epsilons must be"),
        ({"epsilons": 1.0}, "epsilons must be"),
        ({"epsilons": (1.0, -1.0)}, "epsilons must lie"),
        ({"num_draws": 0}, "num_draws must be"),
        ({"seed": -1}, "seed must be"),
        ({"guide": AutoIAFNormal, "inference": DPSVI}, "not one Gaussian"),
        ({"guide": AutoDelta}, "guide"),
        ({"settings": {"sampling": FullBatch(plate="rows")}}, "plate='rows'"),
    ],
)
def test_what_it_refuses(options, said):
    with pytest.raises((ConfigurationError, ModelError), match=said):
        forecast(args=made_up(50), **options)
