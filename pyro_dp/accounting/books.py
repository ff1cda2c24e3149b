"""The books of an accountant: its ledger, the journal on disk, and the run that releases now.

The ledger and the journal change together. Each change happens before the release.
"""

import contextlib
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pyro_dp.accounting import ledger
from pyro_dp.accounting.budget import Budget, Settings
from pyro_dp.accounting.events import Event, NonPrivateLook
from pyro_dp.accounting.journal import Journal
from pyro_dp.accounting.ledger import MOST, Description, Ledger
from pyro_dp.accounting.origins import PLANNED, Origin, Source
from pyro_dp.utils.errors import ConfigurationError, PrivacyError

_STAYS = (
    "a release cannot be undone. Load it into a new accountant, or a later state into this one. "
    "(An accountant with a journal keeps its ledger, and takes older states.)"
)
_OLDER_JOURNAL = (
    "the journal must count every release, so it is an older copy, or that of another ledger. Put "
    "back the one that was written."
)


class Books:
    """The ledger, its journal and its budget, with the methods of the accountant that use them.

    A thread holds the lock while it reads or writes.

    :ivar start: position of the first release.
    """

    def __init__(self, settings: Settings) -> None:
        self.budget = Budget(settings)
        self.ledger = Ledger()
        self.journal: Journal | None = None
        self.lock = threading.RLock()
        self.start = 0
        self._settings = vars(settings)
        self._source: Source | None = None  # the run of the present release
        self._process = os.getpid()
        self._follows = False  # whether another process's accountant counts instead

    @property
    def digest(self) -> str | None:
        return None if self.journal is None else self.journal.digest

    @property
    def position(self) -> int:
        return self.start + sum(self.ledger.counts.values())

    @contextlib.contextmanager
    def next_position(self, source: Source | None) -> Iterator[int]:
        with self.lock:
            before = self._source
            self._source = source or before
            try:
                yield self.position
            finally:
                self._source = before

    def note(self, text: str) -> None:
        with self.lock:
            self.ledger.notes.setdefault(text)
            if self.journal is not None:
                self.journal.note(text)

    def note_result(
        self, origin: Origin, clipped: tuple[float, float] | None, status: str | None
    ) -> None:
        with self.lock:
            if origin in self.ledger.origins:
                self.ledger.origins.note_result(origin, clipped, status)
                if self.journal is not None:
                    self.journal.note_result(origin, clipped, status)

    def describe(self, about: Description) -> None:
        if self.journal is not None:
            self.journal.describe(about)
        self.ledger.description = about

    def enter(self, event: Event, count: int) -> None:
        """Count a release before it happens. Raises as :meth:`PrivacyAccountant.record`."""
        if self._source is not None:
            self.ledger.origins.require_provable(self._source.origin, event)
        beside, ours = self._room(event, count)
        if beside[event] + ours[event] > MOST:
            raise ConfigurationError(f"count: more than {MOST:g} releases of a kind.")
        if type(event) is not NonPrivateLook:
            self.budget.require_room(beside, ours)
        if self.journal is not None:
            self.journal.require_usable()
        self._write(event, count, ours)

    def _room(self, event: Event, count: int) -> tuple[Counter[Event], Counter[Event]]:
        """The two groups of releases that together must fit the budget.

        :returns: everything that counts, without the reservation of the run that releases now. Then
            this run's reservation from here on, including this release.
        """
        source = self._source
        name = source and source.origin.reservation
        held = self.ledger.origins.reserved_as(name)
        before = held
        if source is not None and source.reserves is not None:
            before = Counter(source.reserves)
            if source.origin.plan == PLANNED:
                # With new noise, the plan was calibrated to the rest of the budget, and replaces
                # the old one. With the same noise, a shorter plan or smaller samples return
                # nothing, so the larger count of each event stays reserved.
                noises = {getattr(each, "noise_multiplier", None) for each in before}
                before |= Counter(
                    {e: n for e, n in held.items() if getattr(e, "noise_multiplier", 0) in noises}
                )
        return self.ledger.counted(name), before | Counter({event: count})

    def _write(self, event: Event, count: int, ours: Counter[Event]) -> None:
        """Enter a release, and the reservation of its run, in ledger and journal."""
        source, done = self._source, Counter({event: count})
        if source is not None and source.reserves is not None:
            before = self.ledger.origins.reserved_as(source.origin.reservation)
            if ours - done != before - done:
                self.ledger.origins.reserve(source.origin, ours)
                if self.journal is not None:
                    self.journal.reserve(source.origin, ours)
        self.ledger.enter(event, count, source)
        if self.journal is not None:
            self.journal.enter(event, count, source)

    def require_room(self, event: Event) -> None:
        with self.lock:
            self.budget.require_room(*self._room(event, 1))

    def least_noise(
        self, releases: Callable[[float], Mapping[Event, int]], reservation: str | None
    ) -> float:
        with self.lock:
            counts, reserved = self.ledger.counted(reservation), self.ledger.origins.all_reserved()
        sigma, planned = self.budget.least_noise(counts, releases, bool(reserved))
        with self.lock:
            if self.ledger.counted(reservation) <= Counter(planned):
                self.budget.adopt(planned, self.budget.cost(planned))
        return sigma

    def mirror(self, event: Event) -> None:
        if not self._follows:
            raise PrivacyError("mirror: this accountant follows none, and counts by record().")
        with self.lock:
            _, ours = self._room(event, 1)
            self._write(event, 1, ours)

    def follow(self, state: Mapping[str, Any] | None) -> None:
        with self.lock:
            if self.journal is not None:
                raise PrivacyError(
                    "This process of the cluster has a journal, but does not count: open it on "
                    "rank 0 alone, as in `if cluster.rank == 0: accountant.journal(path)`."
                )
            self._follows = True
            if state is None:
                return
            saved = ledger.from_state(state, self._settings)
            ours, theirs = self.ledger.counts, saved.counts
            event = ledger.first_missing(ours, theirs)
            if event is not None:
                raise PrivacyError(
                    f"This process counts {ours[event]} releases of {event.brief}, but rank 0's "
                    f"ledger counts {theirs.get(event, 0)}. One ledger must have all releases "
                    "about these data. Begin with new accountants, or load the same state into all."
                )
            reserved = [each.origins.all_reserved() for each in (self.ledger, saved)]
            if Counter(ours) != Counter(theirs) or reserved[0] != reserved[1]:
                self._adopt(saved)

    def state(self) -> dict[str, Any]:
        with self.lock:
            return ledger.to_state(self._settings, self.ledger)

    def load(self, state: Mapping[str, Any]) -> None:
        saved = ledger.from_state(state, self._settings)
        with self.lock:
            ours, theirs = self.ledger.counts, saved.counts
            small, large, why = ours, theirs, _STAYS
            if self.journal is not None:
                small, large, why = theirs, ours, _OLDER_JOURNAL
                saved = replace(saved, counts=ours, origins=self.ledger.origins)
            event = ledger.first_missing(small, large)
            if event is not None:
                raise PrivacyError(
                    f"the state counts {theirs.get(event, 0)} releases of {event.brief}, "
                    f"this accountant {ours.get(event, 0)}: {why}"
                )
            self._adopt(saved)

    def open(self, path: str | os.PathLike[str]) -> Journal:
        self.require_counting("journal()")
        with self.lock:
            if self.journal is not None:
                raise ConfigurationError(
                    f"journal: this accountant already has one, {self.journal.path}."
                )
            journal = Journal(path, self._settings, self.ledger)
            if journal.resumed:
                self._adopt(journal.ledger)
            self.journal = journal
            for origin, left in self.ledger.origins.reserved():
                if journal.ledger.origins.reserved_as(origin.reservation) != left:
                    journal.reserve(origin, left)  # made before there was a journal
            self.describe(self.ledger.description)
            return journal

    def _adopt(self, saved: Ledger) -> None:
        """Go on from a saved ledger, after which there may have been unknown releases.

        This ledger's notes, description and reservations stay.
        """
        origins, stated = saved.origins.copy(), self.ledger.description.stated()
        origins.keep_reserved(self.ledger.origins)
        self.ledger.counts, self.ledger.origins = dict(saved.counts), origins
        for text in saved.notes:
            self.note(text)
        self.describe(replace(saved.description, **stated))
        self.start = secrets.randbits(128)
        self.budget.forget(self.ledger.counted())

    def require_counting(self, what: str) -> None:
        """:raises PrivacyError: this accountant follows another."""
        if self._follows:
            raise PrivacyError(
                f"{what}: this process of a cluster does not count. Rank 0's accountant has the "
                "ledger of the cluster: call this on rank 0."
            )

    def require_process(self) -> None:
        """:raises PrivacyError: this accountant follows another, or belongs to another process."""
        self.require_counting("record()")
        if os.getpid() != self._process:
            raise PrivacyError(
                "This accountant belongs to the process that forked this one, where the release "
                "would not count. Record in one process, or give each its own budget."
            )
