"""Adam, row by row: a row's update depends on the gradients of that row and on nothing else."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pyro
import torch
from pyro.optim import PyroOptim
from pyro.params.param_store import normalize_param_name
from torch import Tensor

from pyro_dp.records.local_parameters import LocalParameters
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_number


@dataclass(frozen=True)
class RowAdam:
    """Settings of Adam (Kingma & Ba 2015, arXiv 1412.6980, Algorithm 1) for parameters per record.

    Each row has a step count and moments of its own, so it moves as if it were trained alone. It
    does not move in steps in which its record was not sampled.

    :param lr: step size, > 0, in unconstrained coordinates.
    :param betas: decay of the first and second moment, in [0, 1).
    :param eps: added to the root of the second moment, > 0.
    :raises ConfigurationError: a setting is out of range.

    >>> from pyro_dp import RowAdam
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
        """The settings that this optimizer has for a parameter.

        :raises ConfigurationError: it is no plain Adam.
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
    """Decayed means of one parameter's gradients and of their squares, (N, ...)."""

    steps: Tensor  # how often each row has moved, (N,)
    mean: Tensor
    square: Tensor


_SAVED = {"value", *(each.name for each in fields(_Moments))}


class RowOptimizer:
    """Moves rows of local parameters. All of its state is private."""

    def __init__(self, settings: Callable[[str], RowAdam]):
        self._settings = settings
        self._local = LocalParameters()
        self._adams: dict[str, RowAdam] = {}
        self._moments: dict[str, _Moments] = {}
        self._loaded: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def use(self, local: LocalParameters) -> None:
        """Move these from now on; parameters that it had already keep their moments.

        :raises ConfigurationError: there are no settings for one of them.
        """
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
        """Move the rows of these records.

        A record with a gradient that is not finite does not move: it would be lost for good.

        :param indices: (B,), distinct.
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
        own = {
            name: {"value": leaf.detach().clone()}
            | {key: value.clone() for key, value in vars(self._moments[name]).items()}
            for name, leaf in self._local.leaves.items()
        }
        return own | self._loaded

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Take up a saved state. Parameters that do not exist yet get theirs when they do."""
        self._loaded = dict(state)
        self.use(self._local)

    @staticmethod
    def check(state: Any) -> None:
        """:raises ConfigurationError: this is no state, or not one of the parameters here."""
        store = pyro.get_param_store()
        given: Any = state if isinstance(state, dict) else {"": None}
        for name, own in given.items():
            whole = isinstance(own, dict) and own.keys() == _SAVED
            if not whole or not all(isinstance(each, Tensor) for each in own.values()):
                raise ConfigurationError("load_state_dict: the private local state is damaged.")
            if name in store and store[name].unconstrained().shape != own["value"].shape:
                raise ConfigurationError(f"Parameter {name!r} has another shape than when saved.")

    def _move(self, name: str, indices: Tensor, gradient: Tensor, moves: Tensor) -> None:
        """:param moves: which of the records do, (B,). To look at it would wait for a device."""
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
            place = moves.view(-1, *[1] * (new.dim() - 1))
            old.index_copy_(0, indices, torch.where(place, new, old.index_select(0, indices)))
