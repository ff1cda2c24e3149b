"""Stein moments of an enumerated mixture: brute force, the loop, a broken record."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import mixture, take_one_by_one
from pyro import poutine
from pyro.infer.autoguide import AutoMultivariateNormal

from pyro_dp import PaperDPSEP, PrivacyAccountant
from pyro_dp.infer.ep import stein_sites, tilted_sites

MEAN = torch.tensor([-0.4, 0.7], dtype=torch.float64)
COVARIANCE = torch.tensor([[0.30, 0.05], [0.05, 0.15]], dtype=torch.float64)


def two_means(x):
    """Two components on the line, assignments enumerated: d = 2."""
    weights = x.new_tensor([0.3, 0.7])
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(0.0, 2.0))
    with pyro.plate("data", len(x)) as idx:
        z = pyro.sample("z", dist.Categorical(weights), infer={"enumerate": "parallel"})
        pyro.sample("x", dist.Normal(locs[z], 0.8), obs=x[idx])


def stein(model, *data):
    """The moments of a DPSEP that has seen the data, all rows and their indices."""
    guide = AutoMultivariateNormal(poutine.block(model, hide=["z"]))
    options = dict(accountant=PrivacyAccountant(), noise=0, clip=math.inf, num_steps=1)
    prepared = PaperDPSEP(model, guide, **options)._look_at(data, {})
    assert prepared.problem.moments.name == "stein"
    indices = torch.arange(len(data[0]))
    return prepared.problem.moments, indices, prepared.records.rows(indices)


def log_evidence(x, mean, points, log_weights):
    """log Z of each record at the cavity N(mean, COVARIANCE), as a weighted sum over points."""
    grid = mean + points @ torch.linalg.cholesky(COVARIANCE).T  # (K, 2)
    each = dist.Normal(grid, 0.8).log_prob(x[:, None, None]) + torch.tensor([0.3, 0.7]).log()
    return (each.logsumexp(dim=2) + log_weights).logsumexp(dim=1)


def hermite(nodes=24):
    """Points (nodes^2, 2) of standard normal quadrature, and the logarithms of their weights."""
    points, weights = map(torch.tensor, np.polynomial.hermite_e.hermegauss(nodes))
    pairs = torch.cartesian_prod(weights, weights) / math.sqrt(2 * math.pi)
    return torch.cartesian_prod(points, points), pairs.log().sum(dim=1)


def brute_force(x, points, log_weights):
    """Residuals (B, 2) and precisions (B, 2, 2), by derivatives of log Z."""
    slope = torch.func.jacrev(lambda mean: log_evidence(x, mean, points, log_weights))
    gradient, hessian = slope(MEAN), torch.func.jacrev(slope)(MEAN)
    back = torch.linalg.inv(torch.eye(2) + hessian @ COVARIANCE)
    return (back @ gradient.unsqueeze(2)).squeeze(2), -back @ hessian


def test_stein_sites_agree_with_brute_force(monkeypatch):
    monkeypatch.setattr(tilted_sites, "_NUM_DRAWS", 1000)
    x = torch.tensor([-1.5, -0.2, 0.3, 2.0])
    method, indices, rows = stein(two_means, x)
    with torch.no_grad():
        found = method.factors(MEAN, method.spread(COVARIANCE), indices, rows)
    draws = method._draws
    residual, precision = brute_force(x, draws, torch.zeros(len(draws)))
    torch.testing.assert_close(found.residual, residual, rtol=0.0, atol=1e-8)
    torch.testing.assert_close(found.matrices(), precision, rtol=0.0, atol=1e-8)
    exact = brute_force(x, *hermite())
    assert (found.residual - exact[0]).abs().max() < 0.2 * exact[0].abs().max()
    assert (found.matrices() - exact[1]).abs().max() < 0.2 * exact[1].abs().max()


@pytest.fixture
def few_draws(monkeypatch):
    monkeypatch.setattr(tilted_sites, "_NUM_DRAWS", 4)


@pytest.mark.slow
def test_stein_sites_are_those_of_the_loop(few_draws):
    method, indices, rows = stein(mixture, torch.randn(4, 2))
    mean, covariance = torch.randn(8), 0.1 * torch.eye(8) + 0.02
    with torch.no_grad():
        fast = method.factors(mean, method.spread(covariance), indices, rows)
        take_one_by_one(method)
        slow = method.factors(mean, method.spread(covariance), indices, rows)
    torch.testing.assert_close(fast.residual, slow.residual)
    torch.testing.assert_close(fast.matrices(), slow.matrices())


@pytest.mark.every_commit
@pytest.mark.slow
@pytest.mark.parametrize("vectorizes", [True, False])
def test_a_broken_record_is_nan_and_only_that(few_draws, vectorizes):
    method, indices, rows = stein(mixture, torch.randn(4, 2))
    mean, covariance = torch.randn(8), 0.1 * torch.eye(8)
    if not vectorizes:
        take_one_by_one(method)
    with torch.no_grad():
        whole = method.factors(mean, method.spread(covariance), indices, rows)
        broken = [rows[0].clone()]
        broken[0][2, 0] = torch.nan
        found = method.factors(mean, method.spread(covariance), indices, broken)
    assert found.residual[2].isnan().all() and found.matrices()[2].isnan().all()
    rest = [0, 1, 3]
    torch.testing.assert_close(found.residual[rest], whole.residual[rest])
    torch.testing.assert_close(found.matrices()[rest], whole.matrices()[rest])


def test_a_curvature_near_the_largest_number_is_a_broken_record():
    """An error would tell that there is such a record."""
    ones = torch.ones(3, 3, dtype=torch.float64)
    curvature = torch.stack([1.5e308 * ones, torch.eye(3).double()])
    found = tilted_sites._site(ones[:2], curvature, torch.eye(3).double())
    assert found.residual.isnan().all(1).tolist() == [True, False]


@pytest.mark.parametrize("few_predictors", [False, True])
def test_a_curvature_without_eigenvalues_is_a_broken_record(few_predictors, monkeypatch):
    """Torch raises on some matrices of eight rows, with numbers from 1e-200 to 1e298."""
    eigh = torch.linalg.eigh

    def fails(matrices):
        if (matrices.abs() > 1e200).any():
            raise torch.linalg.LinAlgError("failed to converge")
        return eigh(matrices)

    identity = torch.eye(8, dtype=torch.float64)
    ones, curvature = torch.ones(5, 8).double(), identity.repeat(5, 1, 1)
    curvature[3] *= 1e250
    module = stein_sites if few_predictors else tilted_sites
    root = identity.expand(5, 8, 8) if few_predictors else identity
    expected = module._site(ones, identity.repeat(5, 1, 1), root)
    monkeypatch.setattr(torch.linalg, "eigh", fails)
    found = module._site(ones, curvature, root)
    if few_predictors:
        expected, found = expected[1], found[1]
    else:
        expected, found = expected.residual, found.residual
    assert found.isnan().all(1).tolist() == [False, False, False, True, False]
    torch.testing.assert_close(found[:3], expected[:3], rtol=0, atol=0)
