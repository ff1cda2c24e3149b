"""The messages of one inference's steps among several processes or owners.

With several processes the sum is easy. The hard part is that nobody waits for a message that never
comes. So there is one rule: *whatever leads to a collective is agreed by an agreement first*. An
agreement is one small message of each rank to all, always of the same form. So a rank may say
something unexpected: it needs to look at its data anew, a callback stopped it, or it failed. A rank
that fails anywhere says so in the next agreement, and no other collective begins.

A rank whose arguments or model changed says so in the agreement. Then all leave the step undone,
begin it again, and look at their data together.

Sums become a release in :mod:`pyro_dp.mechanism.cluster` and :mod:`pyro_dp.mechanism.federation`.
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
_LOOKS = 10  # at data, in a step
_EVER_NEW = "A rank has looked at new data again and again: pass the same tensors in each step."
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
    """A rank's word in an agreement. If ranks differ, the least counts."""

    FAILED = 0
    STOPPED = 1
    LOOKS_ANEW = 2
    READY = 3
    EXCHANGES = 4
    HAS = 5  # and more: these are compared by number


class Stopped(ClusterError):
    """A callback stopped the run on some rank."""


class _LooksAnew(Exception):
    """A rank must look at its data anew, and all do: the step begins again."""


class Group(Protocol):
    """Peers that talk: a message of one reaches all.

    :ivar rank: this one's, from 0.
    """

    rank: int

    def tell_all(self, numbers: list[int]) -> list[list[int]]:
        """A few numbers of each, the same number of them, to all; by rank."""

    def exchange(self, public: Any) -> list[Any]:
        """Something public of each, to all; by rank."""


class Alone:
    """An inference without peers: it is rank 0, and agrees with itself."""

    alone = True
    note = ""  # for the ledger: towards whom the guarantee holds
    rank = 0
    own_ledgers = False  # whether each rank counts for itself
    noise_factor = 1.0  # noise in the sums, in units of the noise that the guarantee counts
    due = False  # whether this rank needs a common look, as a state was loaded

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def counts(self) -> bool:
        """Whether the accountant of this rank counts."""
        return self.leads or self.own_ledgers

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Inside, all ranks learn that one fails."""
        return contextlib.nullcontext()

    def step(self, step: Callable[[], T]) -> T:
        """Do this, a step or a part of it; again, if a rank must look at its data first."""
        return step()

    def look_anew(self, needed: bool) -> bool:
        """Whether all ranks look at their data anew, now, as one of them needs it."""
        return needed

    def common(self, settings: Settings, ledger: Ledger) -> Ledger:
        """The ledger that counts, on all; from here on public draws agree.

        :raises ClusterError: a setting differs between ranks; names it.
        """
        return ledger

    def exchange(self, message: M) -> list[M]:
        """A message of each rank, by rank.

        :raises ClusterError: one of them cannot be read.
        """
        return [message]

    def all_have(self, kind: type | None) -> bool:
        """Whether all ranks have such a thing, and none has another one."""
        return True

    def stop(self) -> None:
        """A callback stopped the run here: it does so everywhere."""

    def agreed_noise(self, noise_multiplier: float) -> float:
        """The noise of all ranks, if each has calibrated it to the rest of its budget."""
        return noise_multiplier

    def add_up(
        self, clipped: ClippedSum, event: Event, step: int, public: Sequence[Tensor]
    ) -> None:
        """Agree on a release, and prepare the sum for it.

        :param public: parameters, and whatever else the release depends on.
        """

    def released(
        self, make: Callable[[], list[Tensor]], clipped: ClippedSum, event: Event
    ) -> list[Tensor]:
        """The release, on all ranks.

        :param make: records the event and adds noise.
        """
        return make()

    def warnings(self) -> list[Warning]:
        return []


class Peers(Alone, abc.ABC):
    """One inference on all ranks, seen from one of them."""

    alone = False
    _speaker = "rank"  # what each of them is called

    def __init__(self, group: Group, accountant: PrivacyAccountant):
        self._group, self._accountant = group, accountant
        self.rank = group.rank
        self._draws: list[Tensor] | None = None  # states of public draws, from the first look on
        self._asked = False  # whether another rank is waiting for a common look
        self._depth = 0
        self._told: BaseException | None = None  # an error that all have seen
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
            # The others find out without a message; this one has its own error.
            if error is not self._told:
                with contextlib.suppress(ClusterError):
                    self._agree(Says.FAILED, error=error)
            raise
        finally:
            self._depth -= 1

    def step(self, step: Callable[[], T]) -> T:
        with self.together():
            for _ in range(_LOOKS):
                self._began = time.perf_counter()
                with contextlib.suppress(_LooksAnew), self._public_draws():
                    return step()
                self._asked = True
            raise ClusterError(_EVER_NEW)

    @contextlib.contextmanager
    def _public_draws(self) -> Iterator[None]:
        """The global generators are the cluster's; an undone step has drawn nothing."""
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
        given = self.exchange(Start(settings.by_name, *rest))
        self._require_equal(settings, [Settings(each.settings) for each in given])
        first = given[0]
        if first.ledger is None or not first.states:
            raise ClusterError(UNREADABLE.format(speaker="rank 0"))
        self._draws = first.states
        set_torch_states(first.states)
        return Ledger(*first.ledger)

    @staticmethod
    def _require_equal(settings: Settings, given: list[Settings]) -> None:
        """:raises ClusterError: a setting differs between ranks; names it."""
        for name, value in settings.by_name.items():
            if any(name not in each.by_name or each.by_name[name] != value for each in given):
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
        """Agree to add up, and on all that is public. This rank computed ``own`` seconds."""
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
        """The message of each rank. :raises ClusterError: one failed, or is at another point."""
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
        """:raises ClusterError: on the ranks that did not fail; the others have their error."""


def _digests(*parts: Iterable[bytes]) -> list[int]:
    """A number of 63 bits for each part and all before it.

    An owner may tell two others different noise. It cannot find two values for which all agree.
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
