"""The common base of step-wise private inferences: calibration, run, release, state."""

import abc
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from torch import Tensor
from tqdm.auto import tqdm

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import Event, SubsampledGaussian
from pyro_dp.accounting.events.event import require_short_text
from pyro_dp.accounting.ledger import SECURE, SEEDED
from pyro_dp.accounting.origins import OPEN, PLANNED, Origin, new_name
from pyro_dp.mechanism.clipped_fraction import ClippedFraction
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.cluster import Cluster, Ranks
from pyro_dp.mechanism.federation import Federation, Holders
from pyro_dp.mechanism.fixed_point import FixedPointSum
from pyro_dp.mechanism.messages import Ledger, NoiseMultiplier, Settings
from pyro_dp.mechanism.peers import Alone, Stopped
from pyro_dp.mechanism.release import release
from pyro_dp.mechanism.run_result import (
    BY_CALLBACK,
    DONE,
    Callback,
    ReleasedStep,
    RunResult,
    require_callbacks,
    wants_to_stop,
)
from pyro_dp.mechanism.sampling import DrawnAhead, Indices, RecordSampler
from pyro_dp.mechanism.settings import Execution, Noise, Sampling, require_fit
from pyro_dp.mechanism.streams import Randomness
from pyro_dp.utils import display
from pyro_dp.utils.errors import (
    ClusterError,
    ConfigurationError,
    PrivacyBudgetExceeded,
    PrivacyError,
    PrivacyWarning,
    warn_user,
)
from pyro_dp.utils.interrupts import Interrupts
from pyro_dp.utils.validation import LARGEST, require_count, same

Step = TypeVar("Step", bound=Callable[..., float])
_event = functools.lru_cache(16)(SubsampledGaussian)  # steps are alike
_ONE_BY_ONE = DrawnAhead(1, [])  # each sample when it is needed

_LARGE_DELTA = (
    "delta={delta:g} is large: {times:.3g} / N for N = {size:,} protected records. Publishing "
    "one of them as it is, picked at random, has delta = 1 / N. Stay below, best at a tenth: "
    "PrivacyAccountant(..., delta={better:.0e})."
)
_RESULTS_LOST = (
    " {lost} releases in the journal came after the loaded state, or failed. They are paid for, "
    "and their results are lost. The present result can be used as it is."
)
_AGREED = "noise_multiplier is agreed with the other holders in the first step."


def _peers(peers: Cluster | Federation | None, accountant: PrivacyAccountant) -> Alone:
    """The peers with which an inference makes its steps."""
    if peers is None:
        return Alone()
    if isinstance(peers, Federation):
        if accountant.silent:
            raise ConfigurationError(
                "peers: a private selection hides its trials, and a Federation shows each of "
                "them to other owners. Let each owner choose settings by public knowledge."
            )
        return Holders(peers, accountant)
    return Ranks(peers, accountant)


def whole_step(step: Step) -> Step:
    """A step that Ctrl-C leaves undone, or done with all that follows from its release."""

    @functools.wraps(step)
    def whole(inference: "IterativeMechanism", *args: Any, **kwargs: Any) -> float:
        with inference._interrupts.within():
            return inference._ranks.step(functools.partial(step, inference, *args, **kwargs))

    return whole  # type: ignore[return-value]


