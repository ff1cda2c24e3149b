"""The result of a run, and a step as callbacks see it. Both hold released or public numbers."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np

from pyro_dp.mechanism.clipped_fraction import ClippedFraction
from pyro_dp.utils.display import Displayed, Facts, figure
from pyro_dp.utils.errors import ConfigurationError

Callback = Callable[["ReleasedStep"], bool | None]
DONE = "all steps are done"
BY_CALLBACK = "a callback stopped it"
_RUNNING = "it is not finished"
_READINGS = 30  # how often a run reads the clipped fraction, which waits for the device


@dataclass(frozen=True, eq=False)
class ReleasedStep:
    """A step of ``run(..., callbacks=[...])``, after its release and update.

    A callback may use the inference's ``posterior()``, or save its ``state_dict()``.

    :param step: its number, from 1.
    :param num_steps: number of planned steps.
    :param value: the step's result. For :class:`DPSVI` it is the private loss in nats, or NaN
        without ``Clip.loss``.
    :param bound: C, to which a record's contribution is clipped in the next step. If blocks of a
        release have different bounds, it is the largest.
    :param noise_multiplier: sigma.
    :param noise: standard deviation of the noise in a coordinate of the sum over the step's
        records, before division by the sample rate. With several blocks, it is that of the first.

    >>> def half_way(step: ReleasedStep) -> bool:  # svi.run(x, callbacks=[half_way]) stops there
    ...     return 2 * step.step >= step.num_steps
    """

    step: int
    num_steps: int
    value: float
    bound: float
    noise_multiplier: float
    noise: float
    _inference: Any = field(repr=False)

    @property
    def epsilon(self) -> float:
        """The accountant's epsilon at the time of the call. It counts all planned steps.

        Computing it takes up to a second.
        """
        epsilon: float = self._inference.accountant.get_epsilon()
        return epsilon

    @property
    def clipped_fraction(self) -> ClippedFraction | None:
        """The inference's clipped fraction at the time of the call; None if there is none."""
        return getattr(self._inference, "clipped_fraction", None)


def require_callbacks(callbacks: Any) -> None:
    """:raises ConfigurationError: this is not a list of functions."""
    is_list = isinstance(callbacks, Sequence) and not isinstance(callbacks, str)
    if not (is_list and all(map(callable, callbacks))):
        raise ConfigurationError(
            "callbacks must be a list of functions of a ReleasedStep, for example "
            "callbacks=[lambda step: print(step)]."
        )


def wants_to_stop(callback: Callback, step: ReleasedStep) -> bool:
    """Call a callback. Returns whether it asks to stop the run.

    :raises ConfigurationError: it returned neither a bool nor None.
    """
    answer = callback(step)
    if not isinstance(answer, bool | np.bool_ | None):
        name, kind = getattr(callback, "__name__", repr(callback)), type(answer).__name__
        raise ConfigurationError(
            f"callbacks: {name} returned {kind}. Return True to stop the run, and None or False to "
            "go on. The step is done and counted: run() goes on after it."
        )
    return bool(answer)


