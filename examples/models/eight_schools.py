"""Eight schools: what does coaching do, and how much do schools differ?

Pyro's example [eight_schools](https://github.com/pyro-ppl/pyro/tree/dev/examples/eight_schools),
with its guide. A record is a school (5,000, simulated: 8 are too few for privacy). `mu` and
`tau`, which all schools share, are outside of the plate, and parameters start at constants.
"""

import sys

import pyro
import pyro.distributions as dist
import torch
from comparison import compare
from pictures import draws, forest, legend
from pyro.distributions import constraints, transforms
from pyro.infer import SVI, Trace_ELBO

from pyro_dp import DPSVI


def model(data):
    y, sigma = data[:, 0], data[:, 1]
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    tau = pyro.sample("tau", dist.HalfCauchy(25.0))
    with pyro.plate("data", len(data)):
        eta = pyro.sample("eta", dist.Normal(torch.zeros(len(data)), torch.ones(len(data))))
        theta = mu + tau * eta
        pyro.sample("obs", dist.Normal(theta, sigma), obs=y)


def guide(data):
    J, positive = len(data), constraints.positive
    m_eta = pyro.param("loc_eta", lambda: torch.zeros(J))
    s_eta = pyro.param("scale_eta", lambda: torch.full((J,), 0.1), constraint=positive)
    m_mu = pyro.param("loc_mu", torch.tensor(0.0))
    s_mu = pyro.param("scale_mu", torch.tensor(0.1), constraint=positive)
    m_logtau = pyro.param("loc_logtau", torch.tensor(0.0))
    s_logtau = pyro.param("scale_logtau", torch.tensor(0.1), constraint=positive)
    pyro.sample("mu", dist.Normal(m_mu, s_mu))
    dist_tau = dist.TransformedDistribution(
        dist.Normal(m_logtau, s_logtau), transforms=transforms.ExpTransform()
    )
    pyro.sample("tau", dist_tau)
    with pyro.plate("data", J):
        pyro.sample("eta", dist.Normal(m_eta, s_eta))


def start():
    return model, guide


def svi(model, guide, optim):
    return SVI(model, guide, optim, Trace_ELBO())


def dpsvi(model, guide, optim, accountant, **run):
    return DPSVI(model, guide, optim, Trace_ELBO(), accountant=accountant, **run)


def data(size=5000):
    sigma = 2 + 3 * torch.rand(size)
    return (torch.stack([4 + 5 * torch.randn(size) + sigma * torch.randn(size), sigma], 1),)


def look(model, guide, *data):
    drawn = draws(guide, data, "mu", "tau")
    return torch.stack([drawn["mu"], drawn["tau"]], 1)


def picture(figure, looks, *data):
    axes = figure.subplots()
    forest(axes, looks, ["mean of all schools", "their spread"], torch.tensor([4.0, 5.0]))
    axes.set_xlabel("points of a test that coaching adds")
    legend(figure, axes)


if __name__ == "__main__":
    compare(sys.modules[__name__])
