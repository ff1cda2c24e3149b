"""Groups that learn from each other: players, schools, counties, areas of a map."""

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import Beta, Binomial, Pareto, Uniform, constraints, transforms
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from .entry import plain


def fully_pooled(at_bats):
    phi = pyro.sample("phi", Uniform(torch.tensor(0.0), torch.tensor(1.0)))
    num_players = at_bats.shape[0]
    with pyro.plate("num_players", num_players):
        return pyro.sample("obs", Binomial(at_bats, phi))


def conditioned(at_bats, hits):
    """Pyro example baseball, with pyro.condition and the conjugate guide of tutorial svi_part_i."""
    return pyro.condition(fully_pooled, data={"obs": hits})(at_bats)


def beta_guide(at_bats, hits):
    a = pyro.param("a", torch.tensor(10.0), constraint=constraints.positive)
    b = pyro.param("b", torch.tensor(10.0), constraint=constraints.positive)
    pyro.sample("phi", Beta(a, b))


def not_pooled(at_bats, hits):
    """Pyro example baseball."""
    num_players = at_bats.shape[0]
    with pyro.plate("num_players", num_players):
        phi_prior = Uniform(torch.tensor(0.0), torch.tensor(1.0))
        phi = pyro.sample("phi", phi_prior)
        return pyro.sample("obs", Binomial(at_bats, phi), obs=hits)


def partially_pooled(at_bats, hits):
    """Pyro example baseball."""
    num_players = at_bats.shape[0]
    m = pyro.sample("m", Uniform(torch.tensor(0.0), torch.tensor(1.0)))
    kappa = pyro.sample("kappa", Pareto(torch.tensor(1.0), torch.tensor(1.5)))
    with pyro.plate("num_players", num_players):
        phi_prior = Beta(m * kappa, (1 - m) * kappa)
        phi = pyro.sample("phi", phi_prior)
        return pyro.sample("obs", Binomial(at_bats, phi), obs=hits)


def batting_data(size):
    at_bats = torch.randint(30, 60, (size,)).to(torch.get_default_dtype())
    phi = dist.Beta(torch.tensor(20.0), 55.0).sample((size,))
    return at_bats, dist.Binomial(at_bats, phi).sample()


# Groups that learn from each other.


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


# Fields over space: areas of a map, and a function of a location.


SIDE = 4
AREAS = SIDE**2
CELLS = torch.arange(AREAS).reshape(SIDE, SIDE)
NODE1 = torch.cat([CELLS[:, :-1].flatten(), CELLS[:-1].flatten()])
NODE2 = torch.cat([CELLS[:, 1:].flatten(), CELLS[1:].flatten()])
INDUCING = 10


# Counts of cases by area: neighbours are alike.


def icar(area, exposure, y):
    """Morris et al. 2019, ICAR models in Stan, by area."""
    beta0 = pyro.sample("beta0", dist.Normal(0.0, 2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    phi = pyro.sample("phi", dist.Normal(0.0, 10.0).expand([AREAS]).to_event(1))
    pyro.factor("neighbours", -0.5 * (phi[NODE1] - phi[NODE2]).square().sum())
    pyro.factor("centred", dist.Normal(0.0, 0.001 * AREAS).log_prob(phi.sum()))
    effect = pyro.deterministic("effect", beta0 + sigma * phi)
    rate = exposure * torch.exp(effect[area])
    with pyro.plate("practices", len(y)):
        pyro.sample("y", dist.Poisson(rate), obs=y)


def icar_data(size):
    area, exposure = torch.randint(AREAS, (size,)), 1 + 4 * torch.rand(size)
    column, row = area % SIDE, area // SIDE
    return area, exposure, torch.poisson(exposure * torch.exp(-0.5 + 0.3 * (column - row) / SIDE))


# A Gaussian process by inducing points.


def kernel(one, other, lengthscale, variance):
    distance = (one.unsqueeze(-1) - other) / lengthscale
    return variance * torch.exp(-0.5 * distance**2)


def gaussian_process(x, y):
    """Pyro tutorial gp; Seeger et al. 2003, deterministic training conditional."""
    inducing = torch.linspace(0.0, 1.0, INDUCING)
    lengthscale = pyro.sample("lengthscale", dist.LogNormal(-1.5, 0.5))
    variance = pyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    u = pyro.sample("u", dist.Normal(torch.zeros(INDUCING), 1.0).to_event(1))
    k_uu = kernel(inducing, inducing, lengthscale, variance) + 1e-4 * torch.eye(INDUCING)
    chol = torch.linalg.cholesky(k_uu)
    weights = torch.linalg.solve_triangular(chol.T, u.unsqueeze(-1), upper=True).squeeze(-1)
    f = kernel(x, inducing, lengthscale, variance) @ weights
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, noise), obs=y)


def gaussian_process_data(size):
    x = torch.rand(size)
    return x, torch.sin(6 * x) + 0.3 * torch.randn(size)


ENTRIES = (
    plain("baseball, fully pooled", conditioned, beta_guide, batting_data),
    plain("baseball, not pooled", not_pooled, AutoNormal, batting_data),
    plain("baseball, partially pooled", partially_pooled, AutoNormal, batting_data),
    plain("eight schools", eight_schools, eight_schools_guide, schools_data),
    plain("radon", radon, AutoNormal, radon_data, dpsep=True),
    plain("random slopes", random_slopes, AutoNormal, random_slopes_data, dpsep=True),
    plain(
        "spatial effects",
        icar,
        AutoNormal,
        icar_data,
        edit="the effects of areas are a deterministic site",
        dpsep=True,
    ),
    plain(
        "Gaussian process",
        gaussian_process,
        AutoMultivariateNormal,
        gaussian_process_data,
        dpsep=True,
    ),
)
