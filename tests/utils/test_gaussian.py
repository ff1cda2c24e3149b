"""Gaussians in natural parameters; the closest covariance of low rank plus a diagonal."""

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_dp.utils.linalg import (
    Gaussian,
    apply,
    cholesky,
    dense,
    floored,
    inverse,
    low_rank,
    product,
    stacked,
    unstacked,
)

KINDS = ("full", "diagonal")


def covariance(kind, size=4):
    if kind == "diagonal":
        return 0.2 + torch.rand(size)
    root = torch.randn(size, size)
    return root @ root.T + 0.2 * torch.eye(size)


def gaussian(kind, size=4):
    """With torch's density of the same moments."""
    mean, moments = torch.randn(size), covariance(kind, size)
    return Gaussian.from_moments(mean, moments), MultivariateNormal(mean, dense(moments))


def log_factor(factor, z):
    """Up to a constant, for z (K, d)."""
    return z @ factor.eta - ((z @ dense(factor.precision)) * z).sum(1) / 2


def same_up_to_a_constant(one, other):
    torch.testing.assert_close(one - one[0], other - other[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("combined", "logs"),
    [
        (lambda f, g: f * g, lambda p, q: p + q),
        (lambda f, g: f / g, lambda p, q: p - q),
        (lambda f, g: f**0.3, lambda p, q: 0.3 * p),
        (lambda f, g: f**-2 * g, lambda p, q: q - 2 * p),
    ],
    ids=["product", "quotient", "power", "mixed"],
)
def test_arithmetic_is_that_of_densities(combined, logs, kind):
    (one, p), (other, q), z = gaussian(kind), gaussian(kind), torch.randn(20, 4)
    expected = logs(p.log_prob(z), q.log_prob(z))
    same_up_to_a_constant(log_factor(combined(one, other), z), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_has_the_density_of_its_moments(kind):
    (one, p), (other, q), z = gaussian(kind), gaussian(kind), torch.randn(20, 4)
    factor = one * other
    normal = MultivariateNormal(factor.mean, dense(factor.covariance))
    same_up_to_a_constant(normal.log_prob(z), p.log_prob(z) + q.log_prob(z))


@pytest.mark.parametrize("kind", KINDS)
def test_restricted_is_the_factor_with_the_others_at_zero(kind):
    factor, density = gaussian(kind)
    places, z = torch.tensor([2, 0]), torch.zeros(20, 4)
    z[:, places] = torch.randn(20, 2)
    same_up_to_a_constant(log_factor(factor.restricted(places), z[:, places]), density.log_prob(z))


@pytest.mark.parametrize("kind", KINDS)
def test_embedded_says_nothing_about_the_others(kind):
    factor, density = gaussian(kind, 2)
    places, z = torch.tensor([3, 1]), torch.randn(20, 4)
    same_up_to_a_constant(log_factor(factor.embedded(places, 4), z), density.log_prob(z[:, places]))


@pytest.mark.parametrize("kind", KINDS)
def test_with_precision_keeps_the_gradient_at_the_centre(kind):
    factor, _ = gaussian(kind)
    centre, precision = torch.randn(4), covariance(kind)
    other = factor.with_precision(precision, centre)
    gradients = [f.eta - apply(f.precision, centre) for f in (factor, other)]
    torch.testing.assert_close(*gradients)
    assert torch.equal(other.precision, precision)


@pytest.mark.parametrize("kind", KINDS)
def test_inverse_and_apply(kind):
    matrix, vector = covariance(kind), torch.randn(4)
    torch.testing.assert_close(dense(inverse(matrix)), torch.linalg.inv(dense(matrix)))
    torch.testing.assert_close(apply(matrix, vector), dense(matrix) @ vector)


@pytest.mark.parametrize("outer", [1, 3])
@pytest.mark.parametrize("inner", [1, 2])
@pytest.mark.parametrize("last", [1, 4])
def test_product_is_that_of_matrices(outer, inner, last):
    left, right = torch.randn(5, outer, inner), torch.randn(5, inner, last)
    torch.testing.assert_close(product(left, right), left @ right)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_stacked_has_the_frobenius_norm(size):
    matrix = torch.randn(size, size)
    matrix = matrix + matrix.T
    vector = stacked(matrix)
    assert vector.shape == (size * (size + 1) // 2,)
    torch.testing.assert_close(vector.norm(), matrix.norm())
    torch.testing.assert_close(unstacked(vector, size), matrix)
    torch.testing.assert_close(stacked(unstacked(vector, size)), vector)


@pytest.mark.parametrize("least", [-0.5, 0.0, 0.3])
def test_floored_raises_small_eigenvalues_only(least):
    values, vectors = torch.tensor([-1.0, 0.1, 2.0]), torch.linalg.qr(torch.randn(3, 3)).Q
    full, expected = vectors @ values.diag() @ vectors.T, values.clamp(min=least)
    for each in (least, torch.tensor(least), torch.tensor(least).float()):
        torch.testing.assert_close(floored(values, each), expected, rtol=1e-6, atol=1e-6)
        found, whole = floored(full, each), vectors @ expected.diag() @ vectors.T
        torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e8])
def test_cholesky_of_what_rounding_made_indefinite(size):
    root = torch.randn(6, 2)
    matrix = size * (root @ root.T)  # positive semidefinite, of rank 2
    matrix = matrix - 1e-14 * size * torch.eye(6)
    assert torch.linalg.cholesky_ex(matrix).info > 0
    factor = cholesky(matrix)
    torch.testing.assert_close(factor @ factor.T, matrix, rtol=0, atol=1e-10 * size)


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
