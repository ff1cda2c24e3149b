"""The E-step of a batch of records, summed: the private side of VIPS."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyro_dp.mechanism.blocks import Block
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.contributions import Contributions
from pyro_dp.mechanism.sampling import Indices
from pyro_dp.mechanism.streams import LocalStream
from pyro_dp.records.records import Records
from pyro_dp.records.sandbox import guarded
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.torch_state import rows_on
from pyro_dp.vips.conjugate_model import OTHER_SHAPE, ConjugateModel, Draws, Parts, Statistic
from pyro_dp.vips.isolated_model import IsolatedModel
from pyro_dp.vips.mixed_statistics import MixedStatistics


@dataclass(eq=False, repr=False)
class StatisticsSum:
    """Statistics of a model that are released together, in equal shares.

    :param statistics: those of the release, by name.
    :param microbatch_size: at most so many records are worked on at a time.
    :param sum_type: in what their contributions are added.
    """

    model: ConjugateModel | IsolatedModel
    statistics: Mapping[str, Statistic]
    microbatch_size: int | None
    sum_type: type[ClippedSum]

    def static_sum(self, records: Records, indices: Indices) -> ClippedSum:
        """Clipped statistics that do not depend on a posterior, summed over these records."""
        static = self.model.static_statistics
        return self._sum(lambda chosen, *rows: static(*rows), records, indices)

    def expected_sum(
        self, posterior: Any, local: LocalStream, records: Records, indices: Indices
    ) -> ClippedSum:
        """Clipped expected statistics under the posterior, summed over these records."""

        def parts(chosen: Tensor, *rows: Tensor) -> Parts:
            draws = Draws(local, chosen)
            found = self.model.expected_statistics(posterior, draws, *rows)
            any_static = any(each.static for each in self.statistics.values())
            static = self.model.static_statistics(*rows) if any_static else {}
            return {**found, **static}

        return self._sum(parts, records, indices)

    def estimates(self, released: Sequence[Tensor], sigma: float, rate: float) -> MixedStatistics:
        """Released sums in their declared shapes, and how noisy they are.

        :param released: of all records, the sampled ones' divided by the rate.
        :param sigma: noise multiplier of the release.
        """
        values, noise = {}, {}
        for (name, each), block in zip(self.statistics.items(), released, strict=True):
            values[name] = block.reshape(each.shape)
            noise[name] = 0.0
            if sigma > 0:
                noise[name] = sigma * math.sqrt(len(self.statistics)) * each.bound / rate
        return MixedStatistics(values, noise)

    def _sum(self, parts: Callable[..., Parts], records: Records, indices: Indices) -> ClippedSum:
        share = 1 / len(self.statistics)
        blocks = [Block(each.size, each.bound, share) for each in self.statistics.values()]
        total = self.sum_type(blocks, records.device)
        size = sum(block.size for block in blocks)
        most = self.microbatch_size or rows_on(records.device, size + records.row_size)
        limit = total.most_records(size, most or self.model.microbatch_size)

        def contributions(batch: tuple[Tensor, list[Tensor]]) -> list[Tensor | Contributions]:
            chosen, rows = batch
            found = parts(chosen, *rows)
            return [_flat(found[name], name, x) for name, x in self.statistics.items()]

        batches = records.passes(indices.to(records.device), limit or len(indices))
        with guarded("The E-step"):
            if isinstance(self.model, IsolatedModel):  # which changes what is global
                for batch in batches:
                    total.add(*contributions(batch))
            else:
                total.add_each(contributions, batches)
        return total


def _flat(part: Tensor | Contributions, name: str, statistic: Statistic) -> Tensor | Contributions:
    if not isinstance(part, Tensor):
        return part
    if part.shape[1:] != statistic.shape:
        raise ModelError(OTHER_SHAPE.format(name=name))
    return part.reshape(len(part), statistic.size)
