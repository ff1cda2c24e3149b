"""The curvature of a likelihood, from slopes with noise."""

import pytest
import torch

from pyro_dp.infer.svi.noisy_curvature import NoisyCurvature

DIM, LEVEL = 6, 100.0


def symmetric(generator, size):
    root = size * torch.randn(DIM, DIM, generator=generator)
    return (root + root.mT) / 2**0.5


def turned(values, generator):
    """A covariance with these eigenvalues."""
    turn = torch.linalg.qr(torch.randn(DIM, DIM, generator=generator))[0]
    return (turn * values) @ turn.mT


def cases(count, spread, noise, scale=None):
    """Curvatures with slopes that draws leave uncertain that are narrow in some directions."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.ones(DIM) if scale is None else scale
    for _ in range(count):
        curvature = LEVEL * (torch.eye(DIM) + symmetric(generator, spread))
        error = turned(noise**2 * torch.logspace(-2, 0, DIM), generator)
        root = torch.linalg.cholesky(error)
        slopes = curvature + LEVEL * root @ torch.randn(DIM, DIM, generator=generator)
        both = torch.outer(scale, scale)
        yield curvature * both, slopes * both, error * both, (LEVEL * scale) ** 2


@pytest.mark.parametrize("noise", [0.3, 1.0])
def test_errors_have_the_variance_that_is_told(noise):
    errors, told = 0.0, 0.0
    for curvature, *released in cases(100, 0.15, noise):
        found = NoisyCurvature.of(*released)
        errors += (found.mean - curvature).square().sum().item()
        told += found.squared(torch.eye(DIM)).trace().item()
    assert 0.75 < errors / told < 1.35


def test_directions_with_less_noise_keep_more():
    """By one number for all directions the noisy ones would decide, and nothing would be learnt."""
    errors, without = 0.0, 0.0
    for curvature, *released in cases(60, 0.15, 1.0):
        found = NoisyCurvature.of(*released).mean
        errors += (found - curvature).square().sum().item()
        without += (LEVEL * torch.eye(DIM) - curvature).square().sum().item()
    assert errors < 0.75 * without


def test_scales_of_latents_do_not_matter():
    scale = torch.tensor([0.1, 1.0, 3.0, 0.5, 30.0, 1.0])
    for one, other in zip(cases(5, 0.1, 0.1), cases(5, 0.1, 0.1, scale), strict=True):
        found, scaled = NoisyCurvature.of(*one[1:]).mean, NoisyCurvature.of(*other[1:]).mean
        assert (scaled / torch.outer(scale, scale) - found).abs().max() < 0.15 * LEVEL


def test_slopes_without_noise_are_kept():
    curvature, *_ = next(iter(cases(1, 0.1, 0.1)))
    found = NoisyCurvature.of(curvature, torch.zeros(DIM, DIM), torch.zeros(DIM))
    torch.testing.assert_close(found.mean, curvature)
    assert found.squared(torch.eye(DIM)).abs().max() < 1e-12


def test_it_is_positive_definite_whatever_is_found():
    generator = torch.Generator().manual_seed(1)
    for size in (1e-3, 1.0, 1e6):
        slopes = size * torch.randn(DIM, DIM, generator=generator)
        found = NoisyCurvature.of(slopes, torch.eye(DIM), torch.full((DIM,), size**2))
        assert torch.linalg.eigvalsh(found.mean)[0] > 0


def test_directions_without_a_curvature_are_told():
    """Two latents that make up for each other: noise hides by how much; and a third."""
    curvature = torch.tensor([[1.0, 0.99, 0.0], [0.99, 1.0, 0.0], [0.0, 0.0, 1.0]]) * 1e4
    for noise, told in ((3e3, [True, True, False]), (1e-2, [False] * 3)):
        error = torch.eye(3) * 1e-2
        generator = torch.Generator().manual_seed(0)
        off = 0.03 * noise * torch.randn(3, 3, generator=generator)
        found = NoisyCurvature.of(curvature + off, error, torch.full((3,), noise**2))
        assert found.flat.shape == (3, sum(told) // 2)
