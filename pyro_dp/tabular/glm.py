"""A private regression from a frame: a formula becomes a plain Pyro model, and that is fitted."""

import inspect
import itertools
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from pyro.infer.autoguide import AutoMultivariateNormal
from pyro.infer.autoguide.initialization import init_to_value
from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events.event import LONGEST_TEXT
from pyro_dp.infer.ep.dpsep import DPSEP
from pyro_dp.infer.posterior.evidence import Evidence
from pyro_dp.infer.posterior.posterior import Posterior
from pyro_dp.mechanism.run_result import RunResult
from pyro_dp.mechanism.settings import old_names_explained
from pyro_dp.tabular.design import Design, Formula, levels
from pyro_dp.tabular.encoded import Encoded
from pyro_dp.tabular.expressions import bounds
from pyro_dp.tabular.families import Family, family_of, scale_of
from pyro_dp.tabular.glm_model import Source
from pyro_dp.tabular.incomplete import Incomplete, combinations, filled
from pyro_dp.tabular.levels import Binary, Category
from pyro_dp.tabular.ranges import Count, Number
from pyro_dp.tabular.regression import MODEL, Regression
from pyro_dp.tabular.schema import ROW_OBSERVED, Schema
from pyro_dp.tabular.user_scale import UserScale
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.files import read_file
from pyro_dp.utils.torch_state import forked_rng

# The first q's. If sites come from derivatives at draws, the draws should be near.
_WIDE, _NARROW = 0.1, 0.02
_SEED = 0
_guides = itertools.count(1)


