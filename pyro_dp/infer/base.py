"""The base of inferences from a Pyro model with a private plate.

The objects of a step are reused until arguments, code or parameters change.
"""

import abc
import contextlib
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any, Generic, TypeVar

import pyro
from pyro.infer.autoguide import AutoGuide, AutoLaplaceApproximation
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.graphs.captured_state import CapturedState
from pyro_dp.graphs.references import References
from pyro_dp.graphs.tracing import Compiler, NotTraceable
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.iterative import IterativeMechanism
from pyro_dp.mechanism.nonprivate import Readable
from pyro_dp.mechanism.reservation import Reservation
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.records.arguments import described, read_as_data
from pyro_dp.records.first_look import first_look, refuse_captured_data, refuse_rows
from pyro_dp.records.initial_values import initialised
from pyro_dp.records.losses import user_code
from pyro_dp.records.record_term import RecordTerm
from pyro_dp.records.records import Prepared, Records
from pyro_dp.records.sandbox import RaisedOnPlaceholders, RaisedOnRecords
from pyro_dp.records.tables import refuse_batches
from pyro_dp.utils.errors import ConfigurationError, ModelError, warn_not_private

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

_HAVE_DATA = (IterativeMechanism, Readable, PrivacyAccountant)  # and callbacks may use them
_IN_A_CALLBACK = (
    "callbacks: {error} If one of them read the data, the number of steps would reveal them. Write "
    "a function that refers to no data of these people, and to no object that has them. It may use "
    "step.value (a private loss, with Clip.loss) and the posterior."
)

P = TypeVar("P", bound=Prepared)


class Preparation(Generic[P]):
    """Keeps the objects of the last step, and detects whether they are current.

    :param jit: "none", "trace" or "compile".
    :ivar prepared: the objects; None before the first step.
    :ivar callbacks: callbacks of a new run that were not checked yet.
    """

    def __init__(self, model: Callable, jit: str):
        self.model, self._jit = model, jit
        self.traces_left = 0 if jit == "none" else _MOST_TRACES
        self._watched: CapturedState | None = None  # state of the traced code
        self._before: tuple[bool, set[str]] | None = None  # values before the last build
        self._handed: tuple[bool, set[str]] | None = None  # the same, from another inference
        self.prepared: P | None = None
        self._first: Records | None = None  # the first step's
        self._handlers: list[Any] = []  # around the last build
        self.callbacks: Sequence[Callable] = ()

    def current(self, args: tuple, kwargs: dict) -> P | None:
        """The kept objects; None if arguments, handlers, traced code or parameters changed."""
        kept, handlers = self.prepared, self._handlers
        if kept is None or not (kept.records.same_as(args, kwargs) and kept.is_current()):
            return None
        if len(_PYRO_STACK) != len(handlers) or not all(map(operator.is_, _PYRO_STACK, handlers)):
            return None
        if self.traces_left and self._watched and self._watched.changed:
            return None
        self.look_at_callbacks(kept.records)
        return kept

    def first(self, steps: int) -> Records | None:
        return self._first if steps else None

    def keep(self, prepared: P, steps: int) -> P:
        if self.first(steps) is None:
            refuse_batches(prepared.records.count)
            self._first = prepared.records
        self.prepared, self._handlers = prepared, list(_PYRO_STACK)
        return prepared

    def look_at_callbacks(self, records: Records) -> None:
        """:raises ModelError: a callback holds the data."""
        if not self.callbacks:
            return
        found = References(*self.callbacks, without=_HAVE_DATA)
        try:
            refuse_rows(found, records.plate.size)
            refuse_captured_data(found, records)
        except ModelError as error:
            raise ModelError(_IN_A_CALLBACK.format(error=error)) from None
        self.callbacks = ()

    def traced(self, trace: Callable[[Compiler], Any], term: RecordTerm, *users: Callable) -> Any:
        """The result of tracing; None, with a warning, if there is no graph.

        :param users: model and guide.
        """
        if not (self.traces_left and term.vectorizes):
            return None
        self._watched = CapturedState(*users, *user_code(term.loss), *term.records.constants)
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
        """Before a first build: whether the guide was run, and the names of all parameters."""
        handed, self._handed = self._handed, None
        self._before = handed or (initialised(guide), set(pyro.get_param_store().keys()))
        return self._before

    def take_over(self, other: "Preparation") -> None:
        """Do not count parameters that another inference's look made as earlier values."""
        self._handed = other._before


