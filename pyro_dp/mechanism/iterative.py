"""The base class of private inferences that work in steps: calibration, run and release."""

import abc
import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from torch import Tensor
from tqdm.auto import tqdm

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.cluster import Cluster, Ranks
from pyro_dp.mechanism.federation import Federation, Holders
from pyro_dp.mechanism.peers import Alone, Stopped
from pyro_dp.mechanism.releases import Releases
from pyro_dp.mechanism.reservation import Reservation, Steps
from pyro_dp.mechanism.run_result import (
    BY_CALLBACK,
    DONE,
    Callback,
    ReleasedStep,
    RunResult,
    require_callbacks,
    wants_to_stop,
)
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.mechanism.settings import Execution, Noise, Sampling, require_fit
from pyro_dp.utils.display import Facts, in_notebook
from pyro_dp.utils.errors import ConfigurationError, PrivacyError, warn_user

Step = TypeVar("Step", bound=Callable[..., float])
# Only one thread makes a step at a time. Pyro's handlers belong to the process, so a model would
# see those of another thread. And two steps must not draw at the same position of a ledger.
_TURN = threading.RLock()


def _peers(peers: Cluster | Federation | None, accountant: PrivacyAccountant) -> Alone:
    if peers is None:
        return Alone()
    if isinstance(peers, Federation):
        if accountant.silent:
            raise ConfigurationError(
                "peers: a private selection must hide its trials, but a Federation shows each "
                "trial to other owners. Let each owner choose settings by public knowledge."
            )
        return Holders(peers, accountant)
    return Ranks(peers, accountant)


def whole_step(step: Step) -> Step:
    """Decorate a step, so Ctrl-C leaves it undone, or done together with its update."""

    @functools.wraps(step)
    def whole(inference: "IterativeMechanism", *args: Any, **kwargs: Any) -> float:
        own = inference._releases
        with own.interrupts.within(), _TURN:
            return own.peers.step(functools.partial(step, inference, *args, **kwargs))

    return whole  # type: ignore[return-value]


