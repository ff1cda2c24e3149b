"""What ``accountant.forecast`` does with an inference: a mixin."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyro
from tqdm.auto import tqdm

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.graphs.captured_state import CapturedState
from pyro_dp.infer.posterior.explained import Explained
from pyro_dp.infer.posterior.forecast import Forecast
from pyro_dp.infer.posterior.posterior import Posterior
from pyro_dp.infer.posterior.predicted import Predicted
from pyro_dp.records.arguments import Arguments
from pyro_dp.records.prior_predictive import PriorPredictive
from pyro_dp.utils.errors import ClippingWarning, ConfigurationError, ConvergenceWarning
from pyro_dp.utils.torch_state import forked_rng
from pyro_dp.utils.validation import require_count, require_number

_OWN = ("accountant", "noise_multiplier", "generator", "secure")
_NOT_YOURS = (
    "settings: leave out {name}, which the forecast sets itself. Noise follows from epsilons, "
    "and seeds from seed."
)


class Forecasted(Explained, Predicted):
    """An inference from a Pyro model whose posterior can be forecast. It stands last."""

    @classmethod
    def _forecast(
        cls,
        accountant: PrivacyAccountant,
        model: Callable,
        guide: Callable,
        arguments: Arguments,
        *,
        epsilons: Sequence[float],
        num_draws: int,
        seed: int,
        settings: Mapping[str, Any],
        progress: bool,
    ) -> Forecast:
        """As of :meth:`PrivacyAccountant.forecast`.

        :param accountant: whose settings the trials have; it is not charged.
        """
        budgets = _checked(epsilons)
        num_draws, seed = (
            require_count("num_draws", num_draws),
            require_count("seed", seed, least=0),
        )
        for name in _OWN:
            if name in settings:
                raise ConfigurationError(_NOT_YOURS.format(name=name))
        predictive = PriorPredictive.of(model, *arguments, settings.get("plate"))
        found: dict[float | None, list[Posterior]] = {each: [] for each in (None, *budgets)}
        bar = tqdm(total=num_draws * len(found), desc="forecast", disable=not progress)
        with bar, forked_rng():
            for draw in range(seed, seed + num_draws):
                made_up = predictive.draw(draw)
                for epsilon, posteriors in found.items():
                    trial = PrivacyAccountant(
                        epsilon,
                        accountant.delta,
                        neighboring=accountant.neighboring,
                        engine=accountant.engine,
                    )
                    noise = {"noise_multiplier": 0.0} if epsilon is None else {}
                    own = {**settings, **noise, "accountant": trial, "generator": draw}
                    posterior = cls._tried(model, guide, made_up, own)
                    posteriors.append(posterior.plain if epsilon is None else posterior)
                    bar.update()
        return Forecast.of(found)

    @classmethod
    def _tried(
        cls, model: Callable, guide: Callable, made_up: Arguments, settings: Mapping[str, Any]
    ) -> Posterior:
        """Of a run that leaves model, guide and parameter store as they were."""
        args, kwargs = made_up
        pyro.set_rng_seed(settings["generator"])
        with (
            pyro.get_param_store().scope(),
            CapturedState(model, guide).pristine(),
            warnings.catch_warnings(),
        ):
            # The share of runs whose status is ok tells.
            warnings.simplefilter("ignore", ConvergenceWarning)
            warnings.simplefilter("ignore", ClippingWarning)
            run: Any = cls(model, guide, **settings)  # type: ignore[call-arg]
            run.run(*args, progress=False, **kwargs)
            return run.posterior()


def _checked(epsilons: Sequence[float]) -> list[float]:
    """Ascending, each once."""
    if not isinstance(epsilons, Sequence) or not epsilons:
        raise ConfigurationError("epsilons must be a sequence of budgets, such as (0.3, 1.0, 3.0).")
    return sorted({require_number("epsilons", e, above=0.0, below=math.inf) for e in epsilons})
