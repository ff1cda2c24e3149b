"""Draws by Hamiltonian chains, and posteriors that are draws."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoMultivariateNormal
from seeded import seeded
from torch.distributions import biject_to, constraints

from pyro_dp import DPSEP, ModelError
from pyro_dp.infer.posterior.chains import chain_draws, full_rank, mean_field
from pyro_dp.infer.posterior.posterior import SampledPosterior, Status
from pyro_dp.infer.posterior.prior_factor import BatchedGradient
from pyro_dp.records.global_draw import Latent

PRECISION = torch.tensor([[4.0, 1.9, 0.0], [1.9, 1.0, 0.0], [0.0, 0.0, 100.0]], dtype=torch.float64)
CENTRE = torch.tensor([1.0, -3.0, 5.0], dtype=torch.float64)


def gaussian(z):
    return -0.5 * (z - CENTRE) @ PRECISION @ (z - CENTRE)


def branching(z):
    return gaussian(z) if float(z.detach()[0]) > -1e9 else gaussian(z)


def banana(z):
    """z[1] is normal around the square of z[0], which is standard normal."""
    return -0.5 * z[0] ** 2 - 2.0 * (z[1] - z[0] ** 2) ** 2


def drawn(gradients, dim):
    start, sds = torch.zeros(dim, dtype=torch.float64), torch.ones(dim, dtype=torch.float64)
    sample, moved = chain_draws(gradients, *mean_field(gradients, start, sds))
    assert moved < 0.15
    return sample


class InClosedForm:
    """As a density that branches: chains are fewer where each takes its own time."""

    at_once = False

    def __call__(self, points):
        slopes = -(points - CENTRE) @ PRECISION
        return slopes, 0.5 * (slopes * (points - CENTRE)).sum(1)


@pytest.mark.long
@pytest.mark.parametrize("gradients", [BatchedGradient(gaussian, CENTRE), InClosedForm()])
def test_chains_have_the_moments_of_a_gaussian(gradients):
    sample, exact = drawn(gradients, 3), torch.linalg.inv(PRECISION)
    sds = exact.diagonal().sqrt()
    assert ((sample.mean(0) - CENTRE).abs() < 0.15 * sds).all()
    assert ((sample.std(0) / sds - 1).abs() < 0.12).all()
    assert sample.mT.corrcoef()[0, 1] == pytest.approx(-0.95, abs=0.02)


@pytest.mark.slow
def test_chains_follow_a_curve_and_are_the_same_in_each_call():
    gradients = BatchedGradient(banana, torch.zeros(2, dtype=torch.float64))
    sample = drawn(gradients, 2)
    assert sample[:, 1].mean().item() == pytest.approx(1.0, abs=0.15)
    assert sample[:, 1].var().item() == pytest.approx(2.25, rel=0.25)
    assert sample[:, 0].std().item() == pytest.approx(1.0, rel=0.1)
    assert (sample[:, 1] < -1.0).double().mean() < 0.03  # a Gaussian has a tenth there
    torch.manual_seed(4)
    assert torch.equal(drawn(gradients, 2), sample)


@pytest.mark.long
def test_the_closest_gaussian_of_a_gaussian_is_itself():
    zeros = torch.zeros(3, dtype=torch.float64)
    gradients = BatchedGradient(gaussian, zeros)
    mean, sds = mean_field(gradients, zeros, torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(sds, PRECISION.diagonal().rsqrt(), rtol=1e-3, atol=0)
    mean, covariance = full_rank(gradients, mean, sds)
    torch.testing.assert_close(mean, CENTRE, rtol=0, atol=1e-3)
    torch.testing.assert_close(covariance @ PRECISION, torch.eye(3).double(), rtol=0, atol=0.02)


def test_gradients_of_any_number_of_points():
    points = torch.randn(300, 3, dtype=torch.float64)
    for log_prob in (gaussian, branching):
        gradients = BatchedGradient(log_prob, points[0])
        assert gradients.at_once == (log_prob is gaussian)
        slopes, heights = gradients(points)
        torch.testing.assert_close(slopes, -(points - CENTRE) @ PRECISION)
        torch.testing.assert_close(heights[7], gaussian(points[7]))


@pytest.mark.long
def test_points_without_a_density():
    def fails(z):
        return gaussian(z) + torch.linalg.cholesky((z[0] + 2.0).reshape(1, 1)).sum()

    for log_prob in (fails, lambda z: fails(z) if float(z.detach()[1]) > -1e9 else fails(z)):
        points = torch.randn(200, 3, dtype=torch.float64).clamp(min=-1.9)
        gradients = BatchedGradient(log_prob, points[0])
        points[[3, 150]] = -3.0
        slopes, heights = gradients(points)
        assert (heights == -math.inf).nonzero().flatten().tolist() == [3, 150]
        assert (slopes[[3, 150]] == 0).all() and (slopes[4] != 0).all()
        torch.testing.assert_close(heights[4], fails(points[4]))


def test_it_is_its_draws():
    torch.manual_seed(0)
    sample = torch.randn(4000, 3, dtype=torch.float64).cumsum(1)
    sample[:, 0] = sample[:, 0].exp()
    positive = biject_to(constraints.positive)
    real = biject_to(constraints.independent(constraints.real, 1))
    latents = [
        Latent("w", torch.Size([2]), real, 0, 2),
        Latent("scale", torch.Size([]), positive, 2, 3),
    ]
    status = Status("check", "the last step was long", "steps")
    covariance = sample.mT.cov()
    posterior = SampledPosterior(latents, sample, covariance / 4, status=status)
    torch.testing.assert_close(posterior.mean, sample.mean(0))
    torch.testing.assert_close(posterior.covariance_matrix, covariance)
    torch.testing.assert_close(posterior.noise_share, torch.full((3,), 0.75).double())
    low, middle = posterior.quantiles([0.05, 0.5])["w"]
    assert low[0] == pytest.approx(math.exp(-1.645), rel=0.1)
    assert middle[0] == pytest.approx(1.0, rel=0.1)
    scale = posterior.quantiles([0.5])["scale"][0]
    assert scale == pytest.approx(sample[:, 2].exp().median().item(), rel=0.01)
    draws = posterior.draws(500)
    assert set(draws["w"][:, 0].tolist()) <= set(sample[:, 0].tolist())
    assert draws["scale"].shape == (500,)
    plain = posterior.plain
    torch.testing.assert_close(plain.mean, posterior.mean)
    torch.testing.assert_close(plain.covariance_matrix, covariance / 4)
    assert plain.status == posterior["w"].status == status
    assert posterior["w"].draws(3)["w"].shape == (3, 2)
    assert posterior["scale"].noise_share.item() == pytest.approx(0.75)
    assert "scale" in repr(posterior)


def prior():
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    return pyro.deterministic("effect", scale * z)


def model(group, y):
    effect = prior()
    with pyro.plate("people", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=effect[group]), obs=y)


@pytest.mark.slow
def test_evidence_about_a_deterministic_site_meets_a_prior():
    group = torch.randint(3, (1500,))
    y = torch.bernoulli(torch.sigmoid(torch.linspace(-1.0, 1.0, 3))[group])
    sep = seeded(DPSEP, model, AutoMultivariateNormal, group, y, epsilon=4.0)
    ours, other = sep.posterior(), sep.evidence.posterior(prior, "chains")
    assert ours.names == other.names
    torch.testing.assert_close(other.mean, ours.mean, rtol=0, atol=0.2)
    torch.testing.assert_close(other.stddev, ours.stddev, rtol=0.25, atol=0)
    torch.testing.assert_close(other.plain.stddev, ours.plain.stddev, rtol=0.25, atol=0)
    with pytest.raises(ModelError, match="no latent site 'effect'"):
        sep.evidence.posterior(prior)
