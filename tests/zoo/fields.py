"""Fields over space: areas of a map, and a function of a location."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from .entry import plain

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
