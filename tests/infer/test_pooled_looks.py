"""Looks together: exact without noise, calibrated under it, weights by noise and distance."""

import math
from dataclasses import replace

import pytest
import torch

from pyro_dp.infer.posterior.looks import Look, next_step, pooled, with_last
from pyro_dp.utils.linalg import power

DIM, SIZE, BEND = 4, 1000, 2.0
REPEATS = 400
PRIOR = torch.tensor([1.0, 1.0, 1.0, 1e4])  # precisions


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(8)


def precision(rng):
    root = torch.randn(DIM, DIM, generator=rng)
    return 100.0 * (root @ root.T + torch.eye(DIM))


def symmetric(rng, sd):
    """Noise of this standard deviation on the diagonal, and less off it."""
    noise = torch.randn(DIM, DIM, generator=rng) * sd / 2**0.5
    return torch.triu(noise, 1) + torch.triu(noise, 1).T + 2**0.5 * noise.diagonal().diag()


def look(at, peak, curvature, geometry, rng, sd=0.0, curvature_sd=0.0):
    """A look at a quadratic log likelihood with this peak. Noise follows the geometry."""
    back = power(geometry, 0.5)
    noise = symmetric(rng, curvature_sd)
    score = curvature @ (peak - at) + sd * back @ torch.randn(DIM, generator=rng)
    return Look(at, score, curvature + back @ noise @ back, geometry, sd, curvature_sd)


def test_exact_looks_tell_all_wherever_they_are(rng):
    curvature, peak = precision(rng), torch.randn(DIM, generator=rng)
    looks = [
        look(peak + torch.randn(DIM, generator=rng), peak, curvature, precision(rng), rng)
        for _ in range(4)
    ]
    for count in (1, 4):
        found = pooled(looks[:count], SIZE, BEND)
        torch.testing.assert_close(found.estimate, peak, rtol=0.0, atol=1e-6)
        torch.testing.assert_close(found.curvature, curvature, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.information(peak), curvature, rtol=1e-5, atol=1e-5)


def simulated(rng, lie=1.0):
    """Errors (R, d) of estimates of a truth, and their squares in units of the information.

    The peak lies around the truth as finite data make it, and looks around the peak. Their noise is
    ``lie`` times what they say.
    """
    curvature = precision(rng)
    geometry = curvature * (DIM / curvature.trace())
    truth, root = torch.randn(DIM, generator=rng) / 30, power(curvature, -0.5)
    sd = (curvature.trace() / DIM).sqrt().item()  # a look's, as large as the data's own
    errors, squares = [], []
    for _ in range(REPEATS):
        peak = truth + root @ torch.randn(DIM, generator=rng)
        looks = []
        for _ in range(3):
            at = peak + root @ torch.randn(DIM, generator=rng)
            noisy = look(at, peak, curvature, geometry, rng, lie * sd, lie * 5.0)
            looks.append(replace(noisy, score_sd=sd, curvature_sd=5.0))
        found = pooled(looks, SIZE, BEND)
        errors.append(found.estimate - truth)
        squares.append(errors[-1] @ found.information(found.estimate) @ errors[-1])
    return torch.stack(errors), torch.stack(squares)


@pytest.mark.slow
def test_the_estimate_is_unbiased_and_the_information_is_calibrated(rng):
    """Means of 400 x 4 squares lie within a fifth of 1: six of their standard deviations.

    False alarms: 1e-8 for each test. Noise of twice the size that looks say is rejected.
    """
    errors, squares = simulated(rng)
    scores = errors.mean(dim=0) / errors.std(dim=0) * math.sqrt(REPEATS)
    assert scores.abs().max() < 6.0
    room = 6.0 * math.sqrt(2 / (REPEATS * DIM))
    assert abs(squares.mean() / DIM - 1.0) < room
    _, squares = simulated(rng, lie=2.0)
    assert squares.mean() / DIM - 1.0 > room


