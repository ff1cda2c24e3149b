"""The parts of evidence: the looks of each run and their cost, also as plain numbers and names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from pyro.distributions.transforms import OrderedTransform
from torch import Tensor
from torch.distributions import ComposeTransform, IndependentTransform, Transform, transforms
from torch.distributions.transforms import identity_transform

from pyro_dp.infer.posterior.looks import Look, PooledLooks, pooled
from pyro_dp.infer.posterior.posterior import LEVELS, Status
from pyro_dp.records.global_draw import Latent
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_count

FORMAT, VERSION = "pyro_dp evidence", 1
_LOOK = ("point", "score", "curvature", "geometry")
_NUMBERS = ("score_sd", "curvature_sd", "squared_bias")
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


@dataclass(frozen=True)
class Cost:
    """The cost of a run. All its looks together are one Gaussian mechanism.

    :param mu: mu of Gaussian differential privacy, under ``neighboring``; inf without noise.
    :param run: name of the run in its ledger; empty if there is no name.
    :param unit: the ledger's description of one record; may be empty.
    """

    mu: float
    neighboring: str
    run: str = ""
    unit: str = ""


@dataclass(frozen=True, eq=False)
class Part:
    """The looks of one run at one data set.

    :param size: N.
    :param squared_bias: squared bias of the score in a direction by clipping, in the last look's
        coordinates.
    :param bend: how fast the curvature changes with distance.
    :param status: that of the run's own posterior.
    """

    size: int
    looks: tuple[Look, ...]
    squared_bias: float
    bend: float
    cost: Cost
    status: Status = Status()

    @cached_property
    def pooled(self) -> PooledLooks:
        found = pooled(self.looks, self.size, self.bend)
        return replace(found, score_noise=found.score_noise + self.squared_bias * found.geometry)

    def gaussian(self) -> dict[str, Any]:
        """Estimate and precision as plain numbers, for readers in other languages."""
        mean = self.pooled.estimate
        precision = self.pooled.information(mean, self.pooled.bending(mean))
        return {"estimate": mean.tolist(), "precision": precision.tolist()}


def described(latents: Sequence[Latent]) -> list[dict[str, Any]]:
    return [
        {
            "name": each.name,
            "shape": list(each.shape),
            "transform": _transform_to_plain(each.transform),
        }
        for each in latents
    ]


def to_plain(latents: Sequence[Latent], parts: Sequence[Part], disjoint: bool) -> dict[str, Any]:
    """Evidence as numbers, texts and lists. Arguments are those of ``Evidence``."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "sites": described(latents),
        "disjoint": disjoint,
        "parts": [
            {
                "records": part.size,
                "squared_bias": part.squared_bias,
                "bend": part.bend,
                **vars(part.cost),
                "gaussian": part.gaussian(),
                "status": vars(part.status),
                "looks": [
                    {name: getattr(look, name).tolist() for name in _LOOK}
                    | {name: getattr(look, name) for name in _NUMBERS}
                    for look in part.looks
                ],
            }
            for part in parts
        ],
    }


def from_plain(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``Evidence``.

    :raises ConfigurationError: they are not as :func:`to_plain` gives them.
    """
    if saved.get("format") != FORMAT or saved.get("version") != VERSION:
        raise ConfigurationError(
            f"This is no evidence of version {VERSION}: its format is {saved.get('format')!r}, "
            f"version {saved.get('version')!r}."
        )
    latents, start = [], 0
    for site in saved["sites"]:
        shape = torch.Size(site["shape"])
        stop = start + shape.numel()
        transform = _transform_from_plain(site["transform"])
        latents.append(Latent(site["name"], shape, transform, start, stop))
        start = stop
    parts = []
    for part in saved["parts"]:
        looks = []
        for look in part["looks"]:
            values: Any = {n: torch.tensor(look[n], dtype=torch.float64) for n in _LOOK}
            values |= {name: float(look.get(name, 0.0)) for name in _NUMBERS}
            found = Look(**values)
            _require_shapes(found, start)
            looks.append(found)
        if not looks:
            raise ConfigurationError("A part of the evidence has no looks.")
        size = require_count("records", part["records"])
        cost = Cost(float(part["mu"]), part["neighboring"], part["run"], part["unit"])
        bias, bend = float(part["squared_bias"]), float(part["bend"])
        status = Status(**part["status"])
        if status.level not in LEVELS:
            raise ConfigurationError(f"status {status.level!r} is unknown.")
        parts.append(Part(size, tuple(looks), bias, bend, cost, status))
    return {
        "latents": tuple(latents),
        "parts": tuple(parts),
        "disjoint": bool(saved["disjoint"]),
    }


def _require_shapes(look: Look, dim: int) -> None:
    for name, shape in zip(_LOOK, [(dim,), (dim,), (dim, dim), (dim, dim)], strict=True):
        value = getattr(look, name)
        if value.shape != shape or not value.isfinite().all():
            raise ConfigurationError(f"{name} of a look must be finite numbers of shape {shape}.")


def _transform_to_plain(transform: Transform) -> list[dict[str, Any]]:
    """The parts of a transform, from unconstrained space on.

    :raises ConfigurationError: a part has no name here.
    """
    if isinstance(transform, IndependentTransform):
        return _transform_to_plain(transform.base_transform)
    if isinstance(transform, ComposeTransform):
        return [part for each in transform.parts for part in _transform_to_plain(each)]
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


def _transform_from_plain(parts: list[dict[str, Any]]) -> Transform:
    """:raises ConfigurationError: the parts are not as :func:`_transform_to_plain` gives them."""
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
