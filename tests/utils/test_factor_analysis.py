"""The closest covariance of low rank plus a diagonal: exact where there is one, else closest."""

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_dp.utils.gaussian import low_rank


def of_this_form(size, rank):
    """A covariance of low rank plus a diagonal, with variances of many sizes."""
    factor = torch.randn(size, rank)
    deviations = torch.logspace(-3, 2, size)
    inner = factor @ factor.mT + torch.linspace(0.2, 2.0, size).diag()
    return deviations.unsqueeze(-1) * inner * deviations


def near_this_form(size, rank):
    """As of a sample: it has no exact form, and the closest has no scale near zero."""
    draws = torch.linalg.cholesky(of_this_form(size, rank)) @ torch.randn(size, 20 * size)
    return draws @ draws.mT / (20 * size)


def joined(scale, factor):
    return scale.unsqueeze(-1) * (factor @ factor.mT + torch.eye(len(scale))) * scale


def divergence(covariance, scale, factor):
    zero = torch.zeros(len(scale))
    target = MultivariateNormal(zero, covariance)
    return kl_divergence(target, MultivariateNormal(zero, joined(scale, factor)))


def relative_error(found, covariance):
    deviations = covariance.diagonal().sqrt()
    return ((found - covariance) / deviations / deviations.unsqueeze(-1)).abs().max()


@pytest.mark.parametrize(
    "size, rank, given", [(1, 1, 1), (4, 1, 1), (9, 3, 3), (9, 4, 3), (50, 7, 7), (200, 14, 14)]
)
def test_exact_where_there_is_such_a_matrix(size, rank, given):
    covariance = of_this_form(size, given)
    scale, factor = low_rank(covariance, rank)
    assert scale.shape == (size,) and factor.shape == (size, rank)
    assert relative_error(joined(scale, factor), covariance) < 1e-7


@pytest.mark.parametrize("rank", [6, 11])
def test_any_covariance_of_ample_rank(rank):
    covariance = near_this_form(6, 2)
    scale, factor = low_rank(covariance, rank)
    assert factor.shape == (6, rank)
    assert relative_error(joined(scale, factor), covariance) < 1e-10


@pytest.mark.parametrize("size, rank", [(4, 1), (9, 2), (50, 7)])
def test_its_gradient_is_zero(size, rank):
    """In both parameters: the test of random neighbours can miss a direction."""
    covariance = near_this_form(size, rank)
    scale, factor = (each.requires_grad_() for each in low_rank(covariance, rank))
    loss = divergence(covariance, scale, factor)
    of_scale, of_factor = torch.autograd.grad(loss, (scale, factor))
    assert (of_scale * scale).abs().max() < 1e-6 and of_factor.abs().max() < 1e-6


def test_a_factor_that_takes_all_of_a_variance():
    """A Heywood case: the closest matrix leaves the first coordinate nothing of its own."""
    covariance = torch.tensor([[1.0, 0.8, 0.8], [0.8, 1.0, 0.4], [0.8, 0.4, 1.0]])
    scale, factor = low_rank(covariance, 1)
    assert 0.0 < scale[0] < 1e-2 and (scale[1:] > 0.1).all()
    found = joined(scale, factor).diagonal()
    torch.testing.assert_close(found, covariance.diagonal(), rtol=1e-12, atol=0.0)
    # Nearly nothing is lost by the bound that keeps the scale above zero.
    smaller = torch.tensor([0.1, 1.0, 1.0])
    beyond = divergence(covariance, scale * smaller, factor / smaller.unsqueeze(-1))
    assert divergence(covariance, scale, factor) < beyond + 1e-5


def test_independent_coordinates_stay_independent():
    covariance = torch.logspace(-8, 8, 5).diag()
    assert relative_error(joined(*low_rank(covariance, 2)), covariance) < 1e-12


def test_a_covariance_that_is_almost_singular():
    rows = torch.randn(30, 30) * torch.logspace(0, -4, 30)
    covariance = rows @ rows.mT + 1e-10 * torch.eye(30)
    scale, factor = low_rank(covariance, 5)
    assert (scale > 0.0).all() and factor.isfinite().all()
    assert divergence(covariance, scale, factor).isfinite()
    found = joined(scale, factor).diagonal()
    torch.testing.assert_close(found, covariance.diagonal(), rtol=1e-12, atol=0.0)
