"""The E-step: isolation of a user's model, the private sum of statistics, and the estimates."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_dp.graphs.captured_state import CapturedState, Changes, require_same_changes
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.contributions import Block, Contributions
from pyro_dp.mechanism.sampling import Indices
from pyro_dp.records.records import Records
from pyro_dp.records.sandbox import guarded
from pyro_dp.records.stand_ins import on_varied
from pyro_dp.records.vectorised import all_at_once
from pyro_dp.utils.errors import ConfigurationError, ModelError
from pyro_dp.utils.linalg import agree
from pyro_dp.utils.torch_state import forked_rng, rows_on
from pyro_dp.utils.validation import require_number
from pyro_dp.vips.conjugate_model import (
    WRONG_SHAPE,
    ConjugateModel,
    Draws,
    Parts,
    Request,
    Statistic,
    parts_of,
)
from pyro_dp.vips.site_posterior import SitePosterior

_COUPLED = (
    "Statistic {name!r} of a record moves when other records change. Row b of the E-step's "
    "result may depend on row b of the data only. (No mean over the batch, no loop that stops "
    "when all rows have converged.)"
)
_COUNT = 3
EStep = Callable[..., Parts]  # from (draws, *rows)


class IsolatedModel:
    """Computes the statistics of a :class:`ConjugateModel` for each record as a batch of one.

    So its E-step cannot read other records. It is vectorised by ``torch.vmap`` if possible, else
    run in a loop. The state of the model is restored after each record.

    :ivar state: objects that the model refers to.
    """

    def __init__(self, model: ConjugateModel, state: CapturedState):
        self._model, self._statistics = model, dict(model.statistics)
        self.state = state
        self.microbatch_size = model.microbatch_size

    def static_statistics(self, *rows: Tensor) -> Parts:
        e_step = self._model.static_statistics
        return self._alone(lambda draws, *row: e_step(*row), None, rows, static=True)

    def expected_statistics(self, posterior: Any, draws: Draws, *rows: Tensor) -> Parts:
        e_step = partial(self._model.expected_statistics, posterior)
        return self._alone(e_step, draws, rows, static=False)

    def check(self, posterior: Any, records: Records) -> None:
        """Check the model on public rows, and on single records.

        :raises ModelError: the E-step fails, reads other rows, or changes state that depends on
            them.
        """

        def pair(integers: bool) -> list[tuple[Mapping[str, Tensor], Changes]]:
            batches = [records.varied(_COUNT, seed, integers=integers)[0] for seed in (1, 2)]
            return [self._public(posterior, rows) for rows in batches]

        if found := on_varied(pair):
            (one, kept), (other, also_kept) = found
            require_same_changes(kept, also_kept)
            for name in one:
                if not agree(one[name][0], other[name][0]):
                    raise ModelError(_COUPLED.format(name=name))
        first = [row.unsqueeze(0) for row in records.placeholder()]
        self._public(posterior, first)
        memories: list[Changes] = []
        for i in records.examples():
            row = [each.clone().unsqueeze(0) for each in records.row(i)]
            with forked_rng(), self.state.pristine() as changes, guarded("The E-step"):
                self._both(posterior, row)
            memories.append(changes)
        for changes in memories[1:]:
            require_same_changes(memories[0], changes)

    def _public(
        self, posterior: Any, rows: Sequence[Tensor]
    ) -> tuple[Mapping[str, Tensor], Changes]:
        """Dense statistics of a batch of public rows, and the changes of the model's state."""
        with (
            forked_rng(),
            self.state.pristine() as kept,
            guarded("The E-step on placeholder data", public=True),
        ):
            parts = self._both(posterior, rows)
            found = {name: _dense(part) for name, part in parts.items()}
        for name, statistic in self._statistics.items():
            if name not in found:
                raise ModelError(f"The E-step returns no statistic {name!r}, which is declared.")
            if found[name][0].numel() != statistic.size:
                raise ModelError(WRONG_SHAPE.format(name=name))
        return found, kept

    def _both(self, posterior: Any, rows: Sequence[Tensor]) -> dict[str, Any]:
        draws = _public_draws(len(rows[0]))
        return parts_of(self._model, self._statistics, posterior, draws, rows)

    def _alone(
        self, e_step: EStep, draws: Draws | None, rows: tuple[Tensor, ...], *, static: bool
    ) -> Parts:
        rows = tuple(row.clone() for row in rows)  # the model may write into them
        try:
            return self._vectorized(e_step, draws, rows)
        except Exception:  # no vmap rule, or a failure on some record
            return self._looped(e_step, draws, rows, static)

    def _vectorized(self, e_step: EStep, draws: Draws | None, rows: tuple[Tensor, ...]) -> Parts:
        requests = self._requests(e_step, rows) if draws is not None else []
        tables = [draws(*request) for request in requests] if draws else []

        def one(tables, *row):
            numbers = {r: table.unsqueeze(0) for r, table in zip(requests, tables, strict=True)}
            parts = e_step(Draws(numbers.__getitem__), *[each.unsqueeze(0) for each in row])
            return {name: _dense(part).squeeze(0) for name, part in parts.items()}

        with self.state.preserved(), guarded("The E-step"), all_at_once():
            return torch.vmap(one)(tables, *rows)

    def _requests(self, e_step: EStep, rows: tuple[Tensor, ...]) -> list[Request]:
        """The random numbers that the E-step requests for a record, found on a public row."""
        draws = _public_draws(1)
        with forked_rng(), self.state.preserved(), guarded("The E-step", public=True):
            e_step(draws, *[torch.ones_like(row[:1]) for row in rows])
        return list(draws.cache)

    def _looped(
        self, e_step: EStep, draws: Draws | None, rows: tuple[Tensor, ...], static: bool
    ) -> Parts:
        """Run the E-step record by record. A failure or a wrong shape gives NaN."""
        declared = {n: x for n, x in self._statistics.items() if x.static == static}
        columns: dict[str, list[Tensor]] = {name: [] for name in declared}
        for b in range(len(rows[0])):
            own = draws and draws.of(b)
            try:
                with forked_rng(), self.state.preserved(), guarded("The E-step"):
                    parts = e_step(own, *[row[b : b + 1].clone() for row in rows])
                    found = {name: _dense(part) for name, part in parts.items()}
            except ModelError:
                found = {}
            for name, statistic in declared.items():
                broken = rows[0].new_full((1, *statistic.shape), torch.nan, dtype=torch.float64)
                part = found.get(name, broken)
                columns[name].append(part if part.shape == broken.shape else broken)
        return {name: torch.cat(column) for name, column in columns.items()}


