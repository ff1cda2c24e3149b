"""Evidence from all releases: exact without noise, optimal weights, cleaned curvature."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoMultivariateNormal

from pyro_dp import DPSEP, PrivacyAccountant
from pyro_dp.infer.ep.evidence import Evidence, Look, evidence, power

DIM, SIZE = 4, 1000


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(8)


def precision(rng):
    root = torch.randn(DIM, DIM, generator=rng)
    return 100.0 * (root @ root.T + torch.eye(DIM))


def look(at, peak, curvature, geometry, rng, sd=0.0, curvature_sd=0.0, rate=1.0):
    """Of a quadratic log likelihood with this peak, with noise in the geometry's coordinates."""
    back = power(geometry, 0.5)
    noise = torch.randn(DIM, DIM, generator=rng) * curvature_sd / 2**0.5
    noise = torch.triu(noise, 1) + torch.triu(noise, 1).T + 2**0.5 * noise.diagonal().diag()
    gradient = curvature @ (peak - at) + sd * back @ torch.randn(DIM, generator=rng)
    return Look(at, gradient, curvature + back @ noise @ back, geometry, sd, curvature_sd, rate)


def test_one_exact_look_tells_all(rng):
    curvature, peak = precision(rng), torch.randn(DIM, generator=rng)
    geometry = precision(rng)
    found = evidence(
        [look(torch.zeros(DIM), peak, curvature, geometry, rng)], None, geometry, SIZE, 1e-6
    )
    torch.testing.assert_close(found.estimate, peak, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(found.curvature, curvature, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.information, curvature, rtol=1e-5, atol=1e-5)


def test_the_estimate_has_the_noise_that_it_says(rng):
    """Squared errors in units of the stated covariance are 1 on average, over 400 repeats.

    Their mean has a standard deviation of .035 or so; the limits lie five of them away.
    """
    curvature, peak = precision(rng), torch.randn(DIM, generator=rng) / 30
    geometry = curvature * (DIM / curvature.trace())
    errors = []
    for _ in range(400):
        looks = [
            look(
                peak + torch.randn(DIM, generator=rng) / 60,
                peak,
                curvature,
                geometry,
                rng,
                20.0,
                5.0,
            )
            for _ in range(6)
        ]
        found = evidence(looks, curvature, geometry, SIZE, 1e-6)
        inverse = torch.linalg.inv(found.curvature)
        error = found.estimate - peak
        covariance = inverse @ found.noise @ inverse
        errors.append(error @ torch.linalg.solve(covariance, error) / DIM)
    assert 0.8 < torch.stack(errors).mean() < 1.2


def test_information_goes_to_nothing_under_noise(rng):
    curvature = precision(rng)
    for level, share in ((1e-9, 1.0), (1.0, 0.5), (1e9, 0.0)):
        found = Evidence(torch.zeros(DIM), curvature, level * curvature)
        torch.testing.assert_close(found.information, share * curvature, rtol=1e-6, atol=1e-5)


def test_noisy_looks_count_less(rng):
    curvature, peak = precision(rng), torch.zeros(DIM)
    geometry = torch.eye(DIM)
    exact = look(peak + 0.01, peak, curvature, geometry, rng)
    noisy = look(peak + 0.01, peak + 5.0, curvature, geometry, rng, sd=1e5)
    found = evidence([noisy, exact], curvature, geometry, SIZE, 1e-6)
    torch.testing.assert_close(found.estimate, peak, rtol=0.0, atol=1e-4)


def test_looks_from_far_away_count_less(rng):
    """There the likelihood is another one."""
    curvature, peak = precision(rng), torch.zeros(DIM)
    geometry = torch.eye(DIM)
    far = look(peak + 30.0, peak + 5.0, curvature, geometry, rng, sd=1.0)
    near = look(peak + 0.01, peak, curvature, geometry, rng, sd=1.0)
    found = evidence([far, near], curvature, geometry, SIZE, 1e-6)
    assert (found.estimate - peak).norm() < 0.1


def test_curvature_is_positive_whatever_the_noise(rng):
    identity = torch.eye(DIM)
    closer = 0
    for _ in range(50):
        noisy = look(torch.zeros(DIM), torch.zeros(DIM), identity, identity, rng, 1.0, 3.0)
        found = evidence([noisy], None, identity, SIZE, 1e-6).curvature
        assert torch.linalg.eigvalsh(found).min() > 0
        closer += (found - identity).norm() < (noisy.curvature - identity).norm()
    assert closer >= 45  # noise is taken back, not only cut off


def test_sampling_is_noise_too(rng):
    curvature, peak = precision(rng), torch.zeros(DIM)
    geometry = torch.eye(DIM)
    full, part = (
        evidence(
            [look(peak, peak, curvature, geometry, rng, 1.0, rate=rate)], None, geometry, SIZE, 1e-6
        )
        for rate in (1.0, 0.1)
    )
    torch.testing.assert_close(part.noise - full.noise, 9 * curvature)


def test_eigenvalues_that_noise_pushed_apart_go_back(rng):
    """Well above the floor: of equal ones half the spread is gone, and distinct ones stay."""
    dim = 12
    noise = torch.randn(dim, dim, generator=rng)
    noise = (noise + noise.T) / 2
    for exact in (torch.full((dim,), 20.0), torch.linspace(20.0, 4000.0, dim)):
        curvature, identity = exact.diag(), torch.eye(dim)
        zero = torch.zeros(dim)
        noisy = Look(zero, zero, curvature + noise, identity, 1.0, 1.0, 1.0)
        found = torch.linalg.eigvalsh(evidence([noisy], None, identity, SIZE, 1e-6).curvature)
        raw = torch.linalg.eigvalsh(noisy.curvature)
        if exact.min() == exact.max():
            assert found.std() < 0.5 * raw.std()
        else:
            torch.testing.assert_close(found, raw, rtol=0.0, atol=0.1)


def test_collinear_columns_without_noise():
    """Where only the prior tells coefficients apart, theirs is what is left of it."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
        with pyro.plate("people", len(x)):
            pyro.sample("y", dist.Poisson((x @ w).exp()), obs=y)

    group = torch.nn.functional.one_hot(torch.arange(300) % 3).double()
    x = torch.cat([torch.ones(300, 1), group], dim=1)
    y = torch.poisson(torch.ones(300))
    accountant = PrivacyAccountant(epsilon=None, delta=1e-5)
    sep = DPSEP(
        model,
        AutoMultivariateNormal(model),
        accountant=accountant,
        noise_multiplier=0.0,
        num_steps=8,
    )
    sep.run(x, y, progress=False)
    along = torch.tensor([1.0, -1.0, -1.0, -1.0]) / 2  # changes no rate
    variance = along @ sep.posterior().covariance_matrix @ along
    torch.testing.assert_close(variance, torch.tensor(1.0), rtol=1e-3, atol=0.0)
