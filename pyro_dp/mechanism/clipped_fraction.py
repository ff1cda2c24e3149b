"""How many records were clipped, told from a bit that joins the release: post-processing."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_dp.utils.errors import ConfigurationError

SHARE = 0.01  # of the privacy cost, that the bit takes
MANY = 0.25  # of the records
_HIDDEN = 0.5  # standard error
_SIGNIFICANT = 3.0  # standard errors
_MOST_PENDING = 1000


class ClippedFraction(NamedTuple):
    """A released estimate of the fraction of records whose part was clipped.

    :param fraction: in [0, 1].
    :param standard_error: of it, by the noise and by the sampling of records.

    >>> from pyro_dp import ClippedFraction
    >>> clipped = ClippedFraction(fraction=0.4, standard_error=0.02)  # as svi.clipped_fraction is
    >>> clipped.is_large
    True
    """

    fraction: float
    standard_error: float

    @property
    def is_large(self) -> bool:
        """Whether more than a quarter were clipped, beyond three standard errors."""
        return self.fraction - _SIGNIFICANT * self.standard_error > MANY

    def __str__(self) -> str:
        if self.standard_error > _HIDDEN:
            return "hidden by the noise"
        return f"{self.fraction:.0%} +- {self.standard_error:.1%}"


class ClippedFractions:
    """An estimate for each step, from the released sum of the bits +1/2 (within) and -1/2."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, float]] = []  # fraction, variance
        # As they were released: to look at one means to wait for a device.
        self._pending: list[tuple[Tensor, int, float]] = []

    def add(
        self, released: Tensor, size: int, rate: float, noise_multiplier: float, share: float
    ) -> None:
        """One more step.

        :param released: estimate of the sum of all records' bits, (1,).
        :param size: number N of records.
        :param rate: sample rate.
        :param noise_multiplier: of the whole release.
        :param share: of the bit in its cost.
        """
        noise = noise_multiplier / (2 * math.sqrt(share) * rate * size)
        # A sum of Poisson sampled +-1/2 has variance N rate (1 - rate) / 4, whatever they are.
        variance = noise**2 + (1 - rate) / (4 * rate * size)
        self._pending.append((released, size, variance))
        if len(self._pending) >= _MOST_PENDING:
            self._look()

    def mean(self) -> ClippedFraction | None:
        """Over the last half of the steps; None before the first."""
        self._look()
        last = self._steps[len(self._steps) // 2 :]
        if not last:
            return None
        fraction = sum(each for each, _ in last) / len(last)
        error = math.sqrt(sum(variance for _, variance in last)) / len(last)
        return ClippedFraction(min(max(fraction, 0.0), 1.0), error)

    def state(self) -> Tensor:
        """Fraction and variance of each step, (number of steps, 2)."""
        self._look()
        return torch.tensor(self._steps, dtype=torch.float64).reshape(-1, 2)

    def load(self, state: Tensor) -> None:
        """Go on from what :meth:`state` gave."""
        self._pending = []
        self._steps = [(fraction, variance) for fraction, variance in state.tolist()]

    def _look(self) -> None:
        if not self._pending:
            return
        sums = torch.cat([released for released, *_ in self._pending]).tolist()
        for total, (_, size, variance) in zip(sums, self._pending, strict=True):
            self._steps.append((0.5 - total / size, variance))
        self._pending = []


def require_fractions(state: Any) -> Tensor:
    """What a state has of :meth:`ClippedFractions.state`: nothing, if it is of an older version.

    :raises ConfigurationError: it is something else.
    """
    if state is None:
        return torch.zeros(0, 2)
    if not isinstance(state, Tensor) or state.shape[1:] != (2,) or not state.isfinite().all():
        raise ConfigurationError("load_state_dict: clipped_fractions is damaged.")
    return state
