"""How far a step may go and when averaging begins, judged by released numbers: post-processing."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pyro_dp.utils.linalg import apply, inverse

_SIGNIFICANT = 3.0  # standard deviations of the noise
_RELEVANT = 0.01  # nats
_SETTLED = 1.0  # nats that one more step would gain
_LONGEST_WAY = 0.5  # share of the steps
_CURVED_WAY = 0.8
_CHANGING = ("floor", "_way", "_averaged", "_anchor", "taken", "judged", "unsettled")


class StepControl:
    """Judgements on G, the gradient of the log posterior at the cavity means.

    *Overshooting.* From anchor a to mean m the log posterior changes by about (m - a)'(G_a + G_m) /
    2. If it fell by more than noise explains, the estimate at m is left aside. The next step starts
    from a again, with a larger :attr:`floor` on the precision's eigenvalues, which makes it
    shorter. A Gaussian posterior never has this.

    *Averaging.* The posterior travels while G' P^-1 G stands out of the noise, for at most half of
    the steps. Meanwhile each estimate replaces the one before. After that, estimates are averaged.
    If predictors are curved, as in networks, gradients are weak and turn while the mean moves. Then
    the travel takes four fifths of the steps.

    *Settling.* Estimates of the last half of the steps can speak against it. One does if it was
    left aside, or if G' P^-1 G stood out of the noise by more than one nat. If most of them do, the
    posterior has not :attr:`settled`.

    :param curved: the predictors are no linear function of the latents.
    :param floor: the first step's floor.
    """

    def __init__(self, num_steps: int, curved: bool, floor: float):
        self.floor = floor
        self._curved = curved
        self._way = math.ceil((_CURVED_WAY if curved else _LONGEST_WAY) * num_steps)
        self._averaged = 0
        self._last_half = num_steps // 2
        self.taken = 0  # steps
        self.judged = 0  # steps in the last half
        self.unsettled = 0  # judged steps that speak against settling
        self._anchor: tuple[Tensor, Tensor, float] | None = None

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _CHANGING}

    def load(self, state: Mapping[str, Any]) -> None:
        # States of older versions have fewer.
        vars(self).update({name: state[name] for name in _CHANGING if name in state})

    @property
    def damping(self) -> float:
        """1 while the posterior travels, then 1/2, 1/3, ...: the average of all estimates since."""
        return 1 / max(1, self._averaged)

    @property
    def settled(self) -> bool:
        """Whether the estimates of the last half of the steps say so, so far as there are any."""
        return 2 * self.unsettled <= self.judged

    def accepts(self, mean: Tensor, gradient: Tensor, precision: Tensor, noise: Tensor) -> bool:
        """Judge an estimate: whether to use it.

        :param mean: m of the cavity that it was made at, (d,).
        :param gradient: G there, (d,), with the noise of this step.
        :param precision: P, the posterior's estimated precision, (d, d) or (d,).
        :param noise: covariance of the gradient's noise, of the same shape.
        """
        accepted = self._uses(mean, gradient, precision, noise)
        self.taken += 1
        if self.taken > self._last_half:
            self.judged += 1
            self.unsettled += not accepted or not (
                _excess(gradient, precision, noise) <= 2 * _SETTLED
            )
        return accepted

    def _uses(self, mean: Tensor, gradient: Tensor, precision: Tensor, noise: Tensor) -> bool:
        self._way -= 1
        overshot = self._averaged == 0 and self._overshot(mean, gradient, noise)
        if overshot and self._anchor is not None:
            _, _, before = self._anchor
            self.floor = max(4 * self.floor, before)
            return False
        self.floor /= 2
        size = precision.mean() if precision.dim() == 1 else precision.diagonal().mean()
        self._anchor = mean, gradient, size.item()
        small = not self._curved and self._way > 0 and _excess(gradient, precision, noise) <= 0
        if self._averaged or (noise.any() and (self._way <= 0 or small)):
            self._averaged += 1
        return True

    def _overshot(self, mean: Tensor, gradient: Tensor, noise: Tensor) -> bool:
        if self._anchor is None:
            return False
        anchor, before, _ = self._anchor
        step = mean - anchor
        gain = step @ (before + gradient)
        spread = (2 * step @ apply(noise, step)).clamp(min=0.0).sqrt()
        return bool(gain < -_RELEVANT - _SIGNIFICANT * spread)


def _excess(gradient: Tensor, precision: Tensor, noise: Tensor) -> float:
    """The excess of G' P^-1 G over what noise explains."""
    covariance = inverse(precision)
    squared = gradient @ apply(covariance, gradient)
    # If there were noise only, it would have this mean and variance.
    if covariance.dim() == 1:
        relative = covariance * noise
        mean, variance = relative.sum(), 2 * relative.square().sum()
    else:
        relative = covariance @ noise
        mean, variance = relative.trace(), 2 * (relative * relative.T).sum()
    return (squared - mean - _SIGNIFICANT * variance.sqrt()).item()
