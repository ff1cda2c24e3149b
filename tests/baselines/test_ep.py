"""EP: where it is exact, where stochastic EP agrees with it, and that it marks the ledger first."""

import math
import warnings
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import logistic, regression_data
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

import pyro_dp.baselines.ep
from pyro_dp import (
    ConfigurationError,
    ModelError,
    NotPrivateWarning,
    PaperDPSEP,
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    SubsampledGaussian,
)
from pyro_dp.baselines import EP


def linear(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(x[idx] @ w, 0.5), obs=y[idx])


def new_ep(model=linear, guide=AutoMultivariateNormal, **settings):
    pyro.clear_param_store()
    return EP(model, guide(model), **{"accountant": PrivacyAccountant(), "num_steps": 3} | settings)


def run(ep, *data):
    with pytest.warns(NotPrivateWarning, match="The privacy guarantee ends") as caught:
        posterior = ep.run(*data, progress=False)
    assert [Path(each.filename).name for each in caught] == [Path(__file__).name]
    return posterior


def test_is_exact_for_linear_regression():
    x = torch.randn(20, 2)
    y = x.sum(1)
    ep = new_ep(guide=AutoNormal, damping=1.0)
    posterior = run(ep, x, y)
    precision = torch.eye(2) + x.T @ x / 0.25
    mean = torch.linalg.solve(precision, x.T @ y / 0.25)
    torch.testing.assert_close(posterior.mean, mean)
    torch.testing.assert_close(posterior.precision_matrix, precision)
    torch.testing.assert_close(ep.guide.median()["w"].detach(), mean)


def test_stochastic_ep_agrees_where_there_are_many_records():
    x, y = regression_data(size=400)
    posterior = run(new_ep(logistic, num_steps=25), x, y)
    pyro.clear_param_store()
    guide = AutoMultivariateNormal(logistic)
    settings = dict(num_steps=15, noise_multiplier=0, max_factor_norm=math.inf)
    sep = PaperDPSEP(logistic, guide, accountant=PrivacyAccountant(), **settings)
    sep.run(x, y, progress=False)
    assert torch.distributions.kl_divergence(sep.posterior(), posterior) < 1e-3


def test_sites_that_diverge():
    x, y = regression_data()
    with pytest.warns(NotPrivateWarning), pytest.raises(ModelError, match="finite numbers"):
        new_ep().run(1e200 * x, y, progress=False)


def test_is_a_baseline_with_a_ledger():
    assert not hasattr(pyro_dp, "EP") and "EP" not in pyro_dp.__all__
    guide = AutoNormal(linear)
    with pytest.raises(TypeError, match="accountant"):
        EP(linear, guide, num_steps=3)
    with pytest.raises(ConfigurationError, match="accountant"):
        EP(linear, guide, accountant=None, num_steps=3)


def test_ends_the_guarantee():
    accountant = PrivacyAccountant(epsilon=1.0)
    ep = new_ep(accountant=accountant)
    assert accountant.get_epsilon() == 0.0
    run(ep, *regression_data())
    (entry,) = accountant.ledger
    assert "EP" in entry.event.what and "'data'" in entry.event.what and entry.event.time
    assert accountant.get_epsilon() == math.inf
    with pytest.raises(PrivacyBudgetExceeded):
        accountant.record(SubsampledGaussian(10.0))


def test_data_that_do_not_fit_are_not_read():
    x, y = regression_data()
    x[3] = math.nan
    ep = new_ep()
    with pytest.raises(ModelError):
        ep.run(x, y, progress=False)
    assert ep.accountant.num_releases == 0


def test_the_ledger_is_marked_before_the_fit_reads(monkeypatch):
    """And with warnings as errors nothing is read."""
    data, ep = regression_data(), new_ep(num_steps=2)
    entries, cavities = [], pyro_dp.baselines.ep._cavities

    def watched(*given):
        entries.append(ep.accountant.num_releases)
        return cavities(*given)

    monkeypatch.setattr(pyro_dp.baselines.ep, "_cavities", watched)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(NotPrivateWarning):
            ep.run(*data, progress=False)
    assert entries == [] and ep.accountant.num_releases == 1
    run(ep, *data)
    assert entries == [2, 2]
