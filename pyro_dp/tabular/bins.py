"""Bins of a column: which values have one code."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_count, require_number


@dataclass(frozen=True)
class Bins:
    """Bin i is [edges[i], edges[i + 1]); the last one has its end, too."""

    edges: tuple[float, ...]  # the last one of whole numbers is one more than the largest
    labels: tuple[str, ...]
    whole: bool  # numbers are whole
    draws_whole: bool = False  # numbers are drawn whole, in bins that hold any

    @property
    def size(self) -> int:
        return len(self.edges) - 1

    @cached_property
    def _edges(self) -> np.ndarray:
        return np.array(self.edges, dtype=np.int64 if self.whole else np.float64)

    def codes(self, values: np.ndarray) -> np.ndarray:
        """Which bin each value lies in; those below are in the first, those above in the last."""
        return np.searchsorted(self._edges[1:-1], values, side="right").astype(np.int64)

    def draw(self, codes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A value for each code, uniform within its bin, of few decimals: a thousand values of the
        narrowest bin differ."""
        low, high = self._edges[codes], self._edges[codes + 1]
        if self.whole:
            return rng.integers(low, high)
        drawn = np.minimum(low + rng.random(codes.shape) * (high - low), high)
        shift = 1.0 if self.draws_whole else self._shift
        # Rounding alone would move half of a bin's first number into the bin before it.
        first, stop = np.ceil(self._edges[:-1] * shift), np.ceil(self._edges[1:] * shift)
        stop[-1] = np.floor(self._edges[-1] * shift) + 1
        some = (first < stop)[codes] & (abs(first) + abs(stop) < 2.0**52)[codes]
        drawn[some] = rng.integers(first[codes[some]], stop[codes[some]]) / shift
        return np.clip(drawn, low, high)

    @cached_property
    def _shift(self) -> float:
        """The power of ten without which the decimals are left."""
        wanted = np.ceil(3 - np.log10(np.diff(self._edges).min()))
        return float(10.0 ** np.clip(wanted, 0.0, 15.0))

    def within(self, low: float, high: float) -> np.ndarray:
        """Which bins lie wholly in [low, high], (size,)."""
        ends = self._edges[1:] - 1 if self.whole else self._edges[1:]
        return (self._edges[:-1] >= low) & (ends <= high)


def of_range(
    bins: int | Sequence[float],
    lower: float,
    upper: float,
    text: Callable[[Any], str],
    *,
    whole: bool,
    draws_whole: bool = False,
) -> Bins:
    """
    :param bins: how many of equal width, or their edges, from ``lower`` to ``upper``.
    :param text: how an edge is written in a label.
    :raises ConfigurationError: neither; or more bins than whole numbers.
    """
    edges = _edges(bins, lower, upper, whole)
    if any(low >= high for low, high in itertools.pairwise(edges)):
        raise ConfigurationError("bins: edges must ascend, and differ as floats.")
    if whole:
        edges = [int(edge) for edge in edges]
        pairs = [(text(low), text(high - 1)) for low, high in itertools.pairwise(edges)]
        labels = [low if low == high else f"{low} to {high}" for low, high in pairs]
    else:
        labels = [f"[{text(low)}, {text(high)})" for low, high in itertools.pairwise(edges)]
        labels[-1] = labels[-1][:-1] + "]"
    return Bins(tuple(edges), tuple(labels), whole, draws_whole)


def _edges(bins: Any, lower: float, upper: float, whole: bool) -> list[float]:
    top = upper + 1 if whole else upper
    if not isinstance(bins, (tuple, list)):
        count = require_count("bins", bins)
        if whole and count > top - lower:
            raise ConfigurationError(
                f"bins={count} is more than there are whole numbers from lower to upper: say fewer."
            )
        equal = np.linspace(lower, top, count + 1)
        return (np.floor(equal) if whole else equal).tolist()
    edges = [require_number("bins", edge, above=-np.inf, below=np.inf) for edge in bins]
    if len(edges) < 2 or edges[0] != lower or edges[-1] != upper:
        raise ConfigurationError("bins: the first edge must be lower, and the last one upper.")
    if whole and any(edge % 1 for edge in edges):
        raise ConfigurationError("bins: the edges of whole numbers must be whole.")
    return [*edges[:-1], top]
