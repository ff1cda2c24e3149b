"""The bound of gradients, from a released histogram of their norms."""

import math

import numpy as np
import pytest

from pyro_dp.infer.svi.histogram_bound import bias, bound, read
from pyro_dp.mechanism.norm_histogram import MIDDLES, SIZE, Norms


def log_normal(place, left, right, size):
    """Counts of norms whose logarithms have these spreads to either side."""
    spread = np.where(math.log(place) > MIDDLES, left, right)
    shape = np.exp(-(((MIDDLES - math.log(place)) / spread) ** 2) / 2)
    return size * shape / shape.sum()


def norms_of(counts):
    return Norms.of(np.exp(MIDDLES[counts > 0]), counts[counts > 0])


@pytest.mark.parametrize("right", [0.2, 0.5])
@pytest.mark.parametrize("place", [0.05, 4.0])
def test_it_is_that_of_the_true_norms(place, right):
    """To a few tenths, over noise that hides most bins of the tail."""
    counts = log_normal(place, 0.9, right, 20_000)
    best = bound(norms_of(counts), 10, 1.0 * 11)
    generator = np.random.default_rng(0)
    for _ in range(5):
        noisy = counts + 80 * generator.normal(size=SIZE)
        found = bound(read(noisy, 80.0, 20_000, place * 2, 1.0), 10, 1.0 * 11)
        assert 0.7 < found / best < 1.5


def test_noise_alone_leaves_the_guess():
    """Norms that are merely possible do not make a tail."""
    generator = np.random.default_rng(0)
    for _ in range(5):
        norms = read(5000 * generator.normal(size=SIZE), 5000.0, 500, 3.0, 2.0)
        assert 0.3 < norms.median < 30
        assert norms.share_above(10 * norms.median) < 0.1


def test_counts_that_are_no_bell():
    """Two groups of records: the larger norms are seen."""
    counts = log_normal(1.0, 0.3, 0.2, 15_000) + log_normal(20.0, 0.3, 0.2, 5_000)
    noisy = counts + 5 * np.random.default_rng(0).normal(size=SIZE)
    assert read(noisy, 5.0, 20_000, 1.0, 1.0).share_above(8.0) > 0.15


@pytest.mark.long
def test_no_group_is_made_up():
    """A run reads some fifteen histograms of 160 bins: one false alarm loses it."""
    counts = np.where(np.arange(SIZE) < SIZE // 2, log_normal(0.6, 0.8, 0.15, 20_000), 0.0)
    generator = np.random.default_rng(0)
    for _ in range(1000):
        noisy = counts + 30 * generator.normal(size=SIZE)
        assert read(noisy, 30.0, 20_000, 0.6, 1.0).norms[-1] < 10.0


def test_a_group_far_away_is_seen():
    """It has nine standard deviations in four bins, and noise is never so large."""
    counts = np.where(np.arange(SIZE) < SIZE // 2, log_normal(0.6, 0.8, 0.15, 20_000), 0.0)
    counts[120:124] = 9 * 30 / 2
    generator = np.random.default_rng(0)
    for _ in range(20):
        noisy = counts + 30 * generator.normal(size=SIZE)
        assert read(noisy, 30.0, 20_000, 0.6, 1.0).norms[-1] > 500.0


def test_more_noise_means_a_smaller_bound():
    norms = norms_of(log_normal(1.0, 0.5, 0.5, 10_000))
    found = [bound(norms, 10, noise) for noise in (0.1, 1.0, 10.0, 100.0)]
    assert found == sorted(found, reverse=True) and found[0] > 2 * found[-1]


def test_it_scales_with_the_norms():
    counts = log_normal(1.0, 0.5, 0.5, 10_000)
    one, other = norms_of(counts), norms_of(np.roll(counts, 8))  # two octaves
    assert bound(other, 10, 5.0) == pytest.approx(4 * bound(one, 10, 5.0), rel=0.06)


def test_no_counts_at_all():
    norms = read(np.zeros(SIZE), 1.0, 4000, 2.0, 2.0)
    assert math.isfinite(bound(norms, 3, 0.1)) and norms.counts.sum() == pytest.approx(4000)


def test_bias_is_what_is_cut_off():
    norms = Norms.of(np.array([1.0, 3.0]), np.array([90.0, 10.0]))
    found = bias(norms, np.array([3.0, 2.0]), 2)
    assert found == pytest.approx([0.0, 10 * math.sqrt(1 / 16)])
