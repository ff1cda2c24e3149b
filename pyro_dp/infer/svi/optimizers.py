"""Optimizers: the user's, which gets released gradients only, and Adam for rows per record.

The former is post-processing. The update of a row depends on the gradients of that row alone. A
plan of step sizes, from public numbers alone, serves users without an optimizer.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from inspect import signature
from operator import itemgetter
from typing import Any

import pyro
import torch
from pyro.optim import PyroOptim
from pyro.optim.lr_scheduler import PyroLRScheduler
from pyro.params.param_store import normalize_param_name
from torch import Tensor
from torch.optim import Adam, Optimizer
from torch.optim.adam import adam
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.records.local_parameters import LocalParameters
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_number

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
    """Take one joint step of all parameters if each has a plain Adam. This is faster.

    State and settings remain those of the optimizers of single parameters. Gradients are only read.

    :returns: False if nothing was done: an optimizer is no plain Adam, or has no state yet.
    """
    adams = [optim.optim_objs.get(leaf) for leaf in leaves.values()]
    plain = type(optim).__call__ is PyroOptim.__call__ and all(map(_is_plain, adams))
    if not (plain and leaves) or any(map(optim.grad_clip.get, leaves.values())):
        return False
    settings = [_settings(each.param_groups[0]) for each in adams]
    if any(each != settings[0] for each in settings[1:]):
        return False
    moving = [
        (leaf, gradients[name], each.state.get(leaf))
        for (name, leaf), each in zip(leaves.items(), adams, strict=True)
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
    options = dict(zip(("beta1", "beta2", *_NUMBERS), (*betas, *numbers), strict=True))
    names = ("exp_avg", "exp_avg_sq", *("max_exp_avg_sq",) * options["amsgrad"], "step")
    first, second, *most, steps = ([state[name] for state in states] for name in names)
    tensors = (leaves, gradients, first, second, most[0] if most else [], steps)
    kinds = {(leaf.device.type, leaf.dtype) for leaf in leaves}
    if decoupled or len(kinds) > 1 or kinds.pop()[0] != "cpu":
        adam(*tensors, fused=fused, decoupled_weight_decay=decoupled, **options)
        return
    torch._foreach_add_(steps, 1)  # what torch's function does on the CPU, in half of the time
    torch._fused_adam_(*tensors, **options)


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
        self.failed = False  # if true, parameters are checked again before the next release

    @property
    def needs_metric(self) -> bool:
        make = getattr(self.optim, "pt_scheduler_constructor", None)
        return isinstance(make, type) and issubclass(make, ReduceLROnPlateau)

    def require(self, leaves: Mapping[str, Tensor]) -> None:
        """:raises ConfigurationError: an optimizer cannot be made, or needs a closure."""
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
        """Take a step along released gradients.

        :param rarely: whether this is one of the few steps that also check constrained values.
        :raises ConfigurationError: the optimizer fails, or makes a parameter NaN or infinite.
        """
        self.failed = True
        try:
            if not joint_adam(self.optim, leaves, gradients):
                for name, leaf in leaves.items():
                    # An earlier gradient of the leaf may come from the data, so it is replaced.
                    # The new gradient is a copy, because optimizers write to it.
                    new = gradients[name]
                    leaf.grad = None if new is None else new.clone(memory_format=_CONTIGUOUS)
                self.optim(set(leaves.values()))
        except Exception as error:
            raise ConfigurationError(_FAILED.format(error=_named(error))) from error
        finally:
            for leaf in leaves.values():
                leaf.grad = None
        # The check waits for the device, so it is rare on devices other than the CPU.
        if rarely or all(leaf.device.type == "cpu" for leaf in leaves.values()):
            require_finite(leaves, _LEFT, constrained=rarely)
        self.failed = False

    def set(self, **settings: Any) -> None:
        """Set options of all optimizers, including those that are made later."""
        self.optim.pt_optim_args.update(settings)
        for made in self.optim.optim_objs.values():
            for group in made.param_groups:
                group.update(settings)

    def step_scheduler(self, loss: float) -> None:
        """:raises ConfigurationError: the scheduler fails."""
        if isinstance(self.optim, PyroLRScheduler):
            try:
                self.optim.step(*([loss] if self.needs_metric else []))
            except Exception as error:
                raise ConfigurationError(_FAILED.format(error=_named(error))) from error

    def load(self, state: dict[str, Any]) -> None:
        """Load a state. The next step makes new optimizers from it."""
        self.optim.optim_objs.clear()
        self.optim.set_state(state)


@torch.no_grad()
def require_finite(leaves: Mapping[str, Tensor], text: str, *, constrained: bool = True) -> None:
    """:raises ConfigurationError: a parameter, which is public, is not finite."""
    store = pyro.get_param_store()
    values = [
        (name, each)
        for name, leaf in leaves.items()
        if leaf.numel()
        for each in ((leaf, store[name]) if constrained else (leaf,))
    ]
    if not math.isfinite(sum(each.sum().item() for _, each in values)):
        for name, each in values:  # finite numbers may have an infinite sum
            if not each.isfinite().all():
                raise ConfigurationError(text.format(name=name))


def _needs_closure(optimizer: Optimizer) -> bool:
    _, *others = signature(type(optimizer).step).parameters.values()  # the first is self
    return any(
        p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in others
    )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class RowAdam:
    """Settings of Adam (Kingma & Ba 2015, arXiv 1412.6980, Algorithm 1) for parameters per record.

    Each row has its own step count and moments, so it moves as if it were trained alone. It moves
    only in steps that sample its record.

    :param lr: step size, > 0, in unconstrained coordinates.
    :param betas: decay of the first and second moment, in [0, 1).
    :param eps: added to the root of the second moment, > 0.
    :raises ConfigurationError: a setting is out of range.

    >>> RowAdam(lr=0.1)  # DPSVI(model, guide, RowAdam(lr=0.1), ...)
    RowAdam(lr=0.1, betas=(0.9, 0.999), eps=1e-08)
    """

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        require_number("RowAdam.lr", self.lr, above=0.0, below=math.inf)
        require_number("RowAdam.eps", self.eps, above=0.0, below=math.inf)
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise ConfigurationError("RowAdam.betas must be two numbers.")
        for beta in self.betas:
            require_number("RowAdam.betas", beta, above=0.0, below=1.0, or_equal=True)

    @staticmethod
    def like(optim: PyroOptim, name: str) -> "RowAdam":
        """The settings that an optimizer has for a parameter.

        :raises ConfigurationError: the optimizer is no plain Adam.
        """
        settings = optim.pt_optim_args
        if callable(settings) and optim.pt_optim_args_argc == 1:
            settings = settings(normalize_param_name(name))
        plain = isinstance(settings, dict) and settings.keys() <= {"lr", "betas", "eps"}
        if optim.pt_optim_constructor is not torch.optim.Adam or not plain:
            raise ConfigurationError(
                f"optim: parameter {name!r} has a row per record, and rows are moved by an "
                "Adam of their own. Pass optim=(optim, RowAdam(lr=...)), as optim is no "
                "pyro.optim.Adam with lr, betas and eps only."
            )
        return RowAdam(**settings)


@dataclass
class _Moments:
    """Adam's moments of one parameter."""

    steps: Tensor  # (N,)
    mean: Tensor  # (N, ...)
    square: Tensor  # (N, ...)


