"""The contract of every fuzzed case: a typed error or a valid run, all releases in the ledger."""

import contextlib
import math
import re
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import pyro
import torch
from torch import Tensor

import pyro_dp.mechanism.releases
from pyro_dp import PrivacyAccountant, PrivacyError
from pyro_dp.mechanism.release import release

SECONDS = 10.0  # processor time; calls that wait may take ten times as much by the clock
SENTINEL, HALF_SENTINEL = 987654.321, 9872.0  # half precision has no larger one
# As Python, numpy and torch print them, rounded or not.
_SENTINELS = re.compile(r"98765[34]|9\.8765|9\.877e|9872|9\.872")
_SIGNATURE = re.compile(r"unexpected keyword|required (keyword-only|positional)|positional arg")


class Violation(AssertionError):
    """The contract is broken.

    :param kind: "hang", "crash", "not finite", "unrecorded" or "leak".
    """

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Hang(BaseException):
    """A case took too long. Code that catches exceptions must not catch this."""


class NotBuilt(Exception):
    """Pyro or torch refused what a user would have made before anything of pyro_dp ran."""


@dataclass
class Watch:
    """A case's notes on itself while it runs."""

    accountant: PrivacyAccountant | None = None
    recorded: int = 0  # when the accountant came under watch
    released: int = 0  # releases that returned noisy sums

    def watch(self, accountant: PrivacyAccountant) -> PrivacyAccountant:
        self.accountant, self.recorded = accountant, accountant.num_releases
        self.released = 0
        return accountant

    def step(self, step: Callable[[], object], releases: int = 1) -> object:
        """One step, which makes so many releases."""
        before = self.released
        result = step()
        if self.released - before != releases:
            raise Violation("unrecorded", f"a step made {self.released - before} releases")
        return result

    def require_ledger(self) -> None:
        if self.accountant is not None:
            entered = self.accountant.num_releases - self.recorded
            if entered != self.released:
                raise Violation("unrecorded", f"{self.released} releases, {entered} in the ledger")
            if math.isnan(self.accountant.get_epsilon()):
                raise Violation("not finite", "epsilon is NaN")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call of the package, made of plain values: it prints as the code of the call."""

    settings: dict

    def run(self, watch: Watch) -> None:
        raise NotImplementedError


def check(case: Case) -> str:
    """Run a case.

    :returns: "valid", "not built", "TypeError" or the name of the typed error.
    :raises Violation: it breaks the contract.
    """
    torch.set_default_dtype(torch.float64)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    watch = Watch()
    try:
        with _counted(watch), time_limit(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                case.run(watch)
                outcome = "valid"
            except NotBuilt:
                outcome = "not built"
            except (PrivacyError, TypeError) as error:
                outcome = type(error).__name__
                if outcome == "TypeError" and not _SIGNATURE.search(str(error)):
                    raise
                require_no_data(error)
            watch.require_ledger()
    except Hang:
        raise Violation("hang", f"more than {SECONDS:g} s") from None
    except (Violation, KeyboardInterrupt):
        raise
    except BaseException as error:
        place = _place(error)
        raise Violation("crash", f"{type(error).__name__} at {place}: {error}") from error
    finally:
        pyro.clear_param_store()
    return outcome


def _place(error: BaseException) -> str:
    """The last line of the package that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "pyro_dp" in Path(frame.filename).parts]
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "none of its lines"


def require_finite(values: Iterable[tuple[str, Tensor | float]]) -> None:
    for name, value in values:
        if not torch.as_tensor(value).isfinite().all():
            raise Violation("not finite", f"{name} after a step that raised nothing")


def parameters() -> Iterator[tuple[str, Tensor]]:
    """All in the store, constrained and not."""
    store = pyro.get_param_store()
    for name in store:
        value = store[name]
        yield name, value
        yield f"{name} (unconstrained)", value.unconstrained()


def require_no_data(error: BaseException) -> None:
    """Neither the error nor its cause quotes the sentinel, even if it is not displayed."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        texts = (str(each), repr(each), *map(str, getattr(each, "__notes__", ())))
        if any(_SENTINELS.search(text) for text in texts):
            raise Violation("leak", f"{type(each).__name__} behind {type(error).__name__}: {each}")
        pending += [each.__cause__, each.__context__]


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def stop(signum, frame):
        raise Hang

    clocks = (
        (signal.SIGPROF, signal.ITIMER_PROF, seconds),
        (signal.SIGALRM, signal.ITIMER_REAL, 10 * seconds),
    )
    before = [signal.signal(number, stop) for number, _, _ in clocks]
    for _, clock, limit in clocks:
        signal.setitimer(clock, limit)
    try:
        yield
    finally:
        for (number, clock, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(clock, 0)
            signal.signal(number, handler)


@contextlib.contextmanager
def _counted(watch: Watch) -> Iterator[None]:
    def counting(clipped, **named):
        released = release(clipped, **named)
        watch.released += 1
        return released

    with mock.patch.object(pyro_dp.mechanism.releases, "release", counting):
        yield


@dataclass
class Figures:
    """Figures of many cases.

    :ivar seconds: processor time.
    :ivar slowest: seconds, and the case.
    :ivar outcomes: counts by family of cases and outcome.
    :ivar violations: kind, text and case.
    """

    cases: int = 0
    seconds: float = 0.0
    slowest: tuple[float, str] = (0.0, "")
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)
    violations: list[dict[str, str]] = field(default_factory=list)

    def add(self, case: Case) -> None:
        begin = time.process_time()
        try:
            outcome = check(case)
        except Violation as violation:
            outcome = violation.kind
            self.violations.append(
                {"kind": violation.kind, "text": str(violation)[:500], "case": repr(case)}
            )
        taken = time.process_time() - begin
        self.cases += 1
        self.seconds += taken
        if taken > self.slowest[0]:
            self.slowest = taken, repr(case)
        family = self.outcomes.setdefault(type(case).__name__, {})
        family[outcome] = family.get(outcome, 0) + 1


def odd_values() -> list:
    """Values that nobody should pass, or that look like numbers and are none."""
    return [
        *(None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e300, -1e300, 1e-300, 5e-324),
        *(math.nan, math.inf, -math.inf, 10**400, -(10**400), "1", "", "poisson", b"1", 1j),
        *([], [1.0], (), (1.0, 2.0), {}, {"a": 1}, object, len),
        *(np.float32(0.5), np.float64("nan"), np.int64(3), np.bool_(True), np.array(1.0)),
        *(np.array([1.0, 2.0]), torch.tensor(0.5), torch.tensor([1.0, 2.0]), torch.tensor([])),
    ]
