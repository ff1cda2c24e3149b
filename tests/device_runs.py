"""Fits that are the same on every device, and how often their steps wait for it.

They take public draws as arguments. A guide's draws come from torch's generator of its device, and
differ between devices. A record's draws are a function of its index here.
"""

import contextlib
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoMultivariateNormal, init_to_mean
from record_draws import by_index
from torch.distributions import constraints

from pyro_dp import DPSEP, DPSVI, VIPS, Clip, Noise, PaperDPSVI, PrivacyAccountant
from pyro_dp.vips import LogisticRegression

PROBLEMS = ("logistic", "network", "vae", "local")
POSTERIORS = ("dpsep", "dpsvi", "vips")
FIRST = 3  # steps that are compared with Pyro's code, and may wait as they like


def records(count, dim, device="cpu", seed=0):
    """Rows within the unit ball, and outcomes, of a logistic regression."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, dim, generator=generator, dtype=torch.float64)
    x /= x.norm(dim=1, keepdim=True)
    y = torch.rand(count, generator=generator) < torch.sigmoid(3 * x[:, 0])
    return x.to(device), y.double().to(device)


def logistic(x, y, draw=None):
    w = pyro.sample("w", dist.Normal(x.new_zeros(x.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def logistic_guide(x, y, draw):
    loc = pyro.param("loc", lambda: x.new_zeros(x.shape[1]))
    scale = pyro.param("scale", lambda: x.new_ones(x.shape[1]), constraint=constraints.positive)
    pyro.sample("w", dist.Delta(loc + scale * draw, event_dim=1))


def gaussian_guide():
    """A guide with the same start on every device."""
    return AutoMultivariateNormal(logistic, init_loc_fn=init_to_mean)


class Network:
    """A layer of tanh, with a normal posterior of its weights."""

    def __init__(self, hidden=8):
        self.hidden = hidden

    def model(self, x, y, draw):
        inner = pyro.sample("inner", self._normal(x, x.shape[1] * self.hidden))
        outer = pyro.sample("outer", self._normal(x, self.hidden))
        with pyro.plate("data", len(x)):
            units = torch.tanh(x @ inner.view(x.shape[1], self.hidden))
            pyro.sample("y", dist.Bernoulli(logits=units @ outer), obs=y)

    def guide(self, x, y, draw):
        for name, size in (("inner", x.shape[1] * self.hidden), ("outer", self.hidden)):
            loc = pyro.param(f"{name}.loc", lambda size=size: 0.1 * x.new_ones(size))
            scale = pyro.param(
                f"{name}.scale",
                lambda size=size: 0.1 * x.new_ones(size),
                constraint=constraints.positive,
            )
            pyro.sample(name, dist.Delta(loc + scale * draw[:size], event_dim=1))

    @staticmethod
    def _normal(x, size):
        return dist.Normal(x.new_zeros(size), 1.0).to_event(1)


class VAE(torch.nn.Module):
    """Its draws belong to records."""

    def __init__(self, dim, hidden=16, latent=2):
        super().__init__()
        self.latent = latent
        self.encoder = torch.nn.Sequential(
            torch.nn.Linear(dim, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 2 * latent)
        )
        self.decoder = torch.nn.Sequential(
            torch.nn.Linear(latent, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, dim)
        )

    def model(self, x):
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(len(x), self.latent), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(self.decoder(z), 1.0).to_event(1), obs=x)

    def guide(self, x):
        pyro.module("encoder", self.encoder)
        with pyro.plate("data", len(x)):
            loc, scale = self.encoder(x).chunk(2, dim=-1)
            pyro.sample("z", dist.Normal(loc, scale.exp()).to_event(1))


def local_model(x):
    mean = pyro.sample("mean", dist.Normal(x.new_zeros(()), 1.0))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(mean, 1.0))
        pyro.sample("x", dist.Normal(z, 0.5), obs=x)


def local_guide(x):
    loc = pyro.param("loc", lambda: x.new_zeros(()))
    pyro.sample("mean", dist.Delta(loc))
    with pyro.plate("data", len(x)) as index:
        own = pyro.param("own", lambda: x.new_zeros(len(x)))
        pyro.sample("z", dist.Normal(own[index], 0.5))


def dpsvi(problem, device, count=500, dim=4, num_steps=30, **settings):
    """A DPSVI of this problem, and its arguments.

    :param problem: one of :data:`PROBLEMS`.
    """
    pyro.clear_param_store()
    torch.manual_seed(0)
    x, y = records(count, dim, device)
    draw = torch.linspace(-1.0, 1.0, 8 * dim, dtype=torch.float64)
    if problem == "logistic":
        model, guide, data = logistic, logistic_guide, (x, y, draw[:dim].to(device))
    elif problem == "network":
        network = Network()
        model, guide, data = network.model, network.guide, (x, y, draw.to(device))
    elif problem == "vae":
        vae = VAE(dim).double().to(device)
        model, guide, data = vae.model, vae.guide, (x,)
    else:
        model, guide, data = local_model, local_guide, (x[:, 0].contiguous(),)
    own = dict(accountant=PrivacyAccountant(), noise=Noise(1.0, source=0), sampling=0.1)
    own |= dict(optim=pyro.optim.Adam({"lr": 0.05}), clip=Clip(report=False), num_steps=num_steps)
    return PaperDPSVI(model, guide, **own | settings), data


def fitted(method, device, **settings):
    """The results of a short fit, by name, on the CPU.

    :param method: a problem of :func:`dpsvi`, or one of :data:`POSTERIORS`.
    """
    if method in POSTERIORS:
        data = records(500, 4, device)
        pyro.clear_param_store()
        own = dict(accountant=PrivacyAccountant(5.0, 1e-5), noise=Noise(source=0)) | settings
        if method == "vips":
            inference = VIPS(LogisticRegression(4), num_steps=5, **own)
        else:
            engine = DPSEP if method == "dpsep" else DPSVI
            inference = engine(logistic, gaussian_guide(), **own)
        inference.run(*data, progress=False)
        quantiles = inference.posterior().quantiles([0.1, 0.5, 0.9])
        return {name: value.cpu() for name, value in quantiles.items()}
    inference, data = dpsvi(method, device, **settings)
    with pytest.MonkeyPatch.context() as patch:
        by_index(patch)
        inference.run(*data, progress=False)
    store = pyro.get_param_store()
    return {name: value.detach().cpu() for name, value in store.named_parameters()}


def apart(one, other):
    """The largest difference of two fits, in units of the largest number."""
    assert one.keys() == other.keys()
    largest = max(float(each.abs().max()) for each in one.values())
    return max(float((one[name] - other[name]).abs().max()) for name in one) / largest


@contextlib.contextmanager
def counted_waits(device, stand_in=None):
    """A list that grows whenever the host waits for the device; on the CPU it stays empty.

    :param stand_in: the function that :func:`stand_in_device.build` made.
    """
    found = []
    if device == "cuda":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this mode does not see all
            torch.cuda.set_sync_debug_mode("warn")
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_, **__: found.append(str(message))
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode("default")
    elif stand_in is not None:
        stand_in(found.append)
        try:
            yield found
        finally:
            stand_in(None)
    else:
        yield found


def steps_that_wait(inference, data, device, stand_in=None):
    """How many steps after the first ones made the host wait, and how many there were."""
    waited = []
    for number in range(1, inference.num_steps + 1):
        with counted_waits(device, stand_in) as found:
            inference.step(*data)
        if number > FIRST:
            waited.append(bool(found))
    return sum(waited), len(waited)
