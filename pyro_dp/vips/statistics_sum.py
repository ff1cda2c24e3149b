"""Statistics of VIPS: the private sum of an E-step, and released estimates mixed over the steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.contributions import Block, Contributions
from pyro_dp.mechanism.sampling import Indices
from pyro_dp.records.records import Records
from pyro_dp.records.sandbox import guarded
from pyro_dp.utils.errors import ConfigurationError, ModelError
from pyro_dp.utils.torch_state import rows_on
from pyro_dp.utils.validation import require_number
from pyro_dp.vips.conjugate_model import OTHER_SHAPE, ConjugateModel, Draws, Statistic, parts_of
from pyro_dp.vips.isolated_model import IsolatedModel
from pyro_dp.vips.site_posterior import SitePosterior


@dataclass(frozen=True)
class MixedStatistics:
    """Estimates of the sums over all records, and how noisy they are; all of it public."""

    values: dict[str, Tensor]
    noise: dict[str, float]  # standard deviation in each coordinate

    def joined(self, other: "MixedStatistics") -> "MixedStatistics":
        return MixedStatistics(self.values | other.values, self.noise | other.noise)

    def mixed(
        self, estimates: "MixedStatistics", weight: float, static: Sequence[str]
    ) -> "MixedStatistics":
        """(1 - weight) of this, weight of the estimates.

        :param static: names of estimates that are the same in every step, noise included.
        """
        values, noise = {}, {}
        for name, new in estimates.values.items():
            values[name] = (1 - weight) * self.values[name] + weight * new
            old, added = (1 - weight) * self.noise[name], weight * estimates.noise[name]
            noise[name] = old + added if name in static else math.hypot(old, added)
        return MixedStatistics(values, noise)

    def change(self, before: "MixedStatistics", declared: Mapping[str, Statistic]) -> float:
        """Euclidean norm of the change since, each statistic in units of its bound."""
        moved = [
            torch.linalg.vector_norm(value - before.values[name]) / declared[name].bound
            for name, value in self.values.items()
        ]
        return torch.stack(moved).norm().item()

    def state(self) -> dict[str, Any]:
        values = {name: value.clone() for name, value in self.values.items()}
        return {"values": values, "noise": dict(self.noise)}

    @staticmethod
    def from_state(state: Any, declared: Mapping[str, Statistic]) -> "MixedStatistics":
        """:raises ConfigurationError: not the state of such statistics."""
        try:
            values, noise = dict(state["values"]), dict(state["noise"])
            shapes = {name: tuple(value.shape) for name, value in values.items()}
            fits = all(isinstance(noise[name], float) for name in values)
        except (TypeError, KeyError, ValueError, AttributeError):
            fits = False
        if not fits or shapes != {name: each.shape for name, each in declared.items()}:
            raise ConfigurationError("load_state_dict: the statistics are not those of this model.")
        return MixedStatistics(values, noise)

    def to(self, device: torch.device) -> "MixedStatistics":
        return MixedStatistics({name: x.to(device) for name, x in self.values.items()}, self.noise)


@dataclass(frozen=True, eq=False)
class Progress:
    """The released statistics of a run so far, and the posteriors that follow from them."""

    size: int  # N
    mixed: MixedStatistics  # averages over the steps
    static: MixedStatistics | None = None  # released once
    start: MixedStatistics | None = None  # averages after the first step
    posterior: Any = None  # the model's
    aware: SitePosterior | None = None  # with the noise's uncertainty, once computed

    def to(self, device: torch.device) -> "Progress":
        static, start = (each and each.to(device) for each in (self.static, self.start))
        return Progress(self.size, self.mixed.to(device), static, start)

    def state(self) -> dict[str, Any]:
        parts = {"statistics": self.mixed, "static": self.static, "start": self.start}
        return {"size": self.size} | {name: each and each.state() for name, each in parts.items()}


def require_step_size(value: Any) -> tuple[float, float]:
    """:raises ConfigurationError: not (tau0, kappa) with tau0 >= 0 and kappa in [0, 1]."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ConfigurationError("step_size must be a pair (tau0, kappa) of numbers.")
    tau0, kappa = value
    return (
        require_number("step_size: tau0", tau0, above=0.0, below=math.inf, or_equal=True),
        require_number("step_size: kappa", kappa, above=0.0, below=1.0, or_equal=True, closed=True),
    )


@dataclass(eq=False, repr=False)
class StatisticsSum:
    """Statistics of a model that are released together, in equal shares."""

    model: ConjugateModel | IsolatedModel
    statistics: Mapping[str, Statistic]  # those of the release
    microbatch_size: int | None  # at most so many records are worked on at a time
    sum_type: type[ClippedSum]

    def sum(
        self, posterior: Any, stream: np.random.Generator, records: Records, indices: Indices
    ) -> ClippedSum:
        """Clipped statistics of these records under the posterior, summed over them.

        :param stream: for draws of local latents, private, this step's.
        """
        share = 1 / len(self.statistics)
        blocks = [Block(each.size, each.bound, share) for each in self.statistics.values()]
        total = self.sum_type(blocks, records.device)
        size = sum(block.size for block in blocks)
        most = self.microbatch_size or rows_on(records.device, size + records.row_size)
        limit = total.most_records(size, most or self.model.microbatch_size)

        def contributions(batch: tuple[Tensor, list[Tensor]]) -> list[Tensor | Contributions]:
            chosen, rows = batch
            draws = Draws.by(stream, chosen)
            found = parts_of(self.model, self.statistics, posterior, draws, rows)
            return [_flat(found[name], name, x) for name, x in self.statistics.items()]

        batches = records.passes(indices.to(records.device), limit or len(indices))
        if isinstance(self.model, IsolatedModel):  # it guards itself, and changes global state
            for batch in batches:
                total.add(*contributions(batch))
        else:
            with guarded("The E-step"):
                total.add_each(contributions, batches)
        return total

    def estimates(self, released: Sequence[Tensor], sigma: float, rate: float) -> MixedStatistics:
        """Released sums in their declared shapes, and how noisy they are.

        :param released: sums over all records, the sampled ones' divided by the rate.
        :param sigma: noise multiplier of the release.
        """
        values, noise = {}, {}
        for (name, each), block in zip(self.statistics.items(), released, strict=True):
            values[name] = block.reshape(each.shape)
            noise[name] = 0.0
            if sigma > 0:
                noise[name] = sigma * math.sqrt(len(self.statistics)) * each.bound / rate
        return MixedStatistics(values, noise)


def _flat(part: Tensor | Contributions, name: str, statistic: Statistic) -> Tensor | Contributions:
    if not isinstance(part, Tensor):
        return part
    if part.shape[1:] != statistic.shape:
        raise ModelError(OTHER_SHAPE.format(name=name))
    return part.reshape(len(part), statistic.size)
