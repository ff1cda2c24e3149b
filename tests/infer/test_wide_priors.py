"""Looks begin at the prior's mean, also beside latents whose prior is not normal."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoMultivariateNormal

from pyro_dp import DPSEP, Noise, PrivacyAccountant


def regression(x, y):
    beta = pyro.sample("beta", dist.Normal(0.0, 10.0).expand([3]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def made_up():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 3, generator=draw)
    return x, x @ torch.tensor([1.5, -1.0, 0.0]) + 0.5 * torch.randn(4000, generator=draw)


@pytest.mark.in_turns
@pytest.mark.long
@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_a_wide_prior_and_an_unknown_scale(epsilon):
    x, y = made_up()
    pyro.set_rng_seed(0)
    accountant = PrivacyAccountant(epsilon=epsilon, delta=1e-5)
    sep = DPSEP(
        regression, AutoMultivariateNormal(regression), accountant=accountant, noise=Noise(source=0)
    )
    sep.run(x, y, progress=False)
    found = sep.posterior()
    exact = torch.linalg.lstsq(x, y.unsqueeze(1)).solution.squeeze(1)
    sds = found.variance[:3].sqrt()
    assert str(found.status) == "ok"
    assert (sds < 0.05).all()
    assert ((found.mean[:3] - exact).abs() < 4 * sds).all()


@pytest.mark.in_turns
@pytest.mark.long
@pytest.mark.parametrize("scale", [2.0, 0.1])
def test_a_prior_of_a_scale_that_is_far_too_small(scale):
    """The opening says so, and the first look is made at a scale that fits."""

    def model(x, y):
        sigma = pyro.sample("sigma", dist.HalfNormal(0.1))
        beta = pyro.sample("beta", dist.Normal(0.0, 3.0).expand([3]).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)

    x, y = made_up()
    y = y * (scale / 0.5)
    pyro.set_rng_seed(0)
    accountant = PrivacyAccountant(epsilon=4.0, delta=1e-5)
    sep = DPSEP(model, AutoMultivariateNormal(model), accountant=accountant, noise=Noise(source=0))
    sep.run(x, y, progress=False)
    found = sep.posterior()
    exact = torch.linalg.lstsq(x, y.unsqueeze(1)).solution.squeeze(1)
    sds = found.variance[1:].sqrt()
    assert str(found.status) == "ok"
    assert (sds < 2 * scale / len(x) ** 0.5).all()
    assert ((found.mean[1:] - exact).abs() < 4 * sds).all()
