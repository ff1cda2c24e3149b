"""Clip, sum, release."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sums import exact_sums

from pyro_dp import (
    AdaptiveClip,
    ConfigurationError,
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    SubsampledGaussian,
)
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.contributions import Block
from pyro_dp.mechanism.release import release

# Kolmogorov-Smirnov tests of this file: false-alarm rate of each.
_ALARM = 1e-8


def clipped(bound, *values):
    total = ClippedSum([Block(v.shape[1], bound, 1 / len(values)) for v in values])
    total.add(*values)
    return total


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4, 1e6, 1e30, 1e38])
def test_one_record_moves_the_sum_by_at_most_the_bound(scale, dtype):
    """Norms that are small, ordinary, outliers, and beyond the square root of float32's range."""
    values = torch.randn(50, 7).to(dtype)
    values[20] = (values[20].double() * scale).clamp(*(torch.finfo(dtype).max * s for s in (-1, 1)))
    with_it = exact_sums(clipped(1.5, values))[0]
    without = exact_sums(clipped(1.5, torch.cat([values[:20], values[21:]])))[0]
    replaced = values.clone()
    replaced[20] = -values[20]
    assert torch.linalg.vector_norm(with_it - without) <= 1.5
    assert torch.linalg.vector_norm(with_it - exact_sums(clipped(1.5, replaced))[0]) <= 3.0


def test_a_huge_record_is_clipped_not_dropped():
    """Its norm overflows float32, but it is finite: it counts with norm C."""
    values = torch.full((1, 4), 1e30, dtype=torch.float32)
    torch.testing.assert_close(exact_sums(clipped(1.0, values))[0], torch.full((4,), 0.5))


def test_small_records_are_not_changed():
    values = torch.randn(50, 7)
    torch.testing.assert_close(exact_sums(clipped(math.inf, values))[0], values.sum(0))
    torch.testing.assert_close(exact_sums(clipped(1e3, values))[0], values.sum(0))


