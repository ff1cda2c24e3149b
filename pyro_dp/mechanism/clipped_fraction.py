"""The released fraction of clipped records, and a clipping bound that adapts to it.

Each record adds a bit to the release, +1/2 if it is within the bound, and -1/2 otherwise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_dp.mechanism.contributions import LEAST_BOUND, Block
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_number

SHARE = 0.01  # the bit's share of the privacy cost
MANY = 0.25  # a large fraction of clipped records
_HIDDEN = 0.5  # a standard error beyond which noise hides the fraction
_SIGNIFICANT = 3.0  # standard errors
_MOST_PENDING = 1000  # steps


class ClippedFraction(NamedTuple):
    """A released estimate of the fraction of records whose contribution was clipped.

    :param fraction: in [0, 1].
    :param standard_error: its standard error, from the noise and the sampling of records.

    >>> clipped = ClippedFraction(fraction=0.4, standard_error=0.02)  # as svi.clipped_fraction is
    >>> clipped.is_large
    True
    """

    fraction: float
    standard_error: float

    @property
    def is_large(self) -> bool:
        """Whether significantly more than a quarter of the records were clipped.

        It must exceed a quarter by three standard errors.
        """
        return self.fraction - _SIGNIFICANT * self.standard_error > MANY

    def __str__(self) -> str:
        if self.standard_error > _HIDDEN:
            return "hidden by the noise"
        return f"{self.fraction:.0%} +- {self.standard_error:.1%}"


class ClippedFractions:
    """An estimate for each step, from the released sum of bits.

    :param shares: the bit's share of the privacy cost; empty: releases have no bit.
    """

    def __init__(self, *shares: float) -> None:
        self.blocks = [Block(1, 0.5, share) for share in shares]
        self._steps: list[tuple[float, float]] = []  # fraction, variance
        # Released tensors that were not read yet, because reading waits for the device.
        self._pending: list[tuple[Tensor, int, float]] = []

    def add(
        self, released: Sequence[Tensor], sampler: RecordSampler, noise_multiplier: float
    ) -> None:
        """Add a step.

        :param released: the estimated sum of the bits over all records, (1,), for each block.
        """
        rate, size = sampler.sample_rate, sampler.size
        for block, each in zip(self.blocks, released, strict=True):
            noise = noise_multiplier / (2 * math.sqrt(block.share) * rate * size)
            # The sum of a Poisson sample of bits +-1/2 has variance N rate (1 - rate) / 4.
            variance = noise**2 + (1 - rate) / (4 * rate * size)
            self._pending.append((each, size, variance))
        if len(self._pending) >= _MOST_PENDING:
            self._look()

    def mean(self) -> ClippedFraction | None:
        """The mean over the last half of the steps; None before the first step."""
        self._look()
        last = self._steps[len(self._steps) // 2 :]
        if not last:
            return None
        fraction = sum(each for each, _ in last) / len(last)
        error = math.sqrt(sum(variance for _, variance in last)) / len(last)
        return ClippedFraction(min(max(fraction, 0.0), 1.0), error)

    def state(self) -> Tensor:
        """The fraction and its variance in each step, (number of steps, 2)."""
        self._look()
        return torch.tensor(self._steps, dtype=torch.float64).reshape(-1, 2)

    def load(self, state: Tensor | None) -> None:
        self._pending = []
        self._steps = [] if state is None else [tuple(step) for step in state.tolist()]

    def _look(self) -> None:
        if not self._pending:
            return
        sums = torch.cat([released for released, *_ in self._pending]).tolist()
        for total, (_, size, variance) in zip(sums, self._pending, strict=True):
            self._steps.append((0.5 - total / size, variance))
        self._pending = []


def require_fractions(state: Any) -> None:
    """:raises ConfigurationError: it is neither a result of ``ClippedFractions.state`` nor None."""
    is_state = isinstance(state, Tensor) and state.shape[1:] == (2,) and state.isfinite().all()
    if not (state is None or is_state):
        raise ConfigurationError("load_state_dict: clipped_fractions is damaged.")


@dataclass(frozen=True)
class AdaptiveClip:
    """A clipping bound that adapts to a quantile of the per-record norms.

    In each step every record adds the bit [norm <= C], centred to +-1/2, to the same release. Let b
    be the noisy fraction of records within the bound. The update is
    C <- C exp(-learning_rate (b - quantile)) (Andrew et al. 2021, arXiv 1905.03871).

    :param initial: the bound of the first step.
    :param quantile: the fraction of records that should be within the bound, in (0, 1).
    :param learning_rate: step size of the geometric update, in (0, 100).
    :param share: the bit's part of the privacy cost (of sigma^-2), in (0, 1).
    :raises ConfigurationError: a setting is out of range.

    >>> clip = AdaptiveClip(initial=10.0, quantile=0.8)  # PaperDPSVI(..., clip=clip)
    >>> print(f"{clip.updated(10.0, within=1.0):.1f}")  # all records are within 10
    9.6
    """

    initial: float = 1.0
    quantile: float = 0.5
    learning_rate: float = 0.2
    share: float = 0.01

    def __post_init__(self) -> None:
        uppers = {"initial": math.inf, "learning_rate": 100.0, "quantile": 1.0, "share": 1.0}
        for name, upper in uppers.items():
            require_number(f"AdaptiveClip.{name}", getattr(self, name), above=0.0, below=upper)

    def updated(self, bound: float, within: float) -> float:
        """The next bound, from the released fraction of records ``within`` the present one."""
        # One large draw of noise must not change the bound too much. Clamping is post-processing.
        change = -self.learning_rate * (min(max(within, 0.0), 1.0) - self.quantile)
        return max(LEAST_BOUND, bound * math.exp(change))
