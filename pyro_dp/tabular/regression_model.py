"""Translate a formula into a Pyro model, and its latents into the user's units."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pyro_dp.infer.posterior.explanation import DATA, Explanation, shares_of
from pyro_dp.infer.posterior.posterior import Posterior
from pyro_dp.tabular.design import Design, Formula
from pyro_dp.tabular.encoded import ROW_OBSERVED
from pyro_dp.tabular.glm_model import (
    COEFFICIENTS,
    GROUP_DF,
    GROUP_SCALE,
    Family,
    Incomplete,
    Source,
    combinations,
    family_of,
    filled,
)
from pyro_dp.tabular.levels import LevelColumn
from pyro_dp.tabular.ranges import Count, Number
from pyro_dp.tabular.schema import Schema
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.torch_state import forked_rng

_INCOMPLETE_SD = 0.02  # deviation of the first q if covariates may be missing
_NUM_ROWS = 1000  # made-up rows, to average over covariates
_SEED = 0
_TEXTS = ("formula", "family", "exposure", "group")


class RegressionModel:
    """The public parts of a regression, without records and budget.

    Arguments are those of :class:`~pyro_dp.tabular.PrivateGLM`.

    :ivar source: the Pyro model.
    :raises ConfigurationError: the arguments do not fit; the text names the column or the term.
    """

    def __init__(
        self,
        schema: Schema,
        formula: str,
        family: str,
        exposure: str | None = None,
        group: str | None = None,
    ):
        if not isinstance(schema, Schema):
            raise ConfigurationError(
                "schema must be a Schema: Schema({'age': Number(0, 100), ..})."
            )
        for name, text in dict(family=family, exposure=exposure, group=group).items():
            if not isinstance(text, str | None):
                raise ConfigurationError(f"{name} must be text, not {type(text).__name__}.")
        columns = schema.columns
        self.schema = schema
        self.formula = Formula.read(formula, columns)
        outcome = self.formula.outcome
        self.family = family_of(family, outcome, columns[outcome])
        self._design = Design(self.formula.terms, columns)
        self._group = _group(group, schema)
        self._exposure = _exposure(exposure, columns, self.family)
        once = [outcome, *filter(None, (group, exposure))]
        if len({*once, *self._design.variables}) < len(once) + len(self._design.variables):
            raise ConfigurationError(
                "The formula names a column twice: outcome, group, exposure, and the columns of "
                "the right side must be different ones."
            )
        self._kept = self._kept_columns()
        self._incomplete = [
            Incomplete.of(name, columns[name])
            for name in self._design.variables
            if columns[name].missing
        ]
        known = [n for n in self._design.variables if not columns[n].missing]
        self._complete = Design([(), *((name,) for name in known)], columns)
        centred = "Intercept" in self._design.names
        if self._exposure and not centred:
            raise ConfigurationError("exposure= needs a formula with an intercept.")
        self._scale = self.family.scale(columns[outcome], centred=centred)
        self._texts = dict(zip(_TEXTS, (formula, family, exposure, group), strict=True))
        self.source = self._source()

    @classmethod
    def read(cls, state: Any) -> "RegressionModel":
        """Restore the result of :meth:`state` without running code.

        :raises ConfigurationError: the state is invalid.
        """
        fits = isinstance(state, dict) and {*state} == {"schema", *_TEXTS}
        if not fits or not all(isinstance(state[name], str | None) for name in _TEXTS):
            raise ConfigurationError("The regression must have a schema, a formula and a family.")
        schema = Schema.from_json(json.dumps(state["schema"]))
        return cls(schema, **{name: state[name] for name in _TEXTS})

    def state(self) -> dict[str, Any]:
        """The arguments of :meth:`read`, as plain JSON."""
        return {"schema": json.loads(self.schema.to_json()), **self._texts}

    @property
    def text(self) -> str:
        """The formula and the family."""
        return f"{self.formula.text} ({self.family.name})"

    def end_shares(self, posterior: Posterior) -> dict[str, float]:
        """Expected shares of the lowest and the highest level of an ordinal outcome, at the
        posterior's means. Covariates are spread evenly over the schema's values.
        """
        levels = self.family.ordered
        if not levels:
            return {}
        with forked_rng():
            torch.manual_seed(_SEED)
            means = {n: each.double().mean(0) for n, each in posterior.draws(_NUM_ROWS).items()}
        rng, slots = np.random.default_rng(_SEED), self.schema.max_rows
        codes = rng.integers(0, self.schema.sizes, (_NUM_ROWS, slots, len(self.schema.sizes)))
        frame = self.schema.from_codes(codes if self.schema.unit else codes[:, 0], rng)
        eta = self.tensors(frame.drop(columns=list(self.schema.derived)))[0].double()
        eta, cuts = eta @ means[COEFFICIENTS], means["cutpoints"]
        low, high = torch.sigmoid(cuts[0] - eta), torch.sigmoid(eta - cuts[-1])
        return {str(levels[0]): low.mean().item(), str(levels[-1]): high.mean().item()}

    @property
    def init_scale(self) -> float:
        """Standard deviation of the first q."""
        return _INCOMPLETE_SD if self._incomplete else self.family.first_sd

    @cached_property
    def scale(self) -> "UserScale":
        """The map from the model's latents to the user's units."""
        centre, half = self._scale
        if self._exposure:
            centre = -math.log(self._exposure[3])
        return UserScale(self._design, self.source, self._kept, centre, half)

    def tensors(self, frame: pd.DataFrame) -> list[Tensor]:
        """The arguments of the model, with one row per record.

        :raises SchemaError: the frame does not fit the schema.
        """
        encoded = self.schema.encode(frame)
        outcome = self.formula.outcome
        shape = encoded[outcome].shape
        rows = {name: encoded[name].numpy().reshape(-1) for name in self._design.variables}
        slots = encoded.get(ROW_OBSERVED, torch.ones(shape, dtype=torch.bool))
        known = {each.name: encoded[f"{each.name}_observed"] for each in self._incomplete}
        flat = {name: mask.numpy().reshape(-1) for name, mask in known.items()}
        rows = rows or {outcome: np.zeros(shape.numel())}  # an intercept alone
        matrices = [
            self._design.matrix(filled(rows, flat, self._incomplete, chosen))[:, self._kept]
            for chosen in combinations(self._incomplete)
        ]
        x = np.stack(matrices, axis=1) if self._incomplete else matrices[0]
        y = encoded[outcome]
        if not self.family.ordered:
            centre, half = self._scale
            y = ((y.double() - centre) / half).to(torch.get_default_dtype())
        found = [_floats(x).reshape(*shape, *x.shape[1:]), y]
        if self.source.masked:
            found.append(slots & encoded.get(f"{outcome}_observed", slots))
        if self._exposure:
            name, low, high, unit = self._exposure
            value = encoded[name].double().clamp(low, high)  # empty slots have no exposure
            found.append(_floats((value / unit).log().numpy()))
        if self._group:
            found.append(encoded[self._group[0]])
        if self._incomplete:
            complete = self._complete.matrix(rows)
            found.append(_floats(complete).reshape(*shape, -1))
        for each in self._incomplete:
            value = encoded[each.name]
            if each.weights is not None:
                value = _floats((value.double().numpy() - each.scale[0]) / each.scale[1])
            found += [value, known[each.name] & slots]
        return found

    def _kept_columns(self) -> list[int]:
        """Indices of the design's columns. Thresholds of ordered levels replace the intercept."""
        names = self._design.names
        if not self.family.ordered:
            return list(range(len(names)))
        kept = [place for place, name in enumerate(names) if name != "Intercept"]
        if len(kept) == len(names) or not kept:
            raise ConfigurationError(
                "family='ordinal' needs a formula with an intercept, for which its thresholds "
                "stand, and a term beside it."
            )
        return kept

    def _source(self) -> Source:
        columns, outcome = self.schema.columns, self.formula.outcome
        names = [self._design.names[place] for place in self._kept]
        seen = [
            f"{text} as ({text} - {centre:g}) / {half:g}"
            for text, (centre, half) in self._design.scaled.items()
        ]
        notes = [self.text, f"x: {', '.join(names)}", *seen]
        if self._scale != (0.0, 1.0):
            notes.append(f"y: ({outcome} - {self._scale[0]:g}) / {self._scale[1]:g}")
        if self._exposure:
            notes.append(f"log_exposure: log({self._exposure[0]} / {self._exposure[3]:g})")
        if self._incomplete:
            notes.append(f"complete: {', '.join(self._complete.names)}")
        for place, each in enumerate(self._incomplete, start=1):
            notes.append(f"x{place}: {each.name}, which may be missing; x has all it could be")
        source = Source(
            notes=notes,
            terms=names,
            outcome=outcome,
            family=self.family,
            slotted=self.schema.unit is not None,
            masked=self.schema.unit is not None or columns[outcome].missing,
            exposed=self._exposure is not None,
            group=self._group,
            incomplete=self._incomplete,
            complete=self._complete.names,
        )
        sites = [outcome, "records", *source.start(), *(each.name for each in self._incomplete)]
        twice = {name for name in sites if sites.count(name) > 1}
        if twice:
            raise ConfigurationError(
                f"{min(twice)!r} is a name that the model has for something else: rename the "
                "column."
            )
        return source


