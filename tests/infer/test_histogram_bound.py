"""The bound of gradients, from released histograms of their norms, which states keep."""

import math
import re

import numpy as np
import pytest
import torch

from pyro_dp import Clip, ConfigurationError
from pyro_dp.infer.svi.clip_policy import Measured
from pyro_dp.infer.svi.histogram_bound import HistogramBound, bias, bound, read
from pyro_dp.mechanism.norm_histogram import MIDDLES, SIZE, Bins, Norms

_N = 4000


def counts(scale=1.0, size=_N):
    norms = scale * torch.randn(size, 4).norm(dim=1, keepdim=True)
    return Bins(norms).dense().sum(dim=0)


def noisy(sd, scale=1.0):
    return counts(scale) + sd * torch.randn(SIZE)


def after(steps, sd=5.0, rate=1.0, scale=1.0):
    found = HistogramBound(_N, 4, 0.01)
    for _ in range(steps):
        found = found.updated(noisy(sd, scale), sd, rate)
    return found


@pytest.mark.long
def test_the_mean_is_as_exact_as_it_says():
    """The error has a part from noise and one from sampling."""
    exact, rate, sd = counts(), 0.5, 4.0
    distances, said = [], []
    for _ in range(40):
        found = HistogramBound(_N, 4, 0.01)
        for _ in range(10):
            sampled = torch.distributions.Binomial(exact, torch.tensor(rate)).sample() / rate
            found = found.updated(sampled + sd * torch.randn(SIZE), sd, rate)
        distances.append((found.counts - exact).square().mean().item())
        said.append(found.variance)
    assert np.mean(distances) == pytest.approx(np.mean(said), rel=0.1)


def test_one_of_less_noise_counts_more():
    found = HistogramBound(_N, 4, 0.01)
    one, other = counts(), counts(2.0)
    found = found.updated(one, 1.0, 1.0).updated(other, 10.0, 1.0)
    torch.testing.assert_close(found.counts, (one + other * 2 / 100) / 1.02)


@pytest.mark.long
def test_read_ever_more_rarely():
    found, read = HistogramBound(_N, 4, 0.01), []
    for step in range(1, 100):
        new = found.updated(noisy(5.0), 5.0, 1.0)
        if new.next_reading != found.next_reading:
            read.append(step)
        found = new
    assert read == [1, 2, 3, 5, 8, 12, 18, 27, 41, 62, 93]


@pytest.mark.long
@pytest.mark.every_commit
def test_the_bound_is_of_the_size_of_norms():
    """The units do not matter. With more noise the bound is smaller."""
    assert 1.5 < after(20).bound < 10.0
    assert after(20, scale=1000.0).bound == pytest.approx(1000 * after(20).bound, rel=0.2)
    loud = HistogramBound(_N, 4, 50.0).updated(noisy(5.0), 5.0, 1.0)
    assert loud.bound < 0.7 * after(20).bound


def test_of_many_latents_it_is_the_median():
    found = HistogramBound(_N, 4, 0.01, of_many=True).updated(noisy(1.0), 1.0, 1.0)
    assert found.bound == pytest.approx(torch.randn(10**5, 4).norm(dim=1).median().item(), rel=0.1)
    assert found.clipped(found.bound).fraction == pytest.approx(0.5, abs=0.1)
    assert HistogramBound.resumed(found.state()).of_many
    assert HistogramBound.resumed(
        found.state() | {"information": 3.0}
    ).of_many  # version 0.2.0 had it


@pytest.mark.slow
def test_what_is_clipped():
    """With a standard error that is not too small."""
    errors = []
    for _ in range(30):
        found = after(10, sd=20.0)
        above = found.counts.new_tensor(0.0) + (torch.randn(10**5, 4).norm(dim=1) > found.bound)
        clipped = found.clipped(found.bound)
        errors.append((clipped.fraction - above.double().mean().item()) / clipped.standard_error)
    assert np.square(errors).mean() < 4.0
    assert 0 < clipped.standard_error < 0.05


def test_a_state_goes_on():
    found = after(7)
    again, new = HistogramBound.resumed(found.state()), noisy(5.0)
    assert vars(again.updated(new, 5.0, 1.0)).keys() == found.state().keys()
    one, other = (each.updated(new, 5.0, 1.0) for each in (again, found))
    assert torch.equal(one.counts, other.counts) and one.bound == other.bound
    for damage in (
        {"noise": math.nan},
        {"steps": 1.5},
        {"counts": torch.zeros(2)},
        {"of_many": 1},
        {"more": 1},
    ):
        with pytest.raises(ConfigurationError, match="histogram"):
            HistogramBound.resumed(found.state() | damage)
    with pytest.raises(ConfigurationError, match="histogram"):
        HistogramBound.resumed(5)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (0.01, " clips about 100%.*clip=None"),
        (1.0, None),
        (0.8, None),
        (3.0, None),
        (10, " is far above.* 10 times"),
    ],
)
def test_a_bound_of_ones_own_is_compared(factor, words):
    """It is compared with the bound of least cost."""
    found = after(30)
    status = Measured(Clip(), factor * found.bound, histogram=found).status
    assert status.is_ok == (words is None) == (status.cause != "clipping")
    assert status.is_ok or re.search(f"^check: clip=[0-9.]+.*{words}", str(status))


# The reading of a histogram.


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
    """Counts that noise allows are no evidence of a tail."""
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


@pytest.mark.slow
def test_no_group_is_made_up():
    """A run reads about fifteen histograms of 160 bins, and one false alarm would spoil it."""
    counts = np.where(np.arange(SIZE) < SIZE // 2, log_normal(0.6, 0.8, 0.15, 20_000), 0.0)
    generator = np.random.default_rng(0)
    for _ in range(1000):
        noisy = counts + 30 * generator.normal(size=SIZE)
        assert read(noisy, 30.0, 20_000, 0.6, 1.0).norms[-1] < 10.0


def test_a_group_far_away_is_seen():
    """It has nine standard deviations in four bins, which noise alone never reaches."""
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
