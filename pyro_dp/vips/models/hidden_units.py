"""The E-step of a sigmoid belief network: which hidden units are on in an image."""

import torch
from torch import Tensor


def hidden_units(field: Tensor, coupling: Tensor, sweeps: int) -> Tensor:
    """Means of independent hidden units of value -1/2 or 1/2, (B, K).

    Variational Bayes for p(x) proportional to exp(field . x - x' coupling x / 2): one unit after
    the other is updated given the others, from zero on, for a fixed number of sweeps.

    :param field: of each image, (B, K).
    :param coupling: (K, K), symmetric; its diagonal does not matter, since x^2 is 1/4.
    """
    between = coupling - torch.diag(coupling.diagonal())
    means = torch.zeros_like(field)
    for _ in range(sweeps):
        for k in range(field.shape[1]):
            means[:, k] = torch.tanh((field[:, k] - means @ between[:, k]) / 2) / 2
    return means