class IterativeMechanism(abc.ABC):
    """Base of the inferences: steps with one release each, paid for by one accountant.

    Subclasses implement ``step``. The arguments are those of :class:`DPSVI`.

    :param bound: the largest norm of one record's part of the first release.
    :param plans: whether the first step chooses ``num_steps``, where it is None.
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
        plans: bool = False,
    ):
        self.accountant = accountant
        self.num_steps = None if num_steps is None else require_count("num_steps", num_steps)
        self.noise, self.sampling = Noise.read(noise), Sampling.read(sampling)
        self.execution = Execution.read(execution)
        own = (accountant, self.num_steps, self.noise, self.sampling, self.execution)
        require_fit(*own, bound=bound, plans=plans)
        self._noise_multiplier = self.noise.multiplier
        self._calibrates = self._noise_multiplier is None
        self._bound = bound
        self._ranks = _peers(self.execution.peers, accountant)
        self._randomness = Randomness(self.noise.source, self._ranks.rank)
        self._sum_type = FixedPointSum if self.noise.is_secure else ClippedSum
        if self._randomness.seeded:
            self.accountant.note(SEEDED)
        if self.noise.is_secure:
            self.accountant.note(SECURE)
        if self._ranks.note:
            self.accountant.note(self._ranks.note)
        if not self._ranks.counts:
            self.accountant.follow()
        self._origin: Origin | None = None  # the run's origin, from its first release on
        self._reservation = new_name()  # under which its steps are reserved
        self._reserves = self._calibrates  # the steps that are left, with the next release
        self._steps = 0
        self._lost = 0  # releases that the ledger counts, but without a result
        self._ahead = _ONE_BY_ONE  # the sampler of the last sample
        self._interrupts = Interrupts()
        self._last_event: SubsampledGaussian | None = None
        self._last_noise = 0.0  # in the first block
        self._last_run: RunResult | None = None

    _measure = "change"  # the name of a step's result
    _plan_kind = PLANNED  # the plan of a run that reserves its releases
    _method = ""  # in reports, if that is not the name
    _known_as = ""  # to users, if that is not the name of the class

    @property
    def _name(self) -> str:
        """Its name to users."""
        return self._known_as or type(self).__name__

    @abc.abstractmethod
    def step(self, *args: Any, **kwargs: Any) -> float:
        """Make one step, with one release, on the full data."""

    def run(
        self,
        *args: Any,
        progress: bool = True,
        callbacks: Sequence[Callback] = (),
        **kwargs: Any,
    ) -> RunResult:
        """Make the steps that are left of ``num_steps``, with a progress bar.

        **Ctrl-C** waits for the end of a stage. The stages are the preparation of the first step
        (which may compile), the sum over the records, and the step. Before the release, Ctrl-C
        leaves the step undone. After the release, the step is finished: ledger, parameters,
        optimizer and history agree, and nothing is lost that was paid for. Call ``run`` again to
        go on with the steps that are left. :attr:`last_run` is the interrupted call's result so
        far. A second Ctrl-C before the release does not wait. It may leave torch in a state in
        which this process cannot go on. Then save ``state_dict()``, and load it in another process.
        Callbacks that raise, and interrupts within them, find the step done.

        **Stopping early.** The first release reserves all steps that are left, and nothing is
        returned. So epsilon counts ``num_steps`` steps, even if a callback, an error or you stop
        the run before. A stop may therefore depend on releases: it is post-processing of the run
        as it was planned. ``run`` called again goes on with the steps that were reserved.

        :param progress: show a progress bar.
        :param callbacks: functions of a :class:`ReleasedStep`, called one after the other after
            each step. They see released and public numbers. If one of them returns True, the run
            stops after this step, as if it were the last. ``run`` goes on later.
        :returns: the sequence of the steps' return values, if these are numbers, with noise,
            clipping, times, and why it stopped.
        :raises ConfigurationError: ``num_steps`` is missing and cannot be chosen, or all steps are
            done. A callback returns neither None nor a bool. A scheduler of :class:`DPSVI` needs a
            metric, and there is no private loss.
        :raises PrivacyBudgetExceeded: so many steps do not fit the budget.
        """
        require_callbacks(callbacks)
        with self._ranks.together():
            return self._run(args, kwargs, progress, callbacks)

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        progress: bool,
        callbacks: Sequence[Callback],
    ) -> RunResult:
        num_steps = self._ranks.step(functools.partial(self._planned, args, kwargs))
        self._reserves = self._reserves or not self._calibrates
        name = self._name
        hidden = not progress or self.accountant.silent or not self._ranks.counts
        result = self._last_run = RunResult(name, self._measure, self._steps, num_steps)
        bar = tqdm(
            total=num_steps,
            initial=self._steps,
            desc=f"Fitting with {name}",
            unit="step",
            disable=hidden,
        )
        with self._interrupts.installed(), result.timed(), bar:
            while not self._finished:
                try:
                    with self._interrupts.within():
                        step = self._timed_step(result, args, kwargs)
                except Stopped:  # on another rank
                    self._stopped_by_callback(result)
                    break
                if not math.isnan(step.value):
                    bar.set_postfix_str(f"{self._measure} {step.value:.4g}", refresh=False)
                bar.update()
                stops = [wants_to_stop(callback, step) for callback in callbacks]
                if any(stops) and not self._finished:
                    self._ranks.stop()
                    self._stopped_by_callback(result)
                    result.read_clipped(step)
                    break
            else:
                result.stopped, result.num_steps, bar.total = DONE, self._steps, self._steps
                bar.refresh()
        self._ahead.forget()
        self._note_result()
        for warning in [*self._warnings(), *self._ranks.warnings()]:
            warn_user(warning)
        return result

    @property
    def last_run(self) -> RunResult | None:
        """The result of the last :meth:`run`, even if it was interrupted; None before the first.

        A state does not hold it.
        """
        return self._last_run

    def _note_result(self) -> None:
        """Tell the ledger the fraction clipped, and whether the result can be published."""
        if self._origin is not None:
            self.accountant.note_result(self._origin, self._clipped_now(), self._status_line())

    def _status_line(self) -> str | None:
        """Whether the result can be published; None: nothing judges it."""
        return None

    def _timed_step(
        self, result: RunResult, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ReleasedStep:
        start = time.perf_counter()
        value = self._step_of_run(args, kwargs)
        step = ReleasedStep(
            self._steps,
            result.num_steps,
            value,
            self._next_bound(),
            self.noise_multiplier,
            self._last_noise,
            self.accountant,
            self._clipped_now,
        )
        result.add(step, time.perf_counter() - start)
        return step

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """``num_steps`` of a run that can begin, or go on."""
        if self.num_steps is None:
            raise ConfigurationError("run() needs num_steps: pass it, or call step() yourself.")
        self._refuse_steps_beyond_calibration()
        if self._finished:
            raise ConfigurationError(f"num_steps={self.num_steps} are done: start anew to go on.")
        return self.num_steps

    @property
    def _finished(self) -> bool:
        """Whether no planned step is left."""
        return self.num_steps is not None and self._steps >= self.num_steps

    def _stopped_by_callback(self, result: RunResult) -> None:
        with self._interrupts.within():
            self._stop_early(result.num_steps)
        result.stopped = BY_CALLBACK

    def _stop_early(self, num_steps: int) -> None:
        """A callback has stopped the run. An inference may have more to do then.

        :param num_steps: planned.
        """
        self._interrupts.hold()

    def __reduce__(self) -> NoReturn:
        name = self._name
        raise PrivacyError(f"A {name} holds the data: save its state_dict() instead.")

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._shown().items())
        return f"{self._name}({shown})"

    def _repr_html_(self) -> str:
        """Settings and progress, for notebooks."""
        facts = [(name, str(value)) for name, value in self._shown().items()]
        if self._last_run is not None:
            facts.append(("last run", self._last_run.headline))
        return display.facts(self._name, facts)

    def _shown(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "noise_multiplier": self._noise_multiplier,
            "steps_done": self._steps,
        }

    @property
    def noise_multiplier(self) -> float:
        """sigma: standard deviation of the noise in units of the bound of one record.

        The first step fixes it, if it is calibrated. Before, this is what would fit now.

        :raises ConfigurationError: it must be calibrated, and only the first step determines the
            sample rate or the number of steps, or agrees on it with other owners.
        :raises PrivacyBudgetExceeded: nothing is left of the budget.
        """
        if self._noise_multiplier is not None:
            return self._noise_multiplier
        if self._ranks.own_ledgers:
            raise ConfigurationError(_AGREED)
        rate = self.sampling.rate
        if rate is None or self.sampling.kind == "fixed" or self.num_steps is None:
            raise ConfigurationError("noise_multiplier is calibrated by the first step.")
        return self._calibrated(rate)

    @property
    def _noise_in_sums(self) -> float:
        """sigma in the released sums. It is larger if several owners add their shares."""
        return self._in_sums(self.noise_multiplier)

    def _agreed(self, noise_multiplier: float) -> float:
        """The noise multiplier on which all ranks agree, after calibration to a budget."""
        return self._ranks.agreed_noise(noise_multiplier)

    def _in_sums(self, noise_multiplier: float) -> float:
        return noise_multiplier * self._ranks.noise_factor

    def _calibrate(self, rate: float) -> float:
        """sigma. If needed, it is calibrated once, to the rest of the budget.

        :param rate: the sample rate.
        """
        if self._noise_multiplier is None:
            self._noise_multiplier = self._agreed(self._calibrated(rate))
        return self._noise_multiplier

    def _look_at(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Build the objects of a step on these data, for :func:`nonprivate`."""
        raise NotImplementedError

    def _exact(self) -> dict[str, Callable[..., Any]]:
        """Functions for :func:`nonprivate`, by the names of its methods.

        The ledger notes a call first. The arguments are the result of :meth:`_look_at`, indices
        of all records in batches, and a private stream.
        """
        return {}

    def _step_of_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        return self.step(*args, **kwargs)

    def _next_bound(self) -> float:
        """The bound to which a record's part is clipped in the next step."""
        return self._bound

    def _clipped_now(self) -> ClippedFraction | None:
        """The fraction of clipped records, if there is an estimate."""
        return None

    def _warnings(self) -> list[Warning]:
        """Warnings about a finished run, from released numbers."""
        return []

    def _state(self) -> dict[str, Any]:
        """The common part of all states.

        :raises PrivacyError: on a rank of a cluster whose accountant does not count.
        """
        if not self._ranks.counts:
            raise PrivacyError(
                "state_dict: the ledger of a cluster is on rank 0. Save there, as in "
                "`if cluster.rank == 0: torch.save(...)`, and load it on all."
            )
        return {
            "version": 1,
            "steps": self._steps,
            "noise_multiplier": self._noise_multiplier,
            "reservation": self._reservation,
            "accountant": self.accountant.state_dict(),
        }

    def _require_state(self, state: Any, names: Sequence[str]) -> None:
        """
        :param names: names in a state beside those of :meth:`_state`.
        :raises ConfigurationError: it is not a state of this inference.
        """
        known = {"steps", "noise_multiplier", "accountant", *names}
        if not (
            isinstance(state, dict) and same(state.get("version"), 1) and known <= state.keys()
        ):
            raise ConfigurationError(f"load_state_dict: this is no state_dict() of {self._name}.")
        sigma = state["noise_multiplier"]
        if not self._calibrates and not same(sigma, self._noise_multiplier):
            raise ConfigurationError("noise_multiplier differs from that of the saved run.")
        require_count("steps", state["steps"], least=0)
        require_short_text("reservation", state.get("reservation", self._reservation))

    def _load_state(self, state: dict[str, Any]) -> None:
        """Load the ledger first: it refuses a state that would lower it.

        Releases in a journal beyond the state are paid for and lost. Then the noise of a calibrated
        run is calibrated again, for the steps and the budget that are left.
        """
        self.accountant.load_state_dict(state["accountant"])
        counted = sum(line["count"] for line in state["accountant"]["ledger"])
        self._lost = self.accountant.num_releases - counted
        self._ranks.due = True
        self._steps = state["steps"]
        self._take_over(state.get("reservation", self._reservation))
        self._reserves = self._calibrates
        again = self._calibrates and self._lost
        self._noise_multiplier = None if again else state["noise_multiplier"]

    def _take_over(self, reservation: str) -> None:
        """Go on with the reservation of an earlier run, or of this one."""
        if reservation != self._reservation:
            self._reservation, self._origin = reservation, None

    def _calibrated(self, rate: float) -> float:
        """The smallest noise with which the steps that are left fit the rest of the budget."""
        releases = functools.partial(self._to_release, rate)
        try:
            return self.accountant.least_noise(releases, self._reservation)
        except PrivacyBudgetExceeded as error:
            text = _RESULTS_LOST.format(lost=self._lost) if self._lost else ""
            raise PrivacyBudgetExceeded(f"{error}{text}") from None

    def _to_release(self, rate: float, sigma: float) -> Counter[Event]:
        """The releases of the steps that are left."""
        assert self.num_steps is not None  # calibration and runs have a number
        return Counter({_event(sigma, rate, self.sampling.kind): self.num_steps - self._steps})

    def _to_reserve(self, rate: float) -> Counter[Event] | None:
        """The run's reservation with its next release; None: it does not change."""
        return self._to_release(rate, self._calibrate(rate)) if self._reserves else None

    def _lose_release(self) -> None:
        """Count a release that failed. The steps that are left share the rest of the budget.

        Owners do not calibrate again: another one may not have paid, and noise must be equal.
        """
        self._lost += 1
        if self._calibrates and not self._ranks.own_ledgers:
            self._noise_multiplier = None
        else:
            self._reserves = False  # one step more would not fit the budget: the last is refused

    def _refuse_steps_beyond_calibration(self) -> None:
        if self._calibrates and self._finished:
            raise PrivacyBudgetExceeded(
                f"The noise was calibrated for num_steps={self.num_steps}, which are done: start "
                "anew with the remaining budget."
            )

    def _looks_anew(self, needed: bool) -> bool:
        """Whether the data are looked at now, as they are new here, or on another rank.

        Then all ranks have the same settings, and in a cluster the ledger of rank 0.
        """
        if self._ranks.alone or not self._ranks.look_anew(needed):
            return self._ranks.alone and needed
        ours = self.accountant
        ledger = Ledger(ours.state_dict(), self._noise_multiplier, self._lost, self._reservation)
        if self._ranks.own_ledgers:
            self._ranks.common(Settings(self._in_common()), ledger)
            known = self._ranks.exchange(NoiseMultiplier(self._noise_multiplier))
            if any(each != known[0] for each in known):
                self._noise_multiplier = None  # and is agreed anew
            return True
        budget = {name: getattr(ours, name) for name in ("epsilon", "delta", "neighboring")}
        budget = {f"accountant.{name}": value for name, value in budget.items()}
        first = self._ranks.common(Settings(self._in_common() | budget), ledger)
        if not self._ranks.counts:
            try:
                ours.follow(first.accountant)
            except ConfigurationError as error:
                raise ClusterError(f"The ledger of rank 0 cannot be read. {error}") from error
            self._noise_multiplier, self._lost = first.noise_multiplier, first.lost
            self._take_over(first.reservation)
        return True

    def _in_common(self) -> dict[str, Any]:
        """Settings on which all ranks of a cluster must agree before the first look, by name."""
        return {
            "num_steps": self.num_steps,
            "sample_rate": self.sampling.rate,
            "sampling": self.sampling.kind,
            "The inference": self._name,
            "noise_multiplier": None if self._calibrates else self._noise_multiplier,
            "The bound": float(self._bound),
            "secure": self._sum_type.__name__,
            "The number of steps taken": self._steps,
        }

    def _public(self) -> Sequence[Tensor]:
        """Inputs of a release beside the data. They must be equal on all ranks of a cluster."""
        return ()

    def _sample(
        self, sampler: RecordSampler, position: int, ahead: DrawnAhead = _ONE_BY_ONE
    ) -> Indices:
        """The records of this step: indices, ascending.

        :param ahead: may draw those of other steps, too, except in secure mode.
        """
        self._interrupts.check()
        stream = functools.partial(self._randomness.stream, "sampling")
        if self._randomness.secure:
            return sampler.draw(stream(position))
        if ahead is not self._ahead:  # other data
            self._ahead.forget()
            self._ahead = ahead
        left = None if self.num_steps is None else self.num_steps - self._steps
        return ahead.sample(lambda place: sampler.draw(stream(place)), position, left)

    def _release(self, clipped: ClippedSum, sampler: RecordSampler) -> list[Tensor]:
        """The release of a step: estimates of the sums over all records."""
        sigma = self._calibrate(sampler.sample_rate)
        estimates = self._account_and_release(clipped, sigma, sampler)
        self._steps += 1
        return estimates

    def _run_of_releases(self) -> Origin:
        """The run's origin in the ledger."""
        if self._origin is None:
            secure = self._sum_type is FixedPointSum
            self._origin = Origin.now(
                self._method or self._name,
                seeded=self._randomness.seeded,
                secure=secure,
                reservation=self._reservation,
                plan=self._plan_kind if self._reserves else OPEN,
            )
        return self._origin

    def _warn_of_delta(self, size: int) -> None:
        """
        :param size: N, which is public.
        """
        times = self.accountant.delta * size
        if times >= 1.0:
            delta, better = self.accountant.delta, 0.1 / size
            text = _LARGE_DELTA.format(delta=delta, times=times, size=size, better=better)
            self.accountant.note(text)
            warn_user(PrivacyWarning(text))

    def _account_and_release(
        self, clipped: ClippedSum, noise_multiplier: float, sampler: RecordSampler
    ) -> list[Tensor]:
        """Sums over the batch become estimates of sums over all records."""
        rate = sampler.sample_rate
        bound = max(block.bound for block in clipped.blocks)
        # Powers of the estimates must not overflow.
        if noise_multiplier and noise_multiplier * bound / rate > LARGEST:
            raise ConfigurationError(
                f"The noise would have a standard deviation beyond {LARGEST:g}: lower the noise or "
                "the bound of a record, or raise the sample rate."
            )
        event = _event(noise_multiplier, rate, sampler.sampling)
        if self._last_event is None and noise_multiplier:
            self._warn_of_delta(sampler.size)
        self._last_event = event
        self._last_noise = clipped.blocks[0].noise(self._in_sums(noise_multiplier))
        self._interrupts.hold()
        # Two threads with equal seeds must not find the same position, and draw the same noise.
        ours = self._run_of_releases(), self._next_bound(), self._to_reserve(rate)
        with self.accountant.next_position(*ours) as position:
            self._ranks.add_up(clipped, event, self._steps, self._public())
            door = functools.partial(
                release,
                clipped,
                accountant=self.accountant,
                event=event,
                noise=self._randomness.stream("noise", position),
            )
            try:
                released = self._ranks.released(door, clipped, event)
            except BaseException:
                if self.accountant.position != position:
                    self._lose_release()
                raise
        return [block.div_(rate) for block in released]  # which have memory of their own