def note_values(reservation: Reservation, earlier: bool) -> None:
    """Note in the ledger that there were values before the first step."""
    if earlier and not reservation.plan.done:
        text = _EARLIER.format(name=reservation.inference)
        reservation.accountant.note_earlier_values(text)


_LOCAL_PARAMETERS = (
    "pyro.settings: module_local_params=True keeps parameters out of Pyro's parameter store, where "
    "they are found, moved and saved. Write pyro.settings.set(module_local_params=False) before "
    "model and guide are made."
)
_PRIVATE_GAUSSIAN = "the posterior() of a run with AutoMultivariateNormal(model) as guide"


def laplace_approximation(guide: AutoLaplaceApproximation, *args: Any, **kwargs: Any) -> AutoGuide:
    """Pyro's method of the same name, after a warning: it reads all data without noise."""
    warn_not_private("laplace_approximation", "records", _PRIVATE_GAUSSIAN)
    return type(guide).laplace_approximation(guide, *args, **kwargs)


class PrivateInference(IterativeMechanism, Generic[P]):
    """Base of the inferences from a Pyro model with a private plate.

    Subclasses implement ``step`` and ``_build``. The arguments are those of :class:`DPSVI`.
    """

    _usual_jit = "trace"

    def __init__(self, model: Callable, guide: Callable, **settings: Any):
        for name, function in (("model", model), ("guide", guide)):
            if not callable(function):
                raise ConfigurationError(f"{name} must be a Pyro {name}, which is a callable.")
        if isinstance(model, AutoGuide):
            raise ConfigurationError(
                f"model is an {type(model).__name__}, which is a guide: the order is model, guide."
            )
        if pyro.settings.get("module_local_params"):
            raise ConfigurationError(_LOCAL_PARAMETERS)
        if isinstance(guide, AutoLaplaceApproximation):
            vars(guide)["laplace_approximation"] = MethodType(laplace_approximation, guide)
        super().__init__(**settings)
        self.model = model
        self.guide = guide
        jit = self.execution.jit
        self._kept = Preparation[P](model, self._usual_jit if jit == "auto" else jit)

    def _look_at(self, args: tuple, kwargs: dict) -> P:
        """The objects for these arguments, rebuilt if data, code or parameters changed."""
        current = self._kept.current(args, kwargs)
        if not self._releases.must_look(current is None, self.sampling.rate):
            assert current is not None
            return current
        with _named_arguments(self.model, args, kwargs):
            records = first_look(
                self.model,
                self.guide,
                args,
                kwargs,
                plate=self.sampling.plate,
                slice_data=self.execution.slice_data,
                others=self._others,
                exchange=None if self._releases.peers.alone else self._releases.peers.exchange,
            )
            if self._releases.peers.own_ledgers:
                records.require_no_rows_beside()
            self._kept.look_at_callbacks(records)
            first = self._kept.first(self._steps)
            if first is not None:
                first.require_same_data(records)
            size, plan = records.plate.size, self._reservation.plan
            rate = self.sampling.rate or plan.rate(records.plate.subsample_size, size)
            sampler = RecordSampler(self.sampling.kind, size, rate, records.count)
            return self._kept.keep(self._build(records, sampler), self._steps)

    def _release(
        self, clipped: ClippedSum, sampler: RecordSampler, public: Sequence[Tensor] = (), *own: Any
    ) -> list[Tensor]:
        # Adding the model's constants here ensures that no step omits them.
        kept = self._kept.prepared
        constants = kept.public(self._releases) if kept else []
        return super()._release(clipped, sampler, [*constants, *public], *own)

    @abc.abstractmethod
    def _build(self, records: Records, sampler: RecordSampler) -> P:
        """Check model and guide against new records, and prepare a step."""

    @property
    def _others(self) -> tuple[Any, ...]:
        """Objects of users on which releases depend, other than model and guide."""
        return ()


@contextlib.contextmanager
def _named_arguments(model: Callable, args: tuple, kwargs: dict) -> Iterator[None]:
    """Add the arguments to errors of a first look, and name those that were read as data."""
    try:
        yield
    except ModelError as error:
        raised = isinstance(error, RaisedOnPlaceholders)
        shapes = described(model, args, kwargs) if raised else ""
        cause = read_as_data(model, args, kwargs)
        if not (raised or cause or isinstance(error, RaisedOnRecords)):
            raise
        raise ModelError(f"{cause}{error} {shapes}".rstrip()) from None
