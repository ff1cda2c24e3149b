"""Counts with too many zeros or too much spread."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from .entry import plain
from .regression import features


def zero_inflated(x, y):
    """Lambert 1992; catches of fish of the UCLA statistics pages."""
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    gate = pyro.sample("gate", dist.Beta(1.0, 1.0))
    with pyro.plate("visitors", len(x)):
        pyro.sample("fish", dist.ZeroInflatedPoisson(torch.exp(x @ beta), gate=gate), obs=y)


def zero_inflated_data(size):
    x = features(size, 3)
    caught = torch.poisson(torch.exp(x @ torch.tensor([0.7, -0.4, 0.5])))
    return x, caught * torch.bernoulli(torch.full((size,), 0.6))


def negative_binomial(x, y):
    """UCLA statistics pages: days of absence from school."""
    intercept = pyro.sample("intercept", dist.Normal(0.0, 2.0))
    beta = pyro.sample("beta", dist.Normal(torch.zeros(x.shape[1]), torch.ones(())).to_event(1))
    concentration = pyro.sample("concentration", dist.Gamma(2.0, 1.0))
    mean = (intercept + x @ beta).exp()
    with pyro.plate("days", len(y)):
        pyro.sample("y", dist.GammaPoisson(concentration, concentration / mean), obs=y)


def negative_binomial_data(size):
    x = features(size, 4)[:, :3]
    mean = torch.exp(1 + x @ torch.tensor([0.5, -0.5, 0.0]))
    return x, torch.poisson(dist.Gamma(1.5, 1.5 / mean).sample())


ENTRIES = (
    plain("zero-inflated Poisson", zero_inflated, AutoNormal, zero_inflated_data, dpsep=True),
    plain(
        "negative binomial",
        negative_binomial,
        AutoMultivariateNormal,
        negative_binomial_data,
        dpsep=True,
    ),
)
