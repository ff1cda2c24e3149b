"""The Pyro model of a regression as source code, with families and missing covariates."""

import hashlib
import itertools
import linecache
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from pyro_dp.tabular.column import Column
from pyro_dp.tabular.levels import Binary, Category, LevelColumn
from pyro_dp.tabular.ranges import Count, Number, RangeColumn
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_choice

COEFFICIENTS = "coefficients"
_INTERCEPT_SD, _SD = 5.0, 2.5
GROUP_DF, GROUP_SCALE = 4.0, 0.5  # the joint Student t of groups' intercepts
_NODES = 9  # for a missing number
_MOST = 64  # combinations of values


class Family:
    """The distribution of an outcome, as :class:`~pyro_dp.tabular.PrivateGLM` names it.

    :param outcome: name of the outcome.
    :param column: declaration of the outcome.
    :raises ConfigurationError: the family does not fit this column.
    """

    name: str
    columns: tuple[type[Column], ...]  # the outcome's possible declarations
    declaration: str  # an example, for errors
    distribution: str  # code in which ``eta`` is the linear predictor
    ratios: str | None = None  # the name of exp(coefficient), if it has one
    latents: dict[str, str] = {}  # priors, code by name of the site
    start: dict[str, float | list[float]] = {}  # start values of these latents
    ordered: Sequence[Any] = ()  # levels of an outcome with thresholds
    has_rate = False  # whether an exposure multiplies the mean
    first_sd = 0.02  # deviation of the first q; a narrow q needs few quadrature nodes

    def __init__(self, outcome: str, column: Column):
        if not isinstance(column, self.columns):
            raise ConfigurationError(
                f"family={self.name!r} needs an outcome that is declared as {self.declaration}, "
                f"and {outcome!r} is a {type(column).__name__}: declare it so, or choose another "
                "family."
            )

    def scale(self, column: Column, *, centred: bool) -> tuple[float, float]:
        """Centre and half width that standardise the outcome for the model.

        :param centred: whether an intercept can absorb the centre.
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
    """The family of this name, for an outcome and its declaration.

    :raises ConfigurationError: there is no such family, or it does not fit this column.
    """
    if name in _ELSEWHERE:
        raise ConfigurationError(f"family={name!r} is family={_ELSEWHERE[name]!r} here.")
    require_choice("family", name, tuple(FAMILIES))
    return FAMILIES[name](outcome, column)


@dataclass(frozen=True, eq=False)
class Incomplete:
    """A covariate that is declared with missing values.

    A row without it enters with its average likelihood over all possible values. The weights are
    their probabilities conditional on the complete covariates. The fit includes a model of these
    probabilities, from all rows.

    Levels are summed exactly. A number is Gaussian conditional on the others, and is integrated by
    Gauss-Legendre nodes between its declared bounds. The mean is in units of the standard
    deviation, in which noise affects it about as much as other coefficients.
    """

    name: str
    values: np.ndarray  # possible encoded values, (V,)
    weights: np.ndarray | None  # log weights of the quadrature, (V,); None for levels
    scale: tuple[float, float]  # centre and half width that standardise it for the model

    @classmethod
    def of(cls, name: str, column: Column) -> "Incomplete":
        if isinstance(column, LevelColumn):
            return cls(name, np.arange(len(column.all_levels)), None, (0.0, 1.0))
        assert isinstance(column, RangeColumn)
        low, high = column.bounds
        nodes, weights = np.polynomial.legendre.leggauss(_NODES)
        scale = ((low + high) / 2, (high - low) / 2)
        return cls(name, scale[0] + scale[1] * nodes, np.log(weights), scale)

    @property
    def nodes(self) -> np.ndarray:
        """The standardised values, as the model reads them."""
        return (self.values - self.scale[0]) / self.scale[1]


def combinations(incomplete: Sequence[Incomplete]) -> list[tuple[int, ...]]:
    """All combinations of the covariates' values, by index. Without covariates there is one, ()."""
    number = int(np.prod([len(each.values) for each in incomplete]))
    if number > _MOST:
        raise ConfigurationError(
            f"Covariates {', '.join(repr(each.name) for each in incomplete)} may be missing, "
            f"and have {number} combinations of values, more than {_MOST}. Declare fewer levels, "
            "or fewer of them with missing=True. (The others can have a level for missing "
            "values.)"
        )
    return list(itertools.product(*(range(len(each.values)) for each in incomplete)))


