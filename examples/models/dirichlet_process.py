"""Dirichlet process mixture: an unknown number of clusters of points.

Pyro's [tutorial](https://pyro.ai/examples/dirichlet_process_mixture.html). A record is a point.
"""

import sys

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from comparison import compare
from pictures import COLOURS, panels
from pyro.distributions import constraints
from pyro.infer import SVI, Trace_ELBO

from pyro_dp import DPSVI

T, ALPHA = 6, 0.1
CENTRES = torch.tensor([[-8.0, -8.0], [8.0, 8.0], [1.5, 2.0], [-0.5, 1.0]])


def mix_weights(beta):
    return F.pad(beta, (0, 1), value=1) * F.pad((1 - beta).cumprod(-1), (1, 0), value=1)


def model(data):
    with pyro.plate("beta_plate", T - 1):
        beta = pyro.sample("beta", dist.Beta(1, ALPHA))
    with pyro.plate("mu_plate", T):
        mu = pyro.sample("mu", dist.MultivariateNormal(torch.zeros(2), 5 * torch.eye(2)))
    with pyro.plate("data", len(data)):
        z = pyro.sample("z", dist.Categorical(mix_weights(beta)))
        pyro.sample("obs", dist.MultivariateNormal(mu[z], torch.eye(2)), obs=data)


def guide(data):
    sharp = dist.Dirichlet(torch.ones(T) / T)
    kappa = pyro.param("kappa", lambda: 2 * torch.rand(T - 1), constraint=constraints.positive)
    tau = pyro.param("tau", lambda: 3**0.5 * torch.randn(T, 2))
    phi = pyro.param("phi", lambda: sharp.sample([len(data)]), constraint=constraints.simplex)
    with pyro.plate("beta_plate", T - 1):
        pyro.sample("beta", dist.Beta(torch.ones(T - 1), kappa))
    with pyro.plate("mu_plate", T):
        pyro.sample("mu", dist.MultivariateNormal(tau, torch.eye(2)))
    with pyro.plate("data", len(data)):
        pyro.sample("z", dist.Categorical(phi))


def start():
    return model, guide


def svi(model, guide, optim):
    return SVI(model, guide, optim, Trace_ELBO())


def dpsvi(model, guide, optim, accountant, **run):
    return DPSVI(model, guide, optim, Trace_ELBO(), accountant=accountant, **run)


def data(size=5000):
    return (CENTRES[torch.randint(4, (size,))] + torch.randn(size, 2),)


def look(model, guide, *data):
    return pyro.param("tau").detach(), mix_weights(1 / (1 + pyro.param("kappa").detach()))


def picture(figure, looks, data):
    for axes, label, (centres, weights) in panels(figure, looks):
        axes.scatter(*data[:1000].T, s=1, color="#dddddd")
        axes.scatter(*centres.T, s=10 + 300 * weights, color=COLOURS[label], alpha=0.6)
        axes.scatter(*CENTRES.T, marker="x", color="#CC79A7")


if __name__ == "__main__":
    compare(sys.modules[__name__])
