"""Loss and gradient norms without noise: for :func:`~pyro_dp.mechanism.nonprivate.nonprivate`."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_dp.infer.svi.eager_step import PreparedGradient
from pyro_dp.mechanism.blocks import Block
from pyro_dp.mechanism.contributions import Contributions, Measured
from pyro_dp.mechanism.nonprivate import row_norms
from pyro_dp.mechanism.streams import LocalStream
from pyro_dp.utils.torch_state import private_rng


def exact_loss(
    prepared: PreparedGradient, batches: Iterable[Tensor], stream: np.random.Generator
) -> float:
    """The negative ELBO of all records, with the draws that the next step would make."""
    kept, outside = _gradients(prepared, batches, stream)
    return sum(kept.losses) + outside


def exact_norms(
    prepared: PreparedGradient, batches: Iterable[Tensor], stream: np.random.Generator
) -> Tensor:
    """Norms of the records' gradients before they are clipped, (N,)."""
    kept, _ = _gradients(prepared, batches, stream)
    return torch.cat(kept.norms)


@torch.enable_grad()
def _gradients(
    prepared: PreparedGradient, batches: Iterable[Tensor], stream: np.random.Generator
) -> tuple["_Kept", float]:
    """Norms and losses of the records, and the loss outside the plate."""
    eager = replace(prepared.step.eager, releases_loss=True, report=None)
    particles = eager.draw()
    local = [LocalStream(stream) for _ in particles]
    kept: Any = _Kept([Block(eager.size(particles), 1.0)])
    with private_rng(stream):
        for chosen in batches:
            eager.add_microbatch(kept, particles, chosen, local)
    outside = torch.stack([particle.loss.detach() for particle in particles]).mean()
    return kept, outside.item()


class _Kept:
    """In place of a clipped sum: the norms of records, and the sum of their losses."""

    def __init__(self, blocks: list[Block]):
        self.blocks = blocks
        self.norms: list[Tensor] = []
        self.losses: list[float] = []

    def add(self, gradients: Measured, losses: Contributions) -> None:
        norms = row_norms(gradients)
        self.norms.append(norms)
        self.losses.append(losses.weighted_sum(torch.ones_like(norms).unsqueeze(1)).item())
