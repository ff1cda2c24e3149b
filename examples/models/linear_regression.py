"""Linear regression: income of regions by the ruggedness of their terrain.

Pyro's tutorial [Introduction to Pyro](https://pyro.ai/examples/intro_long.html). A record is a
region (simulated; the tutorial's 170 nations are too few for privacy).
"""

import sys

import pyro
import pyro.distributions as dist
import torch
from comparison import compare
from pictures import draws, forest, legend
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal

from pyro_dp import DPSEP, DPSVI


def model(is_cont_africa, ruggedness, log_gdp=None):
    a = pyro.sample("a", dist.Normal(0.0, 10.0))
    b_a = pyro.sample("bA", dist.Normal(0.0, 1.0))
    b_r = pyro.sample("bR", dist.Normal(0.0, 1.0))
    b_ar = pyro.sample("bAR", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.Uniform(0.0, 10.0))
    mean = a + b_a * is_cont_africa + b_r * ruggedness + b_ar * is_cont_africa * ruggedness
    with pyro.plate("data", len(ruggedness)):
        return pyro.sample("obs", dist.Normal(mean, sigma), obs=log_gdp)


def start():
    return model, AutoMultivariateNormal(model)


def svi(model, guide, optim):
    return SVI(model, guide, optim, Trace_ELBO())


def dpsvi(model, guide, optim, accountant, **run):
    return DPSVI(model, guide, optim, Trace_ELBO(), accountant=accountant, **run)


def dpsep(model, guide, accountant, **run):
    return DPSEP(model, guide, accountant=accountant, **run)


def data(size=5000):
    africa, rugged = torch.bernoulli(torch.full((size,), 0.3)), 6 * torch.rand(size)
    mean = 9.2 - 1.9 * africa - 0.2 * rugged + 0.4 * africa * rugged
    return africa, rugged, mean + 0.9 * torch.randn(size)


def look(model, guide, *data):
    drawn = draws(guide, data, "bR", "bAR")
    return torch.stack([drawn["bR"], drawn["bR"] + drawn["bAR"]], 1)


def picture(figure, looks, *data):
    axes = figure.subplots()
    forest(axes, looks, ["elsewhere", "in Africa"], torch.tensor([-0.2, 0.2]))
    axes.set_xlabel("slope of log GDP by ruggedness")
    legend(figure, axes)


if __name__ == "__main__":
    compare(sys.modules[__name__])
