"""Times until something happens; some are censored."""

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoMultivariateNormal

from .entry import plain
from .regression import features


def weibull(x, time, event):
    """Klein & Moeschberger, Survival Analysis, chapter 12: Weibull."""
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    shape = pyro.sample("shape", dist.LogNormal(0.0, 0.5))
    scale = torch.exp(x @ beta)
    with pyro.plate("patients", len(x)):
        with poutine.mask(mask=event):
            pyro.sample("time", dist.Weibull(scale, shape), obs=time)
        with poutine.mask(mask=~event):
            pyro.factor("survived", -((time / scale) ** shape))


def weibull_data(size):
    x = features(size, 4)
    time = dist.Weibull(torch.exp(x @ torch.tensor([0.6, -0.4, 0.0, 1.0])), 1.5).sample()
    end = 1 + 5 * torch.rand(size)
    return x, torch.minimum(time, end), time < end


ENTRIES = (
    plain("survival with censoring", weibull, AutoMultivariateNormal, weibull_data, dpsep=True),
)
