"""The user's loss for one record, or for the sites outside the plate, in tensor operations only.

Pyro's losses run unchanged, except for a few lines that read numbers out of tensors. These lines
could not be vectorised over records or traced.
"""

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias
from unittest import mock

import torch
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
    trace_elbo,
    trace_mean_field_elbo,
)
from pyro.infer.traceenum_elbo import _compute_dice_elbo, _compute_model_factors
from pyro.infer.util import Dice
from pyro.ops import packed
from pyro.ops.contract import contract_tensor_tree
from pyro.ops.einsum import contract, torch_log
from pyro.ops.rings import LogRing
from pyro.poutine import Trace
from torch import Tensor

from pyro_dp.utils.errors import ConfigurationError, PrivacyError
from pyro_dp.utils.validation import require_count

_Packed = Any  # a tensor with named dimensions
_Costs = dict[frozenset, list[_Packed]]  # by their plates
Loss: TypeAlias = ELBO | Callable

_SUPPORTED = (Trace_ELBO, TraceMeanField_ELBO, TraceEnum_ELBO)
_EQUIVALENT: dict[type[ELBO], type[ELBO]] = {
    JitTrace_ELBO: Trace_ELBO,
    JitTraceMeanField_ELBO: TraceMeanField_ELBO,
    JitTraceEnum_ELBO: TraceEnum_ELBO,
    TraceGraph_ELBO: Trace_ELBO,
    JitTraceGraph_ELBO: Trace_ELBO,
}
_OF_PARTICLES = (RenyiELBO, TraceTailAdaptive_ELBO)
_KINDS = (
    "loss must be one of Trace_ELBO(), TraceMeanField_ELBO(), TraceEnum_ELBO(), TraceGraph_ELBO(), "
    "or your own loss. That is a function of model, guide and their arguments, or a subclass of "
    "ELBO with differentiable_loss. "
)
_WEIGHTED = (
    "loss: {kind} weights whole draws of the latents by the likelihood of all records together. It "
    "is no sum over records, so no record's part of it can be clipped. Use "
    "Trace_ELBO(num_particles=...), with a more flexible guide if its bound is loose, such as "
    "AutoMultivariateNormal(model) or AutoIAFNormal(model)."
)
_NOT_DIFFERENTIABLE = (
    "loss: {kind} takes its gradient in loss_and_grads, which sees all records at once. Give it a "
    "method differentiable_loss(model, guide, *args, **kwargs) that returns the loss as a tensor."
)


class NotVectorizable(PrivacyError):
    """The records' terms cannot be vectorised, and need the loop over single records."""


