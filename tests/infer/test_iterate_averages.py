"""Means of iterates: used if a run has arrived, and not if it still travels."""

import pytest
import torch

from pyro_dp import ConfigurationError
from pyro_dp.infer.svi.averaged_guide import IterateAverages

_STEPS = 800


def averages(path):
    """:param path: iterates, (steps, d)."""
    found = IterateAverages(len(path))
    for step, value in enumerate(path, start=1):
        found.add(step, {"x": value})
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
        found.add(step, {"stays": torch.randn(30), "goes": torch.full((30,), step / 10)})
    assert found.agreed().keys() == {"stays"}


def test_too_few_steps():
    assert averages(torch.randn(3, 5)).agreed() == {}


def test_a_state_goes_on():
    path = torch.randn(_STEPS, 20)
    whole, first = averages(path), IterateAverages(_STEPS)
    for step in range(1, 501):
        first.add(step, {"x": path[step - 1]})
    second = IterateAverages.resumed(first.state())
    for step in range(501, _STEPS + 1):
        second.add(step, {"x": path[step - 1]})
    assert torch.equal(second.agreed()["x"], whole.agreed()["x"])
    with pytest.raises(ConfigurationError, match="averages"):
        IterateAverages.resumed({"counts": [1, 2]})
