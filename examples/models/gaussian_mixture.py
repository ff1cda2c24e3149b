"""Gaussian mixture: two kinds of numbers, of unknown membership.

Pyro's tutorial [Gaussian Mixture Model](https://pyro.ai/examples/gmm.html). A record is a number
(simulated). It starts from constants instead of some of the records.
"""

import sys

import pyro
import pyro.distributions as dist
import torch
from comparison import compare
from pictures import COLOURS, TRUTH, legend
from pyro import poutine
from pyro.infer import SVI, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoDelta

from pyro_dp import DPSVI

K = 2


@config_enumerate
def model(data):
    weights = pyro.sample("weights", dist.Dirichlet(0.5 * torch.ones(K)))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 2.0))
    with pyro.plate("components", K):
        locs = pyro.sample("locs", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(data)):
        assignment = pyro.sample("assignment", dist.Categorical(weights))
        pyro.sample("obs", dist.Normal(locs[assignment], scale), obs=data)


def init_loc_fn(site):
    public = {"weights": torch.ones(K) / K, "scale": torch.tensor(2.0)}
    return public.get(site["name"], torch.tensor([-1.0, 5.0]))


def start():
    exposed = poutine.block(model, expose=["weights", "locs", "scale"])
    return model, AutoDelta(exposed, init_loc_fn=init_loc_fn)


def svi(model, guide, optim):
    return SVI(model, guide, optim, TraceEnum_ELBO(max_plate_nesting=1))


def dpsvi(model, guide, optim, accountant, **run):
    return DPSVI(
        model, guide, optim, TraceEnum_ELBO(max_plate_nesting=1), accountant=accountant, **run
    )


def data(size=5000):
    near = torch.rand(size) < 0.4
    return (torch.where(near, torch.zeros(()), torch.tensor(10.0)) + torch.randn(size),)


def look(model, guide, *data):
    return {site: value.detach() for site, value in guide.median().items()}


def density(x, weights, locs, scale):
    return (weights * dist.Normal(locs, scale).log_prob(x[:, None]).exp()).sum(1)


def picture(figure, looks, data):
    axes, x = figure.subplots(), torch.linspace(-5.0, 15.0, 300)
    axes.hist(data, 60, density=True, color="#eeeeee", label="data")
    for label, look in looks.items():
        axes.plot(x, density(x, **look), color=COLOURS[label], label=label)
    truth = density(x, torch.tensor([0.4, 0.6]), torch.tensor([0.0, 10.0]), torch.ones(()))
    axes.plot(x, truth, label="truth", **TRUTH)
    axes.set_yticks([])
    legend(figure, axes)


if __name__ == "__main__":
    compare(sys.modules[__name__])
