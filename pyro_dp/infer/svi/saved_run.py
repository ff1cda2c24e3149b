"""What a state of DPSVI holds beside ledger and counts, and parameters that wait for their step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_dp.infer.svi.histogram_bound import HistogramBound
from pyro_dp.infer.svi.row_adam import RowOptimizer
from pyro_dp.infer.svi.run_history import RunHistory
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_count, require_scale, require_tensors

NAMES = ("parameters", "optimizer", "bound")  # which every state has
_NO_HISTORY = {"gradients": None, "averages": None}  # of a state of an older version
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
        """:raises ConfigurationError: some wait, and all parameters are known."""
        if self.waiting:
            names = ", ".join(map(repr, self.waiting))
            raise ConfigurationError(_OTHER_NAMES.format(names=names))


@dataclass(frozen=True, eq=False)
class SavedRun:
    """A state that was read, and found sound.

    :param parameters: unconstrained.
    :param optimizer: state of the user's, or of ours.
    :param lengths: states of what gives steps their length: an Adam, and its ways by leaf.
    :param bound: C.
    :param history: of releases, for :meth:`RunHistory.load`.
    :param num_steps: of a run that chooses it; else None.
    :param histogram: of norms, if there is one yet.
    :param local: rows of parameters per record, for :meth:`RowOptimizer.load_state_dict`.
    """

    parameters: SavedParameters
    optimizer: dict[str, Any]
    lengths: dict[str, Any]
    bound: float
    history: Mapping[str, Any]
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
        history = state.get("history", _NO_HISTORY)
        RunHistory.read(history)
        store = pyro.get_param_store()
        for name, value in require_tensors("parameters", state["parameters"]).items():
            if name in store and store[name].unconstrained().shape != value.shape:
                raise ConfigurationError(_OTHER_SHAPE.format(name=name))
        # Where no optimizer was passed, both are one, and states of version 0.1 have just the one.
        lengths = state.get("lengths", {"adam": state["optimizer"], "ways": {}})
        whole = isinstance(lengths, dict) and lengths.keys() == {"adam", "ways"}
        if not (
            whole and all(isinstance(e, dict) for e in (state["optimizer"], *lengths.values()))
        ):
            raise ConfigurationError("load_state_dict: optimizer must be a dictionary.")
        for name, way in lengths["ways"].items():
            if require_tensors(f"lengths of {name}", way).keys() != {"planned", "own", "squares"}:
                raise ConfigurationError("load_state_dict: lengths of steps are damaged.")
        local = state.get("private_local_state", {})
        RowOptimizer.check(local)
        return SavedRun(
            SavedParameters(state["parameters"]),
            state["optimizer"],
            lengths,
            state["bound"],
            history,
            num_steps,
            histogram,
            local,
        )
