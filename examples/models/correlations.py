"""Correlations: four measurements that go together.

Pyro's example [lkj](https://pyro.ai/examples/lkj.html). A record is a row of four measurements
(simulated). SVI fits it instead of NUTS, and needs the `to_event` of `theta`.
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

TRUTH = torch.tensor([[1, 0.6, 0.3, 0], [0.6, 1, 0, -0.4], [0.3, 0, 1, 0.2], [0, -0.4, 0.2, 1]])
SD = torch.tensor([0.5, 1.0, 1.5, 2.0])
PAIRS = torch.tril_indices(4, 4, -1)


def model(y):
    d = y.shape[1]
    N = y.shape[0]
    theta = pyro.sample("theta", dist.HalfCauchy(torch.ones(d)).to_event(1))
    L_omega = pyro.sample("L_omega", dist.LKJCholesky(d, torch.ones(())))
    L_Omega = torch.mm(torch.diag(theta.sqrt()), L_omega)
    mu = torch.zeros(d)
    with pyro.plate("observations", N):
        return pyro.sample("obs", dist.MultivariateNormal(mu, scale_tril=L_Omega), obs=y)


def start():
    return model, AutoMultivariateNormal(model)


def svi(model, guide, optim):
    return SVI(model, guide, optim, Trace_ELBO())


def dpsvi(model, guide, optim, accountant, **run):
    return DPSVI(model, guide, optim, Trace_ELBO(), accountant=accountant, **run)


def dpsep(model, guide, accountant, **run):
    return DPSEP(model, guide, accountant=accountant, **run)


def data(size=5000):
    return (torch.randn(size, 4) @ (SD[:, None] * torch.linalg.cholesky(TRUTH)).T,)


def look(model, guide, *data):
    factor = draws(guide, data, "L_omega")["L_omega"].reshape(-1, 4, 4)
    return (factor @ factor.mT)[:, PAIRS[0], PAIRS[1]]


def picture(figure, looks, *data):
    axes = figure.subplots()
    names = [f"{a + 1} and {b + 1}" for a, b in PAIRS.T.tolist()]
    forest(axes, looks, names, TRUTH[PAIRS[0], PAIRS[1]])
    axes.set_xlabel("correlation")
    legend(figure, axes)


if __name__ == "__main__":
    compare(sys.modules[__name__])
