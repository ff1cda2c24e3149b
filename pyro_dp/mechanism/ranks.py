"""The steps of one inference on all ranks of a cluster: who says what, and when.

The hard part of several processes is not the sum, but that nobody waits for what never comes. So
there is one rule: *whatever leads to a collective is agreed by an agreement first*. An agreement is
one small message of each rank to all, always of the same form, and so a rank may say something else
than the others expect: that it needs to look at its data anew, that a callback stopped it, that it
failed. Who fails, wherever that is, says so in the next agreement, and no other collective begins.

A step, when all goes well: each rank computes its sums; all agree that they have them, that they
are at the same step with the same settings, parameters and public draws; the sums are added up on
rank 0; ledger, journal and noise there; what was released goes to all. Three collectives.

A rank whose arguments or model changed says so in the agreement. Then all leave the step undone,
begin it again, and look at their data together.
"""

import contextlib
import enum
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import Event
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.cluster import Cluster
from pyro_dp.utils.errors import ClusterError, ClusterWarning, PrivacyError
from pyro_dp.utils.rng import set_torch_states, torch_states

T = TypeVar("T")
CLUSTER = (
    "The sums were computed by several processes, which trust each other: the guarantee holds "
    "towards whoever sees what is released, not towards who reads what they send."
)
_FAILED = "Rank {rank} failed, and all left undone what they were at. It raised {what}"
_REFUSED = (
    "Rank 0 refused the release, and nothing was released: what it raised says why. (Its "
    "accountant's budget, journal and settings decide.)"
)
_SPENT = "Rank 0 failed after its ledger had counted the release, and nothing came of it."
_ELSEWHERE = (
    "The ranks are not at the same place of the run: all must make the same calls, run() or "
    "step(), in the same order, on the same inference. (After a state: load it on every rank.)"
)
_OTHER = (
    "{name} differs between ranks: all must run the same script with the same settings, and load "
    "the same state."
)
_DIFFER = {
    1: "The release differs between ranks, in its noise, its rate or its blocks: all must run the "
    "same script, with the same settings.",
    2: "The parameters, or tensors that are constants of the model, differ between ranks. Make the "
    "Cluster before model and guide, so that all start at equal values; load the same state on "
    "all; and change no parameter on one rank alone. (Different processors or versions of torch "
    "can round differently: use the same.)",
    3: "The public draws differ between ranks: model and guide must draw the same there, and none "
    "of it may depend on the rank or its data.",
}
_FEW_STEPS = 10  # of which a mean says nothing yet
_SMALL = (
    "A step of this cluster took {step:.2g} ms, of which the slowest process computed {own:.2g} "
    "ms: the rest is talk. Use larger batches, or fewer processes."
)


class _Says(enum.IntEnum):
    """In an agreement. Where ranks differ, the least counts."""

    FAILED = 0
    STOPPED = 1
    LOOKS_ANEW = 2
    READY = 3
    EXCHANGES = 4
    HAS = 5  # and more: what is compared by number


class Stopped(ClusterError):
    """A callback stopped the run on some rank."""


class _LooksAnew(Exception):
    """A rank must look at its data anew, and all do: the step begins again."""


