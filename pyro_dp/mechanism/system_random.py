"""Random numbers of the operating system, with exact probabilities.

Where a library's generator computes its distributions in floating point, every draw here compares
random bits with integers. Nothing is kept between two draws: what the operating system hands out is
never handed out twice, so that forked, copied, restored or twice imported processes cannot share a
stream, and a process's memory holds nothing from which other draws could be computed.
"""

import math
import os

import numpy as np


class SystemGenerator:
    """Uniform words, and the two distributions by which records are sampled.

    :meth:`binomial` and :meth:`choice` are what a ``numpy.random.Generator`` calls by these names.
    """

    def words(self, count: int, dtype: type[np.unsignedinteger] = np.uint64) -> np.ndarray:
        """Uniform words, (count,)."""
        return np.frombuffer(os.urandom(count * np.dtype(dtype).itemsize), dtype)

    def below(self, limit: int, count: int) -> np.ndarray:
        """Uniform integers in [0, limit), (count,), unsigned.

        :param limit: at most 2^63.
        """
        bits = (limit - 1).bit_length()
        dtype = np.uint16 if bits <= 16 else np.uint32 if bits <= 32 else np.uint64
        found = np.empty(0, dtype)
        while len(found) < count:  # of words of so many bits, at least half are below the limit
            missing = count - len(found)
            spare = math.ceil(missing * 2**bits / limit) + 8
            words = self.words(spare, dtype) & dtype(2**bits - 1)
            found = np.concatenate([found, words[words < limit]])
        return found[:count]

    def binomial(self, n: int, p: float) -> int:
        """How many of ``n`` come up, each with probability ``p`` in (0, 1).

        With p = f 2^-k, f in [1/2, 1): those that show heads k times, and then pass a test of
        probability f, which is a multiple of 2^-53.
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
