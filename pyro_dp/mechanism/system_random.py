"""Random numbers from the operating system, with exact probabilities.

Usual generators compute their distributions in floating point. Here each draw compares random bits
with integers. No state is kept between draws, and the operating system never returns the same bits
twice. So forked, copied or restored processes cannot share a stream, and a process's memory does
not reveal other draws.

The discrete Gaussian has probabilities proportional to exp(-n^2 / (2 s^2)). Algorithm D of Karney
2016 draws it (Sampling exactly from the normal distribution, ACM TOMS 42, arXiv 1303.6257). Propose
n = +-(k s + j), with k from the half-normal weights exp(-k^2 / 2) and j uniform on 0, ..., s - 1.
With x = j / s, accept with probability exp(-x (2 k + x) / 2). The product of both weights is
exp(-(k + x)^2 / 2).

Each probability is compared with a uniform number of 192 bits. The first 64 bits nearly always
decide. If the rounding of a floating-point exponential could matter, the other bits are drawn and
compared in decimal arithmetic. Each integer's probability has an error below 2^-180.
"""

import decimal
import functools
import math
import os
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

MOST = 2**57  # the largest scale: 18 times the scale fits into 63 bits
_REST = 128  # bits of a uniform number after the first 64
_DOUBT = 2.0**-44  # exceeds the error of exp(-r) in float64, for r below 20
_DIGITS = decimal.Context(prec=70)


class SystemGenerator:
    """Uniform integers, and the two distributions by which records are sampled.

    :meth:`integers`, :meth:`binomial` and :meth:`choice` have the meaning of numpy's methods.
    """

    def words(self, count: int, dtype: type[np.unsignedinteger] = np.uint64) -> np.ndarray:
        return np.frombuffer(os.urandom(count * np.dtype(dtype).itemsize), dtype)

    def below(self, limit: int, count: int) -> np.ndarray:
        """Uniform integers in [0, limit), (count,), unsigned.

        :param limit: at most 2^63.
        """
        bits = (limit - 1).bit_length()
        dtype = np.uint16 if bits <= 16 else np.uint32 if bits <= 32 else np.uint64
        found = np.empty(0, dtype)
        while len(found) < count:  # at least half of the masked words are below the limit
            missing = count - len(found)
            spare = math.ceil(missing * 2**bits / limit) + 8
            words = self.words(spare, dtype) & dtype(2**bits - 1)
            found = np.concatenate([found, words[words < limit]])
        return found[:count]

    def integers(self, limit: int) -> int:
        return int(self.below(limit, 1)[0])

    def binomial(self, n: int, p: float) -> int:
        """The number of successes in ``n`` trials of probability ``p`` in (0, 1).

        Let p = f 2^-k with f in [1/2, 1). A trial succeeds if k fair coins show heads, and then an
        event of probability f happens, a multiple of 2^-53.
        """
        f, exponent = math.frexp(p)
        for _ in range(-exponent):
            if n == 0:
                return 0
            coins = int.from_bytes(os.urandom((n + 7) // 8), "little")
            n = (coins >> (-n % 8)).bit_count()
        first, rest = divmod(int(f * 2**53), 2**37)
        words = self.words(n, np.uint16)
        ties = self.words(int(np.count_nonzero(words == first))) >> np.uint64(64 - 37)
        return int(np.count_nonzero(words < first) + np.count_nonzero(ties < rest))

    def choice(
        self, n: int, size: int, *, replace: bool = False, shuffle: bool = False
    ) -> np.ndarray:
        """A uniform subset of ``size`` of the numbers below ``n``, ascending."""
        if replace or shuffle:
            raise NotImplementedError("only without replacement, and in ascending order")
        if 2 * size > n:
            kept = np.ones(n, bool)
            kept[self.choice(n, n - size)] = False
            return np.flatnonzero(kept)
        # The subset is the first ``size`` distinct numbers of a uniform sequence. A round draws as
        # many numbers as are missing, so it never finds too many.
        found = _distinct(self.below(n, size))
        while len(found) < size:
            more = _distinct(self.below(n, size - len(found)))
            place = np.searchsorted(found, more)
            new = found.take(place, mode="clip") != more
            found = np.insert(found, place[new], more[new])
        return found.astype(np.int64)


Stream = np.random.Generator | SystemGenerator  # a source of private random numbers


def _distinct(values: np.ndarray) -> np.ndarray:
    """The distinct values, ascending. (``np.unique`` takes ten times as long.)"""
    ordered = np.sort(values)
    new = np.ones(len(ordered), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return ordered[new]


def discrete_gaussian(scale: int, size: int, stream: SystemGenerator) -> NDArray[np.int64]:
    """Independent draws of the discrete Gaussian, (size,) in int64.

    :param scale: s, in [1, 2^57]. The variance is s^2, to a relative error of exp(-19 s^2).
    """
    found = np.empty(0, np.int64)
    while len(found) < size:  # seven of ten proposals are accepted
        found = np.concatenate([found, _accepted(scale, 3 * (size - len(found)) // 2 + 16, stream)])
    return found[:size]


def _accepted(scale: int, count: int, stream: SystemGenerator) -> NDArray[np.int64]:
    k = _half_normal(stream.words(count))
    j = stream.below(scale, count)
    negative = (stream.words(count) >> np.uint64(63)).astype(bool)
    kept = _accepts(k, j, scale, stream.words(count))
    kept &= ~(negative & (k == 0) & (j == 0))  # otherwise +0 and -0 would both give zero
    n = k * scale + j.astype(np.int64)
    return np.where(negative, -n, n)[kept]


def _half_normal(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Integers k >= 0 with probabilities proportional to exp(-k^2 / 2).

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
    """Whether uniform numbers are below exp(-x (2 k + x) / 2), with x = j / scale.

    :param words: the first 64 bits of the uniform numbers.
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
    """A uniform integer of 192 bits that starts with these 64."""
    return int(word) << _REST | int.from_bytes(os.urandom(_REST // 8), "little")


def _exp_minus(exponent: Fraction) -> int:
    """exp(-exponent) in units of 2^-192."""
    value = _DIGITS.divide(decimal.Decimal(-exponent.numerator), exponent.denominator)
    return math.floor(Fraction(_DIGITS.exp(value)) * (1 << (64 + _REST)))


@functools.cache
def _cumulative() -> tuple[list[int], NDArray[np.uint64]]:
    """The cumulative probabilities of k in units of 2^-192, and their first 64 bits."""
    weights = [_exp_minus(Fraction(k * k, 2)) for k in range(17)]  # exp(-17^2 / 2) < 2^-208
    total, sums = sum(weights), np.cumsum(np.array(weights, dtype=object)).tolist()
    thresholds = [(each << (64 + _REST)) // total for each in sums[:-1]]
    return thresholds, np.array([each >> _REST for each in thresholds], dtype=np.uint64)
