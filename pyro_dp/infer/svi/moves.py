"""Moves: an optimizer follows released gradients, with or without a plan of step sizes."""

from collections.abc import Mapping
from typing import Any

import pyro
import torch
from pyro.optim import PyroOptim
from torch import Tensor

from pyro_dp.infer.posterior.posterior import CLIPPING, REMEDIES, Status
from pyro_dp.infer.svi.averaged_guide import IterateAverages
from pyro_dp.infer.svi.clip_policy import ClipPolicy
from pyro_dp.infer.svi.optimizers import (
    BETAS,
    STARTED,
    USUAL_STEPS,
    PublicOptimizer,
    RowAdam,
    RowOptimizer,
    StepPlan,
    require_finite,
    row_step_size,
    usual_rate,
)
from pyro_dp.mechanism.reservation import Steps
from pyro_dp.utils.errors import ConfigurationError, ConvergenceWarning
from pyro_dp.utils.validation import require_count, require_tensors, same

_DONE = (
    "All num_steps={steps} steps of the plan are done, and the guide holds the result. For a "
    "longer run pass, say, num_steps=5000 to a new DPSVI. To end a loop early call svi.finish()."
)
_OF_PAPER = (
    "load_state_dict: this state has no plan. PaperDPSVI takes the states that DPSVI with an optim "
    "saved in version 0.1."
)
_CONCLUDED = (
    "The guide holds {what}. Looks at all records are more precise. `svi.evidence` says why this "
    "run made none."
)
_OTHER_SHAPE = (
    "Parameter {name!r} has another shape than when it was saved: the state is of another model."
)
_OTHER_NAMES = (
    "load_state_dict: the state is of another model. It has parameters {names}, which model and "
    "guide have not."
)