class Ranks:
    """One inference in a cluster, seen from one of its processes.

    :param cluster: of the processes.
    """

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._draws: list[Tensor] | None = None  # of public draws, from the first look on
        self._asked = False  # whether another rank is waiting for a common look
        self._depth = 0
        self._told: BaseException | None = None  # an error of which all know
        self._began = self._longest = 0.0
        self._times: list[tuple[float, float]] = []  # of a step, and the longest own part

    @property
    def rank(self) -> int:
        return self._cluster.rank

    @property
    def leads(self) -> bool:
        """Whether this is the rank that counts and releases."""
        return self.rank == 0

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Within: all ranks learn where one fails."""
        if self._depth:
            yield
            return
        self._depth += 1
        try:
            yield
        except (ClusterError, _LooksAnew):
            raise
        except BaseException as error:
            # That the others cannot be told, they find out; this one has an error of its own.
            if error is not self._told:
                with contextlib.suppress(ClusterError):
                    self._agree(_Says.FAILED, error=error)
            raise
        finally:
            self._depth -= 1

    def step(self, step: Callable[[], T]) -> T:
        """Do this, a step or a part of it; again, where a rank must look at its data first."""
        with self.together():
            while True:
                self._began = time.perf_counter()
                with contextlib.suppress(_LooksAnew), self._public_draws():
                    return step()
                self._asked = True

    @contextlib.contextmanager
    def _public_draws(self) -> Iterator[None]:
        """The global generators are the cluster's; what is left undone has drawn nothing."""
        own, before = torch_states(), self._draws
        if before is not None:
            set_torch_states(before)
        try:
            yield
            if self._draws is not None:
                self._draws = torch_states()
        except BaseException:
            self._draws = before
            raise
        finally:
            set_torch_states(own)

    def look_anew(self, needed: bool) -> bool:
        """Whether all ranks look at their data anew, now: where this one needs it, or another."""
        if not (needed or self._asked):
            return False
        if not self._asked and _Says.STOPPED in self._agree(_Says.LOOKS_ANEW):
            raise Stopped(_ELSEWHERE)
        self._asked = False
        return True

    def common(self, settings: dict[str, Any], of_first: T) -> T:
        """What rank 0 gives, on all; from here on public draws agree.

        :param settings: that all must have in common.
        :raises ClusterError: one of them differs between ranks; names it.
        """
        given = self.exchange((settings, torch_states(), of_first) if self.leads else (settings,))
        for name, value in settings.items():
            if any(each[0][name] != value for each in given):
                raise ClusterError(_OTHER.format(name=name))
        _, self._draws, of_first = given[0]
        assert self._draws is not None
        set_torch_states(self._draws)
        return of_first

    def exchange(self, public: Any) -> list[Any]:
        """Something public of each rank, by rank."""
        if set(self._agree(_Says.EXCHANGES)) != {_Says.EXCHANGES}:
            self._say_elsewhere()
        return self._cluster.exchange(public)

    def all_have(self, kind: type | None) -> bool:
        """Whether all ranks have such a thing, and none has another one."""
        name = "" if kind is None else kind.__qualname__
        said = self._agree(_Says.HAS + zlib.crc32(name.encode()))
        if min(said) < _Says.HAS:
            self._say_elsewhere()
        return kind is not None and len(set(said)) == 1

    def stop(self) -> None:
        """A callback stopped the run here: it does so everywhere."""
        with self.together():
            self._agree(_Says.STOPPED)

    def add_up(self, clipped: ClippedSum, settings: str, public: Sequence[Tensor]) -> None:
        """Add up the sums of all ranks, which agree on all that is public.

        On rank 0 the sum becomes the total, elsewhere it is emptied.

        :param settings: of the release.
        :param public: parameters, and whatever else the release depends on.
        """
        own = time.perf_counter() - self._began
        settings = f"{settings} {clipped.blocks}"
        digests = zlib.crc32(settings.encode()), _digest(public), _digest(torch_states())
        said = self._agree(_Says.READY, *digests, int(1e6 * own))
        if _Says.STOPPED in said:
            raise Stopped("A callback stopped the run on another rank.")
        if _Says.LOOKS_ANEW in said:
            raise _LooksAnew
        if set(said) != {_Says.READY}:
            self._say_elsewhere()
        clipped.over_ranks(self._cluster.reduce)

    def released(
        self,
        make: Callable[[], list[Tensor]],
        clipped: ClippedSum,
        accountant: PrivacyAccountant,
        event: Event,
    ) -> list[Tensor]:
        """What rank 0 releases, on all ranks.

        :param make: records the event and adds the noise; it is called on rank 0 alone.
        :param clipped: what is released.
        :param accountant: of this rank.
        """
        sizes = [block.size for block in clipped.blocks]
        shared = torch.zeros(1 + sum(sizes), dtype=torch.float64)
        if self.leads:
            position = accountant.position
            try:
                blocks = make()
            except BaseException as error:
                shared[0], self._told = 2 if accountant.position != position else 1, error
                with contextlib.suppress(ClusterError):
                    self._cluster.broadcast(shared)
                raise
            shared[1:] = torch.cat(blocks)
        outcome = int(self._cluster.broadcast(shared)[0])
        if not self.leads and outcome != 1:
            accountant.mirror(event)
        if outcome:
            raise ClusterError(_SPENT if outcome == 2 else _REFUSED)
        self._times.append((time.perf_counter() - self._began, self._longest))
        self._began = time.perf_counter()
        # Also on rank 0, so that all have the same numbers from here on.
        return [block.to(clipped.device, copy=True) for block in torch.split(shared[1:], sizes)]

    def warnings(self) -> list[Warning]:
        """Of a run on rank 0, whose share of the computing was small."""
        if not self.leads or len(self._times) < _FEW_STEPS or self._cluster.size == 1:
            return []
        step, own = (1e3 * float(np.median(each)) for each in zip(*self._times, strict=True))
        if step < 2 * own:
            return []
        return [ClusterWarning(_SMALL.format(step=step, own=own))]

    def _agree(self, says: int, *digests: int, error: BaseException | None = None) -> list[int]:
        """What each rank says.

        :raises ClusterError: one failed, or not all are at the same place.
        """
        numbers = [says, *digests, *[0] * (4 - len(digests))]
        said = self._cluster.tell_all(numbers)
        if any(each[0] == _Says.FAILED for each in said):
            self._say_failed(error)
        if digests and all(each[0] == says for each in said):
            for place, text in _DIFFER.items():
                if len({each[place] for each in said}) > 1:
                    raise ClusterError(text)
        self._longest = 1e-6 * max(each[4] for each in said)
        return [each[0] for each in said]

    def _say_failed(self, error: BaseException | None) -> None:
        """:raises ClusterError: on the ranks that did not fail."""
        what = None
        if error is not None:
            text = f": {error}" if isinstance(error, PrivacyError) else "."
            what = type(error).__name__ + text
        told = self._cluster.exchange(what)
        if error is None:
            rank = next(i for i, each in enumerate(told) if each is not None)
            raise ClusterError(_FAILED.format(rank=rank, what=told[rank]))

    @staticmethod
    def _say_elsewhere() -> None:
        raise ClusterError(_ELSEWHERE)


def _digest(tensors: Sequence[Tensor]) -> int:
    found = 0
    for each in tensors:
        flat = each.detach().cpu().contiguous().reshape(-1)
        found = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), found)
    return found
