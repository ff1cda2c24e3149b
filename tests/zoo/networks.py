"""Bayesian neural networks."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoDiagonalNormal
from pyro.nn import PyroModule, PyroSample
from torch import nn

from .entry import Entry
from .regression import features


class BNN(PyroModule):
    def __init__(self, in_dim=3, out_dim=1, hid_dim=8, prior_scale=3.0):
        super().__init__()
        self.activation = nn.Tanh()
        self.layer1 = PyroModule[nn.Linear](in_dim, hid_dim)
        self.layer2 = PyroModule[nn.Linear](hid_dim, out_dim)
        prior = dist.Normal(0.0, prior_scale)
        self.layer1.weight = PyroSample(prior.expand([hid_dim, in_dim]).to_event(2))
        self.layer1.bias = PyroSample(prior.expand([hid_dim]).to_event(1))
        self.layer2.weight = PyroSample(prior.expand([out_dim, hid_dim]).to_event(2))
        self.layer2.bias = PyroSample(prior.expand([out_dim]).to_event(1))

    def forward(self, x, y=None):
        mu = self.layer2(self.activation(self.layer1(x))).squeeze(-1)
        sigma = pyro.sample("sigma", dist.Gamma(0.5, 1.0))
        with pyro.plate("data", x.shape[0]):
            pyro.sample("obs", dist.Normal(mu, sigma * sigma), obs=y)
        return mu


def network():
    model = BNN()
    return model, AutoDiagonalNormal(model)


def data(size):
    x = features(size, 3)
    return x, torch.sin(3 * x[:, 0]) * x[:, 1] + 0.3 * torch.randn(size)


ENTRIES = (
    Entry(
        "Bayesian neural network",
        "Pyro tutorial bayesian_regression; PyroModule layers of the UvA tutorials",
        network,
        data,
    ),
)
