"""The bound of a record's gradient, from the histograms of norms that its releases bring."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_dp.infer.svi.gradient_bound import bias, bound, read
from pyro_dp.mechanism.blocks import LEAST_BOUND
from pyro_dp.mechanism.clipped_fraction import ClippedFraction
from pyro_dp.mechanism.norm_histogram import SIZE, Norms
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_count, require_number

_SPREAD, _SPREAD_LATER = 2.0, 1.0  # of a guess of norms, in nats
_LONGER = 1.5  # histograms at one reading, in terms of those at the one before
_DAMAGED = "load_state_dict: histogram is damaged."


@dataclass(frozen=True, eq=False)
class HistogramBound:
    """C, and the histograms that it follows: all of it was released.

    Their mean weighs each in proportion to its number, as norms are others where the posterior was
    elsewhere, and to the inverse of its variance.

    :param size: number N of records.
    :param dim: coordinates of a record's gradient.
    :param noise: of the mean of all gradients that a run releases, in units of C.
    :param of_many: there are few steps for each latent. Then C is the records' median norm. Steps
        that adapt to the gradient's size need its direction, and a bound above most norms pays
        noise in each of many directions for that of few records.
    :param counts: the mean histogram, (SIZE,).
    :param variance: of a bin, by noise and sampling, on average over the bins.
    :param weight: of all histograms so far.
    :param steps: number of them.
    :param next_reading: number at which C is chosen anew.
    :param bound: C.
    :param typical: norm of a record by the first histogram. (By the latest it would drift away
        where the noise hides all.)
    """

    size: int
    dim: int
    noise: float
    of_many: bool
    counts: Tensor
    variance: float = 0.0
    weight: float = 0.0
    steps: int = 0
    next_reading: int = 1
    bound: float = math.inf
    typical: float | None = None

    @staticmethod
    def start(size: int, dim: int, noise: float, of_many: bool = False) -> "HistogramBound":
        """Before the first histogram."""
        return HistogramBound(size, dim, noise, of_many, torch.zeros(SIZE, dtype=torch.float64))

    def updated(self, counts: Tensor, sd: float, rate: float) -> "HistogramBound":
        """With one more histogram.

        :param counts: released estimate of all records' bins, (SIZE,).
        :param sd: of its noise in a bin.
        :param rate: of sampling.
        """
        steps = self.steps + 1
        # Sampling adds N (1 - rate) / rate to the squared distance of all bins together.
        variance = sd**2 + self.size * (1 - rate) / (rate * SIZE)
        weight = self.weight + steps / variance
        share = steps / variance / weight
        new = replace(
            self,
            counts=self.counts.to(counts.device).lerp(counts, share),
            variance=(1 - share) ** 2 * self.variance + share**2 * variance,
            weight=weight,
            steps=steps,
        )
        if steps < self.next_reading:
            return new
        norms = new._norms()
        chosen = norms.median if self.of_many else bound(norms, self.dim, self.noise)
        return replace(
            new,
            bound=max(LEAST_BOUND, chosen),
            typical=self.typical or norms.median,
            next_reading=max(steps + 1, math.ceil(_LONGER * steps)),
        )

    def clipped(self, bound: float) -> ClippedFraction:
        """Of all N records, at this bound."""
        norms = self._norms()
        above = max(1, int((norms.norms > bound).sum()))
        error = math.sqrt(above * self.variance) / self.size
        return ClippedFraction(norms.share_above(bound), error)

    def lost(self, bound: float) -> float:
        """About what this bound takes from a coordinate of all records' gradient."""
        return bias(self._norms(), np.array([bound]), self.dim).item()

    def _norms(self) -> Norms:
        counts, sd = self.counts.cpu().numpy(), math.sqrt(self.variance)
        if self.typical is None:
            return read(counts, sd, self.size, math.sqrt(self.dim), _SPREAD)
        return read(counts, sd, self.size, self.typical, _SPREAD_LATER)

    def state(self) -> dict[str, Any]:
        """As a tensor and numbers."""
        return dict(vars(self))

    @staticmethod
    def resumed(state: Any) -> "HistogramBound":
        """What :meth:`state` was taken of.

        :raises ConfigurationError: it is no such state.
        """
        names = {each.name for each in fields(HistogramBound)}
        if not isinstance(state, Mapping):
            raise ConfigurationError(_DAMAGED)
        # Version 0.2.0 kept another number.
        state = {name: value for name, value in state.items() if name != "information"}
        if state.keys() != names:
            raise ConfigurationError(_DAMAGED)
        for name in ("size", "dim", "steps", "next_reading"):
            require_count(f"histogram.{name}", state[name])
        for name in ("noise", "variance", "weight", "bound", "typical"):
            require_number(f"histogram.{name}", state[name], above=0.0, below=math.inf)
        if not isinstance(state["of_many"], bool):
            raise ConfigurationError(_DAMAGED)
        counts = state["counts"]
        if not (isinstance(counts, Tensor) and counts.shape == (SIZE,) and counts.isfinite().all()):
            raise ConfigurationError(_DAMAGED)
        return HistogramBound(**state)
