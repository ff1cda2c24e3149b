"""What a private gradient step needs, built for the data of the step."""

from dataclasses import dataclass

import pyro
from torch import Tensor

from pyro_dp.infer.svi.eager_step import EagerStep
from pyro_dp.infer.svi.traced_step import TracedStep
from pyro_dp.records.prepared import Prepared
from pyro_dp.records.record_term import RecordTerm


@dataclass(frozen=True, eq=False)
class PreparedGradient(Prepared):
    """
    :param term: of one record.
    :param parameters: all unconstrained parameters by name, but for those with a row per record.
    :param step: computes releases and gradients.
    """

    term: RecordTerm
    parameters: dict[str, Tensor]
    step: EagerStep | TracedStep

    def is_current(self) -> bool:
        """Whether the parameters are those of Pyro's store still."""
        store = pyro.get_param_store()
        return all(
            store.param_name(leaf) == name and leaf.requires_grad
            for name, leaf in (self.parameters | self.term.local.leaves).items()
        )
