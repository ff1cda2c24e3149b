"""The base of the inferences from a Pyro model with a private plate."""

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any, Generic

import pyro
from pyro.infer.autoguide import AutoGuide, AutoLaplaceApproximation
from torch import Tensor

from pyro_dp.infer.preparation import P, Preparation
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.iterative import IterativeMechanism
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.records.arguments import described, read_as_data
from pyro_dp.records.first_look import first_look
from pyro_dp.records.records import Records
from pyro_dp.records.sandbox import RaisedOnPlaceholders, RaisedOnRecords
from pyro_dp.utils.errors import ConfigurationError, ModelError, warn_not_private

_LOCAL_PARAMETERS = (
    "pyro.settings: module_local_params=True keeps parameters out of Pyro's parameter store, where "
    "they are found, moved and saved. Write pyro.settings.set(module_local_params=False) before "
    "model and guide are made."
)
_PRIVATE_GAUSSIAN = "the posterior() of a run with AutoMultivariateNormal(model) as guide"


def laplace_approximation(guide: AutoLaplaceApproximation, *args: Any, **kwargs: Any) -> AutoGuide:
    """Pyro's method of a guide that a private inference fits: it reads all data, without noise."""
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
        self._kept = Preparation[P](self._usual_jit if jit == "auto" else jit)

    def _look_at(self, args: tuple, kwargs: dict) -> P:
        """The objects for these arguments. Data, code or parameters that are new make new ones."""
        known = self._kept.current(args, kwargs)
        if not self._releases.must_look(known is None, self.sampling.rate):
            assert known is not None
            return known
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
        # Here no step can forget the model's constants.
        known = self._kept.prepared
        constants = known.public(self._releases) if known else []
        return super()._release(clipped, sampler, [*constants, *public], *own)

    @abc.abstractmethod
    def _build(self, records: Records, sampler: RecordSampler) -> P:
        """Check model and guide against new records, and prepare a step."""

    @property
    def _others(self) -> tuple[Any, ...]:
        """Objects of users, beside model and guide, on which releases depend."""
        return ()


@contextlib.contextmanager
def _named_arguments(model: Callable, args: tuple, kwargs: dict) -> Iterator[None]:
    """Errors of a first look name the arguments, and those that were taken for data.

    :raises ModelError: the same, with more to say.
    """
    try:
        yield
    except ModelError as error:
        raised = isinstance(error, RaisedOnPlaceholders)
        shapes = described(model, args, kwargs) if raised else ""
        cause = read_as_data(model, args, kwargs)
        if not (raised or cause or isinstance(error, RaisedOnRecords)):
            raise
        raise ModelError(f"{cause}{error} {shapes}".rstrip()) from None
