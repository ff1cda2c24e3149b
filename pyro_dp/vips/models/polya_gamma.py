"""Pólya-Gamma variables (Polson, Scott & Windle 2013, arXiv 1205.0310)."""

import torch
from torch import Tensor


def polya_gamma_mean(squared: Tensor) -> Tensor:
    """Mean of PG(1, c), tanh(c / 2) / (2 c), given c^2: at most 1/4."""
    c = squared.clamp(min=0.0).sqrt()
    near_zero = 0.25 - squared / 48  # the next term is c^4 / 480
    return torch.where(c < 1e-3, near_zero, torch.tanh(c / 2) / (2 * c))
