"""Integers with probabilities proportional to exp(-n^2 / (2 s^2)), drawn exactly.

Algorithm D of Karney 2016 (Sampling exactly from the normal distribution, ACM TOMS 42, arXiv
1303.6257): n = +-(k s + j) with k from the half-normal weights exp(-k^2 / 2), j uniform in [0, s),
and accepted with probability exp(-x (2 k + x) / 2), x = j / s. The product of the two weights is
exp(-(k + x)^2 / 2).

A probability is compared with a uniform number of 192 bits, of which the first 64 nearly always
decide; where they cannot, given how a floating-point exponential is rounded, the rest is drawn and
the comparison made in decimal arithmetic. What a number's probability is off by is below 2^-180.
"""

import decimal
import functools
import math
import os
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from pyro_dp.mechanism.system_random import SystemGenerator

MOST = 2**57  # of the scale: 18 times it are integers of 63 bits
_REST = 128  # bits of a uniform number after the first 64
_DOUBT = 2.0**-44  # a float64 exp(-r) is closer than that, for r below 20
_DIGITS = decimal.Context(prec=70)


def discrete_gaussian(scale: int, size: int, stream: SystemGenerator) -> NDArray[np.int64]:
    """Independent draws, (size,) in int64.

    :param scale: s, in [1, 2^57]. The variance is s^2 up to a part of exp(-19 s^2).
    """
    found = np.empty(0, np.int64)
    while len(found) < size:  # seven of ten are accepted
        found = np.concatenate([found, _accepted(scale, 3 * (size - len(found)) // 2 + 16, stream)])
    return found[:size]


def _accepted(scale: int, count: int, stream: SystemGenerator) -> NDArray[np.int64]:
    """The accepted ones of so many candidates."""
    k = _half_normal(stream.words(count))
    j = stream.below(scale, count)
    negative = (stream.words(count) >> np.uint64(63)).astype(bool)
    kept = _accepts(k, j, scale, stream.words(count))
    kept &= ~(negative & (k == 0) & (j == 0))  # zero has one sign
    n = k * scale + j.astype(np.int64)
    return np.where(negative, -n, n)[kept]


def _half_normal(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """k >= 0 with probabilities proportional to exp(-k^2 / 2), in int64.

    :param words: the first 64 bits of uniform numbers.
    """
    thresholds, firsts = _cumulative()
    k = np.searchsorted(firsts, words, side="left")
    for i in np.flatnonzero(firsts.take(k, mode="clip") == words):
        uniform = _continued(words[i])
        k[i] = sum(threshold <= uniform for threshold in thresholds)
    return k.astype(np.int64)


def _accepts(
    k: NDArray[np.int64], j: NDArray[np.uint64], scale: int, words: NDArray[np.uint64]
) -> NDArray[np.bool_]:
    """Whether uniform numbers are below exp(-x (2 k + x) / 2), x = j / scale.

    :param words: their first 64 bits.
    """
    x = j / scale
    distance = words * 2.0**-64 - np.exp(-0.5 * x * (2 * k + x))
    accepted = distance < 0
    for i in np.flatnonzero(np.abs(distance) < _DOUBT):
        exact = Fraction(int(j[i]), scale)
        exponent = exact * (2 * int(k[i]) + exact) / 2
        accepted[i] = _continued(words[i]) < _exp_minus(exponent)
    return accepted


def _continued(word: int) -> int:
    """A uniform number of 192 bits, given its first 64."""
    return int(word) << _REST | int.from_bytes(os.urandom(_REST // 8), "little")


def _exp_minus(exponent: Fraction) -> int:
    """exp(-exponent) in units of 2^-192."""
    value = _DIGITS.divide(decimal.Decimal(-exponent.numerator), exponent.denominator)
    return math.floor(Fraction(_DIGITS.exp(value)) * (1 << (64 + _REST)))


@functools.cache
def _cumulative() -> tuple[list[int], NDArray[np.uint64]]:
    """Cumulative probabilities of k in units of 2^-192, and their first 64 bits."""
    weights = [_exp_minus(Fraction(k * k, 2)) for k in range(17)]  # exp(-17^2 / 2) < 2^-208
    total, sums = sum(weights), np.cumsum(np.array(weights, dtype=object)).tolist()
    thresholds = [(each << (64 + _REST)) // total for each in sums[:-1]]
    return thresholds, np.array([each >> _REST for each in thresholds], dtype=np.uint64)