def test_clipping_keeps_the_direction():
    values = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    torch.testing.assert_close(exact_sums(clipped(1.0, values))[0], torch.tensor([0.9, 1.2]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_record_is_zero_in_every_block(bad):
    gradients, losses = torch.randn(5, 3), torch.randn(5, 1)
    expected = clipped(1.0, gradients[1:], losses[1:])
    gradients[0, 1] = bad
    found = exact_sums(clipped(1.0, gradients, losses))
    for got, want in zip(found, exact_sums(expected), strict=True):
        torch.testing.assert_close(got, want)
    gradients[0, 1], losses[0] = 0.0, bad
    found = exact_sums(clipped(1.0, gradients, losses))
    for got, want in zip(found, exact_sums(expected), strict=True):
        torch.testing.assert_close(got, want)


def test_microbatches_add_up():
    values = torch.randn(10, 4)
    whole, parts = clipped(1.0, values), ClippedSum([Block(4, 1.0)])
    for part in values.split(3):
        parts.add(part)
    torch.testing.assert_close(exact_sums(parts), exact_sums(whole))


def test_sum_of_many_float32_records_is_exact_enough():
    """Rounding in the sum must not move it by a noticeable part of one record's bound."""
    values = torch.full((200_000, 1), 0.1, dtype=torch.float32)
    exact = 200_000 * float(torch.tensor(0.1, dtype=torch.float32))
    assert abs(exact_sums(clipped(1.0, values))[0].item() - exact) < 1e-6


def samples(block_count=1, sigma=2.0, bound=3.0, size=20_000):
    """Noise of one release of zeros, in units of what it should be, per block."""
    blocks = [Block(size, bound * (k + 1), 1 / block_count) for k in range(block_count)]
    released = release(
        ClippedSum(blocks),
        accountant=PrivacyAccountant(),
        event=SubsampledGaussian(sigma, 0.1),
        noise=np.random.default_rng(0),
    )
    return [
        (r / (sigma * math.sqrt(block_count) * b.bound)).numpy()
        for r, b in zip(released, blocks, strict=True)
    ]


@pytest.mark.parametrize("block_count", [1, 3])
def test_noise_has_the_right_scale(block_count):
    """And the test rejects two thirds and three halves of it."""
    for noise in samples(block_count):
        assert stats.kstest(noise, "norm").pvalue > _ALARM
        assert stats.kstest(noise * 2 / 3, "norm").pvalue < _ALARM
        assert stats.kstest(noise * 3 / 2, "norm").pvalue < _ALARM


def test_blocks_have_independent_noise():
    one, other, third = samples(3)
    for a, b in ((one, other), (one, third), (other, third)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 6 / math.sqrt(len(a))


def test_joint_release_is_one_event():
    """sigma = (sum_k sigma_k^-2)^(-1/2), with sigma_k = sigma / sqrt(share_k)."""
    accountant = PrivacyAccountant()
    blocks = [Block(3, 1.0, 0.9), Block(1, 5.0, 0.06), Block(1, 0.5, 0.04)]
    event = SubsampledGaussian(1.3, 0.01)
    release(ClippedSum(blocks), accountant=accountant, event=event, noise=np.random.default_rng(0))
    assert accountant.ledger == ((event, 1),)
    sigmas = [1.3 / math.sqrt(block.share) for block in blocks]
    assert sum(s**-2 for s in sigmas) ** -0.5 == pytest.approx(1.3)


def test_shares_must_sum_to_one():
    accountant = PrivacyAccountant()
    with pytest.raises(ConfigurationError, match="share"):
        release(
            ClippedSum([Block(1, 1.0, 0.5), Block(1, 1.0, 0.6)]),
            accountant=accountant,
            event=SubsampledGaussian(1.0),
            noise=np.random.default_rng(0),
        )
    assert accountant.ledger == ()


def test_recorded_before_it_is_released():
    """A release that does not fit the budget draws no noise and leaves the ledger unchanged."""
    accountant = PrivacyAccountant(epsilon=1.0)

    class NoNoise:
        def standard_normal(self, size):
            raise AssertionError("noise was drawn before the event was recorded")

    with pytest.raises(PrivacyBudgetExceeded):
        release(
            ClippedSum([Block(2, 1.0)]),
            accountant=accountant,
            event=SubsampledGaussian(0.5),
            noise=NoNoise(),
        )
    assert accountant.ledger == ()


def test_no_noise_without_noise_multiplier():
    """Also with an infinite bound, where 0 * inf would be nan."""
    total = ClippedSum([Block(2, math.inf)])
    total.add(torch.ones(3, 2))
    (released,) = release(
        total,
        accountant=PrivacyAccountant(),
        event=SubsampledGaussian(0.0),
        noise=np.random.default_rng(0),
    )
    torch.testing.assert_close(released, torch.full((2,), 3.0))


def test_adaptive_clip_finds_the_quantile():
    """The bound settles where the wanted fraction of norms lies within it."""
    clip, norms = AdaptiveClip(initial=10.0, quantile=0.7), torch.rand(10_000)
    bound = clip.initial
    for _ in range(300):
        bound = clip.updated(bound, (norms <= bound).double().mean().item())
    assert bound == pytest.approx(0.7, abs=0.02)


def test_adaptive_clip_survives_a_wild_fraction():
    clip = AdaptiveClip()
    assert 0.8 < clip.updated(1.0, 1e9) < 1.0 < clip.updated(1.0, -1e9) < 1.2


@pytest.mark.parametrize(
    "setting",
    [
        {"initial": 0.0},
        {"initial": math.inf},
        {"quantile": 1.0},
        {"learning_rate": -1},
        {"share": 1.0},
    ],
)
def test_adaptive_clip_settings(setting):
    with pytest.raises(ConfigurationError, match=next(iter(setting))):
        AdaptiveClip(**setting)


def test_bounds_at_which_squares_underflow_are_refused():
    with pytest.raises(ConfigurationError, match="bound"):
        Block(3, 1e-170)
    adaptive = AdaptiveClip(initial=1e-6, learning_rate=99.0)
    assert adaptive.updated(1e-6, 1.0) == 1e-6
