"""What torch functions see while a model runs on one record: its parameters and its local draws."""

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyro_dp.records.local_draws import DRAWING, LocalDraws


class RecordMode(TorchFunctionMode):
    """What torch functions see while a model runs on one record.

    * Parameters are substituted by identity: by name, ``pyro.module`` and flows that alias a weight
      would go on using their own tensors, and their gradients would silently be zero.
    * Normal and uniform draws come from :class:`LocalDraws`; in-place draws cannot be vectorised
      otherwise.
    """

    def __init__(self, draws: LocalDraws, substitutes: dict[int, Tensor] | None = None):
        super().__init__()
        self.draws = draws
        self.substitutes = substitutes or {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        answer = DRAWING.get(func)
        if answer is not None:
            return answer(self.draws, *args, **kwargs)
        if self.substitutes:
            args = substituted(args, self.substitutes)
            kwargs = {key: substituted(value, self.substitutes) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def substituted(value: Any, substitutes: dict[int, Tensor]) -> Any:
    """An argument of a function, with tensors replaced by ``id``, also in tuples and lists."""
    if isinstance(value, Tensor):
        return substitutes.get(id(value), value)
    if type(value) in (tuple, list):
        return type(value)(substituted(each, substitutes) for each in value)
    return value
