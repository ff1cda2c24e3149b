"""Gaussians in natural parameters."""

import pytest
import torch
from torch.distributions import MultivariateNormal

from pyro_dp.utils.gaussian import Gaussian
from pyro_dp.utils.linalg import (
    apply,
    cholesky,
    dense,
    floored,
    inverse,
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
    expected = vectors @ values.clamp(min=least).diag() @ vectors.T
    torch.testing.assert_close(floored(vectors @ values.diag() @ vectors.T, least), expected)


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e8])
def test_cholesky_of_what_rounding_made_indefinite(size):
    root = torch.randn(6, 2)
    matrix = size * (root @ root.T)  # positive semidefinite, of rank 2
    matrix = matrix - 1e-14 * size * torch.eye(6)
    assert torch.linalg.cholesky_ex(matrix).info > 0
    factor = cholesky(matrix)
    torch.testing.assert_close(factor @ factor.T, matrix, rtol=0, atol=1e-10 * size)