def test_information_goes_to_nothing_under_noise(rng):
    curvature = precision(rng)
    zero = torch.zeros(DIM)
    exact = pooled([look(zero, zero, curvature, curvature, rng)], SIZE, BEND)
    for level, share in ((1e-9, 1.0), (1.0, 0.5), (1e9, 0.0)):
        found = replace(exact, score_noise=level * curvature).information(zero)
        torch.testing.assert_close(found, share * curvature, rtol=1e-6, atol=1e-5)


@pytest.mark.slow
def test_noise_of_the_curvature_is_carried_with_the_distance(rng):
    curvature, zero = precision(rng), torch.zeros(DIM)
    found = pooled([look(zero, zero, curvature, torch.eye(DIM), rng)], SIZE, BEND)
    found, way = replace(found, curvature_sd=3.0), torch.randn(DIM, generator=rng)
    carried = [symmetric(rng, 3.0) @ way for _ in range(20_000)]
    expected = torch.stack(carried).T.cov()
    added = found.noise(way) - found.score_noise
    torch.testing.assert_close(added, expected, rtol=0.05, atol=0.05 * expected.max().item())


def test_noisy_looks_count_less(rng):
    curvature, peak = precision(rng), torch.zeros(DIM)
    exact = look(peak + 0.01, peak, curvature, torch.eye(DIM), rng)
    noisy = look(peak + 0.01, peak + 5.0, curvature, torch.eye(DIM), rng, sd=1e5)
    found = pooled([noisy, exact], SIZE, BEND)
    torch.testing.assert_close(found.estimate, peak, rtol=0.0, atol=1e-4)


def test_looks_from_far_away_count_less(rng):
    """The likelihood is not quadratic that far away."""
    curvature, peak = precision(rng), torch.zeros(DIM)
    far = look(peak + 30.0, peak + 5.0, curvature, torch.eye(DIM), rng, sd=1.0)
    near = look(peak + 0.01, peak, curvature, torch.eye(DIM), rng, sd=1.0)
    found = pooled([far, near], SIZE, BEND)
    assert (found.estimate - peak).norm() < 0.1
    far, near = (found.nonquadratic_error(x).trace() for x in (peak + 30.0, found.centre))
    assert far > 1e6 * near


def test_biased_looks_count_less(rng):
    """A small bound leaves little noise, and a large bias."""
    curvature, peak = precision(rng), torch.zeros(DIM)
    exact = look(peak + 0.01, peak, curvature, torch.eye(DIM), rng, sd=1e-2)
    biased = look(peak + 0.01, peak + 5.0, curvature, torch.eye(DIM), rng, sd=1e-4)
    biased = replace(biased, squared_bias=1e10)
    found = pooled([biased, exact], SIZE, BEND)
    torch.testing.assert_close(found.estimate, peak, rtol=0.0, atol=1e-2)


def test_a_direction_that_noise_hides_does_not_hide_the_others_error(rng):
    """Noise hides a level without records. Clipping moves three others by two deviations."""
    found = pooled(
        [look(torch.zeros(DIM), torch.zeros(DIM), precision(rng), torch.eye(DIM), rng)], 9, 0.0
    )
    noise = torch.tensor([0.0, 0.0, 0.0, 1e12]).diag()
    found = replace(found, curvature=torch.eye(DIM), score_noise=noise, curvature_sd=0.0)
    error = 4 * torch.eye(DIM)
    assert found.relative(error, found.centre) == pytest.approx(4 * 3 / DIM)
    same = replace(found, score_noise=3 * torch.eye(DIM))  # with noise, deviations are longer
    assert same.relative(error, found.centre) == pytest.approx(1.0)


