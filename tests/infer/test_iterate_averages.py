"""Means of iterates, used if a run has arrived, and the posterior that they give."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import logistic, regression_data
from pyro.infer.autoguide import (
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from seeded import seeded

from pyro_dp import DPSVI, ConfigurationError, Execution
from pyro_dp.infer.svi.averaged_guide import IterateAverages

_STEPS = 800


def averages(path, gradients=None, noise=0.0):
    """:param path: iterates, (steps, d); gradients have the same shape."""
    found = IterateAverages(len(path))
    gradients = torch.zeros_like(path) if gradients is None else gradients
    for step, (value, gradient) in enumerate(zip(path, gradients, strict=True), start=1):
        found.add(step, {"x": value}, {"x": gradient}, noise)
    return found


def test_a_run_that_has_arrived():
    """The result is the mean of the last half of the iterates."""
    path = torch.randn(_STEPS, 20)
    path[: _STEPS // 2] = 1e6
    found = averages(path).agreed()["x"]
    torch.testing.assert_close(found, path[_STEPS // 2 :].mean(dim=0))


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_a_run_on_its_way(noise):
    way = torch.linspace(0, 20, _STEPS).unsqueeze(1).expand(-1, 20)
    assert averages(way + noise * torch.randn(_STEPS, 20)).agreed() == {}


def test_a_random_walk():
    assert averages(torch.randn(_STEPS, 200).cumsum(dim=0)).agreed() == {}


def test_each_parameter_by_itself():
    found = IterateAverages(_STEPS)
    for step in range(1, _STEPS + 1):
        iterates = {"stays": torch.randn(30), "goes": torch.full((30,), step / 10)}
        found.add(step, iterates, dict.fromkeys(iterates), 0.0)
    assert found.agreed().keys() == {"stays"}


def test_too_few_steps():
    assert averages(torch.randn(3, 5)).agreed() == {}


def test_a_state_goes_on():
    path = torch.randn(_STEPS, 20)
    whole, first = averages(path, path, noise=2.0), IterateAverages(_STEPS)
    for step in range(1, 501):
        first.add(step, {"x": path[step - 1]}, {"x": path[step - 1]}, 2.0)
    second = IterateAverages.resumed(first.state())
    for step in range(501, _STEPS + 1):
        second.add(step, {"x": path[step - 1]}, {"x": path[step - 1]}, 2.0)
    assert torch.equal(second.agreed()["x"], whole.agreed()["x"])
    assert torch.equal(second.gradient(["x"]), whole.gradient(["x"]))
    assert second.gradient_sd == whole.gradient_sd and second.complete
    with pytest.raises(ConfigurationError, match="averages"):
        IterateAverages.resumed({"counts": [1, 2]})


def test_a_state_of_version_0_2_knows_no_noise():
    state = averages(torch.randn(_STEPS, 3)).state()
    old = {name: state[name] for name in ("num_steps", "counts", "sums")}
    assert not IterateAverages.resumed(old).complete


@pytest.mark.parametrize("falls", [1.0, 0.1])
def test_noise_of_the_mean(falls):
    """Steps of a gradient descent on a quadratic, of any size: the variance is as predicted."""
    steps, runs, sd = 4000, 400, 3.0
    curvature = torch.tensor([[3.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    covariance = torch.linalg.inv(curvature)
    x, total = torch.zeros(runs, 2, dtype=torch.float64), torch.zeros(runs, 2, dtype=torch.float64)
    for step in range(steps):
        gradient = x @ curvature + sd * torch.randn_like(x)
        x = x - 0.1 * falls ** (step / steps) * gradient
        total += x * (step >= steps // 2)
    found = (total / (steps // 2)).T.cov()
    known = averages(torch.zeros(steps, 1), noise=sd**2)
    predicted = known.variances(covariance, 1.0)
    assert not predicted["sampling"].any()
    torch.testing.assert_close(found, predicted["privacy noise"], rtol=0.25, atol=1e-4)


def test_noise_of_sampling():
    predicted = averages(torch.zeros(_STEPS, 1)).variances(torch.eye(2), 0.2)["sampling"]
    torch.testing.assert_close(predicted, torch.eye(2) * 4 / (_STEPS / 2))


# The posterior of gradient steps, and its status.

GUIDES = AutoNormal, AutoMultivariateNormal, AutoLowRankMultivariateNormal


def fitted(model, guide, *data, lr=None, num_steps=400, sigma=1.0):
    optim = None if lr is None else pyro.optim.Adam({"lr": lr})
    options = {"num_steps": num_steps, "clip": 5.0, "execution": Execution(jit="trace")}
    return seeded(DPSVI, model, guide, *data, noise=sigma, optim=optim, **options).posterior()


@pytest.mark.slow
@pytest.mark.parametrize("kind", GUIDES)
def test_steps_that_have_settled(kind):
    data = regression_data(2000)
    exact = fitted(logistic, AutoMultivariateNormal, *data, sigma=0)
    found = fitted(logistic, kind, *data)
    assert found.status.is_ok and found.noise_share.max() < 0.3
    assert ((found.mean - exact.mean).abs() < 3 * found.stddev).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", GUIDES)
@pytest.mark.parametrize(
    ("size", "lr", "num_steps"),
    [
        (2000, 1e-4, 200),  # far too slow, so the means hardly move
        (2000, 0.01, 100),
        (30, 0.01, 100),  # scales start below those of few records
    ],
)
def test_steps_that_have_not(kind, size, lr, num_steps):
    data = regression_data(size)
    found = fitted(logistic, kind, *data, lr=lr, num_steps=num_steps, sigma=0.5)
    assert found.status.cause == "steps"
    assert any(word in found.status.reason for word in ("moved", "further", "widths"))


def persons(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    with pyro.plate("persons", len(y)):
        own = pyro.sample("own", dist.Normal(mean, scale))
        pyro.sample("y", dist.Normal(own, 0.5), obs=y)


@pytest.mark.slow
def test_global_latents_beside_those_of_records():
    """Their intervals do not include the noise, because records' latents depend on them."""
    found = fitted(persons, AutoNormal, 1 + torch.randn(2000))
    assert found.names == ("mean", "scale")
    assert abs(found.mean[0] - 1) < 0.2 and not found.noise_share.any()
    assert "do not include the privacy noise" in found.status.reason
    assert found["scale"].quantiles([0.5])["scale"] > 0
