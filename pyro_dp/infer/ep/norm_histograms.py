"""Released histograms of the norms of the records' parts, and what they say together."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dp.mechanism.clipped_fraction import ClippedFraction
from pyro_dp.mechanism.norm_histogram import Norms

_NEAR = 0.1  # squared distance from which norms are of other records, so to speak
_SPREAD = 2.0  # of the first guess of norms, in nats
_SPREAD_LATER = 0.25
_TYPICAL = 0.8  # norm of a record's gradient, over the root of its curvature


@dataclass(frozen=True, eq=False)
class MeanHistogram:
    """
    :param counts: of the N records, (SIZE,), noisy.
    :param sd: of the noise in a bin.
    :param size: N.
    """

    counts: Tensor
    sd: float
    size: int

    def opening_norms(self, dim: int) -> Norms:
        """Of gradients, where nothing else is known yet.

        :param dim: of the latents.
        """
        return self._read(math.sqrt(dim), _SPREAD, tail=False)

    def norms(self, scale: float, tail: bool) -> Norms:
        """
        :param scale: curvature of a record, all directions together.
        :param tail: as for :meth:`Norms.read`.
        """
        return self._read(_TYPICAL * math.sqrt(scale), _SPREAD_LATER, tail=tail)

    def above(self, bound: float) -> ClippedFraction:
        """How many norms are above it, by the sum of the noisy counts there.

        Its standard error is the noise's.
        """
        above = self.counts[Norms.places_above(bound)]
        fraction = above.sum().item() / self.size
        error = self.sd * math.sqrt(len(above)) / self.size
        return ClippedFraction(min(max(fraction, 0.0), 1.0), error)

    def _read(self, typical: float, spread: float, *, tail: bool) -> Norms:
        counts = self.counts.cpu().numpy()
        return Norms.read(counts, self.sd, self.size, typical=typical, spread=spread, tail=tail)


@dataclass(frozen=True, eq=False)
class NormHistograms:
    """
    :param counts: released histograms, and the standard deviation of their noise.
    """

    counts: tuple[tuple[Tensor, float], ...] = ()

    def with_one(self, counts: Tensor, sd: float) -> "NormHistograms":
        return NormHistograms((*self.counts, (counts, sd)))

    def mean(self, distances: Tensor, size: int) -> MeanHistogram:
        """Mean of all, above all of those near the posterior.

        :param distances: squared, of where each was made.
        :param size: N.
        """
        sds = torch.tensor([sd for _, sd in self.counts]).to(distances).clamp(min=1e-6)
        weights = 1 / ((1 + (distances / _NEAR) ** 2) * sds**2)
        weights = weights / weights.sum()
        counts = torch.tensordot(weights, torch.stack([each for each, _ in self.counts]), dims=1)
        return MeanHistogram(counts, (weights * sds).norm().item(), size)

    def state(self) -> list[tuple[Tensor, float]]:
        return list(self.counts)

    @staticmethod
    def resumed(state: Iterable[tuple[Tensor, float]]) -> "NormHistograms":
        """What :meth:`state` was taken of."""
        return NormHistograms(tuple((counts, sd) for counts, sd in state))
