"""Exact draws from the operating system's generator, which a seeded one stands in for here."""

import math
import os
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import stats

from pyro_dp.mechanism import system_random as module
from pyro_dp.mechanism.system_random import SystemGenerator, discrete_gaussian

_ALARM = 1e-8  # each statistical test's


def fits(values, law):
    """p-value of a chi-squared test of integers from 0 on, cells below 5 expected joined."""
    expected = law * len(values)
    observed = np.bincount(values, minlength=len(law))
    if len(observed) > len(law):
        return 0.0
    inner = expected > 5
    observed = np.append(observed[inner], observed[~inner].sum())
    expected = np.append(expected[inner], max(expected[~inner].sum(), 1e-9))
    return stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue


@pytest.mark.one_in(6)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "p"), [(1, 0.5), (10, 0.3), (1000, 0.04), (1000, 2.0**-7), (50, 0.9), (7, 0.75)]
)
def test_binomial(stream, n, p):
    values = np.array([stream.binomial(n, p) for _ in range(8_000)])
    assert fits(values, stats.binom.pmf(np.arange(n + 1), n, p)) > _ALARM
    wrong = p * 1.15 if p < 0.8 else p / 1.15
    assert fits(values, stats.binom.pmf(np.arange(n + 1), n, wrong)) < _ALARM


def test_binomial_compares_all_bits(monkeypatch):
    """If the first 16 bits are those of the probability, the other 37 decide, exactly."""
    p = (0xABCD * 2**37 + 5) / 2**53

    def words(rest):
        def urandom(count):
            first = np.full(4, 0xABCD, np.uint16).tobytes()
            return first if count == 8 else np.full(count // 8, rest << 27, np.uint64).tobytes()

        return urandom

    for rest, count in ((4, 4), (5, 0)):
        monkeypatch.setattr(os, "urandom", words(rest))
        assert SystemGenerator().binomial(4, p) == count


@pytest.mark.parametrize("p", [1e-300, 5e-324])
def test_rare_events(stream, p):
    assert stream.binomial(10**6, p) == 0


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 2**16, 2**16 + 1, 2**32, 2**32 + 1, 2**63])
def test_below(stream, limit):
    values = stream.below(limit, 20_000)
    assert len(values) == 20_000
    assert values.max() < limit
    if limit < 10:
        assert fits(values.astype(np.int64), np.full(limit, 1 / limit)) > _ALARM
    else:
        uniform = (values + 0.5) / limit
        assert stats.kstest(uniform, "uniform").pvalue > _ALARM
        assert stats.kstest(np.minimum(uniform * 1.05, 1.0), "uniform").pvalue < _ALARM


@pytest.mark.parametrize("size", [0, 1, 3, 5, 6])
def test_subsets(stream, size):
    """All subsets of six are equally likely, however many elements they have."""
    values = [stream.choice(6, size) for _ in range(10_000)]
    assert all((np.diff(value) > 0).all() and len(value) == size for value in values)
    codes = np.array([sum(1 << int(v) for v in value) for value in values])
    subsets = np.array([code for code in range(64) if code.bit_count() == size])
    assert set(codes) == set(subsets)
    place = np.searchsorted(subsets, codes)
    assert fits(place, np.full(math.comb(6, size), 1 / math.comb(6, size))) > _ALARM


def test_a_large_subset(stream):
    indices = stream.choice(10**9, 5000)
    assert len(np.unique(indices)) == 5000
    assert stats.kstest(indices / 1e9, "uniform").pvalue > _ALARM


def test_nothing_is_kept():
    """A stream has no state that a copy of the process could share."""
    assert vars(SystemGenerator()) == {}


@pytest.mark.parametrize("scale", [1, 2, 3, 7])
def test_probabilities_of_the_discrete_gaussian(stream, scale):
    draws, most = discrete_gaussian(scale, 200_000, stream), 12 * scale
    law = np.exp(-(np.arange(-most, most + 1) ** 2) / (2 * scale**2))
    law /= law.sum()
    assert fits(most + draws, law) > _ALARM
    # Mistakes would count zero for both signs, or put one sign off by one.
    assert fits(most + np.append(draws, draws[draws == 0]), law) < _ALARM
    assert fits(most + draws - (draws < 0), law) < _ALARM