def filled(
    rows: Mapping[str, np.ndarray],
    observed: Mapping[str, np.ndarray],
    incomplete: Sequence[Incomplete],
    chosen: Sequence[int],
) -> dict[str, np.ndarray]:
    """Encoded columns, (rows,) each, with missing values replaced by the chosen ones."""
    found = dict(rows)
    for each, index in zip(incomplete, chosen, strict=True):
        found[each.name] = np.where(observed[each.name], rows[each.name], each.values[[index]])
    return found


@dataclass(frozen=True, eq=False)
class Source:
    """Generates the model's code from public names, shapes and settings."""

    notes: Sequence[str]  # lines of comment
    terms: Sequence[str]  # names of the design matrix' columns
    outcome: str
    family: Family
    slotted: bool  # whether a record is a unit with several rows, not a single row
    masked: bool  # whether outcomes may be missing
    exposed: bool  # whether counts are rates times an exposure
    group: tuple[str, Sequence[Any]] | None  # name and levels of the group column
    incomplete: Sequence[Incomplete]  # covariates that may be missing
    complete: Sequence[str]  # names of the columns that predict these

    def text(self) -> str:
        """The code of ``def model(...)``."""
        lines = [f"def model({', '.join(self.arguments)}):"]
        # Formulae may have several lines, and names may come from somebody else's file. They must
        # stay comments.
        notes = [" ".join(line.replace("\0", " ").split()) for line in self.notes]
        lines += [f"    # {line}" for line in notes]
        lines += [f"    {line}" for line in self._latents()]
        lines += ['    with pyro.plate("records", len(x)):']
        lines += [f"        {line}" for line in [*self._covariates(), *self._outcome()]]
        return "\n".join(lines) + "\n"

    def model(self) -> Callable:
        """The model as a function whose source ``inspect`` finds."""
        return _function("model", self.text())

    def prior(self) -> Callable:
        """The latents alone, as a function without arguments."""
        return _function("prior", "\n    ".join(["def prior():", *self._latents()]) + "\n")

    @property
    def arguments(self) -> list[str]:
        """Names of the model's arguments: x, y, then the optional ones."""
        found = ["x", "y"]
        found += ["observed"] if self.masked else []
        found += ["log_exposure"] if self.exposed else []
        found += ["group"] if self.group else []
        found += ["complete"] if self.incomplete else []
        for number in range(1, len(self.incomplete) + 1):
            found += [f"x{number}", f"x{number}_observed"]
        return found

    def start(self) -> dict[str, torch.Tensor]:
        """Start values for a guide, at the middle of the priors."""
        found = {COEFFICIENTS: torch.zeros(len(self.terms))}
        found |= {name: torch.tensor(value) for name, value in self.family.start.items()}
        if self.group:
            found[self.group[0]] = torch.zeros(len(self.group[1]))
        for each in self.incomplete:
            shape = [len(self.complete)]
            if each.weights is None:
                shape.append(len(each.values) - 1)
            else:
                found[f"{each.name}_sd"] = torch.tensor(-1.0).exp()
            found[f"{each.name}_{COEFFICIENTS}"] = torch.zeros(shape)
        return found

    @property
    def scales(self) -> list[float]:
        """Standard deviations of the coefficients' priors."""
        return [_INTERCEPT_SD if name == "Intercept" else _SD for name in self.terms]

    def _latents(self) -> list[str]:
        lines = [
            f"b = pyro.sample({COEFFICIENTS!r}, "
            f"dist.Normal(0.0, torch.tensor({self.scales})).to_event(1))"
        ]
        lines += [
            f"{name} = pyro.sample({name!r}, {prior})"
            for name, prior in self.family.latents.items()
        ]
        if self.group:
            name, count = self.group[0], len(self.group[1])
            lines += [
                "# Normal(0, sd) each, with one sd that is inverse gamma, summed out",
                f"u = pyro.sample({name!r}, dist.MultivariateStudentT("
                f"{GROUP_DF}, torch.zeros({count}), {GROUP_SCALE} * torch.eye({count})))",
            ]
        for place, each in enumerate(self.incomplete, start=1):
            shape, dims = [len(self.complete)], 1
            if each.weights is None:
                shape, dims = [*shape, len(each.values) - 1], 2
            site, sd = f"{each.name}_{COEFFICIENTS}", _SD if each.weights is None else _INTERCEPT_SD
            lines.append(
                f"b{place} = pyro.sample({site!r}, "
                f"dist.Normal(0.0, {sd}).expand({shape}).to_event({dims}))"
            )
            if each.weights is not None:
                site = f"{each.name}_sd"
                lines.append(f"s{place} = pyro.sample({site!r}, dist.LogNormal(-1.0, 0.5))")
        return lines

    def _covariates(self) -> list[str]:
        lines, weights = [], []
        chosen = list(zip(*combinations(self.incomplete), strict=True))
        for place, (each, at) in enumerate(zip(self.incomplete, chosen, strict=True), start=1):
            if each.weights is None:
                lines += [
                    f"logits{place} = torch.nn.functional.pad(complete @ b{place}, (1, 0))",
                    f"given{place} = dist.Categorical(logits=logits{place})",
                    f"log{place} = logits{place}.log_softmax(-1)",
                ]
            else:
                # In units of s, records inform the mean as much as other coefficients.
                lines += [
                    f"mean{place} = complete @ b{place}  # in units of s{place}",
                    f"given{place} = dist.Normal(s{place} * mean{place}, s{place})",
                    f"nodes{place} = torch.tensor({_rounded(each.nodes)})",
                    f"away{place} = nodes{place} / s{place} - mean{place}[..., None]",
                    f"log{place} = torch.tensor({_rounded(each.weights)}) - away{place}**2 / 2",
                ]
            lines.append(self._observed(each.name, f"given{place}", f"x{place}"))
            weights.append(f"log{place}" + (f"[..., {list(at)}]" if len(chosen) > 1 else ""))
        if weights:
            lines.append(
                f"weights = {' + '.join(weights)}  # of what may stand where one is missing"
            )
        return lines

    def _outcome(self) -> list[str]:
        parts = ["log_exposure"] if self.exposed else []
        parts += ["u[group]"] if self.group else []
        each = "[..., None]" if self.incomplete else ""
        eta = " + ".join(["x @ b", *(f"{part}{each}" for part in parts)])
        lines, given = [f"eta = {eta}"], self.family.distribution
        if self.incomplete:
            lines.append(f"each = {given}")
            given = "dist.MixtureSameFamily(dist.Categorical(logits=weights), each)"
        lines.append(f"given = {given}")
        lines.append(self._observed(self.outcome, "given", "y"))
        return lines

    def _observed(self, site: str, given: str, value: str) -> str:
        mask = "observed" if value == "y" else f"{value}_observed"
        if value != "y" or self.masked:
            given += f".mask({mask})"
        if self.slotted:
            given += ".to_event(1)"
        return f"pyro.sample({site!r}, {given}, obs={value})"


def _function(name: str, text: str) -> Callable:
    file = f"<PrivateGLM {hashlib.sha256(text.encode()).hexdigest()}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"torch": torch, "pyro": pyro, "dist": dist, "__name__": __name__}
    exec(compile(text, file, "exec"), names)
    function: Callable = names[name]
    return function


def _rounded(numbers: np.ndarray) -> list[float]:
    return [float(f"{x:.12g}") for x in numbers]
