"""Means of iterates: used if a run has arrived, and not if it still travels."""

import pytest
import torch

from pyro_dp import ConfigurationError
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
    """The mean of the last half, and of nothing before it."""
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
