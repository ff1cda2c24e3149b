"""The base of the inferences from a Pyro model with a private plate."""

import abc
import math
import warnings
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, Generic, TypeVar

import pyro
import torch
from pyro.infer.autoguide import AutoGuide, AutoLaplaceApproximation
from torch import Tensor

from pyro_dp.graphs.captured_state import CapturedState
from pyro_dp.graphs.tracing import Compiler, NotTraceable
from pyro_dp.mechanism.clipped_fraction import (
    SHARE,
    ClippedFraction,
    ClippedFractions,
    require_fractions,
)
from pyro_dp.mechanism.contributions import Block
from pyro_dp.mechanism.iterative import IterativeMechanism
from pyro_dp.mechanism.sampling import Indices, RecordSampler
from pyro_dp.records.arguments import described, read_as_data
from pyro_dp.records.first_look import first_look
from pyro_dp.records.initial_values import initialised
from pyro_dp.records.losses import user_code
from pyro_dp.records.new_records import NewRecords
from pyro_dp.records.plate import PrivatePlate
from pyro_dp.records.record_term import RecordTerm
from pyro_dp.records.records import Prepared, Records
from pyro_dp.records.sandbox import RaisedOnPlaceholders
from pyro_dp.utils.errors import ClippingWarning, ConfigurationError, ModelError, warn_not_private
from pyro_dp.utils.torch_state import sent

_MOST_TRACES = 4  # tracing more often takes longer than it saves
_CHANGING = (
    "arguments, parameters or Python values that the model refers to keep changing, and a graph "
    "would be traced anew each time"
)
_LOCAL_PARAMETERS = (
    "pyro.settings: module_local_params=True keeps parameters out of Pyro's parameter store, where "
    "they are found, moved and saved. Write pyro.settings.set(module_local_params=False) before "
    "model and guide are made."
)
_PRIVATE_GAUSSIAN = "the posterior() of a run with AutoMultivariateNormal(model) as guide"


P = TypeVar("P", bound=Prepared)


def laplace_approximation(guide: AutoLaplaceApproximation, *args: Any, **kwargs: Any) -> AutoGuide:
    """Pyro's method of a guide that a private inference fits: it reads all data, without noise."""
    warn_not_private("laplace_approximation", "records", _PRIVATE_GAUSSIAN)
    return type(guide).laplace_approximation(guide, *args, **kwargs)


