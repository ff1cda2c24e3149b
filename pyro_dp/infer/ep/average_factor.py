"""The average factor f of stochastic EP, raised to the number of records: all that records say."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_dp.infer.ep.site_factors import Structure
from pyro_dp.infer.posterior.gaussian import Gaussian
from pyro_dp.utils.linalg import floored

_CHANGING = ("noise_variance", "sampling_variance", "_centre", "_stepping", "_radius", "_replaced")


class AverageFactor:
    """f^N, a damped average of released estimates; everything in it is public.

    :attr:`known` is the Gaussian that was released, and that is reported. The next step stands on
    :meth:`projected`. There, eigenvalues below the noise's own spectral radius are raised to it.
    That shortens the next step, and is no information about the latents. The precision is raised
    around the average of the cavity means, where noise in the precision does not matter.

    While estimates replace each other (damping 1), steps stand on the average of all precisions so
    far, which has less noise than the last one.

    :param structure: its precision's.
    :param initial: f^N before the first step.
    :param centre: mean of the initial posterior, (d,).
    """

    def __init__(self, structure: Structure, initial: Gaussian, centre: Tensor):
        self.structure = structure
        self.noise_variance = 0.0  # eta's, in each coordinate, from a centred release
        self.sampling_variance = 0.0  # eta's, in units of the sum of the records' precisions
        self._average = initial
        self._centre = centre
        self._stepping = initial.precision
        self._radius: Tensor | float = 0.0  # the radius of the noise in it
        self._replaced = 0

    def state(self) -> dict[str, Any]:
        """Everything that updates change, as tensors and numbers."""
        others = {name: value for name, value in vars(self).items() if name in _CHANGING}
        return others | {"_average": (self._average.eta, self._average.precision)}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from a result of :meth:`state`."""
        for name in _CHANGING:
            value = state[name]
            setattr(self, name, value.to(device) if isinstance(value, Tensor) else value)
        self._average = Gaussian(*state["_average"]).to(device)

    @property
    def known(self) -> Gaussian:
        """The average, with no negative precision."""
        precision = floored(self._average.precision, 0.0)
        return self._average.with_precision(precision, self._centre)

    def hidden(self) -> int:
        """The number of directions in which the next step's precision may be below its noise."""
        stepping = self._stepping
        values = stepping if stepping.dim() == 1 else torch.linalg.eigvalsh(stepping)
        return int((values < self._radius).sum())

    def projected(self, least: float = 0.0) -> Gaussian:
        """The average, with no precision below the noise level, nor below ``least``."""
        radius = torch.as_tensor(self._radius, dtype=torch.float64).clamp(min=least)
        return self._average.with_precision(floored(self._stepping, radius), self._centre)

    def update(
        self,
        estimate: Gaussian,
        cavity_mean: Tensor,
        damping: float,
        *,
        noise: float,
        weight: float,
        sample_rate: float,
    ) -> float:
        """f <- (1 - damping) f + damping f_hat, in natural parameters.

        :param noise: standard deviation of the noise in a coordinate of the estimate's eta.
        :param weight: kappa, so that a coordinate of the precision has noise / weight.
        :returns: Euclidean norm of the change of (eta, kappa Lambda).
        """
        before = self._average
        self._average = before ** (1 - damping) * estimate**damping
        self._centre = (1 - damping) * self._centre + damping * cavity_mean
        self.noise_variance = _averaged(self.noise_variance, noise**2, damping)
        excess = (1 - sample_rate) / sample_rate
        self.sampling_variance = _averaged(self.sampling_variance, excess, damping)
        if damping == 1 and noise > 0:
            self._replaced += 1
            self._stepping = self._stepping + (estimate.precision - self._stepping) / self._replaced
            variance = noise**2 / self._replaced
        else:
            self._stepping, variance = self._average.precision, self.noise_variance
        self._radius = self.structure.noise_radius(variance**0.5 / weight)
        change = self._average / before
        coordinates = weight * self.structure.coordinates(change.precision)
        return torch.cat([change.eta, coordinates]).norm().item()


def _averaged(variance: float, new: float, damping: float) -> float:
    return (1 - damping) ** 2 * variance + damping**2 * new
