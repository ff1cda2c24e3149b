"""The steps of one inference on all ranks of a cluster.

A step, when all goes well: each rank computes its sums; all agree that they have them, that they
are at the same step with the same settings, parameters and public draws; the sums are added up on
rank 0; ledger, journal and noise there; what was released goes to all. Three collectives.
"""

import contextlib
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import Event
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.cluster import Cluster
from pyro_dp.mechanism.messages import UNREADABLE, Failure
from pyro_dp.mechanism.peers import Peers
from pyro_dp.utils.errors import ClusterError, ClusterWarning, PrivacyError

_CLUSTER = (
    "Several processes computed the sums, and they trust each other. The guarantee holds "
    "towards anyone who sees the releases. It does not hold towards anyone who reads the "
    "messages between the processes."
)
_FAILED = "Rank {rank} failed, and all left undone what they were at. It raised {what}"
_REFUSED = (
    "Rank 0 refused the release, and nothing was released: what it raised says why. (Its "
    "accountant's budget, journal and settings decide.)"
)
_SPENT = "Rank 0 failed after its ledger had counted the release, and nothing came of it."
_FEW_STEPS = 10  # of which a mean says nothing yet
_SMALL = (
    "A step of this cluster took {step:.2g} ms, and the slowest process computed for {own:.2g} "
    "ms of it. The rest is communication. Use larger batches, or fewer processes."
)


class Ranks(Peers):
    """One inference in a cluster, seen from one of its processes. The ledger is that of rank 0.

    :param cluster: of the processes.
    :param accountant: of this rank.
    """

    def __init__(self, cluster: Cluster, accountant: PrivacyAccountant):
        super().__init__(cluster)
        self._cluster = cluster
        self._accountant = accountant
        self._times: list[tuple[float, float]] = []  # of a step, and the longest own part

    @property
    def note(self) -> str:
        return _CLUSTER

    def add_up(
        self, clipped: ClippedSum, event: Event, step: int, public: Sequence[Tensor]
    ) -> None:
        """On rank 0 the sum becomes the total, elsewhere it is emptied."""
        self._agree_on(clipped, event, step, public, time.perf_counter() - self._began)
        clipped.over_ranks(self._cluster.reduce)

    def released(
        self, make: Callable[[], list[Tensor]], clipped: ClippedSum, event: Event
    ) -> list[Tensor]:
        """What rank 0 releases, where alone it is made."""
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
                    self._cluster.broadcast(shared)
                raise
            shared[1:] = torch.cat(blocks)
        outcome = self._cluster.broadcast(shared)[0].item()
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
        """On rank 0, where its share of the computing was small."""
        if not self.leads or len(self._times) < _FEW_STEPS or self._cluster.size == 1:
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
        told = Failure(what).of_all(self._cluster.exchange, self._speaker)
        if error is None:
            raise ClusterError(_FAILED.format(rank=ranks[0], what=told[ranks[0]].text))
