"""Torch functions where all records run at once, as others that ``torch.vmap`` knows.

What it does not know as a whole it takes apart, or does for one record after the other.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pyro_dp.records.mixed_dtypes import promoted
from pyro_dp.records.recurrent_layers import RECURRENT

_IN_PLACE = (
    *("addcdiv_", "addcmul_", "clamp_", "clip_", "cumprod_", "cumsum_", "fmod_", "lerp_"),
    *("remainder_", "tril_", "triu_", "xlogy_"),
)


def _written(name: str) -> Callable[..., Tensor]:
    compute = getattr(Tensor, name[:-1])

    def write(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor.copy_(compute(tensor, *args, **kwargs))

    return write


def _bernoulli_loss(logits: Tensor, target: Tensor, *args: Any, **options: Any) -> Tensor | None:
    """Binary cross entropy by the formula of torch's own kernel, not by a decomposition."""
    given = {key: value for key, value in options.items() if value is not None}
    if args or given != {"reduction": "none"} or logits.shape != target.shape:
        return None
    (logits, target), _ = promoted((logits, target), {})
    return (1 - target) * logits - functional.logsigmoid(logits)


# By function; None where the function itself must do.
VECTORISED: dict[Any, Callable[..., Any]] = {
    **RECURRENT,
    **{getattr(Tensor, name): _written(name) for name in _IN_PLACE},
    **{getattr(torch, name): _written(name) for name in _IN_PLACE if hasattr(torch, name)},
    functional.binary_cross_entropy_with_logits: _bernoulli_loss,
}
