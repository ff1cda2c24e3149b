"""The posterior predictive of new records: draws, a form for ArviZ, and a mixin."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn, cast

from pyro.infer import Predictive
from torch import Tensor

from pyro_dp.records.new_records import NewRecords
from pyro_dp.utils.errors import ConfigurationError, NotPrivateWarning, PrivacyError
from pyro_dp.utils.validation import require_count

_OF_THE_FIT = (
    "Argument {name!r} holds records of the fit. Predictions with it are as private as the "
    "records, and the ledger does not cover them. They do not use these records' own latents, "
    "which are drawn as for new records."
)
_REFUSED = (
    "to_arviz: argument {name!r} holds records of the fit, which would be published with the "
    "posterior. Pass new or public records, or none for the posterior alone."
)


class PosteriorPredictive(Predictive):
    """Draws of everything that the model samples, for new records of any number.

    It is a ``pyro.infer.Predictive``: ``predictive(x_new)`` returns draws by site, (num_samples,
    *site shape). They are the global latents, latents and outcomes of the new records, and all
    deterministic sites. The global latents were drawn from the guide when this was made.

    * The model gets all new records at once, in any form that :meth:`DPSVI.step` takes.
    * Outcomes are drawn even if an argument has them. They may be left out. Constants are those of
      the fit, and an integer that was N is the new number.
    * The guide draws a new record's latents if it computes them from arguments that are all passed,
      and else the model does. Rows of parameters for the records of the fit are not used.

    **Guarantee.** The global draws, and results for records that are new or public, are
    post-processing of released numbers. Results for records of the fit are not protected. If they
    are recognised, there is a :class:`NotPrivateWarning`. It reveals that a record is of the fit.
    So the warning, and the error of :meth:`to_arviz`, are for the curator.

    :param new: model, guide, and a description of the arguments.
    :param posterior_samples: draws of the guide's global sites, (num_samples, ...).
    :param return_sites: names of the sites to return; by default all.
    """

    def __init__(
        self,
        new: NewRecords,
        posterior_samples: Mapping[str, Tensor],
        num_samples: int,
        return_sites: Sequence[str] = (),
    ):
        if isinstance(return_sites, str):
            raise ConfigurationError(f"return_sites must be a list, such as [{return_sites!r}].")
        super().__init__(new.model, num_samples=num_samples, return_sites=tuple(return_sites))
        self.posterior_samples = dict(posterior_samples)
        self._new = new

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """
        :param args: new records, as of the model; so are kwargs.
        :returns: draws by site, ``(num_samples, *site shape)``.
        :raises ModelError: they do not fit those of the fit, the model fails on them, or has not
            all of ``return_sites``.
        """
        given = self._new.given(args, kwargs)
        if name := given.recognised:
            warnings.warn(NotPrivateWarning(_OF_THE_FIT.format(name=name)), stacklevel=4)
        return given.draws(self.posterior_samples, self.num_samples, self.return_sites)

    def to_arviz(self, *args: Any, **kwargs: Any) -> Any:
        """The draws as an ``arviz.InferenceData``, with one chain.

        Group ``posterior`` has the global latents. With arguments, ``posterior_predictive`` has the
        records' latents and outcomes, and ``constant_data`` the arguments, which must be new or
        public.

        :param args: new records, as of the model, or none; so are kwargs.
        :raises PrivacyError: an argument holds records of the fit, as far as that can be seen.
        :raises ConfigurationError: ArviZ is not installed: ``pip install pyro-dp[arviz]``.
        """
        arviz = _arviz()
        groups: dict[str, Any] = {"posterior": _chain(self.posterior_samples)}
        names: Collection[str] = ()
        if args or kwargs:
            given = self._new.given(args, kwargs)
            if name := given.recognised:
                raise PrivacyError(_REFUSED.format(name=name))
            drawn = self(*args, **kwargs)
            predicted = {n: x for n, x in drawn.items() if n not in self.posterior_samples}
            constants = given.columns
            names = {n for n, x in predicted.items() if x.shape[1:2] == (given.size,)}
            names |= constants.keys()
            groups["posterior_predictive"] = _chain(predicted)
            groups["constant_data"] = {n: x.numpy(force=True) for n, x in constants.items()}
        return arviz.from_dict(**groups, dims={name: ["records"] for name in names})

    def get_vectorized_trace(self, *args: Any, **kwargs: Any) -> Any:
        """:raises ConfigurationError: always: draws are made one after the other."""
        raise ConfigurationError(
            "get_vectorized_trace: the draws of new records have no one trace."
        )

    def __reduce__(self) -> NoReturn:
        raise PrivacyError("A PosteriorPredictive holds the data: save its posterior_samples.")


def _arviz() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its news of itself, once a day
        try:
            import arviz
        except ImportError:
            raise ConfigurationError(
                "to_arviz needs ArviZ, which is not installed: pip install pyro-dp[arviz]."
            ) from None
    return arviz


def _chain(draws: Mapping[str, Tensor]) -> dict[str, Any]:
    """As of one chain, (1, num_samples, ...)."""
    return {name: value.unsqueeze(0).numpy(force=True) for name, value in draws.items()}


class Predicted:
    """An inference whose guide can predict new records. It stands last among the bases."""

    def predictive(
        self, num_samples: int = 1000, return_sites: Sequence[str] = ()
    ) -> PosteriorPredictive:
        """Draws for new records: ``inference.predictive()(x_new)``.

        The global latents are drawn now, from the guide as it is (its noise-aware posterior, unless
        said otherwise), by torch's global generator. It costs nothing more.

        :param num_samples: number of draws.
        :param return_sites: names of the sites to return; by default all.
        :returns: a ``pyro.infer.Predictive``.
        :raises ConfigurationError: no step was taken yet, and the first step reads the model's
            arguments; or a setting is of the wrong kind.
        """
        count, own = require_count("num_samples", num_samples), cast(Any, self)
        first = own._kept.first(own._steps)
        if first is None:
            raise ConfigurationError(
                "There is nothing to predict with before the first step. With parameters from "
                "elsewhere use pyro.infer.Predictive(model, guide=guide, num_samples=...)."
            )
        new = NewRecords(own._kept.model, own.guide, first)
        return PosteriorPredictive(new, new.global_draws(count), count, return_sites)
