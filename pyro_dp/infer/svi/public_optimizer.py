"""The user's optimizer, which sees released gradients only: all it does is post-processing."""

import math
from collections.abc import Mapping
from inspect import signature
from typing import Any

import pyro
import torch
from pyro.optim import PyroOptim
from pyro.optim.lr_scheduler import PyroLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pyro_dp.infer.svi.joint_adam import joint_adam
from pyro_dp.utils.errors import ConfigurationError

STARTED = "Parameter {name!r} is NaN or infinite before the step: start it at a finite value."
_LEFT = (
    "Parameter {name!r} became NaN or infinite; the release was spent. Use a smaller learning rate "
    "or clip_norm in optim, other initial values, or a prior with a finite gradient."
)
_FAILED = "optim failed, and the release was spent: {error}"


class PublicOptimizer:
    """Moves parameters along released gradients.

    :param optim: the user's, with or without a scheduler.
    """

    def __init__(self, optim: PyroOptim):
        self.optim = optim
        self.failed = False  # then parameters are looked at anew before more is spent

    @property
    def needs_metric(self) -> bool:
        """Whether its scheduler goes by a loss."""
        make = getattr(self.optim, "pt_scheduler_constructor", None)
        return isinstance(make, type) and issubclass(make, ReduceLROnPlateau)

    def require(self, leaves: Mapping[str, Tensor]) -> None:
        """
        :param leaves: unconstrained parameters by name.
        :raises ConfigurationError: no optimizer can be made for them that needs gradients only.
        """
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
        :param gradients: of the leaves, from what was released.
        :param rarely: this is one of few steps in which it is looked at constrained values, too.
        :raises ConfigurationError: it fails, or makes a parameter NaN or infinite.
        """
        self.failed = True
        try:
            if not joint_adam(self.optim, leaves, gradients):
                self._step_of_each(leaves, gradients)
        except Exception as error:
            raise ConfigurationError(_FAILED.format(error=_named(error))) from error
        finally:
            for leaf in leaves.values():
                leaf.grad = None
        # To look means to wait for a device: beside the CPU, rarely.
        if rarely or all(leaf.device.type == "cpu" for leaf in leaves.values()):
            require_finite(leaves, _LEFT, constrained=rarely)
        self.failed = False

    def _step_of_each(
        self, leaves: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None]
    ) -> None:
        """As Pyro takes it."""
        for name, leaf in leaves.items():
            gradient = gradients[name]
            # What a leaf held before came from elsewhere, and may come from the data. A gradient
            # has memory of its own: optimizers write to it.
            leaf.grad = (
                None if gradient is None else gradient.clone(memory_format=torch.contiguous_format)
            )
        self.optim(set(leaves.values()))

    def set(self, **settings: Any) -> None:
        """For the next step, of optimizers that were made and of those that will be."""
        self.optim.pt_optim_args.update(settings)
        for made in self.optim.optim_objs.values():
            for group in made.param_groups:
                group.update(settings)

    def step_scheduler(self, loss: float) -> None:
        """
        :param loss: private, of the step.
        :raises ConfigurationError: it fails.
        """
        if isinstance(self.optim, PyroLRScheduler):
            try:
                self.optim.step(*([loss] if self.needs_metric else []))
            except Exception as error:
                raise ConfigurationError(_FAILED.format(error=_named(error))) from error

    def load(self, state: dict[str, Any]) -> None:
        """Optimizers are made anew in the next step, from a saved state."""
        self.optim.optim_objs.clear()
        self.optim.set_state(state)


@torch.no_grad()
def require_finite(leaves: Mapping[str, Tensor], text: str, *, constrained: bool = True) -> None:
    """
    :param constrained: look at the constrained values, too, which takes longer.
    :raises ConfigurationError: a parameter, all of which are public, is not finite.
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
