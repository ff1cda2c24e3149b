"""Hamiltonian chains that draw from a log density, and Gaussian variational approximations."""

import contextlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyro_dp.infer.posterior.prior_factor import BatchedGradient
from pyro_dp.utils.linalg import cholesky, covariance, standardised

_CHAINS, _FEWER = 128, 16  # chains; fewer if points are computed one by one
_WARM_UP, _ROUND = (40, 40, 40, 80), 100  # transitions of the first rounds, and of later ones
_SETTLED, _MOST_ROUNDS = 0.15, 16  # standard deviations, and the most rounds after the warm-up
_ACCEPTED = 0.8  # the rate that Hoffman & Gelman (2014) recommend
_KAPPA, _T0, _GAMMA = 0.75, 10, 0.05  # settings of their dual averaging
_MOST_STEPS = 16  # leapfrog steps in a transition
_LEAST, _MORE = 0.3, 0.9  # step sizes are uniform in 0.3 to 1.2 times the usual one


def chain_draws(gradients: BatchedGradient, mean: Tensor, sds: Tensor) -> tuple[Tensor, float]:
    """Draws (K, d) from a density, with a fixed seed.

    Chains start at independent normal draws with this mean and these standard deviations, (d,)
    each. The metric of a round is the covariance of all chains in the round before (Neal 2011,
    section 5.4.2). Rounds end when the mean has settled.

    :returns: the last round's draws, and how far the mean moved in the last round: the largest over
        the coordinates, in standard deviations.
    """
    count = _CHAINS if gradients.at_once else _FEWER
    chains = _Chains(gradients, mean.expand(count, -1), sds.diag())
    step_size, moved = 0.5 * len(mean) ** -0.25, math.inf
    for number, length in enumerate([*_WARM_UP, *[_ROUND] * _MOST_ROUNDS]):
        states, step_size = chains.run(length, step_size)
        found = states[length // 2 :].flatten(0, 1)
        chains.root = cholesky(covariance(found))
        before, mean = mean, found.mean(0)
        moved = ((mean - before).abs() / found.std(0)).max().item()
        if moved < _SETTLED and number >= len(_WARM_UP):
            break
    return states.flatten(0, 1), moved


class _Chains:
    """K Hamiltonian chains.

    :param centre: the means of the starting points, (K, d).
    :param root: a root of the metric, which is a covariance, (d, d).
    """

    def __init__(self, gradients: BatchedGradient, centre: Tensor, root: Tensor):
        self.root = root
        self._gradients, self._draws = gradients, torch.Generator().manual_seed(0)
        self._points = centre + self._normal(centre) @ root.mT
        self._slopes, self._heights = self._gradients(self._points)

    def run(self, length: int, step_size: float) -> tuple[Tensor, float]:
        """The states (length, K, d), and the step size that dual averaging finds."""
        states, shift = [], 0.0
        centre, now, average = (math.log(c * step_size) for c in (10, 1, 1))
        for number in range(1, length + 1):
            rate = self._move(math.exp(now))
            states.append(self._points)
            shift += (_ACCEPTED - rate - shift) / (number + _T0)
            now = centre - math.sqrt(number) / _GAMMA * shift
            average += number**-_KAPPA * (now - average)
        return torch.stack(states), math.exp(average)

    def _move(self, step_size: float) -> float:
        """Move each chain, for about a quarter of a period. Returns the mean acceptance rate."""
        # With random step sizes, chains leave regions that reject most sizes (Neal 2011, 4.2).
        step_size *= _LEAST + _MORE * self._uniform(1).item()
        points, slopes, heights = self._points, self._slopes, self._heights
        momenta = self._normal(points)
        energies = momenta.square().sum(1) / 2 - heights
        turn = math.pi / 2 * (0.5 + self._uniform(1).item())
        for _ in range(max(1, min(_MOST_STEPS, int(turn / step_size)))):
            momenta = momenta + step_size / 2 * slopes @ self.root
            points = points + step_size * momenta @ self.root.mT
            slopes, heights = self._gradients(points)
            momenta = momenta + step_size / 2 * slopes @ self.root
        gains = energies - momenta.square().sum(1) / 2 + heights
        chances = gains.nan_to_num(-math.inf).clamp(max=0.0).exp()
        taken = self._uniform(len(points)).to(chances) < chances
        self._heights = torch.where(taken, heights, self._heights)
        self._points = torch.where(taken.unsqueeze(1), points, self._points)
        self._slopes = torch.where(taken.unsqueeze(1), slopes, self._slopes)
        return chances.mean().item()

    def _uniform(self, count: int) -> Tensor:
        return torch.rand(count, generator=self._draws, dtype=torch.float64)

    def _normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self._draws, dtype=torch.float64).to(like)


