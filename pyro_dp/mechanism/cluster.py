"""A cluster: several processes that fit one model to one data set, by ``torch.distributed``.

A launcher (``torchrun``, Spark, Ray, a scheduler) starts the processes. A step without failures has
three collectives: the agreement, the sum on rank 0, and the release.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import Event
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.messages import UNREADABLE, Failure, Start
from pyro_dp.mechanism.peers import Peers
from pyro_dp.utils.errors import ClusterError, ClusterWarning, ConfigurationError, PrivacyError
from pyro_dp.utils.torch_state import set_torch_states, torch_states
from pyro_dp.utils.validation import require_number

T = TypeVar("T")
_LONGEST = 1e6  # seconds
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets these
_NO_GROUP = (
    "Cluster: there is no torch.distributed process group. Start the processes with torchrun "
    "(torchrun --nproc-per-node 2 script.py), or call torch.distributed.init_process_group first."
)
_LOST = (
    "Rank {rank} lost the others while {doing}: one of them died, stopped, left the run, or "
    "computed longer than timeout={timeout:g} seconds ({kind}). At most the releases in rank 0's "
    "ledger happened. Start the processes anew (more or fewer), open the journal on rank 0, and "
    "load the last state on all."
)
_BROKEN = "Rank {rank} cannot go on in a cluster that failed before. Start the processes anew."
_CLUSTER = (
    "Several processes computed the sums, and they trust each other. The guarantee holds "
    "towards anyone who sees the releases. It does not hold towards anyone who reads the "
    "messages between the processes."
)
_FAILED = "Rank {rank} failed, so all ranks abandoned what they were doing. It raised {what}"
_REFUSED = (
    "Rank 0 refused the release, and nothing was released. Its error says why: its accountant's "
    "budget, journal and settings decide."
)
_SPENT = "Rank 0 failed after its ledger had counted the release, so the result is lost."
_FEWEST_STEPS = 10  # for a median of times
_SMALL = (
    "A step of this cluster took {step:.2g} ms, and the slowest process computed for {own:.2g} "
    "ms of it. The rest is communication. Use larger batches, or fewer processes."
)


class Cluster:
    """Processes that fit one model together, each with a shard of the records.

    Write ``DPSEP(model, guide, accountant=accountant, execution=Execution(peers=Cluster()))``,
    likewise :class:`DPSVI` and :class:`VIPS`. ``torchrun`` starts the same script in every process,
    and each passes its own rows to ``run``. Shards may have any sizes, even zero (a tensor of shape
    (0, ...)). In model and guide ``len(x)``, and so the plate's size, is N, the sum of all shards.

    In a step each process draws records from its shard and adds up their contributions. All sums go
    to rank 0. There the accountant records the release, and noise is drawn once. Then the release
    is sent to all.

    Make it before model and guide. All processes take over the states of torch's global generators
    on rank 0, so networks start at equal weights. From then on, public draws (of a guide's latents)
    come from the cluster's own generator. Private draws differ between processes, even with equal
    seeds.

    **Guarantee.** The same as for one process with all records, against anyone who sees the
    releases. Each process samples at the public rate from its own private stream. A release has one
    noise, one event and one ledger.

    **Not protected.** The number of records of each shard, and messages between the processes.
    Rank 0 sees the exact sums, others see parts of them, and nothing is encrypted. All ranks, their
    network and their disks are trusted like one machine.

    **Failures.** If a process fails, the step is undone everywhere. Each other process raises a
    :class:`ClusterError` that says which one failed and why. If a process dies, stops or stays
    away, the others raise an error within ``timeout``, and the cluster cannot be used any more. A
    release counts in rank 0's ledger and journal before it leaves that process.

    :param timeout: the time in seconds, > 0 and < 1e6, that a process waits for the others. It must
        exceed the computing time of a step in any process, and of the preparation before the first.
    :raises ConfigurationError: there is no process group, and the environment describes none.
    :raises ClusterError: the others did not connect in time.

    >>> alone = torch.distributed.HashStore()  # torchrun makes it unnecessary
    >>> torch.distributed.init_process_group("gloo", store=alone, rank=0, world_size=1)
    >>> cluster = Cluster(timeout=10.0)  # then: DPSEP(..., execution=Execution(peers=cluster))
    >>> cluster.rank, cluster.size
    (0, 1)
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, timeout: float = 60.0):
        self.timeout = require_number("timeout", timeout, above=0.0, below=_LONGEST)
        if not (dist.is_available() and dist.is_gloo_available()):
            raise ConfigurationError("Cluster: this torch was built without torch.distributed.")
        self._problem: str | None = None
        self.rank = self.size = 0  # for errors before the processes have met
        limit = timedelta(seconds=self.timeout)
        if not dist.is_initialized():
            if not all(name in os.environ for name in _LAUNCHED):
                raise ConfigurationError(_NO_GROUP)
            self._heard("meeting", lambda: dist.init_process_group("gloo", timeout=limit))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Sums are small, and noise is drawn on the host. So gloo adds them, even beside nccl.
        self._group = self._heard("meeting", lambda: dist.new_group(backend="gloo", timeout=limit))
        start = Start({}, torch_states(), None)
        set_torch_states(start.of_all(self.exchange, "rank")[0].states)

    def tell_all(self, numbers: Sequence[int]) -> list[list[int]]:
        own = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._heard("agreeing", lambda: dist.all_gather(found, own, group=self._group))
        return [each.tolist() for each in found]

    def exchange(self, public: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        gather = partial(dist.all_gather_object, found, public, group=self._group)
        self._heard("exchanging public values", gather)
        return found

    def reduce(self, part: Tensor) -> Tensor | None:
        """The private sum of all parts on rank 0; None elsewhere."""
        total = part.detach().to("cpu", copy=True)
        self._heard("adding up", lambda: dist.reduce(total, dst=0, group=self._group))
        return total if self.rank == 0 else None

    def broadcast(self, numbers: Tensor) -> Tensor:
        """Rank 0's numbers, released or public, on all ranks.

        :param numbers: a host tensor, which is overwritten on other ranks. Shape and dtype are
            equal on all.
        """
        self._heard("sharing", lambda: dist.broadcast(numbers, src=0, group=self._group))
        return numbers

    def _heard(self, doing: str, collective: Callable[[], T]) -> T:
        if self._problem is not None:
            raise ClusterError(self._problem)
        try:
            return collective()
        except RuntimeError as error:
            self._problem = _BROKEN.format(rank=self.rank)
            kind = type(error).__name__
            text = _LOST.format(rank=self.rank, doing=doing, timeout=self.timeout, kind=kind)
            raise ClusterError(text) from error
        except BaseException:  # this rank is out of step with the others
            self._problem = _BROKEN.format(rank=self.rank)
            raise

    def __reduce__(self) -> NoReturn:
        raise ConfigurationError("A Cluster belongs to its process: make one in each.")

    def __repr__(self) -> str:
        return f"Cluster(timeout={self.timeout:g}, rank={self.rank}, size={self.size})"


class Ranks(Peers):
    """One inference in a cluster, seen from one of its processes. Rank 0's ledger counts."""

    note = _CLUSTER
    _group: Cluster

    def __init__(self, cluster: Cluster, accountant: PrivacyAccountant):
        super().__init__(cluster, accountant)
        # For each step its time, and the longest computing time of a rank.
        self._times: list[tuple[float, float]] = []

    def add_up(
        self, clipped: ClippedSum, event: Event, step: int, public: Sequence[Tensor]
    ) -> None:
        self._agree_on(clipped, event, step, public, time.perf_counter() - self._began)
        clipped.over_ranks(self._group.reduce)

    def released(
        self, make: Callable[[], list[Tensor]], clipped: ClippedSum, event: Event
    ) -> list[Tensor]:
        sizes = [block.size for block in clipped.blocks]
        shared = torch.zeros(1 + sum(sizes), dtype=torch.float64)
        if self.leads:
            position = self._accountant.position
            try:
                blocks = make()
            except BaseException as error:
                spent = self._accountant.position != position
                shared[0], self._reported = 2 if spent else 1, error
                with contextlib.suppress(ClusterError):
                    self._group.broadcast(shared)
                raise
            shared[1:] = torch.cat(blocks)
        outcome = self._group.broadcast(shared)[0].item()
        if outcome not in (0, 1, 2):
            raise ClusterError(UNREADABLE.format(speaker="rank 0"))
        if not self.leads and outcome != 1:
            self._accountant.mirror(event)
        if outcome:
            raise ClusterError(_SPENT if outcome == 2 else _REFUSED)
        self._times.append((time.perf_counter() - self._began, self._longest))
        self._began = time.perf_counter()
        # Also on rank 0, so all have the same numbers from here on.
        return [block.to(clipped.device, copy=True) for block in torch.split(shared[1:], sizes)]

    def warnings(self) -> list[Warning]:
        """A warning on rank 0 if most of the time is communication."""
        if not self.leads or len(self._times) < _FEWEST_STEPS or self._group.size == 1:
            return []
        step, own = (1e3 * float(np.median(each)) for each in zip(*self._times, strict=True))
        if step < 2 * own:
            return []
        return [ClusterWarning(_SMALL.format(step=step, own=own))]

    def _say_failed(self, ranks: list[int], error: BaseException | None) -> None:
        what = ""
        if error is not None:
            text = f": {error}" if isinstance(error, PrivacyError) else "."
            what = type(error).__name__ + text
        failures = Failure(what).of_all(self._group.exchange, self._speaker)
        if error is None:
            raise ClusterError(_FAILED.format(rank=ranks[0], what=failures[ranks[0]].text))
