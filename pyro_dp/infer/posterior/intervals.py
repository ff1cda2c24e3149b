"""Intervals of a posterior's sites, and the lines in which a table or a picture shows them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from torch import Tensor


class Interval(NamedTuple):
    """Of each element of a site, in the model's own space: two tensors of the site's shape.

    :param lower: ends of the intervals.
    :param upper: ends of the intervals.
    """

    lower: Tensor
    upper: Tensor


@dataclass(frozen=True)
class Line:
    """One element of a site.

    :param name: ``"w[3]"``.
    :param plain: ends of its interval without the noise.
    :param aware: ends of its interval.
    """

    name: str
    median: float
    plain: tuple[float, float]
    aware: tuple[float, float]

    @property
    def noise(self) -> float:
        """How much of the interval's squared width the noise makes, in [0, 1]."""
        without, width = (end - start for start, end in (self.plain, self.aware))
        if not 0.0 < width < math.inf:
            return 0.0
        return max(1.0 - (without / width) ** 2, 0.0)


def element_names(site: str, shape: Sequence[int]) -> list[str]:
    """``"w[0]"``, ``"w[1, 2]"``; ``"w"`` for a single number without a shape."""
    if not len(shape):
        return [site]
    places = product(*(range(length) for length in shape))
    return [f"{site}[{', '.join(map(str, place))}]" for place in places]


def lines(aware: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> Iterator[Line]:
    """Of all elements, site by site.

    :param aware: lower end, median and upper end, ``(3, *site shape)`` each.
    :param plain: the same without the noise.
    """
    for site, quantiles in aware.items():
        names = element_names(site, quantiles.shape[1:])
        ends, without = (each.reshape(3, -1).T.tolist() for each in (quantiles, plain[site]))
        for name, (low, median, high), (start, _, end) in zip(names, ends, without, strict=True):
            yield Line(name, median, (start, end), (low, high))