_SAVED = {"value", *(each.name for each in fields(_Moments))}


class RowOptimizer:
    """Moves the rows of local parameters. Its whole state is private."""

    def __init__(self, settings: Callable[[str], RowAdam]):
        self._settings = settings
        self._local = LocalParameters()
        self._adams: dict[str, RowAdam] = {}
        self._moments: dict[str, _Moments] = {}
        self._loaded: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def use(self, local: LocalParameters) -> None:
        """Move these parameters from now on. Those that it moved before keep their moments."""
        self._adams = {name: self._settings(name) for name in local.leaves}
        moments = {}
        for name, leaf in local.leaves.items():
            if self._local.leaves.get(name) is leaf:
                moments[name] = self._moments[name]
            else:
                zeros = torch.zeros_like(leaf.movedim(local.dims[name], 0))
                steps = torch.zeros(local.size, dtype=torch.long, device=leaf.device)
                moments[name] = _Moments(steps, zeros, zeros.clone())
        self._local, self._moments = local, moments
        for name in self._loaded.keys() & local.leaves.keys():
            saved = self._loaded.pop(name)
            local.leaves[name].copy_(saved["value"])
            for key, value in vars(moments[name]).items():
                value.copy_(saved[key])

    def set_step_size(self, size: float) -> None:
        self._adams = {name: replace(adam, lr=size) for name, adam in self._adams.items()}

    @torch.no_grad()
    def step(self, indices: Tensor, gradients: dict[str, Tensor]) -> None:
        """Move the rows of these records, except those with a gradient that is not finite.

        :param indices: distinct indices of records, (B,).
        :param gradients: (B, ...) per parameter.
        """
        if not gradients:
            return
        finite = torch.ones(len(indices), dtype=torch.bool, device=indices.device)
        for gradient in gradients.values():
            finite &= gradient.reshape(len(indices), -1).isfinite().all(dim=1)
        for name, gradient in gradients.items():
            if self._local.leaves[name].requires_grad:
                self._move(name, indices, gradient, finite)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        state = {
            name: {"value": leaf.detach().clone()}
            | {key: value.clone() for key, value in vars(self._moments[name]).items()}
            for name, leaf in self._local.leaves.items()
        }
        return state | self._loaded

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Load a state. Parameters that do not exist yet get their values later."""
        self._loaded = dict(state)
        self.use(self._local)

    @staticmethod
    def check(state: Any) -> None:
        """:raises ConfigurationError: the state is damaged, or has parameters of other shapes."""
        store = pyro.get_param_store()
        saved: Any = state if isinstance(state, dict) else {"": None}
        for name, values in saved.items():
            whole = isinstance(values, dict) and values.keys() == _SAVED
            if not whole or not all(isinstance(each, Tensor) for each in values.values()):
                raise ConfigurationError("load_state_dict: the private local state is damaged.")
            if name in store and store[name].unconstrained().shape != values["value"].shape:
                raise ConfigurationError(f"Parameter {name!r} has another shape than when saved.")

    def _move(self, name: str, indices: Tensor, gradient: Tensor, moves: Tensor) -> None:
        """:param moves: whether each record moves, (B,). A branch on it would wait for a device."""
        adam, moments = self._adams[name], self._moments[name]
        steps = moments.steps.index_select(0, indices).add_(1)
        gradient = gradient.to(moments.mean.dtype)
        mean = moments.mean.index_select(0, indices).lerp_(gradient, 1 - adam.betas[0])
        square = moments.square.index_select(0, indices).mul_(adam.betas[1])
        square.addcmul_(gradient, gradient, value=1 - adam.betas[1])
        shape = (-1, *[1] * (gradient.dim() - 1))
        counts = steps.double()
        first, second = (1 - torch.pow(beta, counts).view(shape) for beta in adam.betas)
        spread = (square / second).sqrt_().add_(adam.eps)
        change = torch.where(moves.view(shape), (adam.lr / first) * mean / spread, 0.0)
        rows = self._local.leaves[name].detach().movedim(self._local.dims[name], 0)
        rows.index_add_(0, indices, change.to(rows.dtype), alpha=-1)
        for old, new in ((moments.steps, steps), (moments.mean, mean), (moments.square, square)):
            mask = moves.view(-1, *[1] * (new.dim() - 1))
            old.index_copy_(0, indices, torch.where(mask, new, old.index_select(0, indices)))


USUAL_STEPS = 1000  # the default T
_SAMPLE_RATE, _RECORDS = 0.05, 1000  # a step has at least this rate, and this many records
_FIRST, _LEAST = 0.1, 0.02  # the first step size, and its lower bound
_FALL, _FALL_OF_NOISY = 100.0, 10.0  # the first step size over the last one
_NOISY, _VERY_NOISY = 0.01, 0.05  # thresholds of rho
# First and last step sizes.
_OF_MANY = 0.1, 0.01  # for many latents
_OF_NETWORKS = 0.03, 0.003  # for many parameters inside the plate
_OF_QUIET_NETWORKS = 0.01, 0.001  # the same without noise, which makes Adam's steps shorter
_OF_ROWS = 0.1, 0.01  # for parameters per record
_MANY = 4  # up to so many steps for each latent, latents are many
BETAS = 0.9, 0.95  # Adam soon forgets first gradients that are far too large


def usual_rate(size: int) -> float:
    """The default sample rate for N records."""
    return max(_SAMPLE_RATE, min(1.0, _RECORDS / size))


def row_step_size(done: float) -> float:
    """The step size of parameters per record after this fraction of the steps.

    It falls in the second half of the run. Rows move far for discrete latents, and longest after
    the global latents have settled. Their gradients have no privacy noise.
    """
    first, last = _OF_ROWS
    return float(first * (last / first) ** max(0.0, 2 * done - 1))


@dataclass(frozen=True)
class StepPlan:
    """Step sizes of Adam, which fall geometrically to a hundredth, or to a tenth under noise.

    A narrow posterior needs small last steps. If the noise far exceeds the data, long first steps
    would be a random walk, so they are shorter.

    :param num_steps: T.
    :param dim: d, the number of coordinates of a released gradient.
    :param size: N.
    :param noise: sigma / (q sqrt(T)), of the mean of all released gradients, in units of C.
    :param sees_parameters: whether the records' terms contain parameters, such as the weights of a
        decoder.
    """

    num_steps: int
    dim: int
    size: int
    noise: float
    sees_parameters: bool

    @staticmethod
    def of(
        num_steps: int | None, dim: int, sampler: RecordSampler, noise: float, sees: bool
    ) -> "StepPlan":
        """:param noise: noise of a released sum, in units of C."""
        steps = num_steps or USUAL_STEPS
        of_all = noise / sampler.sample_rate / math.sqrt(steps)
        return StepPlan(steps, dim, sampler.size, of_all, sees)

    @property
    def ratio(self) -> float:
        """rho: roughly the noise in a curvature that DPSEP would release, over the curvature."""
        return 5 * math.sqrt(2) * self.dim**1.5 * self.noise / self.size

    @property
    def is_of_many(self) -> bool:
        """Whether there are few steps for each coordinate."""
        return self.num_steps <= _MANY * self.dim

    def step_size(self, step: int) -> float:
        """The step size of a step, which is counted from 0."""
        if not self.is_of_many:
            first = _FIRST
            if self.ratio > _VERY_NOISY:
                first = max(_LEAST, _FIRST * (_VERY_NOISY / self.ratio) ** 0.3)
            noisy = min(1.0, self.ratio / _NOISY)
            last = first / (_FALL * (_FALL_OF_NOISY / _FALL) ** noisy)
        elif self.sees_parameters:
            first, last = _OF_NETWORKS if self.noise else _OF_QUIET_NETWORKS
        else:
            first, last = _OF_MANY
        return float(first * (last / first) ** (step / self.num_steps))