class PrivateGLM:
    """A generalised linear model, from a frame and a formula to a posterior.

    ::

        glm = PrivateGLM(schema, "visits ~ age + chronic * income", family="poisson",
                         accountant=PrivacyAccountant(epsilon=1.0, delta=1e-5))
        print(glm)                      # the Pyro model that is fitted
        result = glm.fit(frame)
        result.summary()

    A record is a unit of the schema: a person with all rows that it keeps. Conditional on the
    coefficients, rows are independent. Contrasts, levels and scales come from the schema. Numbers
    enter as (age - 50) / 30 by their declared bounds. Their priors are Normal(0, 2.5), and
    Normal(0, 5) for the intercept. The result is in the frame's own units.

    **Missing values**, if the schema declares them. A row without an outcome says nothing about it.
    A missing covariate is summed out, by its probabilities conditional on the covariates that are
    never missing. Their model is fitted along (:mod:`pyro_dp.tabular.incomplete`). No row is
    dropped. This holds if missingness depends on observed values only. Several incomplete
    covariates are assumed independent, conditional on the complete ones.

    **Guarantee.** That of :class:`~pyro_dp.DPSEP`, for one unit of the schema. The record of a unit
    depends on that unit's rows and on the schema alone, as :meth:`Schema.encode` says. Formulae
    that look at other rows are refused.

    **Not protected.** The schema, the formula, and choices among formulae that were made by looking
    at the data; errors that say so are for the curator.

    :param schema: the frame's schema.
    :param formula: a formula of formulaic: columns of the schema, ``+ - * : /``, ``C(column,
        contrast)``, and functions of single numbers such as ``log(age)`` and ``I(age ** 2)``.
    :param family: "poisson" or "negative_binomial" (of a ``Count``, log link), "logistic" (of a
        ``Binary``), "linear" (of a ``Number`` or ``Count``), "ordinal" (of an ordered
        ``Category``, proportional odds).
    :param accountant: as for :class:`~pyro_dp.DPSEP`.
    :param exposure: a column, ``Number`` or ``Count`` with a lower bound above 0, such as hours at
        work. Counts are a rate times it, so its logarithm is added to the linear predictor.
    :param group: a column of levels, each with an intercept of its own. These are normal around the
        common one. Their standard deviation is unknown, and integrated out of the prior.
    :param settings: those of :class:`~pyro_dp.DPSEP`, such as ``noise`` and ``execution``.
    :ivar model: the Pyro model.
    :ivar prior: its latents alone, a model without data for :meth:`~pyro_dp.Evidence.posterior`.
    :ivar source: its code.
    :raises ConfigurationError: formula, family, group and schema do not fit; the text names the
        column or the term.

    >>> import numpy as np
    >>> import pandas as pd
    >>> from pyro_dp import PrivacyAccountant
    >>> from pyro_dp.tabular import Binary, Count, Number, PrivateGLM, Schema
    >>> rng = np.random.default_rng(0)
    >>> people = pd.DataFrame({"age": rng.uniform(20, 80, 3000), "ill": rng.random(3000) < 0.3})
    >>> people["visits"] = rng.poisson(np.exp(0.01 * (people.age - 50) + 0.5 * people.ill))
    >>> schema = Schema({"age": Number(20, 80), "ill": Binary(), "visits": Count(0, 30)})
    >>> accountant = PrivacyAccountant(epsilon=2.0, delta=1e-5)
    >>> glm = PrivateGLM(schema, "visits ~ age + ill", family="poisson", accountant=accountant)
    >>> result = glm.fit(people, progress=False)
    >>> list(result.summary().index)
    ['Intercept', 'age', 'ill[T.True]']
    """

    @old_names_explained()
    def __init__(
        self,
        schema: Schema,
        formula: str,
        *,
        family: str,
        accountant: PrivacyAccountant,
        exposure: str | None = None,
        group: str | None = None,
        **settings: Any,
    ):
        if not isinstance(schema, Schema):
            raise ConfigurationError(
                "schema must be a Schema: Schema({'age': Number(0, 100), ..})."
            )
        _require_settings(settings)
        columns = schema.columns
        self.schema, self.accountant = schema, accountant
        self._settings = settings
        self._formula = Formula.read(formula, columns)
        outcome = self._formula.outcome
        self._family = family_of(family, outcome, columns[outcome])
        self._design = Design(self._formula.terms, columns)
        self._group = _group(group, schema)
        self._exposure = _exposure(exposure, columns, self._family)
        once = [outcome, *filter(None, (group, exposure))]
        if len({*once, *self._design.variables}) < len(once) + len(self._design.variables):
            raise ConfigurationError(
                "The formula names a column twice: outcome, group, exposure, and the columns of "
                "the right side must be different ones."
            )
        self._kept = self._shown_columns()
        self._incomplete = [
            Incomplete.of(name, columns[name])
            for name in self._design.variables
            if columns[name].missing
        ]
        self._combinations = combinations(self._incomplete)
        known = [n for n in self._design.variables if not columns[n].missing]
        self._complete = Design([(), *((name,) for name in known)], columns)
        centred = "Intercept" in self._design.names
        if self._exposure and not centred:
            raise ConfigurationError("exposure= needs a formula with an intercept.")
        self._scale = scale_of(self._family, columns[outcome], centred=centred)
        self._written = self._source()
        self.source, self.model = self._written.text(), self._written.model()
        self.prior = self._written.prior()

    def fit(self, frame: pd.DataFrame, *, progress: bool = True) -> Regression:
        """Compute the posterior privately, and charge the accountant.

        :param frame: with the columns of the schema.
        :param progress: show a progress bar.
        :raises SchemaError: the frame does not fit the schema; nothing was spent.
        :raises PrivacyBudgetExceeded: as of :class:`~pyro_dp.DPSEP`.
        """
        tensors = self._tensors(self.schema.encode(frame))
        # A name of its own, because a second fit must not start at the end of the first.
        kind = type(f"PrivateGLM{next(_guides)}", (AutoMultivariateNormal,), {})
        guide = kind(
            self.model,
            init_loc_fn=init_to_value(values=self._written.start()),
            init_scale=_NARROW if self._incomplete or self._family.name == "ordinal" else _WIDE,
        )
        kind = _called(self._text)
        inference = kind(self.model, guide, accountant=self.accountant, **self._settings)
        run = inference.run(*tensors, progress=progress)
        self.accountant.note(self.schema.note)
        return self._result(inference.posterior(), inference.evidence, inference, run)

    def load(self, path: str | os.PathLike[str]) -> Regression:
        """The result that :meth:`Regression.save` wrote. It needs no data, and costs nothing.

        The schema, the formula and the family must be those of the fit.

        :param path: the file's.
        :raises ConfigurationError: the file is damaged, or has the result of another model.
        :raises OSError: it cannot be read.
        """
        evidence = Evidence.load(path)
        if read_file(path).get(MODEL) != self.source:
            raise ConfigurationError(
                f"{os.fspath(path)} has no result of this model. Use the schema, formula and "
                "family of the fit."
            )
        with forked_rng():  # the same numbers whenever it is read
            torch.manual_seed(_SEED)
            posterior = evidence.posterior(self.prior)
        return self._result(posterior, evidence)

    def __str__(self) -> str:
        return self.source

    def __repr__(self) -> str:
        return f"PrivateGLM({self._formula.text!r}, family={self._family.name!r})"

    @property
    def _text(self) -> str:
        return f"{self._formula.text} ({self._family.name})"

    def _result(
        self,
        posterior: Posterior,
        evidence: Evidence,
        inference: DPSEP | None = None,
        run: RunResult | None = None,
    ) -> Regression:
        return Regression(
            text=self._text,
            source=self.source,
            posterior=posterior,
            evidence=evidence,
            inference=inference,
            run=run,
            scale=self._user_scale(),
            outcome=self._formula.outcome,
            ratios=self._family.ratios,
            encoded=lambda new: self._tensors(self.schema.encode(new)),
            masked=self._written.masked,
        )

    def _shown_columns(self) -> list[int]:
        """The design's names; thresholds of ordered levels replace the intercept."""
        names = self._design.names
        if self._family.name != "ordinal":
            return list(range(len(names)))
        kept = [place for place, name in enumerate(names) if name != "Intercept"]
        if len(kept) == len(names) or not kept:
            raise ConfigurationError(
                "family='ordinal' needs a formula with an intercept, for which its thresholds "
                "stand, and a term beside it."
            )
        return kept

    def _source(self) -> Source:
        columns, outcome = self.schema.columns, self._formula.outcome
        names = [self._design.names[place] for place in self._kept]
        seen = [
            f"{text} as ({text} - {centre:g}) / {half:g}"
            for text, (centre, half) in self._design.scaled.items()
        ]
        notes = [self._text, f"x: {', '.join(names)}", *seen]
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
            family=self._family,
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

    def _user_scale(self) -> UserScale:
        family, (centre, half) = self._family, self._scale
        if self._exposure:
            centre = -math.log(self._exposure[3])
        return UserScale(
            names=self._design.names,
            of_levels=self._design.of_levels,
            matrix=torch.tensor(self._design.to_user[:, self._kept] * half),
            prior=torch.tensor(self._written.scales, dtype=torch.float64),
            centre=centre,
            half=half,
            ordinal=levels(self.schema.columns[self._formula.outcome])
            if family.name == "ordinal"
            else None,
            positive=[name for name in family.latents if name != "cutpoints"],
            group=self._group[0] if self._group else None,
            group_levels=levels(self.schema.columns[self._group[0]]) if self._group else [],
        )

    def _tensors(self, encoded: Encoded) -> list[Tensor]:
        """Arguments of the model, a record a row."""
        outcome, columns = self._formula.outcome, self.schema.columns
        shape = encoded[outcome].shape
        rows = {
            name: encoded[name].numpy().reshape(-1).astype(np.float64)
            if not isinstance(columns[name], (Category, Binary))
            else encoded[name].numpy().reshape(-1)
            for name in self._design.variables
        }
        slots = encoded.get(ROW_OBSERVED, torch.ones(shape, dtype=torch.bool))
        known = {each.name: encoded[f"{each.name}_observed"] for each in self._incomplete}
        flat = {name: mask.numpy().reshape(-1) for name, mask in known.items()}
        rows = rows or {outcome: np.zeros(shape.numel())}  # an intercept alone
        matrices = [
            self._design.matrix(filled(rows, flat, self._incomplete, chosen))[:, self._kept]
            for chosen in self._combinations
        ]
        x = np.stack(matrices, axis=1) if self._incomplete else matrices[0]
        found = [_floats(x).reshape(*shape, *x.shape[1:]), self._outcome(encoded[outcome])]
        if self._written.masked:
            found.append(slots & encoded.get(f"{outcome}_observed", slots))
        if self._exposure:
            name, low, high, unit = self._exposure
            value = encoded[name].double().clamp(low, high)  # an empty slot has none
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

    def _outcome(self, value: Tensor) -> Tensor:
        if self._family.name == "ordinal":
            return value
        centre, half = self._scale
        return ((value.double() - centre) / half).to(torch.get_default_dtype())


