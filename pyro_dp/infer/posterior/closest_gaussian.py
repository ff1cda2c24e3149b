"""The Gaussian closest to a density, by variational inference. No record enters."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_dp.infer.posterior.prior_density import BatchedGradient
from pyro_dp.utils.linalg import cholesky

_FEWEST = 128  # draws
# The first steps are small: a steep density does not throw them far away.
_ADAM, _STEP_SIZE, _FALLS = 300, 0.05, 0.1
_LBFGS, _ROUNDS, _SMALL = 200, 5, 1e-3  # it ends if the objective falls by less


def mean_field(gradients: BatchedGradient, mean: Tensor, sds: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and sds (d,) of the independent Gaussians closest in KL(q || p).

    :param gradients: those of log p.
    :param mean: where to start, (d,).
    :param sds: at the start, (d,).
    """
    start = [mean, sds.log()]
    found = _minimised(gradients, start, lambda leaves: leaves[1].exp().diag(), _ADAM)
    return found[0], found[1].exp()


def full_rank(gradients: BatchedGradient, mean: Tensor, sds: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (d,) and covariance (d, d) of the Gaussian closest in KL(q || p).

    Arguments are those that :func:`mean_field` has found.
    """
    start = [mean, sds.log(), torch.zeros(len(mean), len(mean)).to(mean)]

    def root(leaves: list[Tensor]) -> Tensor:
        _, logs, below = leaves
        return logs.exp().unsqueeze(1) * (below.tril(-1) + torch.eye(len(logs)).to(logs))

    found = _minimised(gradients, start, root, 0)
    factor = root(found)
    return found[0], factor @ factor.mT


@torch.enable_grad()
def _minimised(
    gradients: BatchedGradient,
    start: list[Tensor],
    root: Callable[[list[Tensor]], Tensor],
    first_steps: int,
) -> list[Tensor]:
    """The leaves of the closest Gaussian, whose mean is the first leaf, by fixed draws.

    :param start: the mean, the logarithms of the root's diagonal, and what else ``root`` takes.
    :param first_steps: steps of Adam, for a start that may be far away.
    """
    leaves = [each.clone().requires_grad_() for each in start]
    draws = _draws(start[0])
    least, best = math.inf, [each.detach().clone() for each in leaves]

    def closure() -> Tensor:
        nonlocal least, best
        for leaf in leaves:
            leaf.grad = None
        points = leaves[0] + draws @ root(leaves).mT
        slopes, heights = gradients(points.detach())
        loss = -heights.mean() - leaves[1].detach().sum()
        if loss < least:
            least, best = loss.item(), [leaf.detach().clone() for leaf in leaves]
        (-(slopes * points).sum() / len(draws) - leaves[1].sum()).backward()
        return loss

    def restart() -> None:
        for leaf, value in zip(leaves, best, strict=True):
            leaf.data = value.clone()

    adam = torch.optim.Adam(leaves, lr=_STEP_SIZE)
    falling = torch.optim.lr_scheduler.ExponentialLR(adam, _FALLS ** (1 / _ADAM))
    for _ in range(first_steps):
        adam.step(closure)
        falling.step()
    restart()
    before = math.inf
    for _ in range(_ROUNDS):
        try:
            torch.optim.LBFGS(leaves, max_iter=_LBFGS, line_search_fn="strong_wolfe").step(closure)
        except IndexError:  # its line search met nothing but infinite values
            pass
        restart()
        if not least < before - _SMALL:
            break
        before = least
    return best


def _draws(mean: Tensor) -> Tensor:
    """Standard normal draws (K, d) of mean 0 and covariance 1. They are the same in each call."""
    count, seeded = max(_FEWEST, 4 * len(mean)) // 2, torch.Generator().manual_seed(0)
    half = torch.randn(count, len(mean), generator=seeded, dtype=mean.dtype)
    draws = torch.cat([half, -half]).to(mean.device)
    return draws @ torch.linalg.inv(cholesky(draws.mT @ draws / len(draws))).mT
