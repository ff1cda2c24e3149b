"""A cluster: processes that work on one data set together, and the steps of one inference there.

The engine is ``torch.distributed``. A launcher (``torchrun``, Spark, Ray, a scheduler) makes the
processes. A step without failures has three collectives: the agreement, the sum on rank 0, and the
release.
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
    "Rank 0 refused the release, and nothing was released: its error says why. (Its accountant's "
    "budget, journal and settings decide.)"
)
_SPENT = "Rank 0 failed after its ledger had counted the release, and nothing came of it."
_FEW_STEPS = 10  # too few for a mean
_SMALL = (
    "A step of this cluster took {step:.2g} ms, and the slowest process computed for {own:.2g} "
    "ms of it. The rest is communication. Use larger batches, or fewer processes."
)


class Cluster:
    """Processes that fit one model together, each with a shard of the records.

    Write ``DPSEP(model, guide, accountant=accountant, execution=Execution(peers=Cluster()))``,
    likewise :class:`DPSVI` and :class:`VIPS`. The same script runs in every process, started by
    ``torchrun``, and passes its own rows to ``run``. Shards may have any sizes, even zero (a tensor
    of shape (0, ...)). Model and guide see N, the sum of all: ``len(x)``, and so the plate's size,
    is that of the whole.

    In a step each process draws records from its shard and adds up their contributions. All sums go
    to rank 0. Its accountant records the release before the noise is drawn there, once. The release
    goes to all.

    Make it before model and guide. Torch's global generators become those of rank 0 in all
    processes, so networks start at equal weights. From then on, public draws (of a guide's latents)
    come from the cluster's own generator. Private draws never agree between processes, even if
    ``generator`` is the same seed for all.

    **Guarantee.** The same as for one process with all records, against anybody who sees the
    releases. Each process samples at the public rate from its own private stream. There is one
    noise, one event and one ledger.

    **Not protected.** The number of records of each shard. Messages between the processes: rank 0
    sees the exact sums, others see parts of them, and nothing is encrypted. All ranks, the network
    between them and their disks are trusted, as one machine is.

    **Failures.** If a process fails, all leave the step undone, and each other process gets a
    :class:`ClusterError` that says which failed and why. If one dies, stops or stays away, the
    others get an error within ``timeout``, and the cluster cannot be used any more. A release
    counts in rank 0's ledger, and journal, before it leaves that process.

    :param timeout: in seconds, > 0 and < 1e6: the time a process waits for the others. It must
        exceed the time any of them computes in a step, including the first one's preparation.
    :raises ConfigurationError: there is no process group, and none is described by the environment.
    :raises ClusterError: the others did not come.

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
        self.rank = self.size = 0  # until they are set
        limit = timedelta(seconds=self.timeout)
        if not dist.is_initialized():
            if not all(name in os.environ for name in _LAUNCHED):
                raise ConfigurationError(_NO_GROUP)
            self._heard("meeting", lambda: dist.init_process_group("gloo", timeout=limit))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Sums are small, and noise is drawn on the host. So sums go there, even with nccl.
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
        """The sum of all parts on rank 0, None elsewhere. It is private."""
        total = part.detach().to("cpu", copy=True)
        self._heard("adding up", lambda: dist.reduce(total, dst=0, group=self._group))
        return total if self.rank == 0 else None

    def broadcast(self, numbers: Tensor) -> Tensor:
        """Rank 0's numbers, released or public, on all.

        :param numbers: on the host; elsewhere of the same shape and dtype, and overwritten.
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
        except BaseException:  # the others are not in step any more
            self._problem = _BROKEN.format(rank=self.rank)
            raise

    def __reduce__(self) -> NoReturn:
        raise ConfigurationError("A Cluster belongs to its process: make one in each.")

    def __repr__(self) -> str:
        return f"Cluster(timeout={self.timeout:g}, rank={self.rank}, size={self.size})"


class Ranks(Peers):
    """One inference in a cluster, seen from one of its processes. The ledger is that of rank 0."""

    note = _CLUSTER
    _group: Cluster

    def __init__(self, cluster: Cluster, accountant: PrivacyAccountant):
        super().__init__(cluster, accountant)
        self._times: list[tuple[float, float]] = []  # a step's, and the longest own part

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
                shared[0], self._told = 2 if spent else 1, error
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
        # Also on rank 0, so that all have the same numbers from here on.
        return [block.to(clipped.device, copy=True) for block in torch.split(shared[1:], sizes)]

    def warnings(self) -> list[Warning]:
        """On rank 0, if computing took a small share of its time."""
        if not self.leads or len(self._times) < _FEW_STEPS or self._group.size == 1:
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
        told = Failure(what).of_all(self._group.exchange, self._speaker)
        if error is None:
            raise ClusterError(_FAILED.format(rank=ranks[0], what=told[ranks[0]].text))
