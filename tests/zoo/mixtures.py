"""Mixtures: to which of some kinds a record belongs."""

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.distributions import Beta, Categorical, Dirichlet, MultivariateNormal, constraints
from pyro.infer import TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoDelta
from pyro.ops.indexing import Vindex

from .entry import Entry, plain

K = 2
T = 5
ALPHA = 1.0


# Two Gaussians.


@config_enumerate
def gaussians(data):
    weights = pyro.sample("weights", dist.Dirichlet(0.5 * torch.ones(K)))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 2.0))
    with pyro.plate("components", K):
        locs = pyro.sample("locs", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(data)):
        assignment = pyro.sample("assignment", dist.Categorical(weights))
        pyro.sample("obs", dist.Normal(locs[assignment], scale), obs=data)


def starting_point(site):
    if site["name"] == "weights":
        return torch.ones(K) / K
    if site["name"] == "scale":
        return torch.tensor(2.0)
    return torch.tensor([-1.0, 5.0])


def gaussians_guide():
    exposed = poutine.block(gaussians, expose=["weights", "locs", "scale"])
    return AutoDelta(exposed, init_loc_fn=starting_point)


def gaussians_data(size):
    near = torch.rand(size) < 0.4
    return (torch.where(near, torch.zeros(()), torch.tensor(10.0)) + torch.randn(size),)


# A chain of three switches; the one in the middle is not seen.


@config_enumerate
def switches(prior, obs, num_obs):
    p_a = pyro.sample("p_A", dist.Beta(1, 1))
    p_b = pyro.sample("p_B", dist.Beta(torch.ones(2), torch.ones(2)).to_event(1))
    p_c = pyro.sample("p_C", dist.Beta(torch.ones(2), torch.ones(2)).to_event(1))
    with pyro.plate("data_plate", num_obs):
        a = pyro.sample("A", dist.Bernoulli(p_a.expand(num_obs)), obs=obs["A"])
        b = pyro.sample(
            "B", dist.Bernoulli(Vindex(p_b)[a.type(torch.long)]), infer={"enumerate": "parallel"}
        )
        pyro.sample("C", dist.Bernoulli(Vindex(p_c)[b.type(torch.long)]), obs=obs["C"])


def switches_guide(prior, obs, num_obs):
    a = pyro.param("a", prior["A"], constraint=constraints.positive)
    pyro.sample("p_A", dist.Beta(a[0], a[1]))
    b = pyro.param("b", prior["B"], constraint=constraints.positive)
    pyro.sample("p_B", dist.Beta(b[:, 0], b[:, 1]).to_event(1))
    c = pyro.param("c", prior["C"], constraint=constraints.positive)
    pyro.sample("p_C", dist.Beta(c[:, 0], c[:, 1]).to_event(1))


def switches_data(size):
    prior = {
        "A": torch.tensor([1.0, 10.0]),
        "B": torch.tensor([[10.0, 1.0], [1.0, 10.0]]),
        "C": torch.tensor([[10.0, 1.0], [1.0, 10.0]]),
    }
    a = torch.bernoulli(torch.full((size,), 0.3))
    b = torch.bernoulli(torch.where(a > 0, 0.1, 0.9))
    c = torch.bernoulli(torch.where(b > 0, 0.2, 0.9))
    return prior, {"A": a, "C": c}, size


# As many clusters as there are, by sticks that are broken.


def mix_weights(beta):
    beta1m_cumprod = (1 - beta).cumprod(-1)
    return F.pad(beta, (0, 1), value=1) * F.pad(beta1m_cumprod, (1, 0), value=1)


def dirichlet_process(data):
    """Pyro tutorial dirichlet_process_mixture."""
    with pyro.plate("beta_plate", T - 1):
        beta = pyro.sample("beta", Beta(1, ALPHA))
    with pyro.plate("mu_plate", T):
        mu = pyro.sample("mu", MultivariateNormal(torch.zeros(2), 5 * torch.eye(2)))
    with pyro.plate("data", len(data)):
        z = pyro.sample("z", Categorical(mix_weights(beta)))
        pyro.sample("obs", MultivariateNormal(mu[z], torch.eye(2)), obs=data)


def dirichlet_process_guide(data):
    kappa = pyro.param(
        "kappa", lambda: dist.Uniform(0, 2).sample([T - 1]), constraint=constraints.positive
    )
    tau = pyro.param(
        "tau", lambda: MultivariateNormal(torch.zeros(2), 3 * torch.eye(2)).sample([T])
    )
    phi = pyro.param(
        "phi",
        lambda: Dirichlet(1 / T * torch.ones(T)).sample([len(data)]),
        constraint=constraints.simplex,
    )
    with pyro.plate("beta_plate", T - 1):
        pyro.sample("beta", Beta(torch.ones(T - 1), kappa))
    with pyro.plate("mu_plate", T):
        pyro.sample("mu", MultivariateNormal(tau, torch.eye(2)))
    with pyro.plate("data", len(data)):
        pyro.sample("z", Categorical(phi))


def points(size):
    centres = torch.tensor([[-5.0, -5.0], [0.0, 0.0], [5.0, 5.0]])
    return (centres[torch.randint(3, (size,))] + torch.randn(size, 2),)


ENTRIES = (
    Entry(
        "Gaussian mixture",
        "Pyro tutorial gmm; it starts from public numbers",
        lambda: (gaussians, gaussians_guide()),
        gaussians_data,
        lambda: TraceEnum_ELBO(max_plate_nesting=1),
    ),
    Entry(
        "discrete mixture",
        "Pyro example toy_mixture_model_discrete_enumeration",
        lambda: (switches, switches_guide),
        switches_data,
        lambda: TraceEnum_ELBO(max_plate_nesting=1),
    ),
    plain("Dirichlet process mixture", dirichlet_process, dirichlet_process_guide, points),
)