@pytest.mark.parametrize("scale", [2**30 + 1, 2**57])
def test_large_scales_are_normal(stream, scale):
    draws = discrete_gaussian(scale, 100_000, stream) / scale
    assert stats.kstest(draws, "norm").pvalue > _ALARM
    assert stats.kstest(draws * 1.05, "norm").pvalue < _ALARM
    assert len(np.unique(discrete_gaussian(scale, 1000, stream) % 1024)) > 500  # low bits, too


def test_draws_are_independent(stream):
    draws = discrete_gaussian(2**30, 100_000, stream) / 2.0**30
    for lag in (1, 2, 17):
        assert abs(np.mean(draws[lag:] * draws[:-lag])) < 6 / np.sqrt(len(draws))
    assert abs(np.mean(draws[1:] ** 2 * draws[:-1] ** 2) - 1) < 6 * np.sqrt(8 / len(draws))


def test_size_of_the_discrete_gaussian(stream):
    for size in (0, 1, 2, 1000):
        assert discrete_gaussian(5, size, stream).shape == (size,)


def test_thresholds_are_exact():
    """Against a library with 120 digits."""
    thresholds, firsts = module._cumulative()
    with mpmath.workdps(120):
        weights = [mpmath.exp(-mpmath.mpf(k * k) / 2) for k in range(60)]
        total, below = sum(weights), mpmath.mpf(0)
        for k, threshold in enumerate(thresholds):
            below += weights[k]
            assert abs(threshold / mpmath.mpf(2) ** 192 - below / total) < mpmath.mpf(2) ** -185
            assert int(firsts[k]) == threshold >> 128


@pytest.mark.parametrize("exponent", [Fraction(0), Fraction(1, 3), Fraction(35, 2), Fraction(1, 7)])
def test_exponential_is_exact(exponent):
    with mpmath.workdps(120):
        exact = mpmath.exp(-mpmath.mpf(exponent.numerator) / exponent.denominator)
        assert abs(module._exp_minus(exponent) / mpmath.mpf(2) ** 192 - exact) < 2.0**-185


def test_a_close_call_is_decided_exactly(monkeypatch):
    """Uniform numbers whose first 64 bits are those of the probability: the rest decides."""
    k, j, scale = 1, 3, 7
    x = Fraction(j, scale)
    exact = module._exp_minus(x * (2 * k + x) / 2)
    first, rest = divmod(exact, 2**128)
    arguments = (np.array([k]), np.array([j], np.uint64), scale, np.array([first], np.uint64))
    for other, accepted in ((rest - 1, True), (rest, False), (rest + 1, False)):
        monkeypatch.setattr(os, "urandom", lambda n, other=other: other.to_bytes(n, "little"))
        assert module._accepts(*arguments)[0] == accepted
    for word, accepted in ((first - 1, True), (first + 1, False)):
        word = np.array([word], np.uint64)
        assert module._accepts(*arguments[:3], word)[0] == accepted


def test_a_close_call_between_two_k(monkeypatch):
    thresholds, firsts = module._cumulative()
    for i in (0, 1, 5):
        rest = thresholds[i] % 2**128
        for other, k in ((rest - 1, i), (rest, i + 1)):
            monkeypatch.setattr(os, "urandom", lambda n, other=other: other.to_bytes(n, "little"))
            assert module._half_normal(firsts[i : i + 1])[0] == k
        assert module._half_normal(firsts[i : i + 1] - np.uint64(1))[0] == i
        assert module._half_normal(firsts[i : i + 1] + np.uint64(1))[0] == i + 1


@pytest.mark.long
def test_doubtful_ones_are_as_good_as_the_others(stream, monkeypatch):
    """Exact comparisons give the same numbers."""
    words = np.random.default_rng(1).integers(2**64, size=2000, dtype=np.uint64)
    k, j = module._half_normal(words[::-1].copy()), words % np.uint64(1000)
    fast = module._accepts(k, j, 1000, words)
    monkeypatch.setattr(module, "_DOUBT", 2.0)
    assert (module._accepts(k, j, 1000, words) == fast).all()
