"""The histogram of norms: a record's part, and readings of noisy counts."""

import math

import numpy as np
import pytest
import torch

from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.contributions import Block, Rows
from pyro_dp.mechanism.fixed_point import FixedPointSum
from pyro_dp.mechanism.norm_histogram import SIZE, Bins, MeasuredBins, Norms, with_bins

BLOCKS = [Block(3, 1.5, 0.95), Block(SIZE, 1.0, 0.05)]


def counted(rows: torch.Tensor) -> np.ndarray:
    return Bins(Rows(rows).norms()).dense().sum(0).numpy()


def noisy_counts(norms: np.ndarray, sd: float, seed: int = 5) -> np.ndarray:
    exact = counted(torch.as_tensor(norms).unsqueeze(1))
    return exact + np.random.default_rng(seed).normal(0.0, sd, SIZE)


@pytest.fixture
def rng():
    return np.random.default_rng(6)


def test_bins_are_quarter_octaves(rng):
    norms = np.exp(rng.normal(0.0, 3.0, 5000))
    edges = (np.arange(SIZE + 1) - SIZE // 2) / 4 * math.log(2)
    expected, _ = np.histogram(np.log(norms), edges)
    np.testing.assert_array_equal(counted(torch.as_tensor(norms).unsqueeze(1)), expected)


@pytest.mark.parametrize("sum_type", [ClippedSum, FixedPointSum])
def test_a_record_adds_one_whatever_its_norm(sum_type):
    for size in (0.0, 1e-300, 1e-7, 1.0, 2.9, 1e150):
        clipped = sum_type(BLOCKS)
        clipped.add(*with_bins(Rows(torch.tensor([[size, 0.0, 0.0]], dtype=torch.float64)), 1.5))
        part, bins = clipped._exact_sums
        assert part.norm() <= 1.5
        assert 1 - 1e-8 < bins.sum() <= 1 and bins.norm() <= 1


@pytest.mark.parametrize("sum_type", [ClippedSum, FixedPointSum])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_record_adds_nothing(sum_type, broken):
    clipped = sum_type(BLOCKS)
    clipped.add(*with_bins(Rows(torch.tensor([[1.0, broken, 0.0]])), 1.5))
    assert all(torch.equal(total, torch.zeros_like(total)) for total in clipped._exact_sums)


def test_padding_is_not_counted():
    rows = with_bins(Rows(torch.ones(4, 3)), 2.0)
    weights = torch.tensor([[1.0], [1.0], [0.0], [0.0]])
    assert ClippedSum.clipped_sums(rows, [2.0, 1.0], weights)[1].sum() == 2


@pytest.mark.parametrize("sd", [0.0, 30.0])
@pytest.mark.parametrize("tail", ["bell", "heavy", "two humps"])
def test_many_records_are_read_off(sd, tail, rng):
    bell = 3.0 * np.exp(rng.normal(0.0, 0.5, 40_000))
    norms = {
        "bell": bell,
        "heavy": 2.0 / rng.uniform(size=40_000) ** 0.5,
        "two humps": np.concatenate([bell, 0.1 * bell]),
    }[tail]
    read = Norms.read(noisy_counts(norms, sd), sd, len(norms), typical=1.0, spread=2.0)
    assert read.counts.sum() == pytest.approx(len(norms))
    assert (read.counts >= 0).all() and (np.diff(read.norms) > 0).all()
    if tail == "two humps":  # no single peak: the median lies between the humps
        assert 0.2 < read.median < 4.0
        return
    assert read.median == pytest.approx(np.median(norms), rel=0.2)
    bounds = np.quantile(norms, [0.3, 0.8, 0.98])
    for bound, found in zip(bounds, read.weight(bounds), strict=True):
        assert found == pytest.approx(np.minimum(1, bound / norms).mean(), abs=0.03)
        assert read.share_above(bound) == pytest.approx((norms > bound).mean(), abs=0.06)
    excess = np.maximum(norms - bounds[:, None], 0.0).sum(1)
    found = read.excess(bounds)[:2]  # what lies in the noise, far out, is not seen
    assert (found < 1.25 * excess[:2]).all() and (found > (0.6 if sd else 0.8) * excess[:2]).all()


def test_noise_that_hides_all_leaves_the_guess():
    for _ in range(20):
        read = Norms.read(
            noisy_counts(np.full(500, 900.0), 2000.0), 2000.0, 500, typical=2.0, spread=0.4
        )
        assert 0.5 < read.median < 8.0
        assert read.counts.sum() == pytest.approx(500)


def test_a_guess_far_off_is_overruled(rng):
    norms = 700.0 * np.exp(rng.normal(0.0, 0.4, 5000))
    read = Norms.read(noisy_counts(norms, 60.0), 60.0, len(norms), typical=2.0, spread=2.0)
    assert read.median == pytest.approx(700.0, rel=0.3)


@pytest.mark.long
@pytest.mark.every_commit
def test_noise_far_out_is_no_tail():
    norms = np.concatenate([np.full(20_000, 1.0), np.full(20_000, 0.2)])
    for seed in range(10):
        read = Norms.read(
            noisy_counts(norms, 100.0, seed), 100.0, len(norms), typical=1.0, spread=2.0
        )
        assert read.norms[-1] < 1000.0


def test_a_tail_goes_on_in_the_noise(rng):
    far = np.where(rng.uniform(size=20_000) < 0.1, rng.uniform(size=20_000) ** -0.4, 1.0)
    norms, bound = np.exp(rng.normal(0.0, 0.5, 20_000)) * far, np.array([4.0])
    counts = noisy_counts(norms, 60.0)
    cut, on = (
        Norms.read(counts, 60.0, len(norms), typical=1.0, spread=2.0, tail=tail)
        for tail in (False, True)
    )
    excess = np.maximum(norms - bound, 0.0).sum()
    assert cut.excess(bound)[0] < 0.5 * excess
    assert 0.6 * excess < on.excess(bound)[0] < 1.7 * excess
    assert on.counts.sum() == pytest.approx(len(norms))
    assert on.median == pytest.approx(cut.median, rel=0.1)


def test_a_tail_is_no_larger_than_hidden_counts_allow(rng):
    # Norms of a normal distribution end. The fall of the last octaves, continued, would go on.
    norms = np.linalg.norm(rng.normal(size=(20_000, 10)), axis=1) * abs(rng.normal(size=20_000))
    found = Norms.read(noisy_counts(norms, 8.0), 8.0, 20_000, typical=3.0, spread=0.25, tail=True)
    excess = np.maximum(norms - 8.0, 0.0).sum()
    assert 0.7 * excess < found.excess(np.array([8.0]))[0] < 1.5 * excess


def test_alone_a_broken_record_adds_nothing_either():
    clipped = ClippedSum([Block(SIZE, 1.0)])
    clipped.add(MeasuredBins(torch.tensor([[1.0], [math.nan], [math.inf], [2.0]])))
    assert clipped._exact_sums[0].sum() == pytest.approx(2, rel=1e-9)


def test_a_group_apart_is_seen(rng):
    """Records of a rare value, twenty times as large as the others; but noise is no group."""
    norms = np.exp(rng.normal(0.0, 0.4, 20_000))
    sd = 5.0
    read = dict(size=20_000, typical=1.0, spread=0.25)
    alone = Norms.read(noisy_counts(norms, sd), sd, **read)
    assert alone.norms.max() < 10
    norms[:200] = np.exp(rng.normal(math.log(20.0), 0.1, 200))
    found = Norms.read(noisy_counts(norms, sd), sd, **read)
    assert 17 < found.norms.max() < 30
    assert found.share_above(8.0) == pytest.approx(0.01, rel=0.5)


@pytest.mark.long
def test_noise_makes_no_groups(rng):
    norms = np.exp(rng.standard_t(4, 20_000) * 0.5)  # the histogram is no bell
    exact = noisy_counts(norms, 0.0)
    for seed in range(300):
        counts = exact + np.random.default_rng(seed).normal(0.0, 10.0, SIZE)
        assert Norms.read(counts, 10.0, 20_000, typical=1.0, spread=0.25).norms.max() < 200


def test_a_bias_may_be_as_large_as_the_readings_say():
    norms = Norms(
        np.array([1.0, 3.0]), np.array([[100.0, 0.0], [80.0, 20.0]]), np.array([0.9, 0.1])
    )
    np.testing.assert_allclose(norms.counts, [98.0, 2.0])
    np.testing.assert_allclose(norms.excess(np.array([2.0])), 2.0)
    np.testing.assert_allclose(norms.rms_excess(np.array([2.0])), math.sqrt(0.1) * 20)
    alone = Norms.of(norms.norms, norms.counts)
    np.testing.assert_allclose(alone.rms_excess(np.array([2.0])), 2.0)


def test_noise_that_hides_a_tail_leaves_several_readings(rng):
    norms = np.abs(1 - rng.exponential(size=5000))

    def read(sd):
        counts = noisy_counts(norms, sd)
        found = Norms.read(counts, sd, 5000, typical=0.8, spread=0.25, one_sided=True)
        assert found.counts.sum() == pytest.approx(5000) and found.odds.sum() == pytest.approx(1)
        return [excess(np.array([2.5]))[0] for excess in (found.excess, found.rms_excess)]

    mean, rms = read(170.0)
    assert rms > 1.3 * mean
    mean, rms = read(1.0)
    assert rms < 1.05 * mean
