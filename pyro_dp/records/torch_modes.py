"""What torch functions see while a model runs on one record: its parameters and its local draws."""

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyro_dp.records.local_draws import DRAWING, LocalDraws


class Substitution(TorchFunctionMode):
    """Torch functions get other tensors in place of some, also of those in tuples and lists.

    :param substitutes: by ``id``.
    """

    def __init__(self, substitutes: dict[int, Tensor] | None = None):
        super().__init__()
        self.substitutes = substitutes or {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.substitutes:
            args = self._substituted(args)
            kwargs = {key: self._substituted(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)

    def _substituted(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.substitutes.get(id(value), value)
        if type(value) in (tuple, list):
            return type(value)(self._substituted(each) for each in value)
        return value


class RecordMode(Substitution):
    """What torch functions see while a model runs on one record.

    * Parameters are substituted by identity: by name, ``pyro.module`` and flows that alias a weight
      would go on using their own tensors, and their gradients would silently be zero.
    * Normal and uniform draws come from :class:`LocalDraws`; in-place draws cannot be vectorised
      otherwise.
    """

    def __init__(self, draws: LocalDraws, substitutes: dict[int, Tensor] | None = None):
        super().__init__(substitutes)
        self.draws = draws

    def __torch_function__(self, func, types, args=(), kwargs=None):
        answer = DRAWING.get(func)
        if answer is not None:
            return answer(self.draws, *args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)
