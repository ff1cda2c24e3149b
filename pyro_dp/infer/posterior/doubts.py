"""Reasons why an interval may not hold what it says, told from what was released."""

import torch
from torch import Tensor

HIDDEN = "the privacy noise outweighs the data, and if far larger, the interval is the prior's"
NOT_ARRIVED = "the steps have not reached the posterior, which may be anywhere"
MANY_CLIPPED = "clipping may move it by as much as its interval is wide"


def mostly_in(directions: Tensor, variances: Tensor, hidden: Tensor) -> Tensor:
    """Coordinates more than half of whose variance lies in hidden directions, (d,).

    :param directions: in columns, (d, k).
    :param variances: along each, (k,).
    :param hidden: which of them are, (k,).
    """
    parts = directions.square() * variances
    return parts[:, hidden].sum(dim=1) > 0.5 * parts.sum(dim=1)


def everywhere(like: Tensor) -> Tensor:
    """A doubt of all coordinates."""
    return torch.ones_like(like, dtype=torch.bool)