@dataclass(eq=False, repr=False)
class RunResult(Displayed, Sequence[float]):
    """The steps of one call of ``run``, even if it did not finish.

    It is a sequence of the numbers that the steps returned. For :class:`DPSVI` these are the
    private losses, and without ``Clip.loss`` there are none. It prints as a few lines, and
    :meth:`plot` draws its numbers. All numbers except the times were released or are public.
    **Times are not private**: they may depend on the data, so keep them to yourself.

    :ivar inference: name of its class.
    :ivar measure: the name of the steps' result.
    :ivar earlier: number of steps before this call, which ``num_steps`` includes.
    :ivar num_steps: number of planned steps.
    :ivar returned: the number that each step returned, or NaN.
    :ivar bounds: C after each step, as :attr:`ReleasedStep.bound`.
    :ivar noise_multiplier: sigma of the last step; NaN before the first.
    :ivar noise: :attr:`ReleasedStep.noise` of the last step; NaN before the first.
    :ivar clipped: clipped fractions, by the number of the step after which they were read. There
        are about 30 and the last, or none.
    :ivar seconds: duration of the whole call, including callbacks.
    :ivar step_seconds: duration of each step.
    :ivar stopped: why there were no more steps.

    >>> sep = DPSEP(model, guide, accountant=accountant)
    >>> result = sep.run(heights, progress=False)
    >>> result.inference, result.stopped
    ('DPSEP', 'all steps are done')
    """

    inference: str
    measure: str
    earlier: int
    num_steps: int
    returned: list[float] = field(default_factory=list, init=False)
    bounds: list[float] = field(default_factory=list, init=False)
    noise_multiplier: float = field(default=math.nan, init=False)
    noise: float = field(default=math.nan, init=False)
    clipped: dict[int, ClippedFraction] = field(default_factory=dict, init=False)
    seconds: float = field(default=0.0, init=False)
    step_seconds: list[float] = field(default_factory=list, init=False)
    stopped: str = field(default=_RUNNING, init=False)

    @property
    def values(self) -> list[float]:
        """The steps' results that are numbers."""
        return [each for each in self.returned if not math.isnan(each)]

    @property
    def steps(self) -> int:
        """Number of steps in this call."""
        return len(self.returned)

    @property
    def clipped_fraction(self) -> ClippedFraction | None:
        """The last clipped fraction that was read; None if there is none."""
        return next(reversed(self.clipped.values()), None)

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, place: int) -> float: ...

    @overload
    def __getitem__(self, place: slice) -> list[float]: ...

    def __getitem__(self, place: int | slice) -> float | list[float]:
        return self.values[place]

    def __iter__(self) -> Iterator[float]:
        return iter(self.values)

    def plot(self) -> Any:
        """Draw the steps' results, the bound and the clipped fraction, as far as there are any.

        :returns: a ``matplotlib.figure.Figure``; ``figure.savefig("run.png")`` keeps it.
        :raises ConfigurationError: matplotlib is not installed.
        """
        numbers = [self.earlier + place for place in range(1, self.steps + 1)]
        panels = {}
        if self.values:
            panels[self.measure] = numbers, self.returned
        if any(map(math.isfinite, self.bounds)):
            panels["bound C"] = numbers, self.bounds
        if self.clipped:
            fractions = [each.fraction for each in self.clipped.values()]
            panels["clipped fraction"] = list(self.clipped), fractions
        count = max(len(panels), 1)
        found = figure("result.plot()", height=1.2 + 2.0 * count)
        rows = found.subplots(count, sharex=True, squeeze=False)[:, 0]
        for axes, (label, places) in zip(rows, panels.items(), strict=False):
            axes.plot(*places, marker=".", linestyle="none" if label == self.measure else "-")
            axes.set_ylabel(label)
            if label != self.measure:
                axes.set_ylim(bottom=0.0)
        rows[0].set_title(self.headline)
        rows[-1].set_xlabel("step")
        rows[-1].xaxis.get_major_locator().set_params(integer=True)
        return found

    def __repr__(self) -> str:
        """With the times. Notebooks do not display them, because they are not private."""
        if not self.step_seconds:
            return super().__repr__()
        typical = 1000 * statistics.median(self.step_seconds)
        return f"{super().__repr__()}\n  {self.seconds:.3g} s, {typical:.3g} ms a step"

    def _blocks(self) -> list[Facts]:
        pairs = []
        if self.steps:
            text = (
                f"multiplier {self.noise_multiplier:.4g}, bound {self.bounds[-1]:.4g}, "
                f"{self.noise:.4g} in a coordinate of the sum"
            )
            pairs.append(("Gaussian noise", text))
        if self.clipped_fraction is not None:
            pairs.append(("clipped", str(self.clipped_fraction)))
        if self.values:
            pairs.append((self.measure, f"{self.values[0]:.4g} first, {self.values[-1]:.4g} last"))
        return [Facts(pairs, f"{self.inference}: {self.headline}")]

    @property
    def goes_on(self) -> bool:
        return self.stopped == _RUNNING

    @property
    def headline(self) -> str:
        return f"{self.earlier + self.steps} of {self.num_steps} steps, {self.stopped}"

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the duration of the call, and note an exception that ends it."""
        start = time.perf_counter()
        try:
            yield
        except BaseException as error:
            self.stopped = f"{type(error).__name__} stopped it"
            raise
        finally:
            self.seconds = time.perf_counter() - start

    def add(self, step: ReleasedStep, seconds: float) -> None:
        """Store a step's numbers. The step itself is not stored, because it holds the inference."""
        self.returned.append(step.value)
        self.bounds.append(step.bound)
        self.noise_multiplier, self.noise = step.noise_multiplier, step.noise
        self.step_seconds.append(seconds)
        every = max(1, (self.num_steps - self.earlier) // _READINGS)
        every -= every % 10 if every > 10 else 0  # every tenth step waits for the device anyway
        if self.steps % every == 0 or step.step == self.num_steps:
            self.read_clipped(step)

    def read_clipped(self, step: ReleasedStep) -> None:
        clipped = step.clipped_fraction
        if clipped is not None:
            self.clipped[step.step] = clipped
