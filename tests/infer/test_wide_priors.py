"""Looks begin at the prior's mean, also beside latents whose prior is not normal."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoMultivariateNormal

from pyro_dp import DPSEP, PrivacyAccountant


def regression(x, y):
    beta = pyro.sample("beta", dist.Normal(0.0, 10.0).expand([3]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_a_wide_prior_and_an_unknown_scale(epsilon):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 3, generator=draw)
    y = x @ torch.tensor([1.5, -1.0, 0.0]) + 0.5 * torch.randn(4000, generator=draw)
    pyro.set_rng_seed(0)
    accountant = PrivacyAccountant(epsilon=epsilon, delta=1e-5)
    sep = DPSEP(regression, AutoMultivariateNormal(regression), accountant=accountant, generator=0)
    sep.run(x, y, progress=False)
    found = sep.posterior()
    exact = torch.linalg.lstsq(x, y.unsqueeze(1)).solution.squeeze(1)
    sds = found.variance[:3].sqrt()
    assert str(found.status) == "ok"
    assert (sds < 0.05).all()
    assert ((found.mean[:3] - exact).abs() < 4 * sds).all()
