"""The posterior of gradient steps: its status, and guides with latents per record."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import logistic, regression_data
from pyro.infer.autoguide import (
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)

from pyro_dp import DPSVI, Execution, Noise, PrivacyAccountant

pytestmark = pytest.mark.long
GUIDES = AutoNormal, AutoMultivariateNormal, AutoLowRankMultivariateNormal


def fitted(model, guide, *data, lr=None, num_steps=400, sigma=1.0):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    optim = None if lr is None else pyro.optim.Adam({"lr": lr})
    settings = dict(accountant=PrivacyAccountant(), noise=Noise(sigma, source=0))
    settings["execution"] = Execution(jit="trace")
    svi = DPSVI(model, guide, optim, clip=5.0, num_steps=num_steps, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        svi.run(*data, progress=False)
    return svi.posterior()


@pytest.mark.in_turns
@pytest.mark.slow
@pytest.mark.parametrize("kind", GUIDES)
def test_steps_that_have_settled(kind):
    data = regression_data(2000)
    exact = fitted(logistic, AutoMultivariateNormal(logistic), *data, sigma=0)
    found = fitted(logistic, kind(logistic), *data)
    assert found.status.is_ok and found.noise_share.max() < 0.3
    assert ((found.mean - exact.mean).abs() < 3 * found.stddev).all()


@pytest.mark.parametrize("kind", GUIDES)
@pytest.mark.parametrize(
    ("size", "lr", "num_steps"),
    [
        (2000, 1e-4, 200),  # far too slow, so the means hardly move
        (2000, 0.01, 100),
        (30, 0.01, 100),  # scales start below those of few records
    ],
)
def test_steps_that_have_not(kind, size, lr, num_steps):
    data = regression_data(size)
    found = fitted(logistic, kind(logistic), *data, lr=lr, num_steps=num_steps, sigma=0.5)
    assert found.status.cause == "steps"
    assert any(word in found.status.reason for word in ("moved", "further", "widths"))


def persons(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    with pyro.plate("persons", len(y)):
        own = pyro.sample("own", dist.Normal(mean, scale))
        pyro.sample("y", dist.Normal(own, 0.5), obs=y)


@pytest.mark.slow
def test_global_latents_beside_those_of_records():
    """They have intervals without the noise, since latents of records follow them."""
    found = fitted(persons, AutoNormal(persons), 1 + torch.randn(2000))
    assert found.names == ("mean", "scale")
    assert abs(found.mean[0] - 1) < 0.2 and not found.noise_share.any()
    assert "do not include the privacy noise" in found.status.reason
    assert found["scale"].quantiles([0.5])["scale"] > 0
