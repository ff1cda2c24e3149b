"""Groups that learn from each other."""

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints, transforms
from pyro.infer.autoguide import AutoNormal

from .entry import plain

COUNTIES = 20
GROUPS = 8


# The schools are the records.


def eight_schools(y, sigma):
    """Pyro example eight_schools, with its guide; mean and spread outside of the plate."""
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    tau = pyro.sample("tau", dist.HalfCauchy(scale=torch.tensor(25.0)))
    with pyro.plate("data", len(y)):
        eta = pyro.sample("eta", dist.Normal(torch.zeros(len(y)), torch.ones(len(y))))
        theta = mu + tau * eta
        pyro.sample("obs", dist.Normal(theta, sigma), obs=y)


def eight_schools_guide(y, sigma):
    positive = constraints.positive
    m_eta = pyro.param("loc_eta", lambda: torch.zeros(len(y)))
    s_eta = pyro.param("scale_eta", lambda: torch.full((len(y),), 0.1), constraint=positive)
    m_mu = pyro.param("loc_mu", torch.tensor(0.0))
    s_mu = pyro.param("scale_mu", torch.tensor(0.1), constraint=positive)
    m_logtau = pyro.param("loc_logtau", torch.tensor(0.0))
    s_logtau = pyro.param("scale_logtau", torch.tensor(0.1), constraint=positive)
    pyro.sample("mu", dist.Normal(m_mu, s_mu))
    dist_tau = dist.TransformedDistribution(
        dist.Normal(m_logtau, s_logtau), transforms=transforms.ExpTransform()
    )
    pyro.sample("tau", dist_tau)
    with pyro.plate("data", len(y)):
        pyro.sample("eta", dist.Normal(m_eta, s_eta))


def schools_data(size):
    sigma = 2 + 3 * torch.rand(size)
    return 4 + 5 * torch.randn(size) + sigma * torch.randn(size), sigma


# Radon in houses of counties.


def radon(county, floor, log_radon=None):
    """Gelman & Hill, chapter 12: varying intercepts."""
    mu_a = pyro.sample("mu_a", dist.Normal(0.0, 1.0))
    sigma_a = pyro.sample("sigma_a", dist.HalfCauchy(1.0))
    with pyro.plate("counties", COUNTIES):
        a = pyro.sample("a", dist.Normal(mu_a, sigma_a))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
    with pyro.plate("houses", len(county)):
        pyro.sample("log_radon", dist.Normal(a[county] + b * floor, sigma), obs=log_radon)


def radon_data(size):
    county, floor = torch.randint(COUNTIES, (size,)), torch.bernoulli(torch.full((size,), 0.2))
    a = 1.4 + 0.3 * torch.randn(COUNTIES)
    return county, floor, a[county] - 0.7 * floor + 0.7 * torch.randn(size)


# Slopes and intercepts of groups, correlated.


def random_slopes(x, group, y):
    """McElreath, Statistical Rethinking, chapter 14; Pyro example lkj."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    scale = pyro.sample("scale", dist.HalfNormal(1.0).expand([2]).to_event(1))
    corr = pyro.sample("corr", dist.LKJCholesky(2, concentration=torch.tensor(2.0)))
    with pyro.plate("groups", GROUPS):
        effects = pyro.sample(
            "effects", dist.MultivariateNormal(mu, scale_tril=scale.unsqueeze(-1) * corr)
        )
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    mean = effects[group, 0] + effects[group, 1] * x
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean, sigma), obs=y)


def random_slopes_data(size):
    x, group = 2 * torch.rand(size) - 1, torch.randint(GROUPS, (size,))
    tril = torch.tensor([[0.8, 0.0], [0.4, 0.5]])
    effects = torch.tensor([1.0, -1.0]) + torch.randn(GROUPS, 2) @ tril.T
    return x, group, effects[group, 0] + effects[group, 1] * x + 0.6 * torch.randn(size)


ENTRIES = (
    plain("eight schools", eight_schools, eight_schools_guide, schools_data),
    plain("radon", radon, AutoNormal, radon_data, dpsep=True),
    plain("random slopes", random_slopes, AutoNormal, random_slopes_data, dpsep=True),
)
