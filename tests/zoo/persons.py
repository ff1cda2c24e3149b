"""Persons over time."""

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from .entry import Entry, plain

WEEKS = 6


def autoregression(y):
    """Hamilton, Time Series Analysis, chapter 5: AR(1)."""
    num_persons, num_weeks = y.shape
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    rho = pyro.sample("rho", dist.Uniform(-1.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("persons", num_persons):
        pyro.sample("y_0", dist.Normal(mu, 2.0), obs=y[:, 0])
        for t in range(1, num_weeks):
            mean = mu + rho * (y[:, t - 1] - mu)
            pyro.sample(f"y_{t}", dist.Normal(mean, sigma), obs=y[:, t])


def autoregression_data(size):
    columns = [1 + torch.randn(size)]
    for _ in range(1, WEEKS):
        columns.append(1 + 0.6 * (columns[-1] - 1) + 0.5 * torch.randn(size))
    return (torch.stack(columns, dim=1),)


@config_enumerate
def change_point(counts):
    num_persons, num_weeks = counts.shape
    early = pyro.sample("early", dist.Gamma(2.0, 0.5))
    late = pyro.sample("late", dist.Gamma(2.0, 0.5))
    weeks = torch.arange(num_weeks)
    with pyro.plate("persons", num_persons):
        tau = pyro.sample("tau", dist.Categorical(torch.ones(num_weeks) / num_weeks))
        rate = torch.where(weeks < tau.unsqueeze(-1), early, late)
        pyro.sample("counts", dist.Poisson(rate).to_event(1), obs=counts)


def change_point_data(size):
    tau = torch.randint(WEEKS, (size, 1))
    return (
        torch.poisson(torch.where(torch.arange(WEEKS) < tau, 5.0, 2.0)).to(torch.ones(()).dtype),
    )


ENTRIES = (
    plain(
        "autoregression of persons",
        autoregression,
        AutoMultivariateNormal,
        autoregression_data,
        dpsep=True,
    ),
    Entry(
        "change point of persons",
        "Carlin, Gelfand & Smith 1992: coal mining disasters, one change a person",
        lambda: (change_point, AutoNormal(poutine.block(change_point, hide=["tau"]))),
        change_point_data,
        lambda: TraceEnum_ELBO(max_plate_nesting=1),
        dpsep=True,
    ),
)
