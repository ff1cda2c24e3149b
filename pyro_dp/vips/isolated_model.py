"""The E-step of a user's own model, behind the privacy wall: one record at a time."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_dp.graphs.captured_state import CapturedState, Changes, require_same_changes
from pyro_dp.records.records import Records
from pyro_dp.records.sandbox import guarded
from pyro_dp.records.stand_ins import on_varied
from pyro_dp.records.vectorised import all_at_once
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import agree
from pyro_dp.utils.torch_state import forked_rng
from pyro_dp.vips.conjugate_model import (
    OTHER_SHAPE,
    ConjugateModel,
    Draws,
    Parts,
    Request,
    parts_of,
)

_COUPLED = (
    "Statistic {name!r} of a record moves when other records change. Row b of the E-step's "
    "result may depend on row b of the data only. (No mean over the batch, no loop that stops "
    "when all rows have converged.)"
)
_COUNT = 3
EStep = Callable[..., Parts]  # from (draws, *rows)


class IsolatedModel:
    """Statistics of a :class:`ConjugateModel`, as of a batch of one for every record.

    Its E-step cannot read other records. It runs on all records at once by ``torch.vmap`` if
    possible, else in a loop. State that it keeps of a record is put back.

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

        :raises ModelError: the E-step fails, reads other rows, or keeps something of them.
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
        """Dense statistics of public rows, as one batch, and the state that the model keeps of
        them."""
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
                raise ModelError(OTHER_SHAPE.format(name=name))
        return found, kept

    def _both(self, posterior: Any, rows: Sequence[Tensor]) -> dict[str, Any]:
        draws = _public_draws(len(rows[0]))
        return parts_of(self._model, self._statistics, posterior, draws, rows)

    def _alone(
        self, e_step: EStep, draws: Draws | None, rows: tuple[Tensor, ...], *, static: bool
    ) -> Parts:
        rows = tuple(row.clone() for row in rows)  # it may write into them
        try:
            return self._vectorized(e_step, draws, rows)
        except Exception:  # it cannot be vectorised, or fails on some record
            return self._looped(e_step, draws, rows, static)

    def _vectorized(self, e_step: EStep, draws: Draws | None, rows: tuple[Tensor, ...]) -> Parts:
        requests = self._requests(e_step, rows) if draws is not None else []
        tables = [draws(*request) for request in requests] if draws else []

        def one(tables, *row):
            known = {r: table.unsqueeze(0) for r, table in zip(requests, tables, strict=True)}
            parts = e_step(Draws(known.__getitem__), *[each.unsqueeze(0) for each in row])
            return {name: _dense(part).squeeze(0) for name, part in parts.items()}

        with self.state.preserved(), guarded("The E-step"), all_at_once():
            return torch.vmap(one)(tables, *rows)

    def _requests(self, e_step: EStep, rows: tuple[Tensor, ...]) -> list[Request]:
        """The draws of one record, found on a public row."""
        draws = _public_draws(1)
        with forked_rng(), self.state.preserved(), guarded("The E-step", public=True):
            e_step(draws, *[torch.ones_like(row[:1]) for row in rows])
        return list(draws.known)

    def _looped(
        self, e_step: EStep, draws: Draws | None, rows: tuple[Tensor, ...], static: bool
    ) -> Parts:
        """A record on which it fails, or has another shape, counts as broken: NaN."""
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
    """The same ones each time."""
    return Draws.by(np.random.default_rng(0), torch.arange(count))


def _dense(part: Any) -> Tensor:
    return part if isinstance(part, Tensor) else part.dense()
