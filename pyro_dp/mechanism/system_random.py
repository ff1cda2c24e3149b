"""Random numbers of the operating system, with exact probabilities.

A library's generator computes its distributions in floating point; every draw here compares random
bits with integers. Nothing is kept between two draws. The operating system never hands out the same
bits twice: forked, copied, restored or twice imported processes cannot share a stream. A process's
memory holds nothing that would allow computing other draws.

Integers have probabilities proportional to exp(-n^2 / (2 s^2)). Algorithm D of Karney 2016 draws
them (Sampling exactly from the normal distribution, ACM TOMS 42, arXiv 1303.6257). Let n = +-(k s +
j), k from the half-normal weights exp(-k^2 / 2), and j uniform in [0, s). With x = j / s, it is
accepted with probability exp(-x (2 k + x) / 2). The weights' product is exp(-(k + x)^2 / 2).

A probability is compared with a uniform number of 192 bits. The first 64 nearly always decide. If a
floating-point exponential's rounding leaves it open, the rest is drawn and compared in decimal
arithmetic. The error of a number's probability is below 2^-180.
"""

import decimal
import functools
import math
import os
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

MOST = 2**57  # the largest scale: 18 times it are integers of 63 bits
_REST = 128  # bits of a uniform number after the first 64
_DOUBT = 2.0**-44  # a float64 exp(-r) is closer than that, for r below 20
_DIGITS = decimal.Context(prec=70)


class SystemGenerator:
    """Uniform numbers, and the two distributions by which records are sampled.

    :meth:`integers`, :meth:`binomial` and :meth:`choice` are what they are in numpy.
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
        while len(found) < count:  # at least half the words of so many bits are below the limit
            missing = count - len(found)
            spare = math.ceil(missing * 2**bits / limit) + 8
            words = self.words(spare, dtype) & dtype(2**bits - 1)
            found = np.concatenate([found, words[words < limit]])
        return found[:count]

    def integers(self, limit: int) -> int:
        return int(self.below(limit, 1)[0])

    def binomial(self, n: int, p: float) -> int:
        """How many of ``n`` come up, each with probability ``p`` in (0, 1).

        Let p = f 2^-k, f in [1/2, 1). It counts those that show heads k times and then pass a test
        of probability f, a multiple of 2^-53.
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
            raise NotImplementedError("only subsets, in no order of their own")
        if 2 * size > n:
            kept = np.ones(n, bool)
            kept[self.choice(n, n - size)] = False
            return np.flatnonzero(kept)
        # The first ``size`` distinct ones of a sequence of uniform numbers. No round can find more
        # than are missing.
        found = _distinct(self.below(n, size))
        while len(found) < size:
            more = _distinct(self.below(n, size - len(found)))
            place = np.searchsorted(found, more)
            new = found.take(place, mode="clip") != more
            found = np.insert(found, place[new], more[new])
        return found.astype(np.int64)


Stream = np.random.Generator | SystemGenerator  # a source of private random numbers


def _distinct(values: np.ndarray) -> np.ndarray:
    """Ascending. (``np.unique`` takes ten times as long.)"""
    ordered = np.sort(values)
    new = np.ones(len(ordered), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return ordered[new]


def discrete_gaussian(scale: int, size: int, stream: SystemGenerator) -> NDArray[np.int64]:
    """Independent draws, (size,) in int64.

    :param scale: s, in [1, 2^57]. The variance is s^2 up to a part of exp(-19 s^2).
    """
    found = np.empty(0, np.int64)
    while len(found) < size:  # seven of ten are accepted
        found = np.concatenate([found, _accepted(scale, 3 * (size - len(found)) // 2 + 16, stream)])
    return found[:size]


def _accepted(scale: int, count: int, stream: SystemGenerator) -> NDArray[np.int64]:
    k = _half_normal(stream.words(count))
    j = stream.below(scale, count)
    negative = (stream.words(count) >> np.uint64(63)).astype(bool)
    kept = _accepts(k, j, scale, stream.words(count))
    kept &= ~(negative & (k == 0) & (j == 0))  # zero has one sign
    n = k * scale + j.astype(np.int64)
    return np.where(negative, -n, n)[kept]


def _half_normal(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """k >= 0 with probabilities proportional to exp(-k^2 / 2), by the first 64 bits of uniforms."""
    thresholds, firsts = _cumulative()
    k = np.searchsorted(firsts, words, side="left")
    for i in np.flatnonzero(firsts.take(k, mode="clip") == words):
        uniform = _continued(words[i])
        k[i] = sum(threshold <= uniform for threshold in thresholds)
    return k.astype(np.int64)


def _accepts(
    k: NDArray[np.int64], j: NDArray[np.uint64], scale: int, words: NDArray[np.uint64]
) -> NDArray[np.bool_]:
    """Whether uniforms, by their first 64 bits, are below exp(-x (2 k + x) / 2), x = j / scale."""
    x = j / scale
    distance = words * 2.0**-64 - np.exp(-0.5 * x * (2 * k + x))
    accepted = distance < 0
    for i in np.flatnonzero(np.abs(distance) < _DOUBT):
        exact = Fraction(int(j[i]), scale)
        exponent = exact * (2 * int(k[i]) + exact) / 2
        accepted[i] = _continued(words[i]) < _exp_minus(exponent)
    return accepted


def _continued(word: int) -> int:
    """A uniform number of 192 bits that starts with these 64."""
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
