"""The protocol by which several processes or owners (ranks) make the steps of one inference.

No rank may wait for a message that never comes. So there is one rule: *before each collective
operation, all ranks agree to begin it*. In an agreement each rank sends all others one small
message, always of the same form. Instead of "ready", a rank may report that it must prepare its
data anew, that a callback stopped it, or that it failed. A rank that fails anywhere reports this in
the next agreement, and no other collective begins.

If a rank's arguments or model have changed, it reports so. Then all ranks undo the step, begin it
again, and prepare their data together.

:mod:`pyro_dp.mechanism.cluster` and :mod:`pyro_dp.mechanism.federation` turn sums into releases.
"""

import abc
import contextlib
import enum
import hashlib
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import Event
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.messages import UNREADABLE, Ledger, M, Settings, Start
from pyro_dp.utils.errors import ClusterError
from pyro_dp.utils.torch_state import set_torch_states, torch_states

T = TypeVar("T")
_ATTEMPTS = 10  # at one step, each after a common preparation of data
_EVER_NEW = "A rank gets new data again and again: pass the same tensors in each step."
_ELSEWHERE = (
    "The ranks are not at the same point of the run. All must make the same calls, run() or "
    "step(), in the same order, on the same inference. (After a state: load it on every rank.)"
)
_OTHER = (
    "{name} differs between ranks: all must run the same script with the same settings, and load "
    "the same state."
)
_DIFFER = {
    1: "The release differs between ranks, in its noise, its rate or its blocks: all must run the "
    "same script, with the same settings.",
    2: (
        "The parameters, or tensors that are constants of the model, differ between ranks. Make "
        "the Cluster before model and guide, so that all start at equal values. Load the same "
        "state on all, and change no parameter on one rank alone. (Different processors or "
        "versions of torch can round differently: use the same.)"
    ),
    3: (
        "The public draws differ between ranks. Model and guide must draw the same there, and "
        "no draw may depend on the rank or its data."
    ),
}


class Says(enum.IntEnum):
    """A rank's announcement in an agreement. If ranks differ, the smallest number decides."""

    FAILED = 0
    STOPPED = 1
    LOOKS_ANEW = 2  # it must prepare its data anew
    READY = 3  # for the sum of a step
    EXCHANGES = 4  # messages
    HAS = 5  # numbers from here on identify an object that all ranks must have


class Stopped(ClusterError):
    """A callback stopped the run on some rank."""


class _LooksAnew(Exception):
    """A rank must prepare its data anew. All ranks do so, and the step begins again."""


class Group(Protocol):
    """Connections between all ranks.

    :ivar rank: this process's, from 0.
    """

    rank: int

    def tell_all(self, numbers: list[int]) -> list[list[int]]:
        """Send a few numbers to all ranks. Returns the lists of all ranks, of equal length."""

    def exchange(self, public: Any) -> list[Any]:
        """Send a public value to all ranks. Returns the values of all ranks."""


class Alone:
    """An inference in one process: it is rank 0, and every agreement succeeds."""

    alone = True
    note = ""  # for the ledger: against whom the guarantee holds
    rank = 0
    own_ledgers = False  # whether each rank's accountant counts its own releases
    noise_factor = 1.0  # noise in the sums, in units of the noise that the guarantee counts
    due = False  # whether data must be prepared anew on all ranks, because a state was loaded

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def counts(self) -> bool:
        """Whether the accountant of this rank counts releases."""
        return self.leads or self.own_ledgers

    def together(self) -> contextlib.AbstractContextManager[None]:
        """If one rank fails inside this block, all others learn of it."""
        return contextlib.nullcontext()

    def step(self, step: Callable[[], T]) -> T:
        """Run ``step``, a step or a part of it. Repeat it if a rank must prepare its data first."""
        return step()

    def look_anew(self, needed: bool) -> bool:
        """Whether all ranks prepare their data now, because one of them must."""
        return needed

    def common(self, settings: Settings, ledger: Ledger) -> Ledger:
        """Agree on settings and on public draws. Returns the ledger that counts.

        :raises ClusterError: a setting differs between ranks; names it.
        """
        return ledger

    def exchange(self, message: M) -> list[M]:
        """Send a message to all ranks. Returns those of all ranks.

        :raises ClusterError: one of them cannot be read.
        """
        return [message]

    def all_have(self, kind: type | None) -> bool:
        """Whether all ranks have an object of the same class; ``kind`` is that of this rank's."""
        return True

    def stop(self) -> None:
        """Stop the run on all ranks, because a callback stopped it here."""

    def agreed_noise(self, noise_multiplier: float) -> float:
        """The noise multiplier of all ranks, from those that they have calibrated."""
        return noise_multiplier

    def add_up(
        self, clipped: ClippedSum, event: Event, step: int, public: Sequence[Tensor]
    ) -> None:
        """Agree on a release, and prepare the sum for it.

        :param public: parameters, and other public tensors that the release depends on.
        """

    def released(
        self, make: Callable[[], list[Tensor]], clipped: ClippedSum, event: Event
    ) -> list[Tensor]:
        """The release, the same on all ranks.

        :param make: records the event, and returns the sums with noise.
        """
        return make()

    def warnings(self) -> list[Warning]:
        return []


