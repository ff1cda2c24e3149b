"""Variational auto-encoder: handwritten digits, and new ones that nobody wrote.

Pyro's tutorial [Variational Autoencoders](https://pyro.ai/examples/vae.html), with smaller
networks for smaller images. A record is a digit (1,797 of scikit-learn, 8 by 8 pixels).
"""

import sys

import pyro
import pyro.distributions as dist
import torch
from comparison import compare
from pictures import images
from pyro.infer import SVI, Trace_ELBO
from torch import nn

from pyro_dp import DPSVI

PIXELS, COUNT = 64, 8


class VAE(nn.Module):
    def __init__(self, z_dim=5, hidden_dim=64):
        super().__init__()
        self.z_dim = z_dim
        self.encoder = nn.Sequential(
            nn.Linear(PIXELS, hidden_dim), nn.Softplus(), nn.Linear(hidden_dim, 2 * z_dim)
        )
        self.decoder = nn.Sequential(
            nn.Linear(z_dim, hidden_dim), nn.Softplus(), nn.Linear(hidden_dim, PIXELS), nn.Sigmoid()
        )

    def model(self, x):
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", x.shape[0]):
            z_loc = x.new_zeros((x.shape[0], self.z_dim))
            z_scale = x.new_ones((x.shape[0], self.z_dim))
            z = pyro.sample("latent", dist.Normal(z_loc, z_scale).to_event(1))
            loc_img = self.decoder(z)
            pixels = dist.Bernoulli(loc_img, validate_args=False).to_event(1)
            pyro.sample("obs", pixels, obs=x)

    def guide(self, x):
        pyro.module("encoder", self.encoder)
        with pyro.plate("data", x.shape[0]):
            z_loc, z_scale = self.encoder(x).chunk(2, dim=-1)
            pyro.sample("latent", dist.Normal(z_loc, z_scale.exp()).to_event(1))


def start():
    vae = VAE()
    return vae.model, vae.guide


def svi(model, guide, optim):
    return SVI(model, guide, optim, Trace_ELBO())


def dpsvi(model, guide, optim, accountant, **run):
    return DPSVI(model, guide, optim, Trace_ELBO(), accountant=accountant, **run)


def data():
    from sklearn.datasets import load_digits

    return (torch.tensor(load_digits().data / 16).float(),)


def look(model, guide, *data):
    drawn = torch.randn(COUNT, model.__self__.z_dim, generator=torch.Generator().manual_seed(0))
    return model.__self__.decoder(drawn).reshape(-1, 8, 8)


def picture(figure, looks, x):
    images(figure, {"data": x[:COUNT].reshape(-1, 8, 8)} | looks)


if __name__ == "__main__":
    compare(sys.modules[__name__])
