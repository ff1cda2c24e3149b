"""Gradient steps after their release: optimizers move parameters, by a plan or without."""

from collections.abc import Mapping
from typing import Any

import pyro
import torch
from pyro.optim import PyroOptim
from torch import Tensor

from pyro_dp.infer.posterior.summary import CLIPPING, REMEDIES, Status
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
_IN_ITS_PLACE = (
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


def optimizers(optim: Any) -> tuple[PyroOptim | None, RowAdam | None]:
    """The optimizer of the parameters, and that of rows of parameters per record."""
    found = optim if isinstance(optim, tuple) else () if optim is None else (optim,)
    own = [each for each in found if isinstance(each, PyroOptim)]
    rows = [each for each in found if isinstance(each, RowAdam)]
    if len(own) > 1 or len(rows) > 1 or len(own) + len(rows) < len(found):
        raise ConfigurationError(
            "optim must be a pyro.optim optimizer, for example pyro.optim.Adam({'lr': 0.01}), a "
            "RowAdam for rows of parameters per record, or a tuple of both."
        )
    return next(iter(own), None), next(iter(rows), None)


class ClippedSteps(Steps):
    """Steps whose bound follows a policy.

    No step may follow a plan, whose number of steps the first one may choose.
    """

    def __init__(self, moves: "Moves", num_steps: int | None, sampling: str, bound: float):
        super().__init__(num_steps, sampling, bound)
        self._moves, self.chooses = moves, moves.planned

    @property
    def bound(self) -> float:
        return self._moves.policy.bound

    def rate(self, subsample: int, size: int) -> float:
        if self._moves.planned and subsample >= size:
            return usual_rate(size)
        return super().rate(subsample, size)

    def require_step(self, noise_multiplier: float | None, calibrates: bool) -> None:
        if self._moves.planned and self.finished:
            raise ConfigurationError(_DONE.format(steps=self.num_steps))
        super().require_step(noise_multiplier, calibrates)


class Moves:
    """Steps of optimizers.

    The guide of a planned run ends at means over the last half of the iterates. The plan has step
    sizes, unless the user sets them. Without a plan the guide holds the last iterate, as a paper
    has it.

    :param policy: clips the next release.
    :param optim: the user's; None: ours.
    :param local: the user's, of rows of parameters per record; None: each has usual settings.
    :ivar averages: None before the first look, and without a plan.
    """

    def __init__(
        self, policy: ClipPolicy, optim: PyroOptim | None, local: RowAdam | None, planned: bool
    ):
        self.policy, self.planned = policy, planned
        self.optimizer = PublicOptimizer(optim or pyro.optim.Adam({"fused": True}))
        self.chooses = optim is None  # step sizes
        self.local = local
        self.rows = RowOptimizer(self._row_adam)
        self.waiting: dict[str, Tensor] = {}  # loaded, of parameters that do not exist yet
        self.averages: IterateAverages | None = None
        self.concluded = ""  # what the guide of a planned run holds

    @property
    def names(self) -> tuple[str, ...]:
        """A state must have these parts."""
        return ("averages", "num_steps") if self.planned else ()

    def _row_adam(self, name: str) -> RowAdam:
        usual = RowAdam() if self.planned else None
        return self.local or usual or RowAdam.like(self.optimizer.optim, name)

    def require(self, parameters: Mapping[str, Tensor]) -> None:
        """Take up loaded values.

        :raises ConfigurationError: these parameters cannot be moved.
        """
        self._take_up()
        if self.waiting:
            names = ", ".join(map(repr, self.waiting))
            raise ConfigurationError(_OTHER_NAMES.format(names=names))
        require_finite(parameters, STARTED)
        self.optimizer.require(parameters)

    def begin(self, num_steps: int | None) -> int | None:
        """Begin a run, or go on: the number of its steps."""
        if self.planned:
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
        """Take a step, with its number from 1.

        :param noise: variance of the noise in a location's gradient.
        """
        if self.chooses:
            self.optimizer.set(lr=plan.step_size(step - 1), betas=BETAS)
        # In few steps a device may be waited for.
        rarely = step <= 3 or step % 10 == 0 or step == plan.num_steps
        self.optimizer.step(parameters, gradients, rarely=rarely)
        if self.chooses:
            self.optimizer.set(lr=plan.step_size(step))  # which a state must know
        if self.planned and self.local is None:
            self.rows.set_step_size(row_step_size((step - 1) / plan.num_steps))
        if self.averages is not None:
            self.averages.add(step, parameters, gradients, noise)

    def conclude(self, parameters: Mapping[str, Tensor]) -> None:
        """Write the run's result into the guide."""
        if self.planned:
            averages = self.averages or IterateAverages(1)
            self.concluded = _IN_ITS_PLACE.format(what=averages.conclude(parameters))

    def warnings(self, status: Status) -> list[Warning]:
        """About a finished run, whose posterior has this status."""
        if not self.planned or status.is_ok or status.cause == CLIPPING:
            return []
        return [ConvergenceWarning(f"{status}. {self.concluded or REMEDIES[status.cause]}")]

    def state(self, num_steps: int | None) -> dict[str, Any]:
        if not self.planned:
            return {}
        averages = None if self.averages is None else self.averages.state()
        histogram = self.policy.histogram_state
        return {"averages": averages, "num_steps": num_steps, "histogram": histogram}

    def require_own(self, state: Any) -> None:
        """:raises ConfigurationError: the state is that of a run of another kind."""
        if self.planned and isinstance(state, dict) and "num_steps" not in state:
            raise ConfigurationError(_OF_PAPER)

    def require_state(self, state: Mapping[str, Any], num_steps: int | None) -> None:
        """:raises ConfigurationError: a part is damaged, or of another model or plan."""
        parameters = require_tensors("parameters", state["parameters"])
        store = pyro.get_param_store()
        for name, value in parameters.items():
            if name in store and store[name].unconstrained().shape != value.shape:
                raise ConfigurationError(_OTHER_SHAPE.format(name=name))
        if not isinstance(state["optimizer"], dict):
            raise ConfigurationError("load_state_dict: optimizer must be a dictionary.")
        RowOptimizer.check(state.get("private_local_state", {}))
        saved = state.get("num_steps")
        if not self.planned:
            if saved is not None:
                raise ConfigurationError("load_state_dict: this state has a plan. DPSVI takes it.")
            return
        if saved is not None:
            require_count("num_steps", saved)
        if num_steps is not None and not same(num_steps, saved):
            raise ConfigurationError("num_steps differs from that of the saved run.")
        _averages(state)

    def load(self, state: Mapping[str, Any]) -> None:
        self.rows.load_state_dict(state.get("private_local_state", {}))
        self.waiting = dict(state["parameters"])
        self._take_up()
        self.optimizer.load(state["optimizer"])
        if self.planned:
            self.averages = _averages(state)

    @torch.no_grad()
    def _take_up(self) -> None:
        store = pyro.get_param_store()
        for name in [name for name in self.waiting if name in store]:
            leaf = store[name].unconstrained()
            if leaf.shape != self.waiting[name].shape:
                raise ConfigurationError(_OTHER_SHAPE.format(name=name))
            leaf.copy_(self.waiting.pop(name))


def _averages(state: Mapping[str, Any]) -> IterateAverages | None:
    return None if state["averages"] is None else IterateAverages.resumed(state["averages"])
