"""Images: auto-encoders of grey pixels."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import TraceEnum_ELBO, config_enumerate
from torch import nn

from .entry import Entry

PIXELS = 64
CLASSES = 4


class Encoder(nn.Module):
    def __init__(self, z_dim, hidden_dim):
        super().__init__()
        self.fc1 = nn.Linear(PIXELS, hidden_dim)
        self.fc21 = nn.Linear(hidden_dim, z_dim)
        self.fc22 = nn.Linear(hidden_dim, z_dim)
        self.softplus = nn.Softplus()

    def forward(self, x):
        x = x.reshape(-1, PIXELS)
        hidden = self.softplus(self.fc1(x))
        return self.fc21(hidden), torch.exp(self.fc22(hidden))


class Decoder(nn.Module):
    def __init__(self, z_dim, hidden_dim):
        super().__init__()
        self.fc1 = nn.Linear(z_dim, hidden_dim)
        self.fc21 = nn.Linear(hidden_dim, PIXELS)
        self.softplus = nn.Softplus()

    def forward(self, z):
        hidden = self.softplus(self.fc1(z))
        return torch.sigmoid(self.fc21(hidden))


class VAE(nn.Module):
    def __init__(self, z_dim=4, hidden_dim=32):
        super().__init__()
        self.encoder = Encoder(z_dim, hidden_dim)
        self.decoder = Decoder(z_dim, hidden_dim)
        self.z_dim = z_dim

    def model(self, x):
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", x.shape[0]):
            z_loc = torch.zeros(x.shape[0], self.z_dim, dtype=x.dtype, device=x.device)
            z_scale = torch.ones(x.shape[0], self.z_dim, dtype=x.dtype, device=x.device)
            z = pyro.sample("latent", dist.Normal(z_loc, z_scale).to_event(1))
            loc_img = self.decoder.forward(z)
            pyro.sample(
                "obs",
                dist.Bernoulli(loc_img, validate_args=False).to_event(1),
                obs=x.reshape(-1, PIXELS),
            )
            return loc_img

    def guide(self, x):
        pyro.module("encoder", self.encoder)
        with pyro.plate("data", x.shape[0]):
            z_loc, z_scale = self.encoder.forward(x)
            pyro.sample("latent", dist.Normal(z_loc, z_scale).to_event(1))


def vae():
    made = VAE()
    return made.model, made.guide


class SSVAE(nn.Module):
    """Which of some things is in a picture, and how: the labels are latent."""

    def __init__(self, z_dim=3, hidden_dim=24):
        super().__init__()
        self.z_dim, self.output_size = z_dim, CLASSES
        self.encoder_y = nn.Sequential(
            nn.Linear(PIXELS, hidden_dim),
            nn.Softplus(),
            nn.Linear(hidden_dim, CLASSES),
            nn.Softmax(dim=-1),
        )
        self.encoder_z = nn.Sequential(
            nn.Linear(PIXELS + CLASSES, hidden_dim),
            nn.Softplus(),
            nn.Linear(hidden_dim, 2 * z_dim),
        )
        self.decoder = nn.Sequential(
            nn.Linear(z_dim + CLASSES, hidden_dim),
            nn.Softplus(),
            nn.Linear(hidden_dim, PIXELS),
            nn.Sigmoid(),
        )

    def model(self, xs, ys=None):
        pyro.module("ss_vae", self)
        batch_size = xs.size(0)
        options = dict(dtype=xs.dtype, device=xs.device)
        with pyro.plate("data"):
            prior_loc = torch.zeros(batch_size, self.z_dim, **options)
            prior_scale = torch.ones(batch_size, self.z_dim, **options)
            zs = pyro.sample("z", dist.Normal(prior_loc, prior_scale).to_event(1))
            alpha_prior = torch.ones(batch_size, self.output_size, **options) / self.output_size
            ys = pyro.sample("y", dist.OneHotCategorical(alpha_prior), obs=ys)
            loc = self.decoder(together(zs, ys))
            pyro.sample("x", dist.Bernoulli(loc, validate_args=False).to_event(1), obs=xs)
            return loc

    def guide(self, xs, ys=None):
        with pyro.plate("data"):
            if ys is None:
                alpha = self.encoder_y(xs)
                ys = pyro.sample("y", dist.OneHotCategorical(alpha))
            loc, scale = self.encoder_z(together(xs, ys)).chunk(2, dim=-1)
            pyro.sample("z", dist.Normal(loc, torch.exp(scale)).to_event(1))


def together(*parts):
    """Join them side by side, with any dimensions that enumeration added."""
    shape = torch.broadcast_shapes(*(each.shape[:-1] for each in parts))
    return torch.cat([each.expand(shape + each.shape[-1:]) for each in parts], dim=-1)


def ss_vae():
    made = SSVAE()
    return made.model, config_enumerate(made.guide, "parallel", expand=True)


def images(size):
    """Grey stripes of some kinds, of any strength: (N, 64)."""
    shown = torch.randint(CLASSES, (size,))
    places = torch.arange(PIXELS) / PIXELS
    stripes = torch.sin(2 * torch.pi * torch.arange(1, CLASSES + 1).unsqueeze(-1) * places)
    strength = 0.2 + 0.3 * torch.rand(size, 1)
    return ((0.5 + strength * stripes[shown] + 0.05 * torch.randn(size, PIXELS)).clamp(0, 1),)


ENTRIES = (
    Entry("VAE", "Pyro example vae", vae, images),
    Entry(
        "semi-supervised VAE",
        "Pyro example ss_vae_M2, the unlabelled part",
        ss_vae,
        images,
        lambda: TraceEnum_ELBO(max_plate_nesting=1),
    ),
)
