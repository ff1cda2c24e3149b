"""Tilted moments and sites, against dense grids."""

import math
from functools import partial

import pytest
import torch
from torch.distributions import (
    Bernoulli,
    Binomial,
    Gamma,
    NegativeBinomial,
    Normal,
    Poisson,
    StudentT,
)

from pyro_dp.utils import gauss_hermite

SPREAD = torch.tensor([[1.0, 0.6], [0.6, 2.0]], dtype=torch.float64)
CENTRE = torch.tensor([0.5, -0.5], dtype=torch.float64)


def likelihood(make, value):
    """A log likelihood of one number a (..., 1)."""
    return lambda a: make(a[..., 0]).log_prob(torch.tensor(value))


LIKELIHOODS = {
    "bernoulli": likelihood(lambda a: Bernoulli(logits=a), 1.0),
    "binomial": likelihood(lambda a: Binomial(7, logits=a), 2.0),
    "poisson, none": likelihood(lambda a: Poisson(a.exp()), 0.0),
    "poisson, many": likelihood(lambda a: Poisson(a.exp()), 50.0),
    "negative binomial": likelihood(lambda a: NegativeBinomial(3.0, logits=a), 4.0),
    "gamma rate": likelihood(lambda a: Gamma(2.0, a.exp()), 0.7),
    "log scale": likelihood(lambda a: Normal(0.0, a.exp()), 1.0),
    "student": likelihood(lambda a: StudentT(4.0, a, 1.0), 5.0),  # not log-concave at the cavity
}


def of_normal(value):
    """A log likelihood of location and log scale (..., 2)."""

    def log_likelihood(a):
        return Normal(a[..., 0], a[..., 1].exp(), validate_args=False).log_prob(value)

    return log_likelihood


def on_grid(log_likelihood, mean, covariance, half=30.0, count=4001):
    """Mean (r,) and covariance (r, r) of the tilted distribution, by brute force.

    The first, coarse grid finds where it is.
    """
    rank, root = len(mean), torch.linalg.cholesky(covariance)
    low, high = torch.full((rank,), -half), torch.full((rank,), half)
    for _ in range(3):
        axes = [torch.linspace(*ends, count) for ends in zip(low, high, strict=True)]
        z = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, rank)
        a = mean + z @ root.T
        log_weights = log_likelihood(a) - z.square().sum(1) / 2
        inside, step = z[log_weights > log_weights.max() - 40], (high - low) / count
        low, high = inside.amin(0) - step, inside.amax(0) + step
    weights = torch.softmax(log_weights, dim=0).unsqueeze(1)
    average = (weights * a).sum(0)
    return average, (weights * (a - average)).T @ (a - average)


def site_of_moments(mean, covariance, tilted_mean, tilted_covariance):
    """Precision, and eta - precision m, of the Gaussian that turns a cavity into the tilted one."""
    after = torch.linalg.inv(tilted_covariance)
    precision = after - torch.linalg.inv(covariance)
    return precision, after @ (tilted_mean - mean)


def tilted_moments(log_likelihood, mean, covariance):
    density = partial(gauss_hermite.by_autodiff, log_likelihood)
    return gauss_hermite.tilted_moments(density, mean, covariance)


def tilted_covariance(tilted, covariance):
    """The first problem's, in its own numbers."""
    root = gauss_hermite._root(covariance)
    return root @ tilted.spread[0] @ root.mT


def check(log_likelihood, mean, covariance, tolerance, of_site=None, count=4001):
    """Moments, relative to the tilted standard deviations, and the site, to its largest entry."""
    of_site = of_site or 30 * tolerance
    average, spread = on_grid(log_likelihood, mean, covariance, count=count)
    tilted = tilted_moments(log_likelihood, mean[None], covariance[None])
    scale = spread.diagonal().sqrt()
    assert ((mean + covariance @ tilted.gradient[0] - average) / scale).abs().max() < tolerance
    found = tilted_covariance(tilted, covariance)
    assert ((found - spread) / torch.outer(scale, scale)).abs().max() < tolerance
    for got, want in zip(
        (each[0] for each in tilted.site()),
        site_of_moments(mean, covariance, average, spread),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=of_site * want.abs().max().item())


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize(
    ("variance", "tolerance"), [(1e-3, 1e-8), (0.1, 1e-5), (0.5, 1e-3)], ids=str
)
@pytest.mark.parametrize("centre", [-1.0, 0.5])
def test_one_number(name, variance, tolerance, centre):
    mean, covariance = torch.tensor([centre]), torch.tensor([[variance]])
    check(LIKELIHOODS[name], mean, covariance, tolerance)


