"""A private regression from a frame, and its result: a table, a posterior and an ArviZ object."""

import inspect
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from pyro.infer.autoguide import AutoMultivariateNormal
from pyro.infer.autoguide.initialization import init_to_value
from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import LONGEST_TEXT
from pyro_dp.infer.ep.dpsep import DPSEP
from pyro_dp.infer.posterior.evidence import Evidence
from pyro_dp.infer.posterior.evidence_parts import to_plain
from pyro_dp.infer.posterior.explanation import Explanation
from pyro_dp.infer.posterior.posterior import CHECK, OK, Posterior, Status
from pyro_dp.mechanism.run_result import RunResult
from pyro_dp.mechanism.settings import old_names_explained
from pyro_dp.tabular.glm_model import COEFFICIENTS
from pyro_dp.tabular.regression_model import RegressionModel, by_terms
from pyro_dp.tabular.schema import Schema
from pyro_dp.utils.display import Displayed, Table, numbers
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.files import read_file, write_file
from pyro_dp.utils.torch_state import forked_rng
from pyro_dp.utils.validation import require_count, require_number

_SOURCE, _REGRESSION = "model", "regression"  # entries of a file
_SEED = 0
_DRAWS = 10_000  # for intervals of quantities that are not Gaussian
_PRIOR = (
    "the records say less than the prior about {some} of {all} coefficients. Few records have "
    "them{units}, or noise hides them: {names}"
)
_RARE = (
    "the posterior expects less than 2% of the records at level {levels}. Noise may hide a level "
    "as rare. Join it with its neighbour, by the codebook"
)
_RARE_SHARE, _MANY = 0.02, 1000  # a share, and records that are enough in any case
_UNITS = ", a column is outside its declared units and bounds"