class PrivateInference(IterativeMechanism, Generic[P]):
    """Base of the inferences from a Pyro model with a private plate.

    Subclasses implement ``step`` and ``_build``. The arguments are those of :class:`DPSVI`.

    :param report: a bit of each record, whether it was clipped, joins the release.
    """

    _usual_jit = "trace"

    def __init__(
        self,
        model: Callable,
        guide: Callable,
        *,
        report: bool = False,
        **settings: Any,
    ):
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
        self._jit = self._usual_jit if jit == "auto" else jit
        self._traces_left = 0 if self._jit == "none" else _MOST_TRACES
        # An infinite bound clips nothing.
        self._bit = Block(1, 0.5, SHARE) if report and self._bound < math.inf else None
        self._fractions = ClippedFractions()
        self._watched: CapturedState | None = None  # state of the traced code
        self._before: tuple[bool, set[str]] | None = None  # values before the last build
        self._handed: tuple[bool, set[str]] | None = None  # the same, from another inference
        self._prepared: P | None = None  # for the arguments of the last step
        self._first: Records | None = None  # the first step's

    @property
    def clipped_fraction(self) -> ClippedFraction | None:
        """The fraction of all N records whose part was clipped, with its standard error.

        It is the mean over the last half of the steps so far (of n steps, the last n - n // 2). A
        step sums its records' bits, +1/2 within the bound and -1/2 beyond it, with noise. The
        sample rate and N divide the sum. A record whose part is NaN or infinite counts as half
        clipped. The standard error is that of noise and sampling, which are public. None before the
        first step, with ``Clip(report=False)``, and with an infinite bound.
        """
        return self._fractions.mean()

    def _add_bit(self, bit: Block, released: Tensor, prepared: Prepared) -> None:
        rate, size = prepared.sampler.sample_rate, prepared.records.plate.size
        self._fractions.add(released, size, rate, self._noise_in_sums, bit.share)

    def _warnings(self) -> list[Warning]:
        clipped = self.clipped_fraction
        if not (clipped and clipped.is_large):
            return []
        return [
            ClippingWarning(
                f"About {clipped.fraction:.0%} of the records were clipped at "
                f"clip={self._bound:g}, which biases the posterior. Raise clip until few are "
                "clipped; the noise grows with it."
            )
        ]

    def _clipped_now(self) -> ClippedFraction | None:
        return self.clipped_fraction

    def _shown(self) -> dict[str, Any]:
        clipped = self.clipped_fraction
        return super()._shown() | ({"clipped": str(clipped)} if clipped else {})

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"clipped_fractions": self._fractions.state()}

    def _require_state(self, state: Any, names: Sequence[str]) -> None:
        super()._require_state(state, names)
        require_fractions(state.get("clipped_fractions"))

    def _load_state(self, state: dict[str, Any]) -> None:
        super()._load_state(state)
        self._fractions.load(require_fractions(state.get("clipped_fractions")))

    def _prepare(self, args: tuple, kwargs: dict) -> P:
        """Everything that a step needs, checked. Refuses one step too many. Spends nothing."""
        self._refuse_steps_beyond_calibration()
        return self._look_at(args, kwargs)

    def _look_at(self, args: tuple, kwargs: dict) -> P:
        """The objects for these arguments. Data, code or parameters that are new make new ones."""
        known = self._prepared
        current = known is not None and (
            known.records.same_as(args, kwargs) and self._is_current(known)
        )
        if self._looks_anew(not current):
            try:
                known = self._prepared = self._look_anew(args, kwargs)
            except ModelError as error:
                raised = isinstance(error, RaisedOnPlaceholders)
                shapes = described(self.model, args, kwargs) if raised else ""
                cause = read_as_data(self.model, args, kwargs)
                if not (raised or cause):
                    raise
                raise ModelError(f"{cause}{error} {shapes}".rstrip()) from None
        assert known is not None
        return known

    def _look_anew(self, args: tuple, kwargs: dict) -> P:
        records = first_look(
            self.model,
            self.guide,
            args,
            kwargs,
            plate=self.sampling.plate,
            slice_data=self.execution.slice_data,
            others=self._others,
            exchange=None if self._ranks.alone else self._ranks.exchange,
        )
        if self._steps and self._first is not None:
            self._first.require_same_data(records)
        rate = self._rate(records.plate)
        sampler = RecordSampler(self.sampling.kind, records.plate.size, rate, records.count)
        prepared = self._build(records, sampler)
        if not self._steps or self._first is None:
            self._first = records
        return prepared

    def _new_records(self) -> NewRecords | None:
        if not self._steps or self._first is None:
            return None
        return NewRecords(self.model, self.guide, self._first)

    def _rate(self, plate: PrivatePlate) -> float:
        """The sample rate, which may be that of the plate."""
        return self.sampling.rate or plate.subsample_size / plate.size

    @abc.abstractmethod
    def _build(self, records: Records, sampler: RecordSampler) -> P:
        """Check model and guide against new records, and prepare a step."""

    @property
    def _others(self) -> tuple[Any, ...]:
        """Objects of users, beside model and guide, on which releases depend."""
        return ()

    def _public(self) -> Sequence[Tensor]:
        if self._prepared is None:
            return ()
        constants = [value for _, value in self._prepared.records.constants]
        tensors = [each for each in constants if isinstance(each, Tensor)]
        if self._ranks.own_ledgers:
            return tensors  # a digest of a single number would tell it to other owners
        numbers = [each for each in constants if isinstance(each, (int, float, str))]
        return [*tensors, torch.frombuffer(bytearray(repr(numbers).encode()), dtype=torch.uint8)]

    def _is_current(self, prepared: P) -> bool:
        """Whether the preparation still holds."""
        return not (self._traces_left and self._watched and self._watched.changed)

    def _traced(self, trace: Callable[[Compiler], Any], term: RecordTerm) -> Any:
        """The result of tracing, or None: with a warning, if no graph can be had.

        That records are taken one at a time, had a warning of its own.
        """
        if not (self._traces_left and term.vectorizes):
            return None
        users = (self.model, self.guide, *user_code(term.loss))
        self._watched = CapturedState(*users, *term.records.constants)
        self._traces_left -= 1
        try:
            if not self._traces_left:
                raise NotTraceable(_CHANGING)
            return trace(Compiler(self._jit == "compile"))
        except NotTraceable as reason:
            self._traces_left = 0
            warnings.warn(
                f"jit={self._jit!r} does not apply, and every step runs Pyro code: {reason}.",
                stacklevel=2,
            )
            return None

    def _values_before(self) -> tuple[bool, set[str]]:
        """Whether the guide has been run, and the parameters there are, before a first build."""
        handed, self._handed = self._handed, None
        self._before = handed or (initialised(self.guide), set(pyro.get_param_store().keys()))
        return self._before

    def take_over(self, other: "PrivateInference") -> None:
        """Start where another inference of the same call has begun to look.

        :param other: parameters that its look made are not earlier values here.
        """
        self._handed = other._before

    def start_anew(self) -> None:
        """Drop parameters that the other inference's look made. They may have its shapes."""
        if self._handed is not None and not initialised(self.guide):
            store = pyro.get_param_store()
            for name in store.keys() - self._handed[1]:
                del store[name]

    def _note_earlier_values(self) -> None:
        if self._steps == 0:
            self.accountant.note_earlier_values(
                "Parameters or optimizer had values before the first step of "
                f"{self._name}. If those came from the data, this ledger does not cover "
                "it. To start afresh, call pyro.clear_param_store() and make a new guide."
            )

    def _draw_records(self, prepared: Prepared, position: int) -> Indices:
        """The records of this step: indices, ascending, on their device."""
        indices = self._sample(prepared.sampler, position, prepared.ahead)
        device = prepared.records.device
        # Their number decides shapes, which the host must know: it draws them.
        return sent(indices, device) if isinstance(indices, Tensor) else indices.to(device)
