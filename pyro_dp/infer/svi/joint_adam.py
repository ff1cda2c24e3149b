"""Adam for all parameters in one call: what Pyro's optimizer does, which has one for each."""

from collections.abc import Sequence
from typing import Any

from pyro.optim import PyroOptim
from torch import Tensor
from torch.optim import Adam


class JointAdam:
    """Takes the steps of a :class:`~pyro.optim.PyroOptim` that makes plain Adams.

    State and settings stay those of the optimizers of single parameters.
    """

    def __init__(self) -> None:
        self._adam: Adam | None = None

    def step(self, optim: PyroOptim, leaves: Sequence[Tensor]) -> bool:
        """Move these along their gradients.

        :returns: False where nothing was done: the optimizer does more than this, or does not know
            all of them yet.
        """
        own = [optim.optim_objs.get(leaf) for leaf in leaves]
        plain = type(optim).__call__ is PyroOptim.__call__ and all(map(_is_plain, own))
        if not (plain and leaves) or any(map(optim.grad_clip.get, leaves)):
            return False
        settings = [_settings(each) for each in own]
        if any(each != settings[0] for each in settings[1:]):
            return False
        joint = self._of(leaves)
        fused = all(leaf.device.type == "cpu" and leaf.is_floating_point() for leaf in leaves)
        joint.param_groups[0].update(settings[0], **({"fused": True} if fused else {}))
        for leaf, each in zip(leaves, own, strict=True):
            joint.state[leaf] = each.state[leaf]
        joint.step()
        return True

    def _of(self, leaves: Sequence[Tensor]) -> Adam:
        known = [] if self._adam is None else self._adam.param_groups[0]["params"]
        if self._adam is None or list(map(id, known)) != list(map(id, leaves)):
            self._adam = Adam(leaves)
        return self._adam


def _is_plain(optimizer: Any) -> bool:
    """Whether a step is Adam's and no more."""
    if type(optimizer) is not Adam or len(optimizer.param_groups) != 1:
        return False
    if any(optimizer.param_groups[0][name] for name in ("foreach", "capturable", "differentiable")):
        return False
    return not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def _settings(adam: Adam) -> dict[str, Any]:
    return {key: value for key, value in adam.param_groups[0].items() if key != "params"}
