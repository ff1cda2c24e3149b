"""A guide as one Gaussian: what is written is what Pyro shows, and what is no Gaussian is refused."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import handwritten_guide, logistic
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer import Predictive
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.nn import PyroModule, PyroParam
from torch import nn

from pyro_dp.guides import GaussianGuide
from pyro_dp.initial_values import initialise
from pyro_dp.plates import find_plate
from pyro_dp.records import Records

AUTOGUIDES = [AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal]


def found(model, guide, *data):
    records = Records(model, find_plate(model, data, {}, "data"), data, {}, False)
    initialise(model, guide, records)
    return GaussianGuide(model, guide, records)


def constrained(x):
    """Latents in three spaces, of them one in a plate; the flat vector has 1 + 2 + 4 + 3 entries."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    bound = pyro.sample("bound", dist.Uniform(-1.0, 1.0))
    with pyro.plate("data", len(x)) as idx:
        z = pyro.sample("z", dist.Categorical(weights[:2]), infer={"enumerate": "parallel"})
        pyro.sample("x", dist.Normal(locs[z] * rate[z] + bound, scale).to_event(1), obs=x[idx])


def blocked(kind, **settings):
    return kind(poutine.block(constrained, hide=["z"]), **settings)


def gaussian(size):
    """A correlated Gaussian that differs in every entry."""
    factor = torch.randn(size, size, dtype=torch.float64).tril(-1) / size
    factor += torch.linspace(0.1, 1.0, size, dtype=torch.float64).diag()
    return torch.linspace(-1.0, 1.0, size, dtype=torch.float64), factor @ factor.mT


def regression(x, y):
    """Three real latents, in matrix, vector and scalar."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
    b = pyro.sample("b", dist.MultivariateNormal(torch.zeros(2), torch.eye(2)))
    c = pyro.sample("c", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)) as idx:
        mean = (x[idx] @ w.T + b).sum(-1) + c
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y[idx])


def full_rank(form, value, constraint):
    """A hand-written guide with every kind of site, of d = 6 + 2 + 1."""

    def guide(x, y):
        w = pyro.param("w_loc", torch.zeros(2, 3))
        scale = pyro.param("w_scale", value.repeat(2, 1, 1), constraint=constraint)
        pyro.sample("w", dist.MultivariateNormal(w, **{form: scale}).to_event(1))
        b = pyro.param("b_loc", torch.zeros(2))
        factor = pyro.param("b_scale", torch.eye(2), constraint=constraints.lower_cholesky)
        pyro.sample("b", dist.MultivariateNormal(b, scale_tril=factor))
        c = pyro.param("c_loc", torch.tensor(0.5))
        c_scale = pyro.param("c_scale", torch.tensor(0.5), constraint=constraints.positive)
        pyro.sample("c", dist.Normal(c, c_scale))

    return guide


class ModuleGuide(PyroModule):
    """Parameters as attributes, one of them read twice."""

    def __init__(self):
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(3))
        self.scale = PyroParam(torch.full((3,), 0.3), constraint=constraints.softplus_positive)

    def forward(self, x, y):
        pyro.sample("w", dist.Normal(self.loc, self.scale).to_event(1))
        return self.loc, self.scale


def regression_data(dtype=None):
    return torch.randn(8, 3, dtype=dtype), torch.randn(8, dtype=dtype)


HANDWRITTEN = {
    "Normal": (logistic, handwritten_guide),
    "module": (logistic, ModuleGuide),
    "scale_tril": (
        regression,
        full_rank("scale_tril", 0.5 * torch.eye(3).double(), constraints.softplus_lower_cholesky),
    ),
    "covariance_matrix": (
        regression,
        full_rank("covariance_matrix", 0.5 * torch.eye(3).double(), constraints.positive_definite),
    ),
    "precision_matrix": (
        regression,
        full_rank("precision_matrix", 0.5 * torch.eye(3).double(), constraints.positive_definite),
    ),
}


def handwritten(name):
    model, guide = HANDWRITTEN[name]
    guide = guide() if guide is ModuleGuide else guide
    return model, guide, found(model, guide, *regression_data())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", AUTOGUIDES)
def test_autoguides_show_what_is_written(kind, dtype):
    """Median, quantiles, posterior and draws; scale and simplex in their own space."""
    torch.set_default_dtype(dtype)
    x = torch.randn(8, 2)
    guide = blocked(kind)
    view = found(constrained, guide, x)
    assert view.size == 1 + 2 + 4 + 2 + 1
    mean, covariance = gaussian(view.size)
    view.write(mean, covariance)
    tolerance = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else {}
    close = dict(check_dtype=False, **tolerance)
    u, deviation = view.split(mean), view.split(covariance.diagonal().sqrt())
    for latent in view.latents:
        median, quantiles = guide.median(x), guide.quantiles([0.1, 0.5, 0.9], x)
        torch.testing.assert_close(median[latent.name], latent.transform(u[latent.name]), **close)
        for quantile, z in zip(
            quantiles[latent.name], (-1.2815515655446004, 0, 1.2815515655446004), strict=True
        ):
            expected = latent.transform(u[latent.name] + z * deviation[latent.name])
            torch.testing.assert_close(quantile, expected, **close)
    if kind is not AutoNormal:
        posterior = guide.get_posterior(x)
        torch.testing.assert_close(posterior.mean, mean, **close)
        torch.testing.assert_close(posterior.variance, covariance.diagonal(), **close)
    if kind is AutoMultivariateNormal:
        torch.testing.assert_close(posterior.covariance_matrix, covariance, **close)


@pytest.mark.parametrize("kind", AUTOGUIDES)
def test_draws_follow_what_is_written(kind):
    x = torch.randn(8, 2)
    guide = blocked(kind)
    view = found(constrained, guide, x)
    mean, covariance = gaussian(view.size)
    view.write(mean, covariance)
    sites = [latent.name for latent in view.latents]
    draws = Predictive(constrained, guide=guide, num_samples=4000, return_sites=sites)(x)
    u = torch.cat(
        [latent.transform.inv(draws[latent.name]).reshape(4000, -1) for latent in view.latents], -1
    )
    if not view.correlated:
        covariance = covariance.diagonal().diag()
    torch.testing.assert_close(u.mean(0), mean, rtol=0, atol=0.08)
    torch.testing.assert_close(u.T.cov(), covariance, rtol=0, atol=0.08)
