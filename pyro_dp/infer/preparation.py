"""The objects of a step, kept from one step to the next, and whether they still hold."""

import warnings
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pyro

from pyro_dp.graphs.captured_state import CapturedState
from pyro_dp.graphs.tracing import Compiler, NotTraceable
from pyro_dp.mechanism.reservation import Reservation
from pyro_dp.records.initial_values import initialised
from pyro_dp.records.losses import user_code
from pyro_dp.records.record_term import RecordTerm
from pyro_dp.records.records import Prepared, Records

_MOST_TRACES = 4  # tracing more often takes longer than it saves
_CHANGING = (
    "arguments, parameters or Python values that the model refers to keep changing, and a graph "
    "would be traced anew each time"
)
_EARLIER = (
    "Parameters or optimizer had values before the first step of {name}. If those came from the "
    "data, this ledger does not cover it. To start afresh, call pyro.clear_param_store() and make "
    "a new guide."
)

P = TypeVar("P", bound=Prepared)


class Preparation(Generic[P]):
    """Keeps the objects of the last step, and knows whether they still hold.

    :param jit: "none", "trace" or "compile".
    :ivar prepared: None before the first look.
    """

    def __init__(self, jit: str):
        self._jit = jit
        self.traces_left = 0 if jit == "none" else _MOST_TRACES
        self._watched: CapturedState | None = None  # state of the traced code
        self._before: tuple[bool, set[str]] | None = None  # values before the last build
        self._handed: tuple[bool, set[str]] | None = None  # the same, from another inference
        self.prepared: P | None = None
        self._first: Records | None = None  # the first step's

    def current(self, args: tuple, kwargs: dict) -> P | None:
        """The objects for these arguments; None if these, traced code or parameters are new."""
        known = self.prepared
        if known is None or not (known.records.same_as(args, kwargs) and known.is_current()):
            return None
        return None if self.traces_left and self._watched and self._watched.changed else known

    def first(self, steps: int) -> Records | None:
        return self._first if steps else None

    def keep(self, prepared: P, steps: int) -> P:
        if self.first(steps) is None:
            self._first = prepared.records
        self.prepared = prepared
        return prepared

    def traced(self, trace: Callable[[Compiler], Any], term: RecordTerm, *users: Callable) -> Any:
        """The result of tracing; None, with a warning, if no graph can be had.

        :param users: model and guide.
        """
        if not (self.traces_left and term.vectorizes):
            return None
        watched = (*users, *user_code(term.loss), *term.records.constants)
        self._watched = CapturedState(*watched)
        self.traces_left -= 1
        try:
            if not self.traces_left:
                raise NotTraceable(_CHANGING)
            return trace(Compiler(self._jit == "compile"))
        except NotTraceable as reason:
            self.traces_left = 0
            warnings.warn(
                f"jit={self._jit!r} does not apply, and every step runs Pyro code: {reason}.",
                stacklevel=2,
            )
            return None

    def values_before(self, guide: Callable) -> tuple[bool, set[str]]:
        """Whether the guide has been run, and the parameters there are, before a first build."""
        handed, self._handed = self._handed, None
        self._before = handed or (initialised(guide), set(pyro.get_param_store().keys()))
        return self._before

    def take_over(self, other: "Preparation") -> None:
        """Parameters that the look of another inference made are not earlier values here."""
        self._handed = other._before

    def start_anew(self, guide: Callable) -> None:
        """Drop parameters that the other inference's look made. They may have its shapes."""
        if self._handed is not None and not initialised(guide):
            store = pyro.get_param_store()
            for name in store.keys() - self._handed[1]:
                del store[name]


def note_values(reservation: Reservation, earlier: bool) -> None:
    """Note in the ledger if there were values before the first step."""
    if earlier and not reservation.plan.done:
        text = _EARLIER.format(name=reservation.inference)
        reservation.accountant.note_earlier_values(text)
