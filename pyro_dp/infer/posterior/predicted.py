"""``predictive()`` of the inferences that find a posterior: a mixin."""

import abc
from collections.abc import Sequence

from pyro_dp.infer.posterior.predictive import PosteriorPredictive
from pyro_dp.records.new_records import NewRecords
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_count


class Predicted(abc.ABC):
    """An inference whose guide can predict new records. It stands last among the bases."""

    @abc.abstractmethod
    def _new_records(self) -> NewRecords | None:
        """Model and guide, for new records; None before the first step."""

    def predictive(
        self, num_samples: int = 1000, return_sites: Sequence[str] = ()
    ) -> PosteriorPredictive:
        """Draws for new records: ``inference.predictive()(x_new)``.

        The global latents are drawn now, from the guide as it is (its noise-aware posterior, unless
        said otherwise), by torch's global generator. It costs nothing more.

        :param num_samples: of draws.
        :param return_sites: names of the sites to return; by default all.
        :returns: a ``pyro.infer.Predictive``.
        :raises ConfigurationError: no step was taken yet, after which the model's arguments are
            known; or a setting is of the wrong kind.
        """
        count, new = require_count("num_samples", num_samples), self._new_records()
        if new is None:
            raise ConfigurationError(
                "There is nothing to predict with before the first step. With parameters from "
                "elsewhere use pyro.infer.Predictive(model, guide=guide, num_samples=...)."
            )
        return PosteriorPredictive(new, new.global_draws(count), count, return_sites)
