"""Whether a frame is one that was seen before, without keeping it."""

import hashlib
import os

import numpy as np


class Fingerprint:
    """A salted digest of rows of codes, in any order: private, as is all that comes from it.

    :param codes: (N, ...).
    """

    def __init__(self, codes: np.ndarray):
        self._salt = os.urandom(32)
        self._digest = self._of(codes)

    def same_as(self, codes: np.ndarray) -> bool:
        return self._of(codes) == self._digest

    def _of(self, codes: np.ndarray) -> bytes:
        rows = np.ascontiguousarray(codes.reshape(len(codes), -1))
        ordered = rows[np.lexsort(rows.T)]
        return hashlib.blake2b(ordered.tobytes(), key=self._salt).digest()