class Peers(Alone, abc.ABC):
    """One inference on several ranks, seen from one of them."""

    alone = False
    _speaker = "rank"  # the word for a peer in errors

    def __init__(self, group: Group, accountant: PrivacyAccountant):
        self._group, self._accountant = group, accountant
        self.rank = group.rank
        # States of the generators of public draws, from the first common preparation on.
        self._draws: list[Tensor] | None = None
        self._asked = False  # whether another rank waits for a common preparation of data
        self._depth = 0
        self._reported: BaseException | None = None  # an error that all ranks have seen
        self._began = self._longest = 0.0

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        if self._depth:
            yield
            return
        self._depth += 1
        try:
            yield
        except (ClusterError, _LooksAnew):
            raise
        except BaseException as error:
            if error is not self._reported:
                with contextlib.suppress(ClusterError):
                    self._agree(Says.FAILED, error=error)
            raise
        finally:
            self._depth -= 1

    def step(self, step: Callable[[], T]) -> T:
        with self.together():
            for _ in range(_ATTEMPTS):
                self._began = time.perf_counter()
                with contextlib.suppress(_LooksAnew), self._public_draws():
                    return step()
                self._asked = True
            raise ClusterError(_EVER_NEW)

    @contextlib.contextmanager
    def _public_draws(self) -> Iterator[None]:
        """Use the common public generators. They stay as they were if the step is undone."""
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
        needed, self.due = needed or self.due, False
        if not (needed or self._asked):
            return False
        if not self._asked and Says.STOPPED in self._agree(Says.LOOKS_ANEW):
            raise Stopped(_ELSEWHERE)
        self._asked = False
        return True

    def common(self, settings: Settings, ledger: Ledger) -> Ledger:
        """The ledger is that of rank 0."""
        rest = (torch_states(), ledger.packed()) if self.leads else ([], None)
        received = self.exchange(Start(settings.by_name, *rest))
        self._require_equal(settings, [Settings(each.settings) for each in received])
        first = received[0]
        if first.ledger is None or not first.states:
            raise ClusterError(UNREADABLE.format(speaker="rank 0"))
        self._draws = first.states
        set_torch_states(first.states)
        return Ledger(*first.ledger)

    @staticmethod
    def _require_equal(settings: Settings, received: list[Settings]) -> None:
        """:raises ClusterError: a setting differs between ranks; names it."""
        for name, value in settings.by_name.items():
            if any(name not in each.by_name or each.by_name[name] != value for each in received):
                raise ClusterError(_OTHER.format(name=name))

    def exchange(self, message: M) -> list[M]:
        if set(self._agree(Says.EXCHANGES)) != {Says.EXCHANGES}:
            raise ClusterError(_ELSEWHERE)
        return message.of_all(self._group.exchange, self._speaker)

    def all_have(self, kind: type | None) -> bool:
        name = "" if kind is None else kind.__qualname__
        said = self._agree(Says.HAS + zlib.crc32(name.encode()))
        if min(said) < Says.HAS:
            raise ClusterError(_ELSEWHERE)
        return kind is not None and len(set(said)) == 1

    def stop(self) -> None:
        with self.together():
            self._agree(Says.STOPPED)

    @abc.abstractmethod
    def add_up(
        self, clipped: ClippedSum, event: Event, step: int, public: Sequence[Tensor]
    ) -> None:
        """As :meth:`Alone.add_up`."""

    def _agree_on(
        self, clipped: ClippedSum, event: Event, step: int, public: Sequence[Tensor], own: float
    ) -> None:
        """Agree to add up the sums, and that all public values are equal.

        :param own: seconds that this rank has computed in this step.
        """
        settings = f"{event} of step {step} {clipped.blocks}"
        digests = _digests([settings.encode()], map(_bytes, public), map(_bytes, torch_states()))
        said = self._agree(Says.READY, *digests, int(1e6 * own))
        if Says.STOPPED in said:
            raise Stopped("A callback stopped the run on another rank.")
        if Says.LOOKS_ANEW in said:
            raise _LooksAnew
        if set(said) != {Says.READY}:
            raise ClusterError(_ELSEWHERE)

    def _agree(self, says: int, *digests: int, error: BaseException | None = None) -> list[int]:
        """The announcements of all ranks.

        :param says: this rank's announcement, one of :class:`Says`.
        :param digests: digests of public values, and then a computing time in microseconds.
        :param error: this rank's, if it failed.
        :raises ClusterError: a rank failed, or a public value differs.
        """
        numbers = [says, *digests, *[0] * (4 - len(digests))]
        said = self._group.tell_all(numbers)
        failed = [rank for rank, each in enumerate(said) if each[0] == Says.FAILED]
        if failed:
            self._say_failed(failed, error)
        if digests and all(each[0] == says for each in said):
            for place, text in _DIFFER.items():
                if len({each[place] for each in said}) > 1:
                    raise ClusterError(text)
        self._longest = 1e-6 * max(each[4] for each in said)
        return [each[0] for each in said]

    @abc.abstractmethod
    def _say_failed(self, ranks: list[int], error: BaseException | None) -> None:
        """:raises ClusterError: on ranks that did not fail. The others raise their own error."""


def _digests(*parts: Iterable[bytes]) -> list[int]:
    """A number of 63 bits for each part, which also depends on all parts before it.

    A dishonest owner may send two others different values. It cannot find two that agree.
    """
    so_far, found = hashlib.sha256(), []
    for part in parts:
        for each in part:
            so_far.update(b"%d " % len(each) + each)
        found.append(int.from_bytes(so_far.digest()[:8], "little") >> 1)
    return found


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()
