"""Clip, sum, release."""

import itertools
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
from pyro_dp.mechanism.contributions import Block, Joined, Rows
from pyro_dp.mechanism.fixed_point import FixedPointSum
from pyro_dp.mechanism.release import release
from pyro_dp.mechanism.system_random import SystemGenerator

# Kolmogorov-Smirnov tests of this file: false-alarm rate of each.
_ALARM = 1e-8


@pytest.fixture(params=["system", "seeded"])
def noise(request, stream):
    """A generator of either kind, with a seed."""
    return stream if request.param == "system" else np.random.default_rng(0)


def sum_of(noise, blocks):
    """Which takes this kind of noise."""
    return (FixedPointSum if isinstance(noise, SystemGenerator) else ClippedSum)(blocks)


def clipped(bound, *values, kind=ClippedSum):
    total = kind([Block(v.shape[1], bound, 1 / len(values)) for v in values])
    total.add(*values)
    return total


def made_public(total, sigma=1.0, rate=1.0, accountant=None, noise=None):
    return release(
        total,
        accountant=accountant or PrivacyAccountant(),
        event=SubsampledGaussian(sigma, rate),
        noise=noise or np.random.default_rng(0),
    )


@pytest.mark.parametrize("kind", [ClippedSum, FixedPointSum])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4, 1e6, 1e30, 1e38])
def test_one_record_moves_the_sum_by_at_most_the_bound(scale, dtype, kind):
    """Norms that are small, ordinary, outliers, and beyond the square root of float32's range."""
    values = torch.randn(50, 7).to(dtype)
    values[20] = (values[20].double() * scale).clamp(*(torch.finfo(dtype).max * s for s in (-1, 1)))
    replaced = values.clone()
    replaced[20] = -values[20]
    with_it, without, other = (
        exact_sums(clipped(1.5, each, kind=kind))[0]
        for each in (values, torch.cat([values[:20], values[21:]]), replaced)
    )
    assert torch.linalg.vector_norm(with_it - without) <= 1.5
    assert torch.linalg.vector_norm(with_it - other) <= 3.0


def test_a_huge_record_is_clipped_not_dropped():
    """Its norm overflows float32, but it is finite: it counts with norm C."""
    values = torch.full((1, 4), 1e30, dtype=torch.float32)
    torch.testing.assert_close(exact_sums(clipped(1.0, values))[0], torch.full((4,), 0.5))


def test_only_the_length_of_long_records_changes():
    values = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    torch.testing.assert_close(exact_sums(clipped(1.0, values))[0], torch.tensor([0.9, 1.2]))
    torch.testing.assert_close(exact_sums(clipped(math.inf, values))[0], values.sum(0))


@pytest.mark.parametrize("kind", [ClippedSum, FixedPointSum])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_record_is_zero_in_every_block(kind, bad):
    gradients, losses = torch.randn(5, 3), torch.randn(5, 1)
    expected = exact_sums(clipped(1.0, gradients[1:], losses[1:], kind=kind))
    for place in (gradients[:1, 1], losses[0]):
        before = place.clone()
        place[:] = bad
        found = exact_sums(clipped(1.0, gradients, losses, kind=kind))
        torch.testing.assert_close(found, expected)
        place[:] = before


def test_sum_of_many_float32_records_is_exact_enough():
    """Rounding in the sum must not move it by a noticeable part of one record's bound."""
    values = torch.full((200_000, 1), 0.1, dtype=torch.float32)
    exact = 200_000 * float(torch.tensor(0.1, dtype=torch.float32))
    assert abs(exact_sums(clipped(1.0, values))[0].item() - exact) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_records_do_not_round_a_norm(dtype):
    """Norms agree bit for bit. A fourth would change if the batch chose the parts."""
    rows = torch.randn(60, 30_001, dtype=dtype)
    alone = torch.cat([Rows(row[None]).norms() for row in rows])
    assert torch.equal(Rows(rows).norms(), alone)


@pytest.mark.parametrize("block_count", [1, 3])
def test_noise_has_the_right_scale(noise, block_count):
    """The test rejects two thirds and three halves of it. Blocks have independent noise."""
    blocks = [Block(20_000, 3.0 * (k + 1), 1 / block_count) for k in range(block_count)]
    released = made_public(sum_of(noise, blocks), 2.0, 0.1, noise=noise)
    of_each = [
        (each / (2.0 * math.sqrt(block_count) * block.bound)).numpy()
        for each, block in zip(released, blocks, strict=True)
    ]
    for each in of_each:
        assert stats.kstest(each, "norm").pvalue > _ALARM
        assert stats.kstest(each * 2 / 3, "norm").pvalue < _ALARM
        assert stats.kstest(each * 3 / 2, "norm").pvalue < _ALARM
        for lag in (1, 2, 5):
            assert abs(np.corrcoef(each[lag:], each[:-lag])[0, 1]) < 6 / math.sqrt(len(each))
    for a, b in itertools.combinations(of_each, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 6 / math.sqrt(len(a))


def test_joint_release_is_one_event():
    accountant = PrivacyAccountant()
    blocks = [Block(3, 1.0, 0.9), Block(1, 5.0, 0.06), Block(1, 0.5, 0.04)]
    made_public(ClippedSum(blocks), 1.3, 0.01, accountant)
    ledger = ((SubsampledGaussian(1.3, 0.01), 1),)
    assert accountant.ledger == ledger
    with pytest.raises(ConfigurationError, match="share"):
        made_public(ClippedSum(blocks[:2]), accountant=accountant)
    assert accountant.ledger == ledger


def test_recorded_before_it_is_released():
    """A release that does not fit the budget draws no noise and leaves the ledger unchanged."""
    accountant = PrivacyAccountant(epsilon=1.0)

    class NoNoise:
        def standard_normal(self, size):
            raise AssertionError("noise was drawn before the event was recorded")

    with pytest.raises(PrivacyBudgetExceeded):
        made_public(ClippedSum([Block(2, 1.0)]), 0.5, accountant=accountant, noise=NoNoise())
    assert accountant.ledger == ()


def test_no_noise_without_noise_multiplier():
    """Also with an infinite bound, where 0 * inf would be nan."""
    (released,) = made_public(clipped(math.inf, torch.ones(3, 2)), 0.0)
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


def test_bounds_at_which_squares_underflow_are_refused():
    with pytest.raises(ConfigurationError, match="bound"):
        Block(3, 1e-170)
    adaptive = AdaptiveClip(initial=1e-6, learning_rate=99.0)
    assert adaptive.updated(1e-6, 1.0) == 1e-6


def test_parts_that_ask_for_gradients():
    """A model may capture a network without registering it."""
    weight, total = torch.ones(3, requires_grad=True), ClippedSum([Block(5, 10.0)])
    total.add(Joined([Rows(torch.ones(4, 3) * weight), Rows(torch.ones(4, 2))]))
    (found,) = exact_sums(total)
    assert torch.allclose(found, torch.full((5,), 4.0).double()) and not found.requires_grad
