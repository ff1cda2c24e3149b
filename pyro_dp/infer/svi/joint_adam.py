"""Adam for all parameters in one call: what Pyro's optimizer does, which has one for each."""

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import torch
from pyro.optim import PyroOptim
from torch import Tensor
from torch.optim import Adam
from torch.optim.adam import adam
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_NUMBERS = ("lr", "weight_decay", "eps", "amsgrad", "maximize")
_settings = itemgetter("betas", "decoupled_weight_decay", "fused", *_NUMBERS)
_others = itemgetter("foreach", "capturable", "differentiable")


@torch.no_grad()
def joint_adam(
    optim: PyroOptim, leaves: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None]
) -> bool:
    """Take the step of a :class:`~pyro.optim.PyroOptim` that makes plain Adams.

    State and settings stay those of the optimizers of single parameters.

    :param gradients: of the leaves; they are only read.
    :returns: False where nothing was done: the optimizer does more than this, or has no state of
        some of them yet.
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
    torch._foreach_add_(steps, 1)  # what it does on the CPU, in half of the time
    torch._fused_adam_(*tensors, **own)


def _is_plain(optimizer: Any) -> bool:
    """Whether a step is Adam's and no more."""
    if type(optimizer) is not Adam or len(optimizer.param_groups) != 1:
        return False
    hooks = (
        *(optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks),
        *(_global_optimizer_pre_hooks, _global_optimizer_post_hooks),
    )
    return not (any(_others(optimizer.param_groups[0])) or any(hooks))
