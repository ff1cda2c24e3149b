"""The average factor: damping, noise, and directions that the noise hides."""

import math

import pytest
import torch

from pyro_dp.infer.ep.approximation import AverageFactor
from pyro_dp.infer.ep.site_factors import Full
from pyro_dp.utils.linalg import Gaussian, apply

SETTINGS = {"weight": 0.5, "sample_rate": 1.0}
PRECISION = torch.tensor([[900.0, 30.0], [30.0, 400.0]], dtype=torch.float64)


def start(precision=100.0):
    initial = Gaussian(torch.zeros(2), precision * torch.eye(2))
    return AverageFactor(Full([2]), initial, torch.zeros(2))


def estimate(precision, mean):
    return Gaussian(precision @ mean, precision)


def test_damping_is_in_natural_parameters():
    factor = start()
    mean = torch.tensor([1.0, -2.0])
    change = factor.update(estimate(PRECISION, mean), mean, 0.25, noise=0.0, **SETTINGS)
    expected = 0.75 * 100 * torch.eye(2) + 0.25 * PRECISION
    torch.testing.assert_close(factor.reported.precision, expected)
    torch.testing.assert_close(factor.reported.eta, 0.25 * PRECISION @ mean)
    difference = 0.25 * (PRECISION - 100 * torch.eye(2))
    norm = torch.cat([0.25 * PRECISION @ mean, 0.5 * difference.flatten()]).norm()
    assert change == pytest.approx(norm.item())


def test_a_floor_is_a_step_size_and_no_information():
    """Below the noise's radius: raised for the next step, around the centre, but not reported."""
    factor, mean = start(), torch.tensor([0.4, 0.2])
    hidden = torch.diag(torch.tensor([1000.0, 3.0]))
    factor.update(estimate(hidden, mean), mean, 1.0, noise=10.0, **SETTINGS)
    radius = 10.0 / 0.5 * math.sqrt(2 * 2)
    torch.testing.assert_close(factor.reported.precision, hidden)
    raised = factor.projected()
    torch.testing.assert_close(raised.precision.diagonal(), torch.tensor([1000.0, radius]))
    for one in (raised, factor.projected(least=500.0)):
        torch.testing.assert_close(one.eta - apply(one.precision, mean), torch.zeros(2))
    assert factor.projected(least=500.0).precision[1, 1] == pytest.approx(500.0)


def test_a_negative_precision_is_reported_as_none():
    factor = start()
    negative = torch.diag(torch.tensor([1000.0, -30.0]))
    factor.update(estimate(negative, torch.ones(2)), torch.ones(2), 1.0, noise=10.0, **SETTINGS)
    torch.testing.assert_close(factor.reported.precision, negative.clamp(min=0.0))


def test_on_the_way_steps_stand_on_all_precisions():
    """Their average's noise falls with their number; the reported precision is the last one."""
    factor, radii = start(), []
    for scale in (1.0, 2.0, 3.0):
        hidden = scale * torch.diag(torch.tensor([1000.0, 0.0]))
        factor.update(estimate(hidden, torch.ones(2)), torch.ones(2), 1.0, noise=10.0, **SETTINGS)
        radii.append(factor.projected().precision[1, 1].item())
    torch.testing.assert_close(factor.projected().precision[0, 0], torch.tensor(2000.0))
    torch.testing.assert_close(factor.reported.precision, hidden)
    assert radii[2] == pytest.approx(radii[0] / math.sqrt(3))
