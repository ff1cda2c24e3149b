"""Baseball, partially pooled: how good are hitters, and how much do they differ?

Pyro's example [baseball](https://pyro.ai/examples/baseball.html), by SVI where Pyro has NUTS. A
record is a player (simulated; Pyro's 18 are too few for privacy).
"""

import sys

import pyro
import torch
from comparison import compare
from pictures import COLOURS, TRUTH, draws, legend
from pyro.distributions import Beta, Binomial, Pareto, Uniform
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal

from pyro_dp import DPSVI

M, KAPPA = 20 / 75, 75.0


def partially_pooled(at_bats, hits):
    num_players = at_bats.shape[0]
    m = pyro.sample("m", Uniform(torch.tensor(0.0), torch.tensor(1.0)))
    kappa = pyro.sample("kappa", Pareto(torch.tensor(1.0), torch.tensor(1.5)))
    with pyro.plate("num_players", num_players):
        phi_prior = Beta(m * kappa, (1 - m) * kappa)
        phi = pyro.sample("phi", phi_prior)
        return pyro.sample("obs", Binomial(at_bats, phi), obs=hits)


def start():
    return partially_pooled, AutoNormal(partially_pooled)


def svi(model, guide, optim):
    return SVI(model, guide, optim, Trace_ELBO())


def dpsvi(model, guide, optim, accountant, **run):
    return DPSVI(model, guide, optim, Trace_ELBO(), accountant=accountant, **run)


def data(size=5000):
    at_bats = torch.randint(30, 60, (size,)).float()
    phi = Beta(M * KAPPA, (1 - M) * KAPPA).sample((size,))
    return at_bats, Binomial(at_bats, phi).sample()


def look(model, guide, *data):
    return draws(guide, data, "m", "kappa", count=20)


def picture(figure, looks, at_bats, hits):
    axes = figure.subplots()
    rate = torch.linspace(0.05, 0.55, 200)
    axes.hist(hits / at_bats, 40, density=True, color="#eeeeee", label="hits at bat in the data")
    for label, look in looks.items():
        for k, (m, kappa) in enumerate(zip(look["m"], look["kappa"], strict=True)):
            density = Beta(m * kappa, (1 - m) * kappa).log_prob(rate).exp()
            style = dict(color=COLOURS[label], alpha=0.4, linewidth=0.8)
            axes.plot(rate, density, label=None if k else label, **style)
    truth = Beta(M * KAPPA, (1 - M) * KAPPA).log_prob(rate).exp()
    axes.plot(rate, truth, label="truth", **TRUTH)
    axes.set(xlabel="chance of a hit", yticks=[], ylabel="players")
    legend(figure, axes)


if __name__ == "__main__":
    compare(sys.modules[__name__])
