"""A private regression from a frame: a formula becomes a plain Pyro model, and that is fitted."""

import inspect
import secrets
from collections.abc import Mapping
from typing import Any

import pandas as pd
from pyro.infer.autoguide import AutoMultivariateNormal
from pyro.infer.autoguide.initialization import init_to_value

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import LONGEST_TEXT
from pyro_dp.infer.ep.dpsep import DPSEP
from pyro_dp.mechanism.settings import old_names_explained
from pyro_dp.tabular.regression import Regression
from pyro_dp.tabular.regression_model import RegressionModel
from pyro_dp.tabular.schema import Schema
from pyro_dp.utils.errors import ConfigurationError


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
    never missing (:mod:`pyro_dp.tabular.glm_model`). This holds if missingness depends on observed
    values only. Several incomplete covariates are assumed independent, conditional on the complete
    ones.

    **Guarantee.** That of :class:`~pyro_dp.DPSEP`, for one unit of the schema. Its record depends
    on its rows and on the schema alone. Formulae that look at other rows are refused.

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

    >>> schema = Schema({"age": Number(20, 80), "visits": Count(0, 30)})
    >>> PrivateGLM(schema, "visits ~ age", family="poisson", accountant=accountant)
    PrivateGLM: visits ~ age (poisson)
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
        _require_settings(settings)
        self._regression = RegressionModel(schema, formula, family, exposure, group)
        self.schema, self.accountant = schema, accountant
        self._settings = settings
        written = self._regression.source
        self.source, self.model, self.prior = written.text(), written.model(), written.prior()

    def fit(self, frame: pd.DataFrame, *, progress: bool = True) -> Regression:
        """Compute the posterior privately, and charge the accountant.

        :raises SchemaError: the frame does not fit the schema; nothing was spent.
        :raises PrivacyBudgetExceeded: as of :class:`~pyro_dp.DPSEP`.
        """
        tensors = self._regression.tensors(frame)
        # A name of its own, because a second fit must not start at the end of the first. A number
        # would tell how many trials of a private_selection there were.
        kind = type(f"PrivateGLM_{secrets.token_hex(8)}", (AutoMultivariateNormal,), {})
        guide = kind(
            self.model,
            init_loc_fn=init_to_value(values=self._regression.source.start()),
            init_scale=self._regression.init_scale,
        )
        kind = _called(self._regression.text)
        inference = kind(self.model, guide, accountant=self.accountant, **self._settings)
        run = inference.run(*tensors, progress=progress)
        self.accountant.note(self.schema.note)
        posterior, evidence = inference.posterior(), inference.evidence
        return Regression(self._regression, posterior, evidence, inference=inference, run=run)

    def __str__(self) -> str:
        return self.source

    def __repr__(self) -> str:
        return f"PrivateGLM: {self._regression.text}"


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
