"""The posterior predictive of new records, also for ArviZ."""

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
    """Posterior predictive draws for any number of new records.

    It is a ``pyro.infer.Predictive``: ``predictive(x_new)`` returns draws by site, (num_samples,
    *site shape). The sites are the global latents, the latents and outcomes of the new records,
    and all deterministic sites. The global latents are drawn from the guide in advance.

    * Pass all new records at once, in any form that :meth:`DPSVI.step` takes.
    * Outcomes are always drawn, and you may leave them out. Constants keep the values of the fit,
      and an integer that was N becomes the number of new records.
    * The guide draws a new record's latents if it computes them from arguments that you pass.
      Otherwise the model draws them. Rows of parameters for records of the fit are not used.

    **Guarantee.** The global draws, and results for new or public records, are post-processing of
    released numbers. Results for records of the fit are not protected. A
    :class:`NotPrivateWarning` appears if they are recognised. It reveals that a record belongs to
    the fit, so the warning, and the error of :meth:`to_arviz`, are for the curator.

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
        """Draw for new records, which are passed like the model's arguments.

        :returns: draws by site, ``(num_samples, *site shape)``.
        :raises ModelError: the records do not match those of the fit, the model fails on them, or
            it lacks one of ``return_sites``.
        """
        records = self._new.given(args, kwargs)
        if name := records.recognised:
            warnings.warn(NotPrivateWarning(_OF_THE_FIT.format(name=name)), stacklevel=4)
        return records.draws(self.posterior_samples, self.num_samples, self.return_sites)

    def to_arviz(self, *args: Any, **kwargs: Any) -> Any:
        """The draws as an ``arviz.InferenceData``, with one chain.

        Group ``posterior`` has the global latents. If new records are passed,
        ``posterior_predictive`` has their latents and outcomes, and ``constant_data`` has the
        arguments, which must be new or public.

        :param args: new records as for the model, or none.
        :raises PrivacyError: an argument is recognised to hold records of the fit.
        :raises ConfigurationError: ArviZ is not installed: ``pip install pyro-dp[arviz]``.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # ArviZ announces its releases
            try:
                import arviz
            except ImportError:
                raise ConfigurationError(
                    "to_arviz needs ArviZ, which is not installed: pip install pyro-dp[arviz]."
                ) from None
        groups: dict[str, Any] = {"posterior": _chain(self.posterior_samples)}
        names: Collection[str] = ()
        if args or kwargs:
            records = self._new.given(args, kwargs)
            if name := records.recognised:
                raise PrivacyError(_REFUSED.format(name=name))
            drawn = self(*args, **kwargs)
            predicted = {n: x for n, x in drawn.items() if n not in self.posterior_samples}
            constants = records.columns
            names = {n for n, x in predicted.items() if x.shape[1:2] == (records.size,)}
            names |= constants.keys()
            groups["posterior_predictive"] = _chain(predicted)
            groups["constant_data"] = {n: x.numpy(force=True) for n, x in constants.items()}
        return arviz.from_dict(**groups, dims={name: ["records"] for name in names})

    def get_vectorized_trace(self, *args: Any, **kwargs: Any) -> Any:
        """:raises ConfigurationError: always, because draws are made one after the other."""
        raise ConfigurationError("get_vectorized_trace: draws of new records have no joint trace.")

    def __reduce__(self) -> NoReturn:
        raise PrivacyError("A PosteriorPredictive holds the data: save its posterior_samples.")


def _chain(draws: Mapping[str, Tensor]) -> dict[str, Any]:
    """Draws as NumPy arrays of one chain, (1, num_samples, ...)."""
    return {name: value.unsqueeze(0).numpy(force=True) for name, value in draws.items()}


class Predicted:
    """A mixin, last among the bases: an inference whose guide can predict new records."""

    def predictive(
        self, num_samples: int = 1000, return_sites: Sequence[str] = ()
    ) -> PosteriorPredictive:
        """Predict new records, at no cost: ``inference.predictive()(x_new)``.

        This call draws the global latents from the guide, with torch's global generator.

        :param return_sites: names of the sites to return; by default all.
        :returns: a ``pyro.infer.Predictive``.
        :raises ConfigurationError: no step was taken yet, or a setting has the wrong type.
        """
        count, inference = require_count("num_samples", num_samples), cast(Any, self)
        first = inference._kept.first(inference._steps)
        if first is None:
            raise ConfigurationError(
                "There is nothing to predict with before the first step. With parameters from "
                "elsewhere use pyro.infer.Predictive(model, guide=guide, num_samples=...)."
            )
        new = NewRecords(inference._kept.model, inference.guide, first)
        return PosteriorPredictive(new, new.global_draws(count), count, return_sites)