def test_a_step_over_a_saddle_goes_up(rng):
    """Newton's step would go down where the log likelihood is convex."""
    zero, score = torch.zeros(DIM), torch.ones(DIM)
    concave = torch.full((DIM,), 100.0)
    saddle = torch.tensor([100.0, 100.0, 100.0, -50.0])
    for values, expected in ((concave, score / 100), (saddle, score / saddle.abs())):
        exact = Look(zero, score, values.diag(), torch.eye(DIM), 0.0, 0.0)
        step = next_step(pooled([exact], SIZE, BEND), exact, PRIOR).mean
        torch.testing.assert_close(step, expected, rtol=0.05, atol=0.0)
    noisy = Look(zero, score, concave.diag(), torch.eye(DIM), 0.0, 100.0)
    found = pooled([noisy], SIZE, BEND)
    assert (next_step(found, noisy, PRIOR).mean < (found.estimate - zero) / 2).all()


def test_a_step_leaves_a_saddle_without_a_score():
    """Half a standard deviation of the prior, unless the negative curvature may be noise."""
    zero, values = torch.zeros(DIM), torch.tensor([100.0, 100.0, 100.0, -50.0])
    geometry = torch.tensor([1.0, 1.0, 1.0, 4.0]).diag()
    sd = 1 / PRIOR[-1].sqrt()
    for noise, least, most in ((0.0, 0.45 * sd, 0.55 * sd), (5.0, 0.0, 1e-6)):
        saddle = Look(zero, zero, values.diag(), geometry, 0.0, noise)
        step = next_step(pooled([saddle], SIZE, BEND), saddle, PRIOR).mean
        assert least <= step[-1] <= most
        torch.testing.assert_close(step[:-1], zero[:-1])


def test_curvature_is_positive_whatever_the_noise(rng):
    identity, zero = torch.eye(DIM), torch.zeros(DIM)
    closer = 0
    for _ in range(50):
        noisy = look(zero, zero, identity, identity, rng, 1.0, 3.0)
        found = pooled([noisy], SIZE, BEND).curvature
        assert torch.linalg.eigvalsh(found).min() > 0
        closer += (found - identity).norm() < (noisy.curvature - identity).norm()
    assert closer >= 45  # noise is taken back, not only cut off


def test_eigenvalues_that_noise_pushed_apart_go_back(rng):
    """Above the floor, equal eigenvalues lose half their spread, and distinct ones stay."""
    dim = 12
    noise = torch.randn(dim, dim, generator=rng)
    noise = (noise + noise.T) / 2
    for exact in (torch.full((dim,), 20.0), torch.linspace(20.0, 4000.0, dim)):
        zero = torch.zeros(dim)
        noisy = Look(zero, zero, exact.diag() + noise, torch.eye(dim), 1.0, 1.0)
        found = torch.linalg.eigvalsh(with_last([noisy], None, SIZE, BEND).curvature)
        raw = torch.linalg.eigvalsh(noisy.curvature)
        if exact.min() == exact.max():
            assert found.std() < 0.5 * raw.std()
        else:
            torch.testing.assert_close(found, raw, rtol=0.0, atol=0.1)


def test_a_curvature_that_may_be_noise_is_no_information(rng):
    """Pure noise leaves no information. A curvature far above its noise leaves all of it."""
    zero, identity = torch.zeros(DIM), torch.eye(DIM)
    for level, least, most in ((0.0, 0.0, 0.5), (1e4, 0.99, 1.0)):
        noisy = look(zero, zero, level * identity, identity, rng, sd=1e-3, curvature_sd=10.0)
        found = pooled([noisy], SIZE, BEND)
        kept = torch.linalg.solve(found.curvature, found.information(zero)).diagonal()
        assert least < kept.min() and kept.max() <= most


def test_many_latents_and_noise_alone_have_little_curvature(rng):
    """On average over 40 draws: the largest of 60 noisy eigenvalues must not decide the others."""
    dim, zero, levels = 60, torch.zeros(60), []
    for _ in range(40):
        noise = torch.randn(dim, dim, generator=rng)
        noisy = Look(zero, zero, (noise + noise.T) / 2, torch.eye(dim), 1.0, 1.0)
        found = with_last([noisy], None, SIZE, BEND)
        levels.append(found.curvature.diagonal().mean())
        assert found.information(zero).diagonal().mean() < 0.1
    assert torch.stack(levels).mean() < 0.6  # with a running maximum 0.86; 0.02 is one sd