def _floats(values: np.ndarray) -> Tensor:
    return torch.tensor(values, dtype=torch.get_default_dtype())


def _exposure(
    name: str | None, columns: Mapping[str, Any], family: Family
) -> tuple[str, float, float, float] | None:
    """Name, bounds and unit of the exposure. The unit is about the bounds' geometric mean."""
    if name is None:
        return None
    if not family.has_rate:
        raise ConfigurationError(
            f"exposure={name!r} is for counts: family='poisson' or 'negative_binomial'."
        )
    column = columns.get(name)
    if not isinstance(column, (Number, Count)) or column.missing or column.lower <= 0:
        raise ConfigurationError(
            f"exposure={name!r} must be a column of the schema, declared as Number(lower, upper) "
            "or Count(lower, upper) with lower above 0, without missing values."
        )
    low, high = column.bounds
    return name, low, high, float(f"{math.sqrt(low * high):.2g}")


def _group(name: str | None, schema: Schema) -> tuple[str, list[Any]] | None:
    columns = schema.columns
    if name is None:
        return None
    if name == schema.unit:
        raise ConfigurationError(
            f"group={name!r} is the schema's unit: an intercept for each of them would be a "
            "latent of each record, which is not private. Effects common to the rows of one unit "
            "need no term: a unit is one record with all of its rows."
        )
    if name not in columns:
        raise ConfigurationError(f"group={name!r} is no column of the schema.")
    column = columns[name]
    if not isinstance(column, LevelColumn) or column.missing:
        raise ConfigurationError(
            f"group={name!r} must be declared as Category(levels), without missing values: its "
            "levels are public."
        )
    return name, column.all_levels


