"""What a private gradient step needs, built for the data of the step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyro
from torch import Tensor

from pyro_dp.infer.svi.eager_step import EagerStep, LocalGradients
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.records.prepared import Prepared
from pyro_dp.records.record_term import RecordTerm


class GradientStep(Protocol):
    """An :class:`EagerStep`, or a faster one that computes the same. Draws are of its own kind."""

    @property
    def eager(self) -> EagerStep: ...

    def draw(self) -> Any: ...

    def size(self, draws: Any) -> int: ...

    def add(
        self,
        clipped: ClippedSum,
        draws: Any,
        indices: Tensor,
        new_stream: Callable[[], np.random.Generator],
    ) -> list[LocalGradients]: ...

    def gradients(
        self, draws: Any, released: Tensor
    ) -> tuple[dict[str, Tensor | None], Tensor]: ...


@dataclass(frozen=True, eq=False)
class PreparedGradient(Prepared):
    """
    :param term: of one record.
    :param parameters: all unconstrained parameters by name, but for those with a row per record.
    :param step: computes releases and gradients.
    """

    term: RecordTerm
    parameters: dict[str, Tensor]
    step: GradientStep

    def is_current(self) -> bool:
        """Whether the parameters are those of Pyro's store still."""
        store = pyro.get_param_store()
        return all(
            store.param_name(leaf) == name and leaf.requires_grad
            for name, leaf in (self.parameters | self.term.local.leaves).items()
        )
