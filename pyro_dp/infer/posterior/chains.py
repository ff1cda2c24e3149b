"""Draws from a log density by Hamiltonian chains; searches for the Gaussians closest to it."""

import contextlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyro_dp.infer.posterior.prior_factor import BatchedGradient
from pyro_dp.utils.linalg import cholesky, covariance, standardised

_CHAINS, _FEWER = 128, 16  # the second number if points are computed one by one
_WARM_UP, _ROUND = (40, 40, 40, 80), 100  # transitions of the first rounds, and of each other one
_SETTLED, _MOST_ROUNDS = 0.15, 16  # standard deviations, and rounds after which chains end anyway
_ACCEPTED = 0.8  # the rate that Hoffman & Gelman (2014) recommend
_FORGETS, _OFFSET, _STIFF = 0.75, 10, 0.05  # kappa, t0 and gamma of their dual averaging
_MOST_STEPS = 16  # leapfrog steps in a transition
_LEAST, _MORE = 0.3, 0.9  # a step's size is .3 to 1.2 times the usual one


def chain_draws(gradients: BatchedGradient, mean: Tensor, sds: Tensor) -> tuple[Tensor, float]:
    """Draws (K, d) from a density. They are the same in each call.

    Chains start at independent normal draws with this mean and these sds, (d,) each. The covariance
    of all chains after a round is the metric of the next one (Neal 2011, section 5.4.2). Rounds go
    on until their mean stays.

    :returns: the last round's draws, and how far its mean was from the last but one's, in standard
        deviations of the coordinate where that is largest.
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
    """K chains.

    :param centre: centres of the start, (K, d).
    :ivar root: a root of the metric, which is a covariance (d, d).
    """

    def __init__(self, gradients: BatchedGradient, centre: Tensor, root: Tensor):
        self.root = root
        self._gradients, self._draws = gradients, torch.Generator().manual_seed(0)
        self._points = centre + self._normal(centre) @ root.mT
        self._slopes, self._heights = self._gradients(self._points)

    def run(self, length: int, step_size: float) -> tuple[Tensor, float]:
        """States (length, K, d), and the step size that dual averaging finds."""
        states, shift = [], 0.0
        centre, now, average = (math.log(c * step_size) for c in (10, 1, 1))
        for number in range(1, length + 1):
            rate = self._move(math.exp(now))
            states.append(self._points)
            shift += (_ACCEPTED - rate - shift) / (number + _OFFSET)
            now = centre - math.sqrt(number) / _STIFF * shift
            average += number**-_FORGETS * (now - average)
        return torch.stack(states), math.exp(average)

    def _move(self, step_size: float) -> float:
        """A transition of each chain, for about a quarter of a normal density's period.

        :returns: the mean probability of acceptance.
        """
        # Steps of random size leave regions where most sizes are refused (Neal 2011, section 4.2).
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


_FEWEST = 128  # draws
# The first steps are small: a steep density does not throw them far away.
_ADAM, _STEP_SIZE, _FALLS = 300, 0.05, 0.1
_LBFGS, _ROUNDS, _SMALL = 200, 5, 1e-3  # it ends if the objective falls by less


def mean_field(gradients: BatchedGradient, mean: Tensor, sds: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and sds (d,) of the independent Gaussians closest in KL(q || p), from a start."""
    start = [mean, sds.log()]
    found = _minimised(gradients, start, lambda leaves: leaves[1].exp().diag(), _ADAM)
    return found[0], found[1].exp()


def full_rank(gradients: BatchedGradient, mean: Tensor, sds: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (d,) and covariance (d, d) of the Gaussian closest in KL(q || p)."""
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

    def objective() -> tuple[Tensor, Tensor]:
        points = leaves[0] + draws @ root(leaves).mT
        slopes, heights = gradients(points.detach())
        loss = -heights.mean() - leaves[1].detach().sum()
        return loss, -(slopes * points).sum() / len(draws) - leaves[1].sum()

    search = Search(leaves, objective)
    if first_steps:
        search.by_adam(first_steps, _STEP_SIZE, _FALLS)
        search.restart()
    search.by_lbfgs(_ROUNDS, _LBFGS, _SMALL)
    return search.best


def _draws(mean: Tensor) -> Tensor:
    """Standard normal draws (K, d) of mean 0 and covariance 1. They are the same in each call."""
    count, seeded = max(_FEWEST, 4 * len(mean)) // 2, torch.Generator().manual_seed(0)
    half = torch.randn(count, len(mean), generator=seeded, dtype=mean.dtype)
    draws = torch.cat([half, -half]).to(mean.device)
    return standardised(draws)


class Search:
    """A search for the least value of a function of tensors.

    :param leaves: tensors that require a gradient. They move.
    :param objective: returns the loss, and a number with the loss's gradient.
    :ivar best: the leaves' best values.
    """

    def __init__(self, leaves: Sequence[Tensor], objective: Callable[[], tuple[Tensor, Tensor]]):
        self._leaves, self._objective = list(leaves), objective
        self._least, self.best = math.inf, [leaf.detach().clone() for leaf in leaves]

    def loss(self) -> Tensor:
        """The loss of the present values, whose gradients the leaves get."""
        for leaf in self._leaves:
            leaf.grad = None
        loss, differentiated = self._objective()
        if loss < self._least:
            self._least, self.best = loss.item(), [leaf.detach().clone() for leaf in self._leaves]
        differentiated.backward()
        return loss

    def restart(self) -> None:
        """Back to the best values."""
        for leaf, value in zip(self._leaves, self.best, strict=True):
            leaf.data = value.clone()

    def by_adam(
        self, steps: int, step_size: float, falls: float, betas: tuple[float, float] = (0.9, 0.999)
    ) -> None:
        """
        :param falls: the last step size over the first one.
        """
        adam = torch.optim.Adam(self._leaves, lr=step_size, betas=betas)
        falling = torch.optim.lr_scheduler.ExponentialLR(adam, falls ** (1 / steps))
        for _ in range(steps):
            adam.step(self.loss)
            falling.step()
        adam.zero_grad()

    def by_lbfgs(self, rounds: int, steps: int, small: float) -> None:
        """Each round begins at the best values. It ends where one gains less than ``small``."""
        before = math.inf
        for _ in range(rounds):
            lbfgs = torch.optim.LBFGS(self._leaves, max_iter=steps, line_search_fn="strong_wolfe")
            with contextlib.suppress(IndexError):  # its line search met infinite values alone
                lbfgs.step(self.loss)
            self.restart()
            if not self._least < before - small:
                break
            before = self._least
