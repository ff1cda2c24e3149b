"""The state of a DPSVI beside ledger and counts, and parameters that wait for their step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_dp.infer.svi.averaged_guide import IterateAverages
from pyro_dp.infer.svi.histogram_bound import HistogramBound
from pyro_dp.infer.svi.row_adam import RowOptimizer
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_count, require_scale, require_tensors

NAMES = ("parameters", "optimizer", "bound")  # which every state has
_OTHER_SHAPE = (
    "Parameter {name!r} has another shape than when it was saved: the state is of another model."
)
_OTHER_NAMES = (
    "load_state_dict: the state is of another model. It has parameters {names}, which model and "
    "guide have not."
)


class SavedParameters:
    """Unconstrained values by name: Pyro's store takes them once it has the parameters.

    :param values: those that wait.
    """

    def __init__(self, values: Mapping[str, Tensor] | None = None):
        self.waiting = dict(values or {})

    @torch.no_grad()
    def take_up(self) -> None:
        """:raises ConfigurationError: the store's parameter has another shape."""
        store = pyro.get_param_store()
        for name in [name for name in self.waiting if name in store]:
            leaf = store[name].unconstrained()
            if leaf.shape != self.waiting[name].shape:
                raise ConfigurationError(_OTHER_SHAPE.format(name=name))
            leaf.copy_(self.waiting[name])
            del self.waiting[name]

    def require_none(self) -> None:
        """:raises ConfigurationError: some still wait, although all parameters exist."""
        if self.waiting:
            names = ", ".join(map(repr, self.waiting))
            raise ConfigurationError(_OTHER_NAMES.format(names=names))


def without_history(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as it is today: version 0.2.0 also kept released gradients and lengths of steps.

    :raises ConfigurationError: its history is damaged.
    """
    kept = {name: value for name, value in state.items() if name not in ("history", "lengths")}
    if "history" in state:
        history = state["history"]
        if not isinstance(history, Mapping) or "averages" not in history:
            raise ConfigurationError("load_state_dict: history is damaged.")
        kept["averages"] = history["averages"]
    return kept


@dataclass(frozen=True, eq=False)
class SavedRun:
    """A state that was read, and found sound.

    :param parameters: unconstrained.
    :param optimizer: state of the user's, or of ours.
    :param bound: C.
    :param averages: the iterates', if there are any yet.
    :param num_steps: number of steps of a run that chooses it; else None.
    :param histogram: histogram of norms, if there is one yet.
    :param local: rows of parameters per record, for :meth:`RowOptimizer.load_state_dict`.
    """

    parameters: SavedParameters
    optimizer: dict[str, Any]
    bound: float
    averages: IterateAverages | None
    num_steps: int | None
    histogram: HistogramBound | None
    local: dict[str, Any]

    @staticmethod
    def read(state: Mapping[str, Any]) -> "SavedRun":
        """:raises ConfigurationError: a part is damaged, or of another model."""
        require_scale("bound", state["bound"], infinite=True)
        num_steps = state.get("num_steps")
        if num_steps is not None:
            require_count("num_steps", num_steps)
        histogram = state.get("histogram")
        histogram = None if histogram is None else HistogramBound.resumed(histogram)
        averages = state.get("averages")
        averages = None if averages is None else IterateAverages.resumed(averages)
        store = pyro.get_param_store()
        for name, value in require_tensors("parameters", state["parameters"]).items():
            if name in store and store[name].unconstrained().shape != value.shape:
                raise ConfigurationError(_OTHER_SHAPE.format(name=name))
        if not isinstance(state["optimizer"], dict):
            raise ConfigurationError("load_state_dict: optimizer must be a dictionary.")
        local = state.get("private_local_state", {})
        RowOptimizer.check(local)
        return SavedRun(
            SavedParameters(state["parameters"]),
            state["optimizer"],
            state["bound"],
            averages,
            num_steps,
            histogram,
            local,
        )
