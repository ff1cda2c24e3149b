"""Minimisation that goes on from the best values so far."""

import contextlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


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
