"""Forecasts of the widths of private intervals at several budgets, from made-up data.

Outcomes are drawn from the model's prior predictive. No data are read.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.graphs.captured_state import CapturedState
from pyro_dp.infer.posterior.explanation import Explained
from pyro_dp.infer.posterior.posterior import Interval, Posterior, Summary, element_names
from pyro_dp.infer.posterior.predictive import Predicted
from pyro_dp.mechanism.settings import Noise, Sampling
from pyro_dp.records.arguments import Arguments
from pyro_dp.records.new_records import PriorPredictive
from pyro_dp.utils.display import MOST_LINES, Displayed, Table, figure, left_out, numbers
from pyro_dp.utils.errors import ClippingWarning, ConfigurationError, ConvergenceWarning
from pyro_dp.utils.torch_state import forked_rng
from pyro_dp.utils.validation import require_count, require_number

_MOST_CURVES = 10
_NOT_YOURS = (
    "settings: leave out {name}, which the forecast sets itself. Noise follows from epsilons, "
    "and seeds from seed."
)


@dataclass(frozen=True, eq=False, repr=False)
class Forecast(Displayed):
    """Expected widths of intervals, before any data are touched.

    They are averages over draws of the prior predictive. They reveal nothing about the data, and
    cost nothing. Draws from a wide prior can be unlike any real data.

    :param names: the names of the k elements of all sites.
    :param epsilons: the E budgets.
    :param widths: average widths of 95% intervals, noise included, (E, k).
    :param without_noise: average widths for a run without noise, (k,).
    :param ok: share of the draws whose posterior had the status "ok", (E,).
    :param num_draws: number of draws from the prior predictive.

    >>> made_up = torch.zeros(1000)  # outcomes are drawn: any values of the right shape do
    >>> forecast = accountant.forecast(model, guide, made_up, inference=DPSEP,
    ...                                epsilons=(1.0, 10.0), num_draws=1, progress=False)
    >>> small, large = forecast.widths[:, 0]
    >>> bool(small > large), forecast.names
    (True, ['height'])
    """

    names: Sequence[str]
    epsilons: Sequence[float]
    widths: Tensor
    without_noise: Tensor
    ok: Tensor
    num_draws: int

    @staticmethod
    def of(found: Mapping[float | None, Sequence[Summary]]) -> "Forecast":
        """From the posteriors of all draws, by budget; None is the run without noise."""
        intervals = {e: [each.intervals() for each in runs] for e, runs in found.items()}
        widths = {epsilon: _mean_width(runs) for epsilon, runs in intervals.items()}
        epsilons = [each for each in found if each is not None]
        ok = [[float(each.status.is_ok) for each in found[epsilon]] for epsilon in epsilons]
        sites = intervals[None][0].items()
        return Forecast(
            [name for site, each in sites for name in element_names(site, each.lower.shape)],
            epsilons,
            torch.stack([widths[each] for each in epsilons]),
            widths[None],
            torch.tensor(ok).mean(dim=1),
            len(found[None]),
        )

    @property
    def times_as_wide(self) -> Tensor:
        """The ratio of widths with and without noise, as a geometric mean over elements, (E,)."""
        return (self.widths / self.without_noise).log().mean(dim=1).exp()

    def plot(self) -> Any:
        """Plot width against epsilon on logarithmic scales; dashed lines are without noise.

        :returns: a ``matplotlib.figure.Figure``; ``figure.savefig("forecast.png")`` keeps it.
        :raises ConfigurationError: matplotlib is not installed.
        """
        found = figure("forecast.plot()")
        axes = found.subplots()
        for i, name in enumerate(self.names[:_MOST_CURVES]):
            color, widths = f"C{i}", self.widths[:, i].tolist()
            axes.plot(self.epsilons, widths, color=color, marker=".", label=name)
            axes.axhline(self.without_noise[i].item(), color=color, linestyle="--")
        axes.set(xscale="log", yscale="log", xlabel="epsilon (nats)")
        axes.set_xticks(self.epsilons, [f"{each:g}" for each in self.epsilons])
        axes.tick_params(axis="x", which="minor", labelbottom=False)
        for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatted("{x:g}")
        axes.set_ylabel("expected width of 95% intervals")
        more = len(self.names) > _MOST_CURVES
        axes.set_title(f"The first {_MOST_CURVES} of {len(self.names)}" if more else "")
        found.legend(loc="outside right upper", fontsize="small", title="dashed: without noise")
        return found

    def _blocks(self) -> list[Table | str]:
        names = self.names[:MOST_LINES]
        columns = torch.vstack([self.widths, self.without_noise])[:, :MOST_LINES].tolist()
        head = ("epsilon", *(f"{each:g}" for each in self.epsilons), "without noise")
        rows = [*zip(names, *map(numbers, columns), strict=True)]
        rows.append(("times as wide", *(f"{each:.2f}" for each in self.times_as_wide.tolist()), ""))
        rows.append(("status ok", *(f"{each:.0%}" for each in self.ok.tolist()), ""))
        draws = f"{self.num_draws} draw{'s' * (self.num_draws > 1)} of the prior predictive"
        return [
            f"Expected widths of 95% intervals, from {draws}:",
            Table(head, rows, "Expected widths"),
            *left_out(len(self.names), "forecast.widths"),
        ]


def _mean_width(runs: Sequence[Mapping[str, Interval]]) -> Tensor:
    """The mean width of each element over the runs, (k,)."""
    flat = [[(i.upper - i.lower).flatten().double().cpu() for i in run.values()] for run in runs]
    return torch.stack([torch.cat(each) for each in flat]).mean(dim=0)


class Forecasted(Explained, Predicted):
    """A mixin, last among the bases: an inference whose posterior can be forecast."""

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
        """As :meth:`PrivacyAccountant.forecast`. The accountant is not charged."""
        if not isinstance(epsilons, Sequence) or not epsilons:
            raise ConfigurationError(
                "epsilons must be a sequence of budgets, such as (0.3, 1.0, 3.0)."
            )
        budgets = sorted(
            {require_number("epsilons", e, above=0.0, below=math.inf) for e in epsilons}
        )
        num_draws = require_count("num_draws", num_draws)
        seed = require_count("seed", seed, least=0)
        for name in settings.keys() & {"accountant", "noise"}:
            raise ConfigurationError(_NOT_YOURS.format(name=name))
        predictive = PriorPredictive.of(
            model, *arguments, Sampling.read(settings.get("sampling")).plate
        )
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
                    noise = Noise(0.0 if epsilon is None else None, source=draw)
                    pyro.set_rng_seed(draw)
                    posterior = _posterior_of_trial(
                        cls, model, guide, made_up, **settings, accountant=trial, noise=noise
                    )
                    posteriors.append(posterior.plain if epsilon is None else posterior)
                    bar.update()
        return Forecast.of(found)


def _posterior_of_trial(
    kind: Callable[..., Any], model: Callable, guide: Callable, made_up: Arguments, **settings: Any
) -> Posterior:
    """The posterior of a run that changes neither model, guide nor parameter store."""
    args, kwargs = made_up
    with (
        pyro.get_param_store().scope(),
        CapturedState(model, guide).pristine(),
        warnings.catch_warnings(),
    ):
        # The forecast reports the share of runs whose status is ok instead.
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", ClippingWarning)
        run = kind(model, guide, **settings)
        run.run(*args, progress=False, **kwargs)
        found: Posterior = run.posterior()
        return found