@dataclass(frozen=True, eq=False)
class UserScale:
    """Maps the model's latents to the user's units.

    :param kept: indices of the design's columns in the source and in the table.
    :param centre: centre of the outcome, which the intercept absorbs.
    :param half: half width of the outcome, which scales all coefficients.
    """

    design: Design
    source: Source
    kept: Sequence[int]
    centre: float
    half: float

    @cached_property
    def matrix(self) -> Tensor:
        """(K, k): the user's K coefficients are ``matrix @ b`` of the model's."""
        return torch.tensor(self.design.to_user[:, self.kept] * self.half)

    @property
    def coefficients(self) -> Sequence[str]:
        """Names of the coefficients in the table."""
        return self.source.terms

    @property
    def others(self) -> list[str]:
        """Names of the other quantities, in the order of :meth:`elements`."""
        found = [*self.thresholds, *self._positive]
        if self.source.group:
            name, levels = self.source.group
            found += [*(f"{name}[{level}]" for level in levels), f"sd of {name}"]
        return found

    @property
    def thresholds(self) -> list[str]:
        return [f"{low}|{high}" for low, high in itertools.pairwise(self.source.family.ordered)]

    @property
    def sites(self) -> list[str]:
        """The model's latents that have rows in the table besides the coefficients."""
        group = self.source.group
        return [*self.source.family.latents, *([group[0]] if group else [])]

    def called(self, name: str) -> str:
        """The table's name of an unconstrained coordinate: a group's has its level."""
        site, _, index = name.partition("[")
        group = self.source.group
        return f"{site}[{group[1][int(index[:-1])]}]" if group and site == group[0] else name

    def mean(self, posterior: Posterior) -> Tensor:
        """Means of the coefficients."""
        found = self.matrix @ posterior[COEFFICIENTS].mean.double()
        found = found + self.centre * self._is_intercept
        return found[self.kept]

    def covariance(self, posterior: Posterior) -> Tensor:
        """Covariance of the (Gaussian) coefficients."""
        covariance = posterior[COEFFICIENTS].covariance_matrix.double()
        return (self.matrix @ covariance @ self.matrix.mT)[self.kept][:, self.kept]

    def noise_share(self, posterior: Posterior) -> Tensor:
        """Privacy noise's share of each coefficient's variance."""
        aware = self.covariance(posterior).diagonal()
        plain = self.covariance(posterior.plain).diagonal()
        return (1 - plain / aware).nan_to_num(0.0).clamp(0.0, 1.0)

    def unknown(self, posterior: Posterior) -> list[str]:
        """Names of coefficients that keep more than half of their prior variance."""
        prior = torch.tensor(self.source.scales, dtype=torch.float64)
        before = (self.matrix * prior).square().sum(dim=1)[self.kept]
        mostly = self.covariance(posterior).diagonal() > before / 2
        return [name for name, each in zip(self.coefficients, mostly, strict=True) if each]

    def draws(self, posterior: Posterior, num: int) -> dict[str, Tensor]:
        """Reproducible draws by variable, (num, ...): coefficients, thresholds, and the others.

        Student's t mixes normals over an inverse gamma variance. So, conditional on these, the
        squared standard deviation of groups' intercepts is inverse gamma.
        """
        with forked_rng():
            torch.manual_seed(_SEED)
            drawn = {name: each.double() for name, each in posterior.draws(num).items()}
            group, levels = self.source.group or ("", [])
            gamma = torch.distributions.Gamma(0.5 * (GROUP_DF + len(levels)), 1.0)
            precision = gamma.sample((num,)).double()
        user = drawn[COEFFICIENTS] @ self.matrix.mT + self.centre * self._is_intercept
        found = {COEFFICIENTS: user[:, self.kept]}
        if self.source.family.ordered:
            found["thresholds"] = drawn["cutpoints"] - user[:, self._is_intercept.bool()]
        for name in self._positive:
            found[name] = drawn[name] * (self.half if name == "sigma" else 1.0)
        if group:
            own = drawn[group]
            rate = (GROUP_DF * GROUP_SCALE**2 + own.square().sum(dim=1)) / 2
            found[group] = own * self.half
            found[f"sd of {group}"] = (rate / precision).sqrt() * self.half
        return found

    def elements(self, draws: dict[str, Tensor]) -> Tensor:
        """The draws of :attr:`others`, (num, others)."""
        parts = [each.reshape(len(each), -1) for n, each in draws.items() if n != COEFFICIENTS]
        return torch.cat(parts, dim=1) if parts else draws[COEFFICIENTS][:, :0]

    @property
    def _is_intercept(self) -> Tensor:
        return torch.tensor([float(name == "Intercept") for name in self.design.names]).double()

    @property
    def _positive(self) -> list[str]:
        return [name for name in self.source.family.latents if name != "cutpoints"]