def _called(text: str) -> type[DPSEP]:
    """DPSEP, as the report names it beside others on the same budget."""
    name = " ".join(f"DPSEP of {text}".split())
    name = "".join(letter for letter in name if letter.isprintable())
    return type("DPSEP", (DPSEP,), {"_method": name[:LONGEST_TEXT]})


def _require_settings(settings: Mapping[str, Any]) -> None:
    known = inspect.signature(DPSEP).parameters
    unknown = [name for name in settings if name not in known or name in ("model", "guide")]
    if unknown:
        hint = " (exposure='hours' is how counts have an offset)" if "offset" in unknown else ""
        raise ConfigurationError(
            f"{unknown[0]!r} is no setting of PrivateGLM, and none of DPSEP{hint}."
        )


def _floats(values: np.ndarray) -> Tensor:
    return torch.tensor(values, dtype=torch.get_default_dtype())


def _exposure(
    name: str | None, columns: Mapping[str, Any], family: Family
) -> tuple[str, float, float, float] | None:
    """Name, bounds, and the unit in which the model has it: the bounds' geometric mean.

    The unit in which the intercept is 0. A fit starts near rates of one in it.
    """
    if name is None:
        return None
    if family.name not in ("poisson", "negative_binomial"):
        raise ConfigurationError(
            f"exposure={name!r} is for counts: family='poisson' or 'negative_binomial'."
        )
    column = columns.get(name)
    if not isinstance(column, (Number, Count)) or column.missing or column.lower <= 0:
        raise ConfigurationError(
            f"exposure={name!r} must be a column of the schema, declared as Number(lower, upper) "
            "or Count(lower, upper) with lower above 0, without missing values."
        )
    low, high = bounds(column)
    return name, low, high, float(f"{math.sqrt(low * high):.2g}")


def _group(name: str | None, schema: Schema) -> tuple[str, int] | None:
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
    if not isinstance(column, (Category, Binary)) or column.missing:
        raise ConfigurationError(
            f"group={name!r} must be declared as Category(levels), without missing values: its "
            "levels are public."
        )
    return name, len(levels(column))
