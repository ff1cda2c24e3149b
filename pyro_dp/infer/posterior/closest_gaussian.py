"""The Gaussian closest to a density, by variational inference. No record enters."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_dp.infer.posterior.gaussian import Gaussian
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import cholesky

Density = Callable[[Tensor], Tensor]

_FEWEST = 64  # draws
_ADAM, _STEP_SIZE, _FALLS = (
    300,
    0.05,
    0.1,
)  # first steps, which a steep density does not throw far away
_LBFGS, _ROUNDS, _SMALL = 200, 5, 1e-3  # it ends if the objective falls by less


def mean_field(log_prob: Density, mean: Tensor, sds: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and sds (d,) of the independent Gaussians closest in KL(q || p).

    :param log_prob: log density of a point (d,), up to a constant.
    :param mean: where to start, (d,).
    :param sds: at the start, (d,).
    """
    start = [mean, sds.log()]
    found = _minimised(log_prob, start, lambda leaves: leaves[1].exp().diag(), _ADAM)
    return found[0], found[1].exp()


def full_rank(log_prob: Density, mean: Tensor, sds: Tensor) -> Gaussian:
    """The Gaussian closest in KL(q || p), from what :func:`mean_field` has found."""
    start = [mean, sds.log(), torch.zeros(len(mean), len(mean)).to(mean)]

    def root(leaves: list[Tensor]) -> Tensor:
        _, logs, below = leaves
        return logs.exp().unsqueeze(1) * (below.tril(-1) + torch.eye(len(logs)).to(logs))

    found = _minimised(log_prob, start, root, 0)
    factor = root(found)
    return Gaussian.from_moments(found[0], factor @ factor.mT)


@torch.enable_grad()
def _minimised(
    log_prob: Density,
    start: list[Tensor],
    root: Callable[[list[Tensor]], Tensor],
    first_steps: int,
) -> list[Tensor]:
    """The leaves of the closest Gaussian, whose mean is the first leaf, by fixed draws.

    :param start: the mean, the logarithms of the root's diagonal, and what else ``root`` takes.
    :param first_steps: steps of Adam, for a start that may be far away.
    """
    leaves = [each.clone().requires_grad_() for each in start]
    draws, log_probs = _draws(start[0]), _batched(log_prob, start[0])
    least, best = math.inf, [each.detach().clone() for each in leaves]

    def closure() -> Tensor:
        nonlocal least, best
        for leaf in leaves:
            leaf.grad = None
        loss = -log_probs(leaves[0] + draws @ root(leaves).mT).mean() - leaves[1].sum()
        if loss.item() < least:
            least, best = loss.item(), [leaf.detach().clone() for leaf in leaves]
        loss.backward()
        for leaf in leaves:
            if leaf.grad is not None:
                leaf.grad.nan_to_num_(0.0, 0.0, 0.0)
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
    dim = len(mean)
    half = torch.randn(
        max(_FEWEST // 2, 2 * dim),
        dim,
        generator=torch.Generator().manual_seed(0),
        dtype=mean.dtype,
    )
    draws = torch.cat([half, -half]).to(mean.device)
    return draws @ torch.linalg.inv(cholesky(draws.mT @ draws / len(draws))).mT


def _batched(log_prob: Density, point: Tensor) -> Density:
    """The density at many points (K, d): at once, or one by one if it branches on them."""
    batched = torch.func.vmap(log_prob, randomness="different")
    try:
        batched(point.unsqueeze(0))
    except (RuntimeError, ValueError, ModelError):
        return lambda points: torch.stack([log_prob(each) for each in points])
    return batched
