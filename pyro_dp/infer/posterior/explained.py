"""``explain()`` of the inferences that find a posterior: a mixin."""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from pyro_dp.accounting import composition
from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import SubsampledGaussian
from pyro_dp.infer.posterior.explanation import DATA, NOISE, Explanation
from pyro_dp.infer.posterior.status import Status


class Found(Protocol):
    """What any posterior tells of itself."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def noise_share(self) -> Tensor: ...

    @property
    def status(self) -> Status: ...


class Explained(abc.ABC):
    """An inference that can say what limits its posterior. It stands last among the bases."""

    accountant: PrivacyAccountant

    @abc.abstractmethod
    def posterior(self, noise_aware: bool = True) -> Any:
        """What was found so far."""

    def _noise_parts(self) -> Mapping[str, Tensor]:
        """What makes the part of the variances that is not of the data.

        :returns: variances (d,), in a common unit, by the names of an explanation's shares.
        """
        return {NOISE: torch.ones(())}

    def explain(self) -> Explanation:
        """What limits the posterior so far, and which epsilon or N would help.

        **Guarantee.** It reads the posterior, numbers that were released, the ledger and the
        settings: post-processing, which costs nothing. Two runs that released the same numbers
        explain themselves in the same words, whatever their data.

        :raises ConfigurationError: as :meth:`posterior`.
        """
        posterior: Found = self.posterior()
        return Explanation(
            tuple(posterior.names),
            _shares(posterior.noise_share, self._noise_parts()),
            posterior.status,
            getattr(self, "clipped_fraction", None),
            self.accountant.get_epsilon(),
            _epsilon_at_half_noise(self.accountant),
        )


def _shares(noise: Tensor, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """
    :param noise: the share of all that is not of the data, (d,).
    :param parts: of it, (d,), in any unit; where all are zero, it is privacy noise.
    """
    total = sum(parts.values(), torch.zeros_like(noise))
    shares = {DATA: 1 - noise}
    for name, part in parts.items():
        alone = torch.full_like(noise, float(name == NOISE))
        shares[name] = noise * torch.where(total > 0, part / total, alone)
    return shares


def _epsilon_at_half_noise(accountant: PrivacyAccountant) -> float | None:
    """None, if the ledger has events other than Gaussian ones, or some without noise."""
    halved = {}
    for event, count in accountant.counted:
        if not isinstance(event, SubsampledGaussian) or not event.noise_multiplier:
            return None
        halved[replace(event, noise_multiplier=event.noise_multiplier / 2)] = count
    settings = accountant.delta, accountant.neighboring, accountant.engine
    return composition.epsilon(halved, *settings)
