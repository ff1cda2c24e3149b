"""Guides of other families: fitted to a posterior by their density, without the data."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints
from pyro.infer import TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoDelta, AutoIAFNormal, AutoNormal
from seeded import records_of, seeded

from pyro_dp import DPSVI, ConvergenceWarning, ModelError, Noise, PrivacyAccountant
from pyro_dp.infer.posterior.fitted_guide import FittedGuide, read_guide
from pyro_dp.infer.posterior.gaussian_guide import GaussianGuide
from pyro_dp.records.initial_values import initialise

POSITIVE = constraints.positive
DATA = 7.5 * torch.ones(40)  # no placeholder has this value
MEAN = torch.tensor([0.4, -1.0], dtype=torch.float64)
COVARIANCE = torch.tensor([[0.04, 0.015], [0.015, 0.01]], dtype=torch.float64)


def two(y):
    rate = pyro.sample("rate", dist.Beta(2.0, 2.0))
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with pyro.plate("people", len(y)):
        pyro.sample("y", dist.Normal(level + rate, 1.0), obs=y)


def dependent(y):
    """A Beta, and a Normal whose location follows it."""
    assert not (y == 7.5).any()
    alpha = pyro.param("alpha", torch.tensor(2.0), constraint=POSITIVE)
    beta = pyro.param("beta", torch.tensor(2.0), constraint=POSITIVE)
    start, slope = pyro.param("start", torch.tensor(0.0)), pyro.param("slope", torch.tensor(0.0))
    scale = pyro.param("scale", torch.tensor(1.0), constraint=POSITIVE)
    rate = pyro.sample("rate", dist.Beta(alpha, beta))
    pyro.sample("level", dist.Normal(start + slope * torch.logit(rate), scale))


def read(model, guide, *data):
    pyro.clear_param_store()
    records = records_of(model, *data, plate="people")
    initialise(model, guide, records)
    return read_guide(model, guide, records)


@pytest.mark.slow
def test_dependent_sites_of_another_family_get_the_posterior():
    view = read(two, dependent, DATA)
    assert isinstance(view, FittedGuide)
    assert [latent.name for latent in view.latents] == ["rate", "level"]
    view.write(MEAN, COVARIANCE)
    assert view.fit() < 0.5
    pyro.set_rng_seed(0)
    with pyro.plate("draws", 4_000):
        nodes = pyro.poutine.trace(dependent).get_trace(torch.zeros(1)).nodes
    draws = torch.logit(nodes["rate"]["value"]), nodes["level"]["value"]
    found = torch.stack(draws, dim=1).detach().double()
    torch.testing.assert_close(found.mean(0), MEAN, rtol=0.0, atol=0.02)
    torch.testing.assert_close(found.T.cov(), COVARIANCE, rtol=0.1, atol=1e-3)


def test_a_point_becomes_the_mean():
    view = read(two, AutoDelta(pyro.poutine.block(two, hide=["y"])), DATA)
    assert isinstance(view, FittedGuide)
    view.write(MEAN, COVARIANCE)
    assert view.fit() < 1e-5
    found = pyro.param("AutoDelta.rate").item(), pyro.param("AutoDelta.level").item()
    assert found == pytest.approx((torch.sigmoid(MEAN[0]).item(), -1.0), rel=1e-5)


@pytest.mark.slow
def test_a_fit_repeats_and_leaves_the_public_generators():
    found = []
    for _ in range(2):
        view = read(two, dependent, DATA)
        view.write(MEAN, COVARIANCE)
        torch.manual_seed(len(found))
        before = torch.get_rng_state()
        view.fit()
        assert torch.equal(before, torch.get_rng_state())
        found.append(pyro.param("alpha").item())
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_guide_that_branches_on_a_latent_takes_its_draws_one_by_one():
    def branches(y):
        alpha = pyro.param("alpha", torch.tensor(2.0), constraint=POSITIVE)
        beta = pyro.param("beta", torch.tensor(2.0), constraint=POSITIVE)
        low, high = (pyro.param(name, torch.tensor(0.0)) for name in ("low", "high"))
        scale = pyro.param("scale", torch.tensor(1.0), constraint=POSITIVE)
        rate = pyro.sample("rate", dist.Beta(alpha, beta))
        pyro.sample("level", dist.Normal(low if rate < 0.6 else high, scale))

    view = read(two, branches, DATA)
    view.write(MEAN, COVARIANCE)
    assert view.fit() < 0.5
    # Half of the rates lie below .6. There the level is .06 lower on average, else .06 higher.
    low, high = pyro.param("low").item(), pyro.param("high").item()
    assert low == pytest.approx(-1.06, abs=0.03) and high == pytest.approx(-0.94, abs=0.03)


def test_what_is_read_otherwise():
    assert isinstance(read(two, AutoNormal(two), DATA), GaussianGuide)
    with pytest.raises(ModelError, match="AutoIAFNormal is fitted by gradient steps alone"):
        read(two, AutoIAFNormal(two), DATA)

    def without_parameters(y):
        pyro.sample("rate", dist.Beta(2.0, 2.0))
        pyro.sample("level", dist.Normal(0.0, 1.0))

    with pytest.raises(ModelError, match="no parameters to fit"):
        read(two, without_parameters, DATA)


def coin(tosses):
    fairness = pyro.sample("fairness", dist.Beta(10.0, 10.0))
    with pyro.plate("tosses", len(tosses)):
        pyro.sample("obs", dist.Bernoulli(fairness), obs=tosses)


def coin_guide(tosses):
    alpha = pyro.param("alpha", torch.tensor(15.0), constraint=POSITIVE)
    beta = pyro.param("beta", torch.tensor(15.0), constraint=POSITIVE)
    pyro.sample("fairness", dist.Beta(alpha, beta))


def stuck_guide(tosses):
    alpha = pyro.param("alpha", torch.tensor(15.0), constraint=POSITIVE)
    pyro.sample("fairness", dist.Beta(alpha, alpha))


@pytest.mark.slow
@pytest.mark.parametrize("loop", [False, True])
def test_dpsvi_makes_looks_and_the_guide_holds_the_conjugate_posterior(loop):
    tosses = (torch.arange(2_000) % 10 < 6).float()
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    accountant = PrivacyAccountant(epsilon=4.0, delta=1e-5)
    svi = DPSVI(coin, coin_guide, accountant=accountant, noise=Noise(source=0))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        if loop:
            with pytest.warns(match="returns nan"):
                for _ in range(100):
                    svi.step(tosses)
        else:
            svi.run(tosses, progress=False)
    assert svi.posterior().status.is_ok
    assert len(svi.evidence.looks) > 1
    assert accountant.get_epsilon() <= 4.0
    found = dist.Beta(pyro.param("alpha").item(), pyro.param("beta").item())
    exact = dist.Beta(10.0 + 1_200, 10.0 + 800)  # conjugate
    assert abs(found.mean - exact.mean) < 2.5 * found.stddev
    assert 0.95 < found.stddev / exact.stddev < 1.5  # the noise is in it


@pytest.mark.slow
def test_dpsvi_warns_of_a_guide_that_cannot_hold_the_posterior():
    tosses = (torch.arange(2_000) % 10 < 8).float()
    pyro.clear_param_store()
    accountant = PrivacyAccountant(epsilon=4.0, delta=1e-5)
    svi = DPSVI(coin, stuck_guide, accountant=accountant, noise=Noise(source=0))
    with pytest.warns(ConvergenceWarning, match="stuck_guide could not be fitted"):
        svi.run(tosses, progress=False)
    assert math.isclose(svi.posterior().quantiles([0.5])["fairness"].item(), 0.8, abs_tol=0.05)
    assert svi.posterior().status.is_ok


@config_enumerate
def two_kinds(y):
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(2)))
    with pyro.plate("kinds", 2):
        locs = pyro.sample("locs", dist.Normal(0.0, 10.0))
    with pyro.plate("people", len(y)):
        kind = pyro.sample("kind", dist.Categorical(weights))
        pyro.sample("y", dist.Normal(locs[kind], 1.0), obs=y)


def start_of_two_kinds(site):
    public = {"weights": torch.ones(2) / 2, "locs": torch.tensor([-1.0, 5.0])}
    return public[site["name"]]


@pytest.mark.slow
def test_a_mixture_gets_intervals():
    """Its guide is a point, and gradient steps find no interval for it.

    Intervals of four standard deviations: one of 5,000 seeds would fail; it is fixed.
    """
    near = torch.rand(2000) < 0.4
    y = torch.where(near, 0.0, 6.0) + torch.randn(2000)
    exposed = pyro.poutine.block(two_kinds, expose=["weights", "locs"])
    guide = AutoDelta(exposed, init_loc_fn=start_of_two_kinds)
    own = {"optim": pyro.optim.Adam({"lr": 0.05}), "loss": TraceEnum_ELBO(max_plate_nesting=1)}
    svi = seeded(DPSVI, two_kinds, lambda _: guide, y, epsilon=2.0, seed=3, **own)
    posterior = svi.posterior()
    assert posterior.status.is_ok
    low, high = (posterior.quantiles([at])["locs"][0] for at in (3e-5, 1 - 3e-5))
    assert (low < torch.tensor([0.0, 6.0])).all() and (high > torch.tensor([0.0, 6.0])).all()
    assert (high - low < 0.6).all()
    low, high = (posterior.quantiles([at])["weights"][0, 0] for at in (3e-5, 1 - 3e-5))
    assert low < near.float().mean() < high
    assert svi._inference._fit.current.problem.prior._vectorizes
    torch.testing.assert_close(guide.median()["locs"].double(), posterior["locs"].mean)