class Regression(Displayed):
    """A posterior on the scale of the user's columns. Everything except :attr:`inference` is
    public.

    :ivar posterior: the :class:`~pyro_dp.Posterior` of the model's latents.
    :ivar evidence: the :class:`~pyro_dp.Evidence`, to use other priors.
    :ivar inference: the inference that ran; None if the result was read from a file.
    :ivar run: the :class:`~pyro_dp.RunResult`; None likewise.

    >>> age = np.random.default_rng(0).uniform(20, 80, 3000)
    >>> people = pd.DataFrame({"age": age, "ill": age + 20 * np.sin(age) > 60})
    >>> schema = Schema({"age": Number(20, 80), "ill": Binary()})
    >>> glm = PrivateGLM(schema, "ill ~ age", family="logistic", accountant=accountant)
    >>> odds = glm.fit(people, progress=False).summary(ratios=True)  # for a year more
    >>> bool(odds.loc["age", "lower"] > 1)
    True
    """

    def __init__(
        self,
        model: RegressionModel,
        posterior: Posterior,
        evidence: Evidence,
        *,
        inference: Any = None,
        run: RunResult | None = None,
    ):
        self.posterior, self.evidence = posterior, evidence
        self.inference, self.run = inference, run
        self._model, self._scale = model, model.scale

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Regression":
        """The result that :meth:`save` wrote. It needs no data, and costs nothing.

        :raises ConfigurationError: the file is damaged, or has no regression.
        :raises OSError: it cannot be read.
        """
        evidence, state = Evidence.load(path), read_file(path)
        if _REGRESSION not in state:
            raise ConfigurationError(
                f"{os.fspath(path)} has no regression. Regression.save writes one."
            )
        model = RegressionModel.read(state[_REGRESSION])
        if state.get(_SOURCE) != model.source.text():
            raise ConfigurationError(
                f"{os.fspath(path)} has a model that this version writes otherwise. Read it with "
                "the version that wrote it."
            )
        with forked_rng():  # each load returns the same numbers
            torch.manual_seed(_SEED)
            posterior = evidence.posterior(model.source.prior())
        return cls(model, posterior, evidence)

    @property
    def status(self) -> Status:
        """Whether the table can be published: the status of :attr:`posterior`.

        If that is ok, it is ``check`` if the posterior expects few records at the lowest or highest
        level of an ordinal outcome. Otherwise it names coefficients that the prior determines more
        than the records do. It stays ok if these are few and belong to levels. Their intervals are
        close to the prior's.
        """
        found = self.posterior.status
        if found.is_ok and self._rare:
            return Status(CHECK, _RARE.format(levels=" and at level ".join(map(repr, self._rare))))
        names, count = self._scale.unknown(self.posterior), len(self._scale.coefficients)
        if not found.is_ok or not names:
            return found
        rare = self._scale.design.of_levels >= {*names} and 2 * len(names) < count
        reason = _PRIOR.format(
            some=len(names), all=count, names=", ".join(names), units="" if rare else _UNITS
        )
        return Status(OK if rare else CHECK, reason)

    @cached_property
    def _rare(self) -> list[str]:
        """End levels of an ordinal outcome that the posterior expects to be rare."""
        limit = min(_RARE_SHARE, _MANY / self.evidence.size)
        shares = self._model.end_shares(self.posterior)
        return [level for level, share in shares.items() if share < limit]

    def summary(self, level: float = 0.95, *, ratios: bool = False) -> pd.DataFrame:
        """A row for each coefficient and other unknown quantity.

        Columns: ``mean``, ``sd``; ``lower`` and ``upper``, an interval that includes the privacy
        noise; and ``privacy``, the noise's share of the interval's squared width.
        :attr:`status` says whether the table can be published.

        :param level: the intervals' level, in (0, 1).
        :param ratios: report coefficients as odds or rate ratios, exp(coefficient), with a
            ``median`` instead of mean and sd.
        :raises ConfigurationError: level is out of range, or the family has no ratios.
        """
        require_number("level", level, above=0.0, below=1.0)
        table = pd.concat([self._coefficients(level), self._others(level)])
        if not ratios:
            return table
        if self._model.family.ratios is None:
            raise ConfigurationError("ratios=True: exp(coefficient) of a linear model is none.")
        table = table.loc[[n for n in self._scale.coefficients if n != "Intercept"]]
        found = np.exp(table[["mean", "lower", "upper"]]).rename(columns={"mean": "median"})
        found.index.name = self._model.family.ratios
        return found.join(table[["privacy"]])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the schema, the formula and released numbers as JSON, for :meth:`load`.

        :class:`~pyro_dp.Evidence` can also load the file.

        :raises OSError: it cannot be written.
        """
        regression = {_SOURCE: self._model.source.text(), _REGRESSION: self._model.state()}
        write_file(path, to_plain(**vars(self.evidence)) | regression)

    def explain(self) -> Explanation:
        """The limits of the table's intervals, and the epsilon or number of units that would help.

        This is ``inference.explain()`` with the names and scales of the terms. If noise is the only
        source of error, its shares are those of the table. Rows below the coefficients (thresholds,
        standard deviations) use the model's unconstrained latents: ``cutpoints[1]`` is the
        logarithm of a gap. It costs nothing.
        """
        found = replace(self._run("explain()").explain(), status=self.status)
        return by_terms(found, self.posterior, self._scale)

    def to_arviz(self, frame: pd.DataFrame | None = None, num_samples: int = 1000) -> Any:
        """An ``arviz.InferenceData`` of one chain, for ``az.plot_forest`` and the like.

        :param frame: new or public records. They add ``posterior_predictive`` draws of their
            outcomes, and ``observed_data``, for ``az.plot_ppc``. If units have several rows, or
            outcomes may be missing, both hold the rows with an outcome, unit by unit. If no row has
            one, draws are for all slots, without observations. The frame of the fit is refused, as
            far as it is recognised.
        :raises PrivacyError: the frame holds records of the fit.
        :raises ConfigurationError: ArviZ is not installed, or the result is from a file.
        """
        require_count("num_samples", num_samples)
        predictive = self._run("to_arviz()").predictive(num_samples)
        tensors = [] if frame is None else self._model.tensors(frame)
        found = predictive.to_arviz(*tensors)  # which refuses the frame of the fit
        import arviz

        draws = self._scale.draws(self.posterior, num_samples)
        source = self._model.source
        names = {COEFFICIENTS: list(source.terms)}
        if source.family.ordered:
            names["thresholds"] = self._scale.thresholds
        if source.group:
            names[source.group[0]] = [str(each) for each in source.group[1]]
        dims = {name: [f"{name}_of"] for name in names}
        groups: dict[str, Any] = {}
        if frame is not None:
            drawn = found.posterior_predictive[source.outcome].values
            seen, some = tensors[1].numpy(force=True), True
            if source.masked:
                there = tensors[2].numpy(force=True)
                some = bool(there.any())
                if some:
                    drawn, seen = drawn[:, :, there], seen[there]
            groups["posterior_predictive"] = {source.outcome: drawn}
            if some:
                groups["observed_data"] = {source.outcome: seen}
        return arviz.from_dict(
            posterior={name: each[None].numpy() for name, each in draws.items()},
            coords={f"{name}_of": values for name, values in names.items()},
            dims=dims,
            **groups,
        )

    def _run(self, name: str) -> Any:
        """:raises ConfigurationError: the result is from a file."""
        if self.inference is None:
            raise ConfigurationError(f"{name} needs the run. A file has none.")
        return self.inference

    def _blocks(self) -> list[Table | str]:
        table = self.summary()
        shares = [f"{share:.0%}" for share in table.pop("privacy")]
        table = table.apply(lambda column: numbers(column.tolist())).assign(privacy=shares)
        rows = list(table.itertuples(name=None))
        shown = Table(("", *table.columns), rows, "Coefficients")
        return [self._model.text, shown, *self.status.lines]

    def _coefficients(self, level: float) -> pd.DataFrame:
        mean = self._scale.mean(self.posterior)
        sd = self._scale.covariance(self.posterior).diagonal().sqrt()
        half = torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)) * sd
        share = self._scale.noise_share(self.posterior)
        return _table(self._scale.coefficients, mean, sd, mean - half, mean + half, share)

    def _others(self, level: float) -> pd.DataFrame:
        aware, plain = (
            self._scale.elements(self._scale.draws(each, _DRAWS))
            for each in (self.posterior, self.posterior.plain)
        )
        ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
        if not aware.shape[1]:
            return _table([], *[torch.zeros(0)] * 5)
        (low, high), (start, stop) = (torch.quantile(each, ends, dim=0) for each in (aware, plain))
        share = (1 - ((stop - start) / (high - low)) ** 2).nan_to_num(0.0).clamp(0.0, 1.0)
        names = self._scale.others
        return _table(names, aware.mean(dim=0), aware.std(dim=0), low, high, share)


def _table(names: Sequence[str], *columns: Tensor) -> pd.DataFrame:
    heads = ("mean", "sd", "lower", "upper", "privacy")
    index = pd.Index(names, dtype=object)
    return pd.DataFrame(
        {head: each.tolist() for head, each in zip(heads, columns, strict=True)},
        index=index,
        dtype=np.float64,
    )


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

    **Missing values**, if the schema declares them. A row without an outcome has no likelihood.
    A missing covariate is summed out, by its probabilities conditional on the covariates that are
    never missing (:mod:`pyro_dp.tabular.glm_model`). This holds if missingness depends on observed
    values only. Several incomplete covariates are assumed independent, conditional on the complete
    ones.

    **Guarantee.** That of :class:`~pyro_dp.DPSEP`, for one unit of the schema. Its record depends
    on its rows and on the schema alone. Formulae that look at other rows are refused.

    **Not protected.** The schema, the formula, and a choice among formulae after a look at the
    data. Errors that say so are for the curator.

    :param schema: the frame's schema.
    :param formula: a formula of formulaic: columns of the schema, ``+ - * : /``, ``C(column,
        contrast)``, and functions of single numbers such as ``log(age)`` and ``I(age ** 2)``.
    :param family: "poisson" or "negative_binomial" (of a ``Count``, log link), "logistic" (of a
        ``Binary``), "linear" (of a ``Number`` or ``Count``), "ordinal" (of an ordered
        ``Category``, proportional odds).
    :param accountant: as for :class:`~pyro_dp.DPSEP`.
    :param exposure: a column, ``Number`` or ``Count`` with a lower bound above 0, such as hours at
        work. Counts are a rate times it, so its logarithm is added to the linear predictor.
    :param group: a column of levels, each with its own intercept. These are normal around the
        common one. Their unknown standard deviation is integrated out of the prior.
    :param settings: those of :class:`~pyro_dp.DPSEP`, such as ``noise`` and ``execution``.
    :ivar model: the Pyro model.
    :ivar prior: a model of its latents without data, for :meth:`~pyro_dp.Evidence.posterior`.
    :ivar source: the model's code.
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
        # A unique name, because a second fit must not start at the end of the first. A counter
        # would reveal the number of trials of a private_selection.
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
    """DPSEP with the formula in its name, for reports of several fits on one budget."""
    name = " ".join(f"DPSEP of {text}".split())
    name = "".join(letter for letter in name if letter.isprintable())
    return type("DPSEP", (DPSEP,), {"_method": name[:LONGEST_TEXT]})


def _require_settings(settings: Mapping[str, Any]) -> None:
    allowed = inspect.signature(DPSEP).parameters
    unknown = [name for name in settings if name not in allowed or name in ("model", "guide")]
    if unknown:
        hint = " (exposure='hours' is how counts have an offset)" if "offset" in unknown else ""
        raise ConfigurationError(
            f"{unknown[0]!r} is no setting of PrivateGLM, and none of DPSEP{hint}."
        )
