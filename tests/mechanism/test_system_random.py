"""Exact draws from the operating system's generator, which a seeded one stands in for here."""

import math
import os

import numpy as np
import pytest
from scipy import stats

from pyro_dp.mechanism.system_random import SystemGenerator

_ALARM = 1e-8  # each statistical test's


@pytest.fixture
def stream(monkeypatch):
    monkeypatch.setattr(os, "urandom", np.random.default_rng(0).bytes)
    return SystemGenerator()


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


@pytest.mark.long
@pytest.mark.parametrize(
    ("n", "p"), [(1, 0.5), (10, 0.3), (1000, 0.04), (1000, 2.0**-7), (50, 0.9), (7, 0.75)]
)
def test_binomial(stream, n, p):
    values = np.array([stream.binomial(n, p) for _ in range(20_000)])
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
