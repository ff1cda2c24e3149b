"""A cluster: processes that work on one data set together, and what they say to each other.

The engine is ``torch.distributed``; whoever launches it (``torchrun``, Spark, Ray, a scheduler)
makes the processes. What an inference says, and when, is :mod:`pyro_dp.mechanism.ranks`.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pyro_dp.mechanism.messages import Draws
from pyro_dp.utils.errors import ClusterError, ConfigurationError
from pyro_dp.utils.torch_state import set_torch_states, torch_states
from pyro_dp.utils.validation import require_number

T = TypeVar("T")
_LONGEST = 1e6  # seconds
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets
_NO_GROUP = (
    "Cluster: there is no torch.distributed process group. Start the processes with torchrun "
    "(torchrun --nproc-per-node 2 script.py), or call torch.distributed.init_process_group first."
)
_LOST = (
    "Rank {rank} lost the others while {doing}: one of them died, stopped, left the run, or "
    "computed longer than timeout={timeout:g} seconds ({kind}). What rank 0's ledger counts may "
    "have been released, and no more. Start the processes anew, open the journal on rank 0, and "
    "load the last state on all; there may be more or fewer of them."
)
_BROKEN = "Rank {rank} cannot go on in a cluster that failed before. Start the processes anew."


class Cluster:
    """Processes that fit one model together, each with a shard of the records.

    ``DPSEP(model, guide, accountant=accountant, cluster=Cluster())``, likewise :class:`DPSVI` and
    :class:`VIPS`: the same script runs in every process, started by ``torchrun``, and passes its
    own rows to ``run``. Shards may have any sizes, also none (a tensor of shape (0, ...)). Model
    and guide see N, the sum of all: ``len(x)``, and so the plate's size, is that of the whole.

    In a step each process draws records from its shard and adds up what they contribute. The sums
    of all go to rank 0, whose accountant records the release before its noise is drawn there, once;
    what was released goes to all, and all do the same with it. At most three collectives a step.

    Make it before model and guide: torch's global generators become those of rank 0 in all
    processes, so that networks start at equal weights. Public draws (of a guide's latents) then
    come from a generator of the cluster's own, which goes on from there; private ones never agree
    between processes, also where ``generator`` is the same seed for all.

    **Guarantee.** As of one process with all records, to whoever sees what is released: sums over
    shards are the sum over records, each process samples with the public rate and from its own
    private stream, and there is one noise, one event and one ledger.

    **Not protected.** What the processes send each other: rank 0 sees the exact sums, others see
    parts of them, and none of it is encrypted. All ranks, the network between them and their disks
    are trusted, as one machine is. The number of records of each shard.

    **What goes wrong.** Where a process fails, all leave the step undone, and each other one gets a
    :class:`ClusterError` that says which and why. Where one dies, stops or stays away, the others
    get one within ``timeout``, and the cluster is of no more use. A release counts in rank 0's
    ledger, and journal, before it leaves that process.

    :param timeout: in seconds, > 0 and < 1e6: so long does a process wait for the others, and so it
        must be longer than what one of them computes in a step, the first one's preparation
        included.
    :raises ConfigurationError: there is no process group, and none is described by the environment.
    :raises ClusterError: the others did not come.

    >>> import torch
    >>> from pyro_dp import Cluster
    >>> alone = torch.distributed.HashStore()  # torchrun makes it unnecessary
    >>> torch.distributed.init_process_group("gloo", store=alone, rank=0, world_size=1)
    >>> cluster = Cluster(timeout=10.0)  # then: DPSEP(model, guide, ..., cluster=cluster)
    >>> cluster.rank, cluster.size
    (0, 1)
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, timeout: float = 60.0):
        self.timeout = require_number("timeout", timeout, above=0.0, below=_LONGEST)
        if not (dist.is_available() and dist.is_gloo_available()):
            raise ConfigurationError("Cluster: this torch was built without torch.distributed.")
        self._problem: str | None = None
        self.rank = self.size = 0  # until they are known
        limit = timedelta(seconds=self.timeout)
        if not dist.is_initialized():
            if not all(name in os.environ for name in _LAUNCHED):
                raise ConfigurationError(_NO_GROUP)
            self._heard("meeting", lambda: dist.init_process_group("gloo", timeout=limit))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Sums are small, and noise is drawn on the host: there they meet, also beside nccl.
        self._group = self._heard("meeting", lambda: dist.new_group(backend="gloo", timeout=limit))
        set_torch_states(Draws(torch_states()).of_all(self.exchange, "rank")[0].states)

    def tell_all(self, numbers: Sequence[int]) -> list[list[int]]:
        """A few numbers of each process, the same number of them, to all; by rank."""
        own = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._heard("agreeing", lambda: dist.all_gather(found, own, group=self._group))
        return [each.tolist() for each in found]

    def exchange(self, public: Any) -> list[Any]:
        """Something public of each process, to all; by rank."""
        found: list[Any] = [None] * self.size

        def exchange() -> None:
            dist.all_gather_object(found, public, group=self._group)

        self._heard("exchanging what is public", exchange)
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
