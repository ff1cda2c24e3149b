"""Counts that were released with noise: what to expect, given that they are not negative."""

import math

import torch
from torch import Tensor

_FAR = 50.0  # standard deviations below zero


def expected_counts(noisy: Tensor, sd: float, prior_mean: Tensor) -> Tensor:
    """E[x | noisy] for x ~ Exponential with this mean and noisy ~ N(x, sd^2).

    This is the mean of N(noisy - sd^2 / prior_mean, sd^2), truncated to what is positive. Where the
    count stands out of the noise, it is the released one; where it drowns, the prior's mean.

    :param noisy: any shape.
    :param sd: of the noise; 0 for none.
    :param prior_mean: > 0, of a shape that broadcasts.
    :returns: >= 0.
    """
    if sd == 0:
        return noisy.clamp(min=0.0)
    below = sd / prior_mean - noisy / sd  # the mean before truncation, in sds below zero
    hazard = math.sqrt(2 / math.pi) / torch.special.erfcx(below / math.sqrt(2))
    inverse = 1 / below.clamp(min=_FAR)
    far = inverse * (1 - 2 * inverse.square())  # hazard - below, without cancellation
    return sd * torch.where(below > _FAR, far, (hazard - below).clamp(min=0.0))
