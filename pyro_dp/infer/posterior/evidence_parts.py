"""The parts of evidence: the looks of each run and their cost, also as JSON values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from pyro.distributions.transforms import OrderedTransform
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
    """The privacy cost of a run: all its looks together are one Gaussian mechanism.

    :param mu: mu of Gaussian differential privacy, under ``neighboring``; inf without noise.
    :param run: the name of the run in its ledger, or empty.
    :param unit: the ledger's description of one record, or empty.
    """

    mu: float
    neighboring: str
    run: str = ""
    unit: str = ""


@dataclass(frozen=True, eq=False)
class Part:
    """The looks of one run at one data set.

    :param size: N, the number of records.
    :param squared_bias: squared clipping bias of the score in one of the last look's coordinates.
    :param bend: rate at which the curvature changes with distance.
    :param status: the status of the run's posterior.
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
        """Estimate and precision as lists, for readers in other languages."""
        mean = self.pooled.estimate
        precision = self.pooled.information(mean, self.pooled.nonquadratic_error(mean))
        return {"estimate": mean.tolist(), "precision": precision.tolist()}


def described(latents: Sequence[Latent]) -> list[dict[str, Any]]:
    """The sites as JSON values, without their positions in the flat vector."""
    return [
        {
            "name": each.name,
            "shape": list(each.shape),
            "transform": _transform_to_plain(each.transform),
        }
        for each in latents
    ]


def to_plain(latents: Sequence[Latent], parts: Sequence[Part], disjoint: bool) -> dict[str, Any]:
    """JSON values of evidence. The arguments are those of ``Evidence``."""
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
    """The arguments of ``Evidence``, from the result of :func:`to_plain`.

    :raises ConfigurationError: the values are not such a result.
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
            for name, value in values.items():
                expected = (start,) if name in ("point", "score") else (start, start)
                if value.shape != expected or not value.isfinite().all():
                    raise ConfigurationError(
                        f"{name} of a look must be finite numbers of shape {expected}."
                    )
            values |= {name: float(look.get(name, 0.0)) for name in _NUMBERS}
            looks.append(Look(**values))
        if not looks:
            raise ConfigurationError("A part of the evidence has no looks.")
        size = require_count("records", part["records"])
        cost = Cost(float(part["mu"]), part["neighboring"], part["run"], part["unit"])
        bias, bend = float(part["squared_bias"]), float(part["bend"])
        status = Status(**part["status"])
        if status.level not in LEVELS:
            raise ConfigurationError(f"status {status.level!r} is unknown.")
        parts.append(Part(size, tuple(looks), bias, bend, cost, status))
    return {"latents": tuple(latents), "parts": tuple(parts), "disjoint": bool(saved["disjoint"])}


def _transform_to_plain(transform: Transform) -> list[dict[str, Any]]:
    """The parts of a transform in order, starting in unconstrained space.

    :raises ConfigurationError: a part is not in the table above.
    """
    if isinstance(transform, IndependentTransform):
        return _transform_to_plain(transform.base_transform)
    if isinstance(transform, ComposeTransform):
        return [part for each in transform.parts for part in _transform_to_plain(each)]
    if isinstance(transform, transforms.AffineTransform):
        numbers = {
            name: torch.as_tensor(getattr(transform, name), dtype=torch.float64).tolist()
            for name in ("loc", "scale")
        }
        return [{"name": "affine", **numbers}]
    name = _NAMES.get(type(transform))
    if name is None:
        raise ConfigurationError(
            f"A {type(transform).__name__} cannot be written to a file. Give the site a support "
            "of real, positive, bounded or ordered numbers, or a simplex."
        )
    return [{"name": name}]


def _transform_from_plain(parts: list[dict[str, Any]]) -> Transform:
    """:raises ConfigurationError: the parts are no result of :func:`_transform_to_plain`."""
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
