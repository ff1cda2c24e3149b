"""Capture and recapture: how many animals survive a year, how many are seen again?

Pyro's example [Cormack-Jolly-Seber](https://pyro.ai/examples/capture_recapture.html), `model_1`.
A record is an animal's simulated history. The model computes a new mask in each step.
"""

import sys

import pyro
import pyro.distributions as dist
import torch
from comparison import compare
from pictures import COLOURS, TRUTH, draws, legend
from pyro import poutine
from pyro.infer import SVI, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal

from pyro_dp import DPSEP, DPSVI

SURVIVE, SEEN, YEARS = 0.7, 0.6, 5


def model_1(capture_history):
    N, T = capture_history.shape
    phi = pyro.sample("phi", dist.Uniform(0.0, 1.0))  # survival probability
    rho = pyro.sample("rho", dist.Uniform(0.0, 1.0))  # recapture probability
    with pyro.plate("animals", N, dim=-1):
        z = torch.ones(N)
        first_capture_mask = torch.zeros(N).bool()
        for t in pyro.markov(range(T)):
            with poutine.mask(mask=first_capture_mask):
                mu_z_t = first_capture_mask.float() * phi * z + (1 - first_capture_mask.float())
                z = pyro.sample(f"z_{t}", dist.Bernoulli(mu_z_t), infer={"enumerate": "parallel"})
                pyro.sample(f"y_{t}", dist.Bernoulli(rho * z), obs=capture_history[:, t])
            first_capture_mask = first_capture_mask | capture_history[:, t].bool()


def start():
    return model_1, AutoDiagonalNormal(poutine.block(model_1, expose=["phi", "rho"]))


def svi(model, guide, optim):
    return SVI(model, guide, optim, TraceEnum_ELBO(max_plate_nesting=1))


def dpsvi(model, guide, optim, accountant, **run):
    return DPSVI(
        model, guide, optim, TraceEnum_ELBO(max_plate_nesting=1), accountant=accountant, **run
    )


def dpsep(model, guide, accountant, **run):
    return DPSEP(model, guide, accountant=accountant, **run)


def data(size=5000):
    first, alive, years = torch.randint(YEARS - 1, (size,)), torch.ones(size), []
    for t in range(YEARS):
        alive = torch.where(t > first, alive * (torch.rand(size) < SURVIVE), alive)
        years.append((t == first) + (t > first) * alive * (torch.rand(size) < SEEN))
    return (torch.stack(years, 1),)


def look(model, guide, *data):
    return draws(guide, data, "phi", "rho")


def picture(figure, looks, *data):
    axes = figure.subplots()
    for label, look in looks.items():
        axes.scatter(look["phi"], look["rho"], s=3, color=COLOURS[label], label=label)
    axes.axvline(SURVIVE, label="truth", **TRUTH)
    axes.axhline(SEEN, **TRUTH)
    axes.set(xlabel="chance to survive a year", ylabel="chance to be seen")
    legend(figure, axes)


if __name__ == "__main__":
    compare(sys.modules[__name__])
