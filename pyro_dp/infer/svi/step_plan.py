"""How long the steps of DPSVI are, and how many there are: from public numbers alone."""

import math
from dataclasses import dataclass

from pyro_dp.mechanism.sampling import RecordSampler

USUAL_STEPS = 1000  # T, if it is not set
_SAMPLE_RATE, _RECORDS = 0.05, 1000  # in a step, at least
_FIRST, _LEAST = 0.1, 0.02  # first step size, and its least
_FALL, _FALL_OF_NOISY = 100.0, 10.0  # first over last step size
_NOISY, _VERY_NOISY = 0.01, 0.05  # rho
_OF_MANY = 0.1, 0.01  # first and last, of many latents
_OF_NETWORKS = 0.03, 0.003  # and of many parameters that records see
_OF_QUIET_NETWORKS = 0.01, 0.001  # without noise, which makes Adam's steps shorter
_OF_ROWS = 0.1, 0.01  # first and last, of parameters per record
_MANY = 4  # steps for each latent
BETAS = 0.9, 0.95  # Adam's: it soon forgets first gradients that are far too large


def usual_rate(size: int) -> float:
    """The sample rate for N records, if it is not set."""
    return max(_SAMPLE_RATE, min(1.0, _RECORDS / size))


def row_step_size(done: float) -> float:
    """The step size of parameters per record, whose gradients have no privacy noise.

    It falls in the second half of the run. Rows of discrete latents travel far, and longest after
    the global latents have settled.

    :param done: the fraction of steps that were taken.
    """
    first, last = _OF_ROWS
    return float(first * (last / first) ** max(0.0, 2 * done - 1))


@dataclass(frozen=True)
class StepPlan:
    """Step sizes of an Adam that fall geometrically, to a hundredth, or to a tenth with noise.

    Small last steps are close to a posterior that is narrow. If noise hides nearly everything, long
    first steps walk at random and far away.

    :param num_steps: T.
    :param dim: d, coordinates of a released gradient.
    :param size: N.
    :param noise: sigma / (q sqrt(T)), of all released gradients together, in units of C.
    :param sees_parameters: whether records see parameters, such as weights of a decoder, beside
        latents or instead of them.
    """

    num_steps: int
    dim: int
    size: int
    noise: float
    sees_parameters: bool

    @staticmethod
    def of(
        num_steps: int | None, dim: int, sampler: RecordSampler, noise: float, sees: bool
    ) -> "StepPlan":
        """:param noise: that of a released sum, in units of C."""
        steps = num_steps or USUAL_STEPS
        of_all = noise / sampler.sample_rate / math.sqrt(steps)
        return StepPlan(steps, dim, sampler.size, of_all, sees)

    @property
    def ratio(self) -> float:
        """rho: about the noise in a released curvature, over the curvature (as DPSEP's)."""
        return 5 * math.sqrt(2) * self.dim**1.5 * self.noise / self.size

    @property
    def is_of_many(self) -> bool:
        return self.num_steps <= _MANY * self.dim

    def step_size(self, step: int) -> float:
        """:param step: from 0."""
        if self.is_of_many:
            return self._between(*self._of_many, step)
        first = _FIRST
        if self.ratio > _VERY_NOISY:
            first = max(_LEAST, _FIRST * (_VERY_NOISY / self.ratio) ** 0.3)
        noisy = min(1.0, self.ratio / _NOISY)
        return self._between(first, first / (_FALL * (_FALL_OF_NOISY / _FALL) ** noisy), step)

    @property
    def _of_many(self) -> tuple[float, float]:
        if not self.sees_parameters:
            return _OF_MANY
        return _OF_NETWORKS if self.noise else _OF_QUIET_NETWORKS

    def _between(self, first: float, last: float, step: float) -> float:
        return float(first * (last / first) ** (step / self.num_steps))
