"""Gaussian process: a function, by its values at ten inducing points.

Pyro's tutorial [Gaussian Processes](https://pyro.ai/examples/gp.html), its sparse part. A record
is a measurement (simulated as there). The approximation by inducing points is written out,
because modules of `pyro.contrib.gp` hold the data.
"""

import sys

import pyro
import pyro.distributions as dist
import torch
from comparison import compare
from pictures import COLOURS, TRUTH, draws, panels
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal

from pyro_dp import DPSEP, DPSVI

INDUCING = torch.linspace(0.0, 5.0, 10)


def kernel(x, z, variance, lengthscale):
    return variance * torch.exp(-0.5 * ((x.unsqueeze(-1) - z) / lengthscale) ** 2)


def process(x, u, variance, lengthscale):
    Kuu = kernel(INDUCING, INDUCING, variance, lengthscale) + 1e-4 * torch.eye(len(INDUCING))
    weights = torch.linalg.solve_triangular(torch.linalg.cholesky(Kuu).mT, u[:, None], upper=True)
    return (kernel(x, INDUCING, variance, lengthscale) @ weights).squeeze(-1)


def model(x, y):
    variance = pyro.sample("variance", dist.LogNormal(0.0, 2.0))
    lengthscale = pyro.sample("lengthscale", dist.LogNormal(-1.0, 1.0))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    u = pyro.sample("u", dist.Normal(torch.zeros(len(INDUCING)), 1.0).to_event(1))
    f = process(x, u, variance, lengthscale)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, noise), obs=y)


def start():
    return model, AutoMultivariateNormal(model)


def svi(model, guide, optim):
    return SVI(model, guide, optim, Trace_ELBO())


def dpsvi(model, guide, optim, accountant, **run):
    return DPSVI(model, guide, optim, Trace_ELBO(), accountant=accountant, **run)


def dpsep(model, guide, accountant, **run):
    return DPSEP(model, guide, accountant=accountant, **run)


def data(size=5000):
    x = 5 * torch.rand(size)
    return x, 0.5 * torch.sin(3 * x) + 0.2 * torch.randn(size)


def look(model, guide, *data):
    drawn = draws(guide, data, "u", "variance", "lengthscale", count=200)
    x = torch.linspace(0.0, 5.0, 100)
    each = zip(*(drawn[site] for site in ("u", "variance", "lengthscale")), strict=True)
    return torch.stack([process(x, *one) for one in each])


def picture(figure, looks, *data):
    x, levels = torch.linspace(0.0, 5.0, 100), torch.tensor([0.025, 0.975])
    for axes, label, functions in panels(figure, looks):
        axes.fill_between(x, *functions.quantile(levels, dim=0), color=COLOURS[label], alpha=0.5)
        axes.plot(x, 0.5 * torch.sin(3 * x), **TRUTH)


if __name__ == "__main__":
    compare(sys.modules[__name__])