def without_history(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state of version 0.2.0, which also kept released gradients and step lengths.

    :raises ConfigurationError: the history is damaged.
    """
    kept = {name: value for name, value in state.items() if name not in ("history", "lengths")}
    if "history" in state:
        history = state["history"]
        if not isinstance(history, Mapping) or "averages" not in history:
            raise ConfigurationError("load_state_dict: history is damaged.")
        kept["averages"] = history["averages"]
    return kept


def optimizers(optim: Any) -> tuple[PyroOptim | None, RowAdam | None]:
    """The optimizers of shared parameters and of rows of parameters per record, if any.

    :raises ConfigurationError: ``optim`` has another type.
    """
    found = optim if isinstance(optim, tuple) else () if optim is None else (optim,)
    shared = [each for each in found if isinstance(each, PyroOptim)]
    rows = [each for each in found if isinstance(each, RowAdam)]
    if len(shared) > 1 or len(rows) > 1 or len(shared) + len(rows) < len(found):
        raise ConfigurationError(
            "optim must be a pyro.optim optimizer, for example pyro.optim.Adam({'lr': 0.01}), a "
            "RowAdam for rows of parameters per record, or a tuple of both."
        )
    return next(iter(shared), None), next(iter(rows), None)


class ClippedSteps(Steps):
    """Steps whose bound is that of a clipping policy."""

    def __init__(self, moves: "Moves", num_steps: int | None, sampling: str, bound: float):
        super().__init__(num_steps, sampling, bound)
        self._moves = moves

    @property
    def bound(self) -> float:
        return self._moves.policy.bound


class PlannedSteps(ClippedSteps):
    """A fixed number of steps, which the first step may choose."""

    chooses = True

    def rate(self, subsample: int, size: int) -> float:
        return super().rate(subsample, size) if subsample < size else usual_rate(size)

    def require_step(self, noise_multiplier: float | None, calibrates: bool) -> None:
        if self.finished:
            raise ConfigurationError(_DONE.format(steps=self.num_steps))


class Moves:
    """Steps of the user's optimizer, as in papers: the guide holds the last iterate.

    :param policy: the clipping policy of the next release.
    :param optim: the user's optimizer; None: an Adam with our step sizes.
    :param local: the user's settings for rows of parameters per record; None: the usual settings.
    """

    steps: type[ClippedSteps] = ClippedSteps
    state_keys: tuple[str, ...] = ()  # that a saved state must have
    averages: IterateAverages | None = None  # None: the guide holds the last iterate

    def __init__(self, policy: ClipPolicy, optim: PyroOptim | None, local: RowAdam | None):
        self.policy = policy
        self.optimizer = PublicOptimizer(optim or pyro.optim.Adam({"fused": True}))
        self.chooses = optim is None  # step sizes
        self.local = local
        self.rows = RowOptimizer(self._row_adam)
        self.waiting: dict[str, Tensor] = {}  # loaded values of parameters that do not exist yet

    def _row_adam(self, name: str) -> RowAdam:
        return self.local or RowAdam.like(self.optimizer.optim, name)

    def require(self, parameters: Mapping[str, Tensor]) -> None:
        """Set loaded values, and check the parameters.

        :raises ConfigurationError: the parameters cannot be moved.
        """
        self._set_loaded()
        if self.waiting:
            names = ", ".join(map(repr, self.waiting))
            raise ConfigurationError(_OTHER_NAMES.format(names=names))
        require_finite(parameters, STARTED)
        self.optimizer.require(parameters)

    def begin(self, num_steps: int | None) -> int | None:
        """Begin or continue a run. Returns its number of steps."""
        return num_steps

    def move(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor | None],
        plan: StepPlan,
        step: int,
        noise: float,
    ) -> None:
        """Take a step, which is counted from 1.

        :param noise: variance of the noise in a location's gradient.
        """
        # Only in these steps may the CPU wait for the device.
        rarely = step <= 3 or step % 10 == 0 or step == plan.num_steps
        self.optimizer.step(parameters, gradients, rarely=rarely)

    def conclude(self, parameters: Mapping[str, Tensor]) -> None:
        """Write the run's result into the guide."""

    def status_line(self, status: Status) -> str | None:
        """The status for the ledger; None if there is none."""
        return None

    def warnings(self, status: Status) -> list[Warning]:
        """Warnings after a run whose posterior has this status."""
        return []

    def state(self, num_steps: int | None, histogram: Any) -> dict[str, Any]:
        return {}

    def require_own(self, state: Any) -> None:
        """:raises ConfigurationError: the state belongs to another method."""

    def require_state(self, state: Mapping[str, Any], num_steps: int | None) -> None:
        """:raises ConfigurationError: the state is damaged, or has another model or plan."""
        saved, store = require_tensors("parameters", state["parameters"]), pyro.get_param_store()
        for name, value in saved.items():
            if name in store and store[name].unconstrained().shape != value.shape:
                raise ConfigurationError(_OTHER_SHAPE.format(name=name))
        if not isinstance(state["optimizer"], dict):
            raise ConfigurationError("load_state_dict: optimizer must be a dictionary.")
        RowOptimizer.check(state.get("private_local_state", {}))
        self._require_plan(state.get("num_steps"), num_steps)

    def _require_plan(self, saved: Any, num_steps: int | None) -> None:
        if saved is not None:
            raise ConfigurationError("load_state_dict: this state has a plan. DPSVI takes it.")

    def load(self, state: Mapping[str, Any]) -> None:
        self.rows.load_state_dict(state.get("private_local_state", {}))
        self.waiting = dict(state["parameters"])
        self._set_loaded()
        self.optimizer.load(state["optimizer"])

    @torch.no_grad()
    def _set_loaded(self) -> None:
        store = pyro.get_param_store()
        for name in [name for name in self.waiting if name in store]:
            leaf = store[name].unconstrained()
            if leaf.shape != self.waiting[name].shape:
                raise ConfigurationError(_OTHER_SHAPE.format(name=name))
            leaf.copy_(self.waiting.pop(name))


class PlannedMoves(Moves):
    """A planned number of steps. The guide ends at means over the last half of them.

    Step sizes follow from the plan, unless the user sets them.
    """

    steps = PlannedSteps
    state_keys = ("averages", "num_steps")
    concluded = ""  # a text on what the guide holds

    def _row_adam(self, name: str) -> RowAdam:
        return self.local or RowAdam()

    def begin(self, num_steps: int | None) -> int:
        num_steps = num_steps or USUAL_STEPS
        self.averages = self.averages or IterateAverages(num_steps)
        return num_steps

    def move(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor | None],
        plan: StepPlan,
        step: int,
        noise: float,
    ) -> None:
        if self.chooses:
            self.optimizer.set(lr=plan.step_size(step - 1), betas=BETAS)
        super().move(parameters, gradients, plan, step, noise)
        if self.chooses:
            self.optimizer.set(lr=plan.step_size(step))  # a saved state has the next step size
        if self.local is None:
            self.rows.set_step_size(row_step_size((step - 1) / plan.num_steps))
        if self.averages is not None:
            self.averages.add(step, parameters, gradients, noise)

    def conclude(self, parameters: Mapping[str, Tensor]) -> None:
        averages = self.averages or IterateAverages(1)
        self.concluded = _CONCLUDED.format(what=averages.conclude(parameters))

    def status_line(self, status: Status) -> str:
        return str(status)

    def warnings(self, status: Status) -> list[Warning]:
        if status.is_ok or status.cause == CLIPPING:
            return []
        return [ConvergenceWarning(f"{status}. {self.concluded or REMEDIES[status.cause]}")]

    def state(self, num_steps: int | None, histogram: Any) -> dict[str, Any]:
        averages = None if self.averages is None else self.averages.state()
        return {"averages": averages, "num_steps": num_steps, "histogram": histogram}

    def require_own(self, state: Any) -> None:
        if isinstance(state, dict) and "num_steps" not in state:
            raise ConfigurationError(_OF_PAPER)

    def require_state(self, state: Mapping[str, Any], num_steps: int | None) -> None:
        super().require_state(state, num_steps)
        IterateAverages.resumed(state["averages"])

    def _require_plan(self, saved: Any, num_steps: int | None) -> None:
        if saved is not None:
            require_count("num_steps", saved)
        if num_steps is not None and not same(num_steps, saved):
            raise ConfigurationError("num_steps differs from that of the saved run.")

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.averages = IterateAverages.resumed(state["averages"])