def record_loss(loss: ELBO, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> Tensor:
    """The negative ELBO as a scalar, with the derivative of Pyro's surrogate loss.

    :param model: shows only the wanted sites, such as those inside the plate; so does the guide.
    """
    with _no_numbers_read():
        return torch.as_tensor(loss.differentiable_loss(model, guide, *args, **kwargs))


def looped_loss(loss: ELBO, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> Tensor:
    """The same loss of one record by Pyro's sums, which may read numbers out of tensors.

    Pyro's ``TraceEnum_ELBO`` refuses a loss without a derivative. A record's term has none if all
    of its latents are drawn without a reparameterisation. Then only its value counts.
    """
    with mock.patch.object(TraceEnum_ELBO, "differentiable_loss", _negative(_compute_dice_elbo)):
        return torch.as_tensor(loss.differentiable_loss(model, guide, *args, **kwargs)).reshape(())


def _negative(elbo: Callable[[Trace, Trace], Tensor]) -> Callable[..., Tensor]:
    """``differentiable_loss`` of a ``TraceEnum_ELBO``, from the ELBO of a pair of traces."""

    def loss(self: TraceEnum_ELBO, model: Callable, guide: Callable, *args, **kwargs) -> Tensor:
        traces = self._get_traces(model, guide, args, kwargs)
        return -sum(elbo(*each) for each in traces) / self.num_particles

    return loss


@contextlib.contextmanager
def _no_numbers_read() -> Iterator[None]:
    """Inside, Pyro's losses use tensor operations only, also as parts of other losses."""
    quiet: Any = {"torch_item": _detached, "warn_if_nan": lambda *_: None}
    with (
        mock.patch.multiple(trace_elbo, **quiet),
        mock.patch.multiple(trace_mean_field_elbo, **quiet),
        mock.patch.object(TraceEnum_ELBO, "differentiable_loss", _negative(_enumerated_elbo)),
        # torch.func cannot see through Pyro's safe_log.
        mock.patch.object(torch_log, "safe_log", _SafeLog.apply),
    ):
        yield


def _detached(x: Tensor | float) -> Tensor | float:
    return x.detach() if isinstance(x, Tensor) else x


def _enumerated_elbo(model_trace: Trace, guide_trace: Trace) -> Tensor:
    """The ELBO of a pair of traces.

    Enumerated latents of the model are summed out within the logarithm, those of the guide outside.
    """
    costs, log_factors, ordering, sum_dims, scale = _compute_model_factors(model_trace, guide_trace)
    if log_factors:
        sizes: dict[str, int] = {}
        for factor in (f for group in log_factors.values() for f in group):
            sizes.update(zip(factor._pyro_dims, factor.shape, strict=True))
        log_factors = contract_tensor_tree(log_factors, sum_dims, ring=LogRing(dim_to_size=sizes))
    for plates, group in log_factors.items():
        costs.setdefault(plates, []).extend(packed.scale_and_mask(t, scale=scale) for t in group)
    for name, site in guide_trace.nodes.items():
        if site["type"] == "sample":
            cost = packed.neg(site["packed"]["log_prob"])
            costs.setdefault(ordering[name], []).append(cost)
    return _expectation(costs, Dice(guide_trace, ordering))


def _expectation(costs: _Costs, dice: Dice) -> Tensor:
    """Expected costs under the guide.

    They are exact for the guide's enumerated latents, and have score-function derivatives for drawn
    ones. Pyro's version reads probabilities as numbers, to skip those that are 0.
    """
    total = torch.tensor(0.0)
    for plates, group in costs.items():
        factors = dice._get_log_factors(plates)
        scale = math.exp(sum(f for f in factors if not isinstance(f, Tensor)))
        weights = [packed.exp(f) for f in factors if isinstance(f, Tensor)]
        for cost in group:
            total = total + scale * _weighted(cost, weights)
    return total


def _weighted(cost: _Packed, weights: list[_Packed]) -> Tensor:
    if not weights:
        return cost.sum()
    weighted = {d for w in weights for d in w._pyro_dims}
    dims = "".join(d for d in cost._pyro_dims if d in weighted)
    weight = contract(
        ",".join(w._pyro_dims for w in weights) + "->" + dims, *weights, backend="torch"
    )
    weight._pyro_dims = dims
    cost, weight = packed.broadcast_all(cost, weight)
    return (weight * torch.where(weight > 0, cost, 0.0)).sum()


class _SafeLog(torch.autograd.Function):
    """``log`` with a finite gradient at 0, in a form that ``torch.func`` can transform."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.log()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / x.clamp(min=torch.finfo(x.dtype).eps)


class OwnLoss(ELBO):
    """A loss that the user wrote, for one draw of the latents.

    :param loss: a function of model, guide and their arguments, or an object of a subclass of ELBO.
    """

    def __init__(self, loss: Loss):
        of_elbo = (loss.num_particles, loss.max_plate_nesting) if isinstance(loss, ELBO) else ()
        super().__init__(*of_elbo)
        self.loss = loss

    def _get_trace(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> Any:
        raise NotImplementedError  # the user's loss makes its traces

    def differentiable_loss(self, model: Callable, guide: Callable, *args, **kwargs) -> Tensor:
        if not isinstance(self.loss, ELBO):
            return self.loss(model, guide, *args, **kwargs)
        loss = single_particle(self.loss, self.max_plate_nesting)
        return loss.differentiable_loss(model, guide, *args, **kwargs)


def as_elbo(loss: Any) -> ELBO:
    """The loss as one that this package can take apart.

    Losses with jit become those without, because a record's term is the same.

    :raises ConfigurationError: the value is no loss, or the loss is no sum over records.
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
    if kind in _EQUIVALENT:
        return _EQUIVALENT[kind](loss.num_particles, loss.max_plate_nesting)
    if isinstance(loss, _OF_PARTICLES):
        raise ConfigurationError(_WEIGHTED.format(kind=kind.__name__))
    if kind in _SUPPORTED:
        return loss
    # A base class's differentiable_loss may differ from the loss_and_grads that SVI would use.
    missing = not hasattr(kind, "differentiable_loss")
    if missing or _depth(kind, "differentiable_loss") > _depth(kind, "loss_and_grads"):
        raise ConfigurationError(_NOT_DIFFERENTIABLE.format(kind=kind.__name__))
    return OwnLoss(loss)


def _depth(kind: type, name: str) -> int:
    """The distance to the base class that defines a method."""
    return next(i for i, base in enumerate(kind.__mro__) if name in vars(base) or base is ELBO)


def user_code(loss: ELBO) -> tuple[Loss, ...]:
    """The user's part of a loss, which may hold data or keep state."""
    return (loss.loss,) if isinstance(loss, OwnLoss) else ()


def enumerates(loss: ELBO) -> bool:
    """Whether the loss sums over latents that are marked for enumeration; a function may."""
    if isinstance(loss, OwnLoss):
        return isinstance(loss.loss, TraceEnum_ELBO) or not isinstance(loss.loss, ELBO)
    return isinstance(loss, TraceEnum_ELBO)


def single_particle(loss: ELBO, max_plate_nesting: float | None = None) -> ELBO:
    """A copy of the loss for one particle; callers handle several one by one."""
    loss = copy.copy(loss)
    if max_plate_nesting is not None:
        loss.max_plate_nesting = max_plate_nesting
    loss.num_particles, loss.vectorize_particles = 1, False
    return loss
