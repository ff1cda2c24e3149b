"""Families of outcomes: which column each is for, and how its distribution is written in Pyro."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_dp.tabular.column import Column
from pyro_dp.tabular.levels import Binary, Category
from pyro_dp.tabular.ranges import Count, Number, RangeColumn
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_choice


@dataclass(frozen=True)
class Family:
    """The distribution of an outcome, as :class:`~pyro_dp.tabular.PrivateGLM` names it."""

    name: str
    distribution: str  # code in which ``eta`` is the linear predictor
    ratios: str | None = None  # the name of exp(coefficient)
    latents: dict[str, str] = field(default_factory=dict)  # priors, code by name of the site
    start: dict[str, Tensor] = field(default_factory=dict)  # start values of these latents
    ordered: Sequence[Any] = ()  # levels of an outcome with thresholds


_NAMES = ("poisson", "negative_binomial", "logistic", "linear", "ordinal")
_ELSEWHERE = {"binomial": "logistic", "gaussian": "linear", "normal": "linear"}
_NEEDS: dict[str, tuple[Any, str]] = {
    "poisson": (Count, "Count(lower, upper)"),
    "negative_binomial": (Count, "Count(lower, upper)"),
    "logistic": (Binary, "Binary()"),
    "linear": ((Number, Count), "Number(lower, upper)"),
    "ordinal": (Category, "Category(levels, ordered=True)"),
}


def family_of(name: str, outcome: str, column: Column) -> Family:
    """
    :param outcome: its name.
    :raises ConfigurationError: there is no such family, or it is none for this column.
    """
    if name in _ELSEWHERE:
        raise ConfigurationError(f"family={name!r} is family={_ELSEWHERE[name]!r} here.")
    require_choice("family", name, _NAMES)
    kind, declaration = _NEEDS[name]
    if not isinstance(column, kind):
        raise ConfigurationError(
            f"family={name!r} needs an outcome that is declared as {declaration}, and {outcome!r} "
            f"is a {type(column).__name__}: declare it so, or choose another family."
        )
    if isinstance(column, Count) and name != "linear" and column.lower < 0:
        raise ConfigurationError(f"family={name!r}: {outcome!r} must have lower >= 0.")
    if name == "poisson":
        return Family(name, "dist.Poisson(eta.exp())", "rate ratio")
    if name == "logistic":
        return Family(name, "dist.Bernoulli(logits=eta)", "odds ratio")
    if name == "linear":
        prior, start = "dist.LogNormal(-1.0, 1.0)", torch.tensor(-1.0).exp()
        return Family(name, "dist.Normal(eta, sigma)", None, {"sigma": prior}, {"sigma": start})
    if name == "negative_binomial":
        return Family(
            name,
            "dist.NegativeBinomial(concentration, logits=eta - concentration.log())",
            "rate ratio",
            {"concentration": "dist.LogNormal(0.0, 1.0)"},
            {"concentration": torch.tensor(1.0)},
        )
    assert isinstance(column, Category)
    count = len(column.levels)
    if not column.ordered or column.other or count < 3:
        raise ConfigurationError(
            "family='ordinal' needs an outcome of three levels or more, and 'other' has no "
            f"position in their order. Declare {outcome!r} as Category(levels, ordered=True)."
        )
    scales = ", ".join(["2.5", *["1.0"] * (count - 2)])
    base = f"dist.Normal(0.0, torch.tensor([{scales}])).to_event(1)"
    return Family(
        name,
        "dist.OrderedLogistic(eta, cutpoints)",
        "odds ratio",
        {"cutpoints": f"dist.TransformedDistribution({base}, dist.transforms.OrderedTransform())"},
        {"cutpoints": torch.linspace(-1.0, 1.0, count - 1)},
        column.levels,
    )


def scale_of(family: Family, column: Column, *, centred: bool) -> tuple[float, float]:
    """Centre and half width of the outcome, in which a linear model sees it; (0, 1) of others.

    :param centred: there is an intercept to take the centre up.
    """
    if family.name != "linear":
        return 0.0, 1.0
    assert isinstance(column, RangeColumn)
    low, high = column.bounds
    return ((low + high) / 2, (high - low) / 2) if centred else (0.0, max(abs(low), abs(high)))
