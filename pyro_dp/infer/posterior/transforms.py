"""Transforms from unconstrained coordinates to a site's own values, as plain numbers and names."""

from typing import Any

import torch
from pyro.distributions.transforms import OrderedTransform
from torch import Tensor
from torch.distributions import ComposeTransform, IndependentTransform, Transform, transforms
from torch.distributions.transforms import identity_transform

from pyro_dp.utils.errors import ConfigurationError

_PLAIN = {
    "exp": transforms.ExpTransform,
    "softplus": transforms.SoftplusTransform,
    "sigmoid": transforms.SigmoidTransform,
    "stick_breaking": transforms.StickBreakingTransform,
    "corr_cholesky": transforms.CorrCholeskyTransform,
    "lower_cholesky": transforms.LowerCholeskyTransform,
    "ordered": OrderedTransform,
}
_NAMES = {kind: name for name, kind in _PLAIN.items()}


def to_plain(transform: Transform) -> list[dict[str, Any]]:
    """The parts of a transform, from unconstrained space on.

    :raises ConfigurationError: a part has no name here.
    """
    if isinstance(transform, IndependentTransform):
        return to_plain(transform.base_transform)
    if isinstance(transform, ComposeTransform):
        return [part for each in transform.parts for part in to_plain(each)]
    if isinstance(transform, transforms.AffineTransform):
        numbers = {name: _plain(getattr(transform, name)) for name in ("loc", "scale")}
        return [{"name": "affine", **numbers}]
    name = _NAMES.get(type(transform))
    if name is None:
        raise ConfigurationError(
            f"A {type(transform).__name__} cannot be written to a file. Give the site a support "
            "of real, positive, bounded or ordered numbers, or a simplex."
        )
    return [{"name": name}]


def from_plain(parts: list[dict[str, Any]]) -> Transform:
    """
    :raises ConfigurationError: the parts are not as :func:`to_plain` gives them.
    """
    found: list[Transform] = []
    try:
        for part in parts:
            if part["name"] == "affine":
                loc, scale = (torch.tensor(part[n]).double() for n in ("loc", "scale"))
                found.append(transforms.AffineTransform(loc, scale))
            else:
                found.append(_PLAIN[part["name"]]())
    except (KeyError, TypeError, ValueError):
        raise ConfigurationError(f"The transform {parts!r} is unknown.") from None
    if not found:
        return identity_transform
    return found[0] if len(found) == 1 else ComposeTransform(found)


def _plain(value: float | Tensor) -> Any:
    return value.tolist() if isinstance(value, Tensor) else float(value)
