"""Batting averages: how much players reveal about each other."""

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import Beta, Binomial, Pareto, Uniform, constraints
from pyro.infer.autoguide import AutoNormal

from .entry import plain


def fully_pooled(at_bats):
    phi = pyro.sample("phi", Uniform(torch.tensor(0.0), torch.tensor(1.0)))
    num_players = at_bats.shape[0]
    with pyro.plate("num_players", num_players):
        return pyro.sample("obs", Binomial(at_bats, phi))


def conditioned(at_bats, hits):
    """Pyro example baseball, with pyro.condition and the conjugate guide of tutorial svi_part_i."""
    return pyro.condition(fully_pooled, data={"obs": hits})(at_bats)


def beta_guide(at_bats, hits):
    a = pyro.param("a", torch.tensor(10.0), constraint=constraints.positive)
    b = pyro.param("b", torch.tensor(10.0), constraint=constraints.positive)
    pyro.sample("phi", Beta(a, b))


def not_pooled(at_bats, hits):
    """Pyro example baseball."""
    num_players = at_bats.shape[0]
    with pyro.plate("num_players", num_players):
        phi_prior = Uniform(torch.tensor(0.0), torch.tensor(1.0))
        phi = pyro.sample("phi", phi_prior)
        return pyro.sample("obs", Binomial(at_bats, phi), obs=hits)


def partially_pooled(at_bats, hits):
    """Pyro example baseball."""
    num_players = at_bats.shape[0]
    m = pyro.sample("m", Uniform(torch.tensor(0.0), torch.tensor(1.0)))
    kappa = pyro.sample("kappa", Pareto(torch.tensor(1.0), torch.tensor(1.5)))
    with pyro.plate("num_players", num_players):
        phi_prior = Beta(m * kappa, (1 - m) * kappa)
        phi = pyro.sample("phi", phi_prior)
        return pyro.sample("obs", Binomial(at_bats, phi), obs=hits)


def data(size):
    at_bats = torch.randint(30, 60, (size,)).to(torch.get_default_dtype())
    phi = dist.Beta(torch.tensor(20.0), 55.0).sample((size,))
    return at_bats, dist.Binomial(at_bats, phi).sample()


ENTRIES = (
    plain("baseball, fully pooled", conditioned, beta_guide, data),
    plain("baseball, not pooled", not_pooled, AutoNormal, data),
    plain("baseball, partially pooled", partially_pooled, AutoNormal, data),
)