def by_terms(found: Explanation, posterior: Posterior, scale: UserScale) -> Explanation:
    """Translate an explanation of the model's latents to the rows of the table.

    Each coefficient of the user is a linear combination of the model's, because the intercept
    absorbs the centres. Its total share is the one in the table. Sampling, clipping and noise
    divide this share in proportion to their shares of the model's coefficients, with squared
    weights, as if these were uncorrelated. Latents without a row (coefficients of missing values)
    are left out.
    """
    own = [place for place, name in enumerate(found.names) if _site(name) == COEFFICIENTS]
    others = [j for j, name in enumerate(found.names) if _site(name) in scale.sites]
    squares = scale.matrix[scale.kept].square()
    variance = posterior[COEFFICIENTS].covariance_matrix.diagonal().double()
    parts = {
        name: squares @ (share[own].double() * variance)
        for name, share in found.shares.items()
        if name != DATA
    }
    shares = shares_of(scale.noise_share(posterior), parts)
    names = {found.names[j]: scale.called(found.names[j]) for j in others}
    return replace(
        found,
        names=(*scale.coefficients, *names.values()),
        shares={
            name: torch.cat([share, found.shares[name][others].double()])
            for name, share in shares.items()
        },
    )


def _site(name: str) -> str:
    return name.split("[")[0]