def _public_draws(count: int) -> Draws:
    """Random numbers from a fixed seed, for public rows."""
    return Draws.by(np.random.default_rng(0), torch.arange(count))


def _dense(part: Any) -> Tensor:
    return part if isinstance(part, Tensor) else part.dense()


@dataclass(frozen=True)
class MixedStatistics:
    """Estimates of the sums over all records (public), and the deviation of their noise."""

    values: dict[str, Tensor]
    noise: dict[str, float]  # standard deviation in each coordinate

    def joined(self, other: "MixedStatistics") -> "MixedStatistics":
        return MixedStatistics(self.values | other.values, self.noise | other.noise)

    def mixed(
        self, estimates: "MixedStatistics", weight: float, static: Sequence[str]
    ) -> "MixedStatistics":
        """The average (1 - weight) self + weight estimates.

        :param static: names of estimates whose noise is the same in every step, so its deviations
            add.
        """
        values, noise = {}, {}
        for name, new in estimates.values.items():
            values[name] = (1 - weight) * self.values[name] + weight * new
            old, added = (1 - weight) * self.noise[name], weight * estimates.noise[name]
            noise[name] = old + added if name in static else math.hypot(old, added)
        return MixedStatistics(values, noise)

    def change(self, before: "MixedStatistics", declared: Mapping[str, Statistic]) -> float:
        """Euclidean norm of the change since ``before``, each statistic in units of its bound."""
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
    posterior: Any = None  # result of the model's M-step
    aware: SitePosterior | None = None  # noise-aware posterior, once computed

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
    """Sums the statistics of a model that are released together, in equal shares."""

    model: ConjugateModel | IsolatedModel
    statistics: Mapping[str, Statistic]  # the released ones
    microbatch_size: int | None  # most records at a time
    sum_type: type[ClippedSum]

    def sum(
        self, posterior: Any, stream: np.random.Generator, records: Records, indices: Indices
    ) -> ClippedSum:
        """Clipped statistics of these records under the posterior, summed over them.

        :param stream: this step's private generator, for local latents.
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
        """Released sums in their declared shapes, with the deviation of their noise.

        :param released: sums over the sampled records, divided by the sample rate.
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
        raise ModelError(WRONG_SHAPE.format(name=name))
    return part.reshape(len(part), statistic.size)
