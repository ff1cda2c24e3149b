"""The discrete Gaussian, from the operating system's generator, for which a seeded one stands."""

import os
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import stats

from pyro_dp.mechanism import system_random as module
from pyro_dp.mechanism.system_random import SystemGenerator, discrete_gaussian

_ALARM = 1e-8


@pytest.fixture
def stream(monkeypatch):
    monkeypatch.setattr(os, "urandom", np.random.default_rng(0).bytes)
    return SystemGenerator()


def law(scale):
    values = np.arange(-12 * scale, 12 * scale + 1)
    weights = np.exp(-(values**2) / (2 * scale**2))
    return values, weights / weights.sum()


def pvalue(draws, scale):
    values, probabilities = law(scale)
    expected = probabilities * len(draws)
    observed = np.bincount(draws - values[0], minlength=len(values))
    inner = expected > 5
    observed = np.append(observed[inner], observed[~inner].sum())
    expected = np.append(expected[inner], expected[~inner].sum())
    return stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue


@pytest.mark.parametrize("scale", [1, 2, 3, 7])
def test_probabilities(stream, scale):
    draws = discrete_gaussian(scale, 200_000, stream)
    assert pvalue(draws, scale) > _ALARM
    # Mistakes would count zero for both signs, or put one sign off by one.
    assert pvalue(np.append(draws, draws[draws == 0]), scale) < _ALARM
    assert pvalue(draws - (draws < 0), scale) < _ALARM


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


def test_size(stream):
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


def test_doubtful_ones_are_as_good_as_the_others(stream, monkeypatch):
    """With every comparison made exactly, the same numbers come out."""
    words = np.random.default_rng(1).integers(2**64, size=2000, dtype=np.uint64)
    k, j = module._half_normal(words[::-1].copy()), words % np.uint64(1000)
    fast = module._accepts(k, j, 1000, words)
    monkeypatch.setattr(module, "_DOUBT", 2.0)
    assert (module._accepts(k, j, 1000, words) == fast).all()
