"""Nineteen of Pyro's examples: model, guide, data, and the optimizer of the example.

Twelve are those of examples/models and three are entries of tests/zoo. Four are written here, by
Pyro's tutorials. Sizes of data keep a run short. If Pyro has MCMC, the optimizer is Adam from .01
or .02.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.infer import ELBO, Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoDelta, AutoLowRankMultivariateNormal, AutoNormal
from pyro.nn import PyroModule
from pyro.ops.indexing import Vindex
from pyro.optim import Adam, ClippedAdam, ExponentialLR, PyroOptim

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples" / "models")]

from zoo import ZOO  # noqa: E402

STEPS = 1000
SEED = 0


@dataclass(frozen=True)
class Example:
    """The arguments that a user passes.

    :param start: a new model and a new guide.
    :param draw: arguments of the model.
    :param optim: a new optimizer.
    :param loss: a new one.
    """

    start: Callable[[], tuple[Callable, Callable]]
    draw: Callable[[], tuple]
    optim: Callable[[], PyroOptim]
    loss: Callable[[], ELBO] = Trace_ELBO

    def data(self) -> tuple:
        """The same for all fits."""
        pyro.set_rng_seed(SEED)
        return self.draw()


def adam(lr: float, **settings) -> Callable[[], PyroOptim]:
    return lambda: Adam({"lr": lr, **settings})


def falling(lr: float) -> Callable[[], PyroOptim]:
    """A scheduler, which ends at a tenth."""
    options = {"optimizer": torch.optim.Adam, "optim_args": {"lr": lr}}
    return lambda: ExponentialLR(options | {"gamma": 0.1 ** (1 / STEPS)})


def clipped(lr: float) -> Callable[[], PyroOptim]:
    """The optimizer of the tutorial svi_part_iv: its step size falls to a tenth."""
    return lambda: ClippedAdam({"lr": lr, "lrd": 0.1 ** (1 / STEPS)})


def enumerated(nesting: int) -> Callable[[], ELBO]:
    return lambda: TraceEnum_ELBO(max_plate_nesting=nesting)


def shown(name: str, optim: Callable, loss: Callable = Trace_ELBO, size: int | None = None):
    """A module of examples/models."""
    module = importlib.import_module(name)
    draw = module.data if size is None else partial(module.data, size)
    return Example(module.start, draw, optim, loss)


def of_zoo(name: str, optim: Callable, size: int) -> Example:
    entry = ZOO[name]
    return Example(entry.make, partial(entry.data, size), optim, entry.loss)


# Example svi_torch: a regression as a module.


class Regression(PyroModule):
    def forward(self, covariates, data=None):
        coeff = pyro.sample("coeff", dist.Normal(0.0, 1.0))
        bias = pyro.sample("bias", dist.Normal(0.0, 1.0))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", len(covariates)):
            return pyro.sample("obs", dist.Normal(bias + coeff * covariates, scale), obs=data)


def regression():
    model = Regression()
    return model, AutoNormal(model)


def regression_data(size=10_000):
    covariates = torch.randn(size)
    return covariates, 0.7 * covariates - 0.3 + 0.8 * torch.randn(size)


# Tutorials svi_part_i and svi_part_ii: is a coin fair?


def coin(tosses):
    fairness = pyro.sample("latent_fairness", dist.Beta(10.0, 10.0))
    with pyro.plate("tosses", len(tosses)):
        pyro.sample("obs", dist.Bernoulli(fairness), obs=tosses)


def coin_guide(tosses):
    alpha = pyro.param("alpha_q", torch.tensor(15.0), constraint=constraints.positive)
    beta = pyro.param("beta_q", torch.tensor(15.0), constraint=constraints.positive)
    pyro.sample("latent_fairness", dist.Beta(alpha, beta))


def coin_data(size=2000):
    return (torch.bernoulli(torch.full((size,), 0.6)),)


# Tutorials svi_part_iv and bayesian_regression: counts, by a guide of low rank.


def poisson(x, counts):
    coefs = pyro.sample("coefs", dist.Normal(torch.zeros(x.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("counts", dist.Poisson((x @ coefs).exp()), obs=counts)


def poisson_data(size=4000):
    x = torch.cat([2 * torch.rand(size, 5) - 1, torch.ones(size, 1)], 1)
    return x, torch.poisson((x @ torch.tensor([0.7, -0.5, 0.0, 0.4, 0.0, 0.5])).exp())


# Example hmm, its model_4: the first hidden state drives the second, and tones follow both.


def two_chains(melodies, lengths):
    priors = 0.9 * torch.eye(2) + 0.1
    probs_w = pyro.sample("probs_w", dist.Dirichlet(priors).to_event(1))
    probs_x = pyro.sample("probs_x", dist.Dirichlet(priors).expand([2, 2]).to_event(2))
    tones = melodies.shape[-1]
    probs_y = pyro.sample("probs_y", dist.Beta(0.1, 0.9).expand([2, 2, tones]).to_event(3))
    tones_plate = pyro.plate("tones", tones, dim=-1)
    with pyro.plate("melodies", len(melodies), dim=-2):
        w = x = torch.tensor(0)
        for t in pyro.markov(range(melodies.shape[1])):
            with pyro.poutine.mask(mask=(t < lengths).unsqueeze(-1)):
                w = pyro.sample(f"w_{t}", dist.Categorical(probs_w[w]))
                x = pyro.sample(f"x_{t}", dist.Categorical(Vindex(probs_x)[w, x]))
                with tones_plate as tone:
                    heard = dist.Bernoulli(Vindex(probs_y)[w, x, tone])
                    pyro.sample(f"y_{t}", heard, obs=melodies[:, t])


def start_two_chains():
    probs = pyro.poutine.block(two_chains, expose=["probs_w", "probs_x", "probs_y"])
    return pyro.infer.config_enumerate(two_chains), AutoDelta(probs)


EXAMPLES = {
    "intro_long": shown("linear_regression", adam(0.02), size=1700),
    "bayesian_regression_ii": of_zoo("linear regression", adam(0.05), 5000),
    "svi_torch": Example(regression, regression_data, adam(0.01)),
    "svi_part_i": Example(lambda: (coin, coin_guide), coin_data, adam(0.005, betas=(0.95, 0.999))),
    "poisson": Example(
        lambda: (poisson, AutoLowRankMultivariateNormal(poisson)), poisson_data, clipped(0.02)
    ),
    "radon": of_zoo("radon", falling(0.02), 5000),
    "toy_mixture": of_zoo("discrete mixture", adam(0.01), 5000),
    "logistic_regression": shown("logistic_regression", adam(0.01)),
    "correlations": shown("correlations", adam(0.02)),
    "gaussian_process": shown("gaussian_process", adam(0.005)),
    "eight_schools": shown("eight_schools", adam(0.01)),
    "baseball": shown("baseball", adam(0.02)),
    "capture_recapture": shown("capture_recapture", adam(0.002), enumerated(1), 2500),
    "gaussian_mixture": shown(
        "gaussian_mixture", adam(0.1, betas=(0.8, 0.99)), enumerated(1), 3000
    ),
    "dirichlet_process": shown("dirichlet_process", adam(0.05), size=2000),
    "hidden_markov": shown("hidden_markov", adam(0.05), enumerated(2), 1500),
    "hidden_markov_4": Example(
        start_two_chains,
        partial(importlib.import_module("hidden_markov").data, 1500),
        adam(0.05),
        enumerated(2),
    ),
    "prodlda": shown("prodlda", adam(0.001), TraceMeanField_ELBO, 3000),
    "vae": shown("vae", adam(0.001)),
}
