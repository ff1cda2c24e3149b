"""The user's optimizer, which sees released gradients only: all it does is post-processing."""

import math
from collections.abc import Mapping
from inspect import signature
from operator import itemgetter
from typing import Any

import pyro
import torch
from pyro.optim import PyroOptim
from pyro.optim.lr_scheduler import PyroLRScheduler
from torch import Tensor
from torch.optim import Adam, Optimizer
from torch.optim.adam import adam
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from pyro_dp.utils.errors import ConfigurationError

_CONTIGUOUS = torch.contiguous_format
_NUMBERS = ("lr", "weight_decay", "eps", "amsgrad", "maximize")
_settings = itemgetter("betas", "decoupled_weight_decay", "fused", *_NUMBERS)
_others = itemgetter("foreach", "capturable", "differentiable")
STARTED = "Parameter {name!r} is NaN or infinite before the step: start it at a finite value."
_LEFT = (
    "Parameter {name!r} became NaN or infinite; the release was spent. Use a smaller learning rate "
    "or clip_norm in optim, other initial values, or a prior with a finite gradient."
)
_FAILED = "optim failed, and the release was spent: {error}"


@torch.no_grad()
def joint_adam(
    optim: PyroOptim, leaves: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None]
) -> bool:
    """Take the step of a :class:`~pyro.optim.PyroOptim` that makes plain Adams.

    State and settings stay those of the optimizers of single parameters.

    :param gradients: the leaves' gradients; they are only read.
    :returns: False if nothing was done: the optimizer does more than this, or has no state of
        some of the leaves yet.
    """
    own = [optim.optim_objs.get(leaf) for leaf in leaves.values()]
    plain = type(optim).__call__ is PyroOptim.__call__ and all(map(_is_plain, own))
    if not (plain and leaves) or any(map(optim.grad_clip.get, leaves.values())):
        return False
    settings = [_settings(each.param_groups[0]) for each in own]
    if any(each != settings[0] for each in settings[1:]):
        return False
    moving = [
        (leaf, gradients[name], each.state.get(leaf))
        for (name, leaf), each in zip(leaves.items(), own, strict=True)
        if gradients[name] is not None
    ]
    if not all(state and leaf.is_floating_point() for leaf, _, state in moving):
        return False
    if moving:
        moved, along, states = (list(each) for each in zip(*moving, strict=True))
        _adam(moved, along, states, *settings[0])
    return True


def _adam(
    leaves: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
    betas: tuple[float, float],
    decoupled: bool,
    fused: bool | None,
    *numbers: Any,
) -> None:
    own = dict(zip(("beta1", "beta2", *_NUMBERS), (*betas, *numbers), strict=True))
    names = ("exp_avg", "exp_avg_sq", *("max_exp_avg_sq",) * own["amsgrad"], "step")
    first, second, *most, steps = ([state[name] for state in states] for name in names)
    tensors = (leaves, gradients, first, second, most[0] if most else [], steps)
    kinds = {(leaf.device.type, leaf.dtype) for leaf in leaves}
    if decoupled or len(kinds) > 1 or kinds.pop()[0] != "cpu":
        adam(*tensors, fused=fused, decoupled_weight_decay=decoupled, **own)
        return
    torch._foreach_add_(steps, 1)  # as it does on the CPU, in half of the time
    torch._fused_adam_(*tensors, **own)


def _is_plain(optimizer: Any) -> bool:
    if type(optimizer) is not Adam or len(optimizer.param_groups) != 1:
        return False
    hooks = (
        *(optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks),
        *(_global_optimizer_pre_hooks, _global_optimizer_post_hooks),
    )
    return not (any(_others(optimizer.param_groups[0])) or any(hooks))


class PublicOptimizer:
    """Moves parameters along released gradients."""

    def __init__(self, optim: PyroOptim):
        self.optim = optim
        self.failed = False  # then parameters are looked at anew before more is spent

    @property
    def needs_metric(self) -> bool:
        make = getattr(self.optim, "pt_scheduler_constructor", None)
        return isinstance(make, type) and issubclass(make, ReduceLROnPlateau)

    def require(self, leaves: Mapping[str, Tensor]) -> None:
        """:raises ConfigurationError: no optimizer can be made that needs gradients only."""
        for name, leaf in leaves.items():
            try:
                made = self.optim.optim_objs.get(leaf) or self.optim._get_optim(leaf)
            except Exception as error:
                raise ConfigurationError(
                    f"optim cannot be made for parameter {name!r}: {_named(error)}. Its arguments "
                    "are those of torch's optimizer, for example {'lr': 0.01}."
                ) from error
            optimizer = getattr(made, "optimizer", made)  # a scheduler's
            if _needs_closure(optimizer):
                raise ConfigurationError(
                    f"optim: {type(optimizer).__name__}.step needs a closure, which would evaluate "
                    "the loss without noise. Use an optimizer that takes one gradient per step, "
                    "such as pyro.optim.Adam({'lr': 0.01})."
                )

    def step(
        self, leaves: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None], *, rarely: bool
    ) -> None:
        """
        :param gradients: the leaves' gradients, from released numbers.
        :param rarely: this is one of the few steps that check constrained values, too.
        :raises ConfigurationError: it fails, or makes a parameter NaN or infinite.
        """
        self.failed = True
        try:
            if not joint_adam(self.optim, leaves, gradients):
                for name, leaf in leaves.items():
                    # A gradient that the leaf held before may come from the data, so it is
                    # replaced. The new one is a copy, because optimizers write to it.
                    own = gradients[name]
                    leaf.grad = None if own is None else own.clone(memory_format=_CONTIGUOUS)
                self.optim(set(leaves.values()))
        except Exception as error:
            raise ConfigurationError(_FAILED.format(error=_named(error))) from error
        finally:
            for leaf in leaves.values():
                leaf.grad = None
        # A look waits for the device, so on devices other than the CPU it is rare.
        if rarely or all(leaf.device.type == "cpu" for leaf in leaves.values()):
            require_finite(leaves, _LEFT, constrained=rarely)
        self.failed = False

    def set(self, **settings: Any) -> None:
        """Set options for the next step, also of optimizers that are made later."""
        self.optim.pt_optim_args.update(settings)
        for made in self.optim.optim_objs.values():
            for group in made.param_groups:
                group.update(settings)

    def step_scheduler(self, loss: float) -> None:
        """:raises ConfigurationError: it fails."""
        if isinstance(self.optim, PyroLRScheduler):
            try:
                self.optim.step(*([loss] if self.needs_metric else []))
            except Exception as error:
                raise ConfigurationError(_FAILED.format(error=_named(error))) from error

    def load(self, state: dict[str, Any]) -> None:
        """Optimizers are made anew in the next step."""
        self.optim.optim_objs.clear()
        self.optim.set_state(state)


@torch.no_grad()
def require_finite(leaves: Mapping[str, Tensor], text: str, *, constrained: bool = True) -> None:
    """
    :param constrained: check the constrained values, too, which takes longer.
    :raises ConfigurationError: a parameter is not finite (all parameters here are public).
    """
    store = pyro.get_param_store()
    values = [
        (name, each)
        for name, leaf in leaves.items()
        if leaf.numel()
        for each in ((leaf, store[name]) if constrained else (leaf,))
    ]
    if not math.isfinite(sum(each.sum().item() for _, each in values)):
        for name, each in values:  # whose sum may be infinite where they are not
            if not each.isfinite().all():
                raise ConfigurationError(text.format(name=name))


def _needs_closure(optimizer: Optimizer) -> bool:
    _, *others = signature(type(optimizer).step).parameters.values()  # the first is self
    return any(
        p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in others
    )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