_FEWEST = 128  # draws in a Monte Carlo estimate
_ADAM, _STEP_SIZE, _DECAY = 300, 0.05, 0.1  # small steps, which a steep density cannot throw far
_LBFGS, _ROUNDS, _TOLERANCE = 200, 5, 1e-3


def mean_field(gradients: BatchedGradient, mean: Tensor, sds: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviations (d,) of the mean-field Gaussian that minimises KL(q || p)."""
    start = [mean, sds.log()]
    found = _minimised(gradients, start, lambda leaves: leaves[1].exp().diag(), _ADAM)
    return found[0], found[1].exp()


def full_rank(gradients: BatchedGradient, mean: Tensor, sds: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (d,) and covariance (d, d) of the Gaussian that minimises KL(q || p)."""
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
    """The parameters of the Gaussian that minimises KL(q || p), over draws with a fixed seed.

    :param start: the mean, the logarithms of the root's diagonal, and the rest of the root.
    :param first_steps: steps of Adam, for a start that may be far away.
    """
    leaves = [each.clone().requires_grad_() for each in start]
    mean = start[0]
    count, seeded = max(_FEWEST, 4 * len(mean)) // 2, torch.Generator().manual_seed(0)
    half = torch.randn(count, len(mean), generator=seeded, dtype=mean.dtype)
    draws = standardised(torch.cat([half, -half]).to(mean.device))

    def objective() -> tuple[Tensor, Tensor]:
        points = leaves[0] + draws @ root(leaves).mT
        slopes, heights = gradients(points.detach())
        loss = -heights.mean() - leaves[1].detach().sum()
        return loss, -(slopes * points).sum() / len(draws) - leaves[1].sum()

    search = Search(leaves, objective)
    if first_steps:
        search.by_adam(first_steps, _STEP_SIZE, _DECAY)
        search.restart()
    search.by_lbfgs(_ROUNDS, _LBFGS, _TOLERANCE)
    return search.best


class Search:
    """Minimises a function of tensors.

    :param leaves: tensors that require a gradient, which the search changes.
    :param objective: returns the loss, and a surrogate with the loss's gradient.
    :ivar best: the leaves' best values so far.
    """

    def __init__(self, leaves: Sequence[Tensor], objective: Callable[[], tuple[Tensor, Tensor]]):
        self._leaves, self._objective = list(leaves), objective
        self._least, self.best = math.inf, [leaf.detach().clone() for leaf in leaves]

    def loss(self) -> Tensor:
        """Evaluate the loss at the leaves, and set their gradients."""
        for leaf in self._leaves:
            leaf.grad = None
        loss, differentiated = self._objective()
        if loss < self._least:
            self._least, self.best = loss.item(), [leaf.detach().clone() for leaf in self._leaves]
        differentiated.backward()
        return loss

    def restart(self) -> None:
        """Set the leaves to their best values."""
        for leaf, value in zip(self._leaves, self.best, strict=True):
            leaf.data = value.clone()

    def by_adam(
        self, steps: int, step_size: float, decay: float, betas: tuple[float, float] = (0.9, 0.999)
    ) -> None:
        """Take steps of Adam, whose size falls geometrically to ``decay`` times the first size."""
        adam = torch.optim.Adam(self._leaves, lr=step_size, betas=betas)
        schedule = torch.optim.lr_scheduler.ExponentialLR(adam, decay ** (1 / steps))
        for _ in range(steps):
            adam.step(self.loss)
            schedule.step()
        adam.zero_grad()

    def by_lbfgs(self, rounds: int, steps: int, tolerance: float) -> None:
        """Run L-BFGS in rounds from the best values, until one gains less than ``tolerance``."""
        before = math.inf
        for _ in range(rounds):
            lbfgs = torch.optim.LBFGS(self._leaves, max_iter=steps, line_search_fn="strong_wolfe")
            with contextlib.suppress(IndexError):  # torch's, if all values are infinite
                lbfgs.step(self.loss)
            self.restart()
            if not self._least < before - tolerance:
                break
            before = self._least
