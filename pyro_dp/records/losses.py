"""The loss that a user hands over, seen as the loss of one record or of what lies outside."""

import copy
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from pyro.infer import (
    ELBO,
    JitTrace_ELBO,
    JitTraceEnum_ELBO,
    JitTraceGraph_ELBO,
    JitTraceMeanField_ELBO,
    RenyiELBO,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
    TraceTailAdaptive_ELBO,
)
from torch import Tensor

from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_count

Loss: TypeAlias = ELBO | Callable

_KNOWN = (Trace_ELBO, TraceMeanField_ELBO, TraceEnum_ELBO)
_TAKEN_AS: dict[type[ELBO], type[ELBO]] = {
    JitTrace_ELBO: Trace_ELBO,
    JitTraceMeanField_ELBO: TraceMeanField_ELBO,
    JitTraceEnum_ELBO: TraceEnum_ELBO,
    TraceGraph_ELBO: Trace_ELBO,
    JitTraceGraph_ELBO: Trace_ELBO,
}
_OF_PARTICLES = (RenyiELBO, TraceTailAdaptive_ELBO)
_KINDS = (
    "loss must be one of Trace_ELBO(), TraceMeanField_ELBO(), TraceEnum_ELBO(), TraceGraph_ELBO(), "
    "or a loss of your own: a function of model, guide and their arguments, or a subclass of ELBO "
    "with differentiable_loss. "
)
_WEIGHTED = (
    "loss: {kind} weights whole draws of the latents by what all records together say of them. It "
    "is no sum over records, and no record's part of it can be clipped. Use "
    "Trace_ELBO(num_particles=...), and where its bound is loose a more flexible guide, such as "
    "AutoMultivariateNormal(model) or AutoIAFNormal(model)."
)
_NOT_DIFFERENTIABLE = (
    "loss: {kind} takes its gradient in loss_and_grads, which sees all records at once. Give it a "
    "method differentiable_loss(model, guide, *args, **kwargs) that returns the loss as a tensor."
)


class OwnLoss(ELBO):
    """A loss of the user's own, for one draw: what it is now, not what it was.

    :param loss: a function of model, guide and their arguments, or a subclass of ELBO.
    """

    def __init__(self, loss: Loss):
        of_elbo = (loss.num_particles, loss.max_plate_nesting) if isinstance(loss, ELBO) else ()
        super().__init__(*of_elbo)
        self.loss = loss

    def _get_trace(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> Any:
        raise NotImplementedError  # the loss makes its own

    def differentiable_loss(self, model: Callable, guide: Callable, *args, **kwargs) -> Tensor:
        if not isinstance(self.loss, ELBO):
            return self.loss(model, guide, *args, **kwargs)
        return single_particle(self.loss, self.max_plate_nesting).differentiable_loss(
            model, guide, *args, **kwargs
        )


def as_elbo(loss: Any) -> ELBO:
    """Losses that are the same for a record are one: those with jit are those without.

    :raises ConfigurationError: it is no loss, or one that is no sum over records.
    """
    if inspect.ismethod(loss) and loss.__name__ == "differentiable_loss":
        loss = loss.__self__  # a loss that is written as a function
    if isinstance(loss, type):
        raise ConfigurationError(
            f"{_KINDS}It is the class itself: write {loss.__name__}() instead of {loss.__name__}."
        )
    kind = type(loss)
    if not isinstance(loss, ELBO):
        if not callable(loss):
            raise ConfigurationError(f"{_KINDS}It is of type {kind.__name__}.")
        return OwnLoss(loss)
    require_count("loss.num_particles", loss.num_particles)
    if kind in _TAKEN_AS:
        return _TAKEN_AS[kind](loss.num_particles, loss.max_plate_nesting)
    if isinstance(loss, _OF_PARTICLES):
        raise ConfigurationError(_WEIGHTED.format(kind=kind.__name__))
    if kind in _KNOWN:
        return loss
    # The derivative must be of what SVI would take.
    place = {name: _depth(kind, name) for name in ("differentiable_loss", "loss_and_grads")}
    if place["differentiable_loss"] > place["loss_and_grads"] or _is_missing(kind):
        raise ConfigurationError(_NOT_DIFFERENTIABLE.format(kind=kind.__name__))
    return OwnLoss(loss)


def _depth(kind: type, name: str) -> int:
    """In how distant a base a method is defined."""
    return next(i for i, base in enumerate(kind.__mro__) if name in vars(base) or base is ELBO)


def _is_missing(kind: type) -> bool:
    return getattr(kind, "differentiable_loss", None) is getattr(ELBO, "differentiable_loss", None)


def user_code(loss: ELBO) -> tuple[Loss, ...]:
    """What of a loss is the user's own, and may hold or keep anything."""
    return (loss.loss,) if isinstance(loss, OwnLoss) else ()


def enumerates(loss: ELBO) -> bool:
    """Whether it sums over latents that are marked to be enumerated; a function may."""
    if isinstance(loss, OwnLoss):
        return isinstance(loss.loss, TraceEnum_ELBO) or not isinstance(loss.loss, ELBO)
    return isinstance(loss, TraceEnum_ELBO)


def single_particle(loss: ELBO, max_plate_nesting: float | None = None) -> ELBO:
    """The user's loss for one particle; several are handled one by one."""
    loss = copy.copy(loss)
    if max_plate_nesting is not None:
        loss.max_plate_nesting = max_plate_nesting
    loss.num_particles, loss.vectorize_particles = 1, False
    return loss
