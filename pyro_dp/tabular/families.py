"""Families of outcomes: which column each is for, and how its distribution is written in Pyro."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from pyro_dp.tabular.column import Column
from pyro_dp.tabular.levels import Binary, Category
from pyro_dp.tabular.ranges import Count, Number, RangeColumn
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_choice


class Family:
    """The distribution of an outcome, as :class:`~pyro_dp.tabular.PrivateGLM` names it.

    :param outcome: its name.
    :param column: its declaration.
    :raises ConfigurationError: the family is none for this column.

    :ivar columns: kinds of column that it is for.
    :ivar declaration: how such a column is declared.
    :ivar distribution: code in which ``eta`` is the linear predictor.
    :ivar ratios: the name of exp(coefficient), if it has one.
    :ivar latents: priors, code by name of the site.
    :ivar start: start values of these latents.
    :ivar ordered: levels of an outcome with thresholds.
    :ivar has_rate: whether an exposure multiplies the mean.
    :ivar first_sd: standard deviation of the first q.
    """

    name: str
    columns: tuple[type[Column], ...]
    declaration: str
    distribution: str
    ratios: str | None = None
    latents: dict[str, str] = {}
    start: dict[str, float | list[float]] = {}
    ordered: Sequence[Any] = ()
    has_rate = False
    first_sd = 0.02  # sites of a narrow q need few nodes

    def __init__(self, outcome: str, column: Column):
        if not isinstance(column, self.columns):
            raise ConfigurationError(
                f"family={self.name!r} needs an outcome that is declared as {self.declaration}, "
                f"and {outcome!r} is a {type(column).__name__}: declare it so, or choose another "
                "family."
            )

    def scale(self, column: Column, *, centred: bool) -> tuple[float, float]:
        """Centre and half width of the outcome, in which the model sees it.

        :param centred: there is an intercept to take the centre up.
        """
        return 0.0, 1.0


class Logistic(Family):
    name = "logistic"
    columns, declaration = (Binary,), "Binary()"
    distribution = "dist.Bernoulli(logits=eta)"
    ratios = "odds ratio"
    first_sd = 0.1


class Linear(Family):
    name = "linear"
    columns, declaration = (Number, Count), "Number(lower, upper)"
    distribution = "dist.Normal(eta, sigma)"
    latents = {"sigma": "dist.LogNormal(-1.0, 1.0)"}
    start = {"sigma": math.exp(-1.0)}
    first_sd = 0.1

    def scale(self, column: Column, *, centred: bool) -> tuple[float, float]:
        assert isinstance(column, RangeColumn)
        low, high = column.bounds
        return ((low + high) / 2, (high - low) / 2) if centred else (0.0, max(abs(low), abs(high)))


class Poisson(Family):
    name = "poisson"
    columns, declaration = (Count,), "Count(lower, upper)"
    distribution = "dist.Poisson(eta.exp())"
    ratios = "rate ratio"
    has_rate = True

    def __init__(self, outcome: str, column: Column):
        super().__init__(outcome, column)
        assert isinstance(column, Count)
        if column.lower < 0:
            raise ConfigurationError(f"family={self.name!r}: {outcome!r} must have lower >= 0.")


class NegativeBinomial(Poisson):
    name = "negative_binomial"
    distribution = "dist.NegativeBinomial(concentration, logits=eta - concentration.log())"
    latents = {"concentration": "dist.LogNormal(0.0, 1.0)"}
    start = {"concentration": 1.0}


class Ordinal(Family):
    name = "ordinal"
    columns, declaration = (Category,), "Category(levels, ordered=True)"
    distribution = "dist.OrderedLogistic(eta, cutpoints)"
    ratios = "odds ratio"

    def __init__(self, outcome: str, column: Column):
        super().__init__(outcome, column)
        assert isinstance(column, Category)
        count = len(column.levels)
        if not column.ordered or column.other or count < 3:
            raise ConfigurationError(
                "family='ordinal' needs an outcome of three levels or more, and 'other' has no "
                f"position in their order. Declare {outcome!r} as Category(levels, ordered=True)."
            )
        scales = ", ".join(["2.5", *["1.0"] * (count - 2)])
        base = f"dist.Normal(0.0, torch.tensor([{scales}])).to_event(1)"
        increasing = f"dist.TransformedDistribution({base}, dist.transforms.OrderedTransform())"
        self.latents = {"cutpoints": increasing}
        self.start = {"cutpoints": torch.linspace(-1.0, 1.0, count - 1).tolist()}
        self.ordered = column.levels


FAMILIES = {each.name: each for each in (Poisson, NegativeBinomial, Logistic, Linear, Ordinal)}
_ELSEWHERE = {"binomial": "logistic", "gaussian": "linear", "normal": "linear"}


def family_of(name: str, outcome: str, column: Column) -> Family:
    """
    :param outcome: its name.
    :raises ConfigurationError: there is no such family, or it is none for this column.
    """
    if name in _ELSEWHERE:
        raise ConfigurationError(f"family={name!r} is family={_ELSEWHERE[name]!r} here.")
    require_choice("family", name, tuple(FAMILIES))
    return FAMILIES[name](outcome, column)