class IterativeMechanism(abc.ABC):
    """Base of the inferences: steps with one release each, paid for by one accountant.

    Subclasses implement ``step``. The other arguments are those of :class:`DPSVI`.

    :param bound: the largest norm of one record's contribution to the first release.
    :param plan: returns the :class:`Steps` for ``num_steps``, the kind of sampling, and the bound.
    """

    def __init__(
        self,
        *,
        accountant: PrivacyAccountant,
        num_steps: int | None = None,
        bound: float,
        noise: Noise | float | None = None,
        sampling: Sampling | float | None = None,
        execution: Execution | None = None,
        plan: Callable[[int | None, str, float], Steps] = Steps,
    ):
        self.noise, self.sampling = Noise.read(noise), Sampling.read(sampling)
        self.execution = Execution.read(execution)
        steps = plan(num_steps, self.sampling.kind, bound)
        own = (accountant, steps.num_steps, self.noise, self.sampling, self.execution)
        require_fit(*own, bound=bound, plans=steps.chooses)
        peers = _peers(self.execution.peers, accountant)
        name = self._known_as or type(self).__name__
        names = name, self._method or name
        self._releases = Releases(accountant, peers, self.noise, steps, *names)
        if not peers.counts:
            accountant.follow()

    _kept: Any = None  # preparations for the data, after the first step
    last_run: RunResult | None = None
    """The result of the last :meth:`run`, even if it was interrupted; None before the first.

    A state does not hold it.
    """
    _measure = "change"  # the name of a step's result
    _method = ""  # the name in reports, if it is another one
    _known_as = ""  # the name for users, if it is not that of the class
    # Functions that read exact numbers for nonprivate(), by the names of its methods. The ledger
    # records each read first. They take the inference, the result of _look_at, all indices in
    # batches, and a stream.
    _exact = MappingProxyType[str, Callable[..., Any]]({})

    @property
    def _reservation(self) -> Reservation:
        """The run's part of the budget."""
        return self._releases.reservation

    @property
    def accountant(self) -> PrivacyAccountant:
        """The accountant that pays for all releases."""
        return self._reservation.accountant

    @property
    def num_steps(self) -> int | None:
        """Number of planned steps; None: there is no plan, or not yet.

        You can set it. If a run has reserved more steps, they are not returned.
        """
        return self._reservation.plan.num_steps

    @num_steps.setter
    def num_steps(self, num_steps: int | None) -> None:
        self._reservation.plan.num_steps = num_steps

    @property
    def _steps(self) -> int:
        """Number of steps done."""
        return self._reservation.plan.done

    @abc.abstractmethod
    def step(self, *args: Any, **kwargs: Any) -> float:
        """Make one step, with one release. Pass the full data."""

    def run(
        self, *args: Any, progress: bool = True, callbacks: Sequence[Callback] = (), **kwargs: Any
    ) -> RunResult:
        """Make the steps that are left of ``num_steps``.

        **Ctrl-C** waits for the end of a stage. The stages are the preparation of the first step
        (which may compile), the sum over the records, and the step. Before the release, Ctrl-C
        leaves the step undone. After the release, the step is finished, so no paid result is lost.
        Call ``run`` again for the steps that are left. :attr:`last_run` has the interrupted call's
        result so far. A second Ctrl-C before the release does not wait. Then torch may be in a
        state in which this process cannot go on: save ``state_dict()``, and load it in another
        process. If a callback raises or is interrupted, its step is already done.

        **Stopping early.** The first release reserves all steps that are left, and nothing is
        returned. So epsilon counts ``num_steps`` steps, even if a callback, an error or you stop
        the run earlier. The decision to stop may therefore depend on releases.

        :param progress: show a progress bar.
        :param callbacks: functions of a :class:`ReleasedStep`, called in turn after each step. They
            see released and public numbers. They must not read the data, because the number of
            steps would reveal something. A callback that holds the data is refused. If one returns
            True, the run stops after this step, and a later ``run`` goes on.
        :returns: the steps' return values, if these are numbers, with noise, clipping, times, and
            why the run stopped.
        :raises ConfigurationError: ``num_steps`` is missing and cannot be chosen, or all steps are
            done. Or a callback returned neither None nor a bool.
        :raises PrivacyBudgetExceeded: the steps do not fit the budget.
        """
        require_callbacks(callbacks)
        if self._kept is not None:
            self._kept.callbacks = callbacks
        peers, interrupts = self._releases.peers, self._releases.interrupts
        plan, name = self._reservation.plan, self._reservation.inference
        with peers.together():
            num_steps = peers.step(functools.partial(self._planned, args, kwargs))
            self._reservation.begin_run()
            result = RunResult(name, self._measure, self._steps, num_steps)
            self.last_run = result
            bar = tqdm(
                total=num_steps,
                initial=self._steps,
                desc=f"Fitting with {name}",
                unit="step",
                disable=not progress or self.accountant.silent or not peers.counts,
            )
            with interrupts.installed(), result.timed(), bar:
                while not plan.finished:
                    try:
                        with interrupts.within():
                            start = time.perf_counter()
                            value = self.step(*args, **kwargs)
                            sizes = plan.bound, self.noise_multiplier, self._releases.noise
                            step = ReleasedStep(self._steps, num_steps, value, *sizes, self)
                            result.add(step, time.perf_counter() - start)
                    except Stopped:  # on another rank
                        result.stopped = BY_CALLBACK
                        break
                    if not math.isnan(step.value):
                        bar.set_postfix_str(f"{self._measure} {step.value:.4g}", refresh=False)
                    bar.update()
                    stops = [wants_to_stop(callback, step) for callback in callbacks]
                    if any(stops) and not plan.finished:
                        peers.stop()
                        result.stopped = BY_CALLBACK
                        result.read_clipped(step)
                        break
                else:
                    result.stopped, result.num_steps = DONE, self._steps
                    bar.total = self._steps
                    bar.refresh()
                with interrupts.within():  # no interrupt between parts of the conclusion
                    interrupts.hold()
                    found = self._conclude()
            self._releases.forget()
            for warning in [*found, *peers.warnings()]:
                warn_user(warning)
            return result

    def _conclude(self, status: str | None = None) -> Sequence[Warning]:
        """Note the clipped fraction and the status of the result in the ledger.

        :param status: whether the result can be published.
        :returns: warnings about the finished run, from released numbers.
        """
        self._reservation.note_result(getattr(self, "clipped_fraction", None), status)
        return ()

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """``num_steps``, after checks that the run can begin or go on."""
        if self.num_steps is None:
            raise ConfigurationError("run() needs num_steps: pass it, or call step() yourself.")
        self._reservation.require_step()
        if self._reservation.plan.finished:
            raise ConfigurationError(f"num_steps={self.num_steps} are done: start anew to go on.")
        return self.num_steps

    def __reduce__(self) -> NoReturn:
        name = self._reservation.inference
        raise PrivacyError(f"A {name} holds the data: save its state_dict() instead.")

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._shown().items())
        return f"{self._reservation.inference}({shown})"

    def _repr_html_(self) -> str:
        """Settings and progress, for notebooks."""
        facts = [(name, str(value)) for name, value in self._shown().items()]
        if self.last_run is not None:
            facts.append(("last run", self.last_run.headline))
        return in_notebook([Facts(facts, self._reservation.inference)])

    def _shown(self) -> dict[str, Any]:
        clipped = getattr(self, "clipped_fraction", None)
        return {
            "num_steps": self.num_steps,
            "noise_multiplier": self._reservation.noise_multiplier,
            "steps_done": self._steps,
        } | ({"clipped": str(clipped)} if clipped else {})

    @property
    def noise_multiplier(self) -> float:
        """sigma: standard deviation of the noise in units of the bound of one record.

        If sigma is calibrated, the first step fixes it. Before, this is the noise that would fit.

        :raises ConfigurationError: it must be calibrated, and only the first step determines the
            sample rate or the number of steps, or agrees on it with other owners.
        :raises PrivacyBudgetExceeded: nothing is left of the budget.
        """
        if self._reservation.noise_multiplier is not None:
            return self._reservation.noise_multiplier
        if self._releases.peers.own_ledgers:
            raise ConfigurationError(
                "noise_multiplier is agreed with the other holders in the first step."
            )
        rate = self.sampling.rate
        if rate is None or self.sampling.kind == "fixed" or self.num_steps is None:
            raise ConfigurationError("noise_multiplier is calibrated by the first step.")
        return self._reservation.least(rate)

    def _release(
        self,
        clipped: ClippedSum,
        sampler: RecordSampler,
        public: Sequence[Tensor] = (),
        noise_multiplier: float | None = None,
    ) -> list[Tensor]:
        """Release the sums of a step. Returns estimates of the clipped sums over all records.

        :param clipped: sums over the records that take part.
        :param public: other inputs of the step, which must be equal on all ranks of a cluster.
        :param noise_multiplier: sigma. None: that of the steps, and the release counts as a step.
        """
        ours, rate, sigma = self._reservation, sampler.sample_rate, noise_multiplier
        if sigma is None:
            sigma = ours.plan.noise(ours.calibrate(rate))
        event = self._releases.begin(clipped, sigma, sampler)
        entry = ours.begin(), ours.plan.bound, ours.reserved(rate)
        with self.accountant.next_position(*entry) as position:
            try:
                released = self._releases.make(clipped, event, position, self._steps, public)
            except BaseException:
                if self.accountant.position != position:
                    ours.lose()
                raise
        ours.plan.done += noise_multiplier is None
        return [block.div_(rate) for block in released]  # release() returned new tensors
