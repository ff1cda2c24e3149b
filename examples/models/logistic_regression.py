"""Logistic regression: who had an affair, of 6,366 women who were asked in 1974?

The model of Pyro's [docs of MCMC](https://docs.pyro.ai/en/stable/mcmc.html). A record is a woman
(`fair` of statsmodels). Answers are scaled by the bounds of the questionnaire, which are public.
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

# Lowest and highest answer.
BOUNDS = {
    "rate_marriage": (1.0, 5.0),
    "age": (17.5, 42.0),
    "yrs_married": (0.5, 23.0),
    "children": (0.0, 5.5),
    "religious": (1.0, 4.0),
    "educ": (9.0, 20.0),
}


def model(x, y):
    zeros = torch.zeros(x.shape[1])
    coefs = pyro.sample("beta", dist.Normal(zeros, 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Bernoulli(logits=x @ coefs), obs=y)


def start():
    return model, AutoMultivariateNormal(model)


def svi(model, guide, optim):
    return SVI(model, guide, optim, Trace_ELBO())


def dpsvi(model, guide, optim, accountant, **run):
    return DPSVI(model, guide, optim, Trace_ELBO(), accountant=accountant, **run)


def dpsep(model, guide, accountant, **run):
    return DPSEP(model, guide, accountant=accountant, **run)


def data():
    from statsmodels.datasets import fair

    frame = fair.load_pandas().data
    x = [(2 * frame[name] - low - high) / (high - low) for name, (low, high) in BOUNDS.items()]
    x = torch.tensor([*(each.to_list() for each in x), [1.0] * len(frame)]).T.contiguous()
    return x, torch.tensor((frame["affairs"] > 0).to_list()).float()


def look(model, guide, *data):
    return draws(guide, data, "beta")["beta"]


def picture(figure, looks, *data):
    axes = figure.subplots()
    forest(axes, looks, [*BOUNDS, "intercept"])
    axes.set_xlabel("log odds by half of the range of answers")
    legend(figure, axes)


if __name__ == "__main__":
    compare(sys.modules[__name__])
