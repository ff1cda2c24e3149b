"""Branches on a record's values, where all records run at once."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from pyro_dp.records.record_elbo import NotVectorizable

_SEVERAL = "a branch depends on more than one number of a record"
_OTHERS = "its branches on values of a record depend on public draws"


class Decisions:
    """What a model asks of a record by ``if``, ``while``, ``assert`` or ``bool``.

    All records go the way of a public placeholder. Those of which the answer is another one are
    marked, each by its own values: what comes out for them does not count.

    :param answers: the placeholder's, in order of use. None: these records are placeholders, and
        what they answer is kept in :attr:`answers`.
    """

    def __init__(self, answers: Sequence[bool] | None = None):
        self.answers: list[bool] = []
        self._known = answers
        self._otherwise: list[Tensor] = []

    def __call__(self, condition: Tensor) -> bool:
        """The answer to go on with.

        :param condition: of one record, under ``torch.vmap``.
        """
        if condition.numel() != 1:
            raise NotVectorizable(_SEVERAL)
        said = condition.detach().reshape(()) != 0
        if self._known is None:
            answer = bool(_of_all(said).flatten()[0])
        elif len(self.answers) < len(self._known):
            answer = self._known[len(self.answers)]
        else:
            raise NotVectorizable(_OTHERS)
        self.answers.append(answer)
        self._otherwise.append(said != answer)
        return answer

    @property
    def otherwise(self) -> list[Tensor]:
        """Whether a record answers otherwise anywhere, a scalar; empty if nothing was asked."""
        return [torch.stack(self._otherwise).any()] if self._otherwise else []


def _of_all(value: Tensor) -> Tensor:
    while is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
    return value