@pytest.mark.parametrize("wide", [1e-4, 1.0, 1e2])
def test_a_gaussian_likelihood_is_exact(wide):
    """In a cavity so many times as wide as the likelihood."""
    mean, variance = torch.full((1, 1), 0.7), torch.full((1, 1, 1), (wide * 0.3) ** 2)
    normal = likelihood(lambda a: Normal(a, 0.3), 1.3)
    precision, residual = tilted_moments(normal, mean, variance).site()
    assert precision.item() == pytest.approx(0.3**-2, rel=1e-10)
    assert residual.item() == pytest.approx(0.6 / 0.3**2, rel=1e-10)


@pytest.mark.parametrize("value", [0.3, 3.0])
@pytest.mark.parametrize(("size", "tolerance"), [(1e-3, 1e-6), (0.02, 1e-5), (0.1, 1e-3)], ids=str)
def test_two_numbers(value, size, tolerance):
    check(of_normal(value), CENTRE, size * SPREAD, tolerance, count=201)


def test_two_numbers_of_a_gaussian_likelihood_are_exact():
    precision, value = torch.tensor([[3.0, -1.0], [-1.0, 2.0]]), torch.tensor([2.0, 1.0])

    def log_likelihood(a):
        return -(((a - value) @ precision) * (a - value)).sum(-1) / 2

    found, residual = tilted_moments(log_likelihood, CENTRE[None], 100 * SPREAD[None]).site()
    torch.testing.assert_close(found[0], precision, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(residual[0], precision @ (value - CENTRE), rtol=1e-9, atol=1e-9)


def derivatives(log_likelihood, mean):
    def scalar(a):
        return log_likelihood(a[None])[0]

    return (
        torch.autograd.functional.jacobian(scalar, mean),
        torch.autograd.functional.hessian(scalar, mean),
    )


@pytest.mark.parametrize("variance", [0.0, 1e-10, 1e-14])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_narrow_cavity_gives_gradient_and_hessian(name, variance):
    log_likelihood, mean = LIKELIHOODS[name], torch.tensor([0.5])
    gradient, hessian = derivatives(log_likelihood, mean)
    tilted = tilted_moments(log_likelihood, mean[None], torch.full((1, 1, 1), variance))
    precision, residual = tilted.site()
    torch.testing.assert_close(precision[0], -hessian, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(residual[0], gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-10])
def test_a_narrow_cavity_of_two_numbers(size):
    gradient, hessian = derivatives(of_normal(0.3), CENTRE)
    precision, residual = tilted_moments(of_normal(0.3), CENTRE[None], size * SPREAD[None]).site()
    torch.testing.assert_close(precision[0], -hessian, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(residual[0], gradient, rtol=1e-6, atol=1e-6)


def test_a_singular_covariance_is_the_limit_of_regular_ones():
    """Two numbers that move together, as with one latent."""
    singular = 0.1 * torch.outer(CENTRE, CENTRE)
    sites = [
        tilted_moments(of_normal(0.3), CENTRE[None], (singular + ridge * torch.eye(2))[None]).site()
        for ridge in (0.0, 1e-9)
    ]
    for limit, regular in zip(*sites, strict=True):
        torch.testing.assert_close(limit, regular, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("broken", ["mean", "covariance", "likelihood"])
def test_a_broken_record_stays_in_its_place(rank, broken):
    """Bitwise: a record's site is a function of that record alone."""
    mean = torch.linspace(-1, 1, 5 * rank).reshape(5, rank)
    covariance = 0.1 * SPREAD[:rank, :rank].repeat(5, 1, 1)
    value = torch.linspace(0.0, 1.0, 5)

    def sites():
        def log_likelihood(a):
            return of_normal(value)(torch.cat([a, a], dim=-1)[..., :2])

        return tilted_moments(log_likelihood, mean, covariance).site()

    expected = sites()
    {"mean": mean, "covariance": covariance, "likelihood": value}[broken][2] = math.nan
    others = [0, 1, 3, 4]
    for got, want in zip(sites(), expected, strict=True):
        assert got[2].isnan().any()
        assert torch.equal(got[others], want[others])


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("centre", [-2.0, 0.5])
def test_one_number_in_a_wide_cavity(name, centre):
    """Newton's method overshoots into the exponential, and is not back after six steps."""
    mean, covariance = torch.tensor([centre]), torch.tensor([[9.0]])
    check(LIKELIHOODS[name], mean, covariance, 0.15, of_site=0.2)


def test_two_numbers_in_a_wide_cavity():
    """The density is skewed, and few nodes are only a rough rule; but it does not diverge."""
    tilted = tilted_moments(of_normal(0.3), CENTRE[None], SPREAD[None])
    average, spread = on_grid(of_normal(0.3), CENTRE, SPREAD, count=201)
    moved = CENTRE + SPREAD @ tilted.gradient[0] - average
    assert (moved / spread.diagonal().sqrt()).abs().max() < 3.0
    assert all(each.abs().max() < 100.0 for each in tilted.site())
