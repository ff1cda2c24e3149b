"""What a run of DPSVI released about the likelihood: noisy gradients at public draws."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_dp.utils.errors import ConfigurationError

_DAMAGED = "load_state_dict: history is damaged."


class ReleasedGradients:
    """Estimates of d log p(y | z) / dz, summed over all N records, one for each draw z.

    All of it was released or is public.

    :param rate: q, at which records are sampled.
    :param size: N.
    :ivar cut: what clipping takes from a coordinate of each gradient, beyond what the bias of all
        has, (T,); None: nothing that is known.
    """

    def __init__(self, rate: float, size: int):
        self.rate, self.size = rate, size
        self.cut: Tensor | None = None
        self._draws: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._noise: list[float] = []

    def add(self, draw: Tensor, gradient: Tensor, noise: float) -> None:
        """One more release. Nothing is copied, and no device waited for.

        :param draw: z, unconstrained, (d,).
        :param gradient: the released sum, divided by q, (d,): of the likelihood alone.
        :param noise: standard deviation of the privacy noise in a coordinate of it, sigma C / q.
        """
        self._draws.append(draw.detach())
        self._gradients.append(gradient.detach())
        self._noise.append(noise)

    def __len__(self) -> int:
        return len(self._noise)

    @property
    def draws(self) -> Tensor:
        """(T, d), float64, on the CPU."""
        return _stacked(self._draws)

    @property
    def gradients(self) -> Tensor:
        """(T, d), float64, on the CPU."""
        return _stacked(self._gradients)

    @property
    def noise(self) -> Tensor:
        """(T,), float64, on the CPU."""
        return torch.tensor(self._noise, dtype=torch.float64)

    def state(self) -> dict[str, Any]:
        """All of it, as tensors and numbers."""
        names = ("rate", "size", "draws", "gradients", "noise")
        return {name: getattr(self, name) for name in names}

    @staticmethod
    def resumed(state: Mapping[str, Any]) -> "ReleasedGradients":
        """What :meth:`state` was taken of.

        :raises ConfigurationError: it is no such state.
        """
        if not isinstance(state, Mapping) or set(state) != set(ReleasedGradients(1.0, 1).state()):
            raise ConfigurationError(_DAMAGED)
        rate, size = state["rate"], state["size"]
        history = [state[name] for name in ("draws", "gradients", "noise")]
        whole = type(rate) is float and 0 < rate <= 1 and type(size) is int and size > 0
        if not whole or not all(_sound(each) for each in history):
            raise ConfigurationError(_DAMAGED)
        draws, gradients, noise = history
        if draws.shape != gradients.shape or noise.shape != draws.shape[:1] or noise.lt(0).any():
            raise ConfigurationError(_DAMAGED)
        found = ReleasedGradients(rate, size)
        for each in zip(draws, gradients, noise.tolist(), strict=True):
            found.add(*each)
        return found


def _stacked(rows: list[Tensor]) -> Tensor:
    if not rows:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack(rows).to(device="cpu", dtype=torch.float64)


def _sound(given: Any) -> bool:
    return isinstance(given, Tensor) and given.is_floating_point() and bool(given.isfinite().all())
