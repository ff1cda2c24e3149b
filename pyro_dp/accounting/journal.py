"""The ledger on disk, written before every release.

A journal is a text file to which lines are appended. Its first line has the accountant's settings.
Each later line has one entry: a release, a run's reservation, a note, a description of the data, or
a fact about a run's result. A line consists of a digest and a JSON value. The digest covers the
line and the digest before it, and so all lines above.

**Why a killed process never counts less than it released.** A value is released only after
``record`` has returned. ``record`` returns only after the whole line was written, with its newline
last, and ``fsync`` has returned. So the lines of all releases that happened are complete. A process
that dies while it writes leaves at most one incomplete line: the last one, without its newline. Its
``record`` had not returned, so nothing was released, and the next opening of the journal may drop
the line. (If only the newline is missing, the line stays: counting too much is safe.) A complete
line counts, even if its release did not happen. Any other fault is damage and refused, in the last
line too. If a complete line does not match its digest, its release may have happened.

**What the file cannot detect.** If later lines were cut off cleanly, the file is still a journal,
as an older copy is. This is detected only if something else counts more: a state that is loaded, or
the process that has the file open.

**Why not a database.** sqlite3 loses its lock when other code in the process opens and closes the
file, as a backup does. Then a second process can write, and one of two releases is lost. With
rollback journals a release takes three times as long. With a write-ahead log, the main file holds
an older ledger.
"""

import os
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyro_dp.accounting import ledger
from pyro_dp.accounting.events import Event
from pyro_dp.accounting.ledger import Description, Ledger
from pyro_dp.accounting.origins import Origin, Source, bound_of, clipped_of, origin_of
from pyro_dp.utils.errors import ConfigurationError, PrivacyError
from pyro_dp.utils.files import line_of, sync_folder, value_of
from pyro_dp.utils.validation import require_count

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

VERSION = 1


class _Lines:
    """The meaning of a journal's lines. Events and runs are numbered in order of appearance."""

    def __init__(self, found: Ledger, neighboring: str) -> None:
        self._found, self._neighboring = found, neighboring
        self._events: list[Event] = []
        self._runs: list[Origin] = []
        self._numbers: dict[Event | Origin, int] = {}

    def number(self, of: Event | Origin) -> int | None:
        """The number of an event or run; None before its first line."""
        return self._numbers.get(of)

    def name(self, origin: Origin) -> int | dict[str, str]:
        """A run's number, or in its first line its description."""
        return self._numbers[origin] if origin in self._numbers else origin.saved()

    def take(self, value: Any, origin: Origin | None = None) -> None:
        """Enter a line into the ledger.

        :param origin: the run that the line names; None: it is read from the line.
        """
        if isinstance(value, str):
            self._found.notes[ledger.current_note(value)] = None
        elif isinstance(value, list):
            index, count, *source = value
            if len(source) > 2:
                raise ValueError("it has too many values")
            event = self._events[require_count("event", index, least=0)]
            self._enter(event, count, [*source, None, None][:2], origin)
        elif "clipped" in value:
            number, *pair = value["clipped"]
            self._found.origins.note_result(self._run(number), clipped_of(pair), None)
        elif "status" in value:
            number, status = value["status"]
            self._found.origins.note_result(self._run(number), None, status)
        elif "reserved" in value:
            releases = ledger.from_lines(value["reserved"], self._neighboring)
            self._found.origins.reserve(self._named(value["run"], origin), releases)
        elif "description" in value:
            self._found.description = ledger.described(value["description"])
        else:
            event, count = ledger.from_line(value, self._neighboring)
            self._enter(event, count, [value.get("run"), value.get("bound")], origin)

    def _enter(self, event: Event, count: Any, source: list[Any], origin: Origin | None) -> None:
        run, bound = source
        by = None if run is None else Source(self._named(run, origin), bound_of(bound))
        self._found.enter(event, require_count("count", count), by)
        if event not in self._numbers:
            self._numbers[event] = len(self._events)
            self._events.append(event)

    def _named(self, run: Any, origin: Origin | None) -> Origin:
        if not isinstance(run, dict):
            return self._run(run)
        origin = origin or origin_of(run)
        self._numbers[origin] = len(self._runs)
        self._runs.append(origin)
        return origin

    def _run(self, number: Any) -> Origin:
        return self._runs[require_count("run", number, least=0)]


class Journal:
    """An open journal of one accountant in one process. ``accountant.journal(path)`` opens it.

    The file stays locked until :meth:`close`, the end of a ``with`` block, or the end of the
    process. After that, the accountant refuses to record.

    **Guarantee.** A journal that is opened again counts every value that was released, no matter
    when the process was killed or the power failed.

    **Not protected.** An older copy that replaces the file. Deliberate edits, because the digests
    have no key. A power failure, if a disk, network folder or system returns from ``fsync`` before
    the data are safe. (On macOS they may still be in the drive's cache.)

    For arguments and exceptions, see :meth:`PrivacyAccountant.journal`.

    :param ours: the accountant's ledger. The file must contain its releases, and gets its notes.
    :ivar digest: the last line's digest, which covers the whole file.
    :ivar ledger: the content of the file.
    :ivar resumed: whether the file existed.
    """

    def __init__(
        self, path: str | os.PathLike[str], settings: Mapping[str, Any], ours: Ledger
    ) -> None:
        if fcntl is None:
            raise ConfigurationError(
                "journal: this system has no POSIX file locks, but they must keep a second process "
                "out. Use save() after every step instead."
            )
        self.path = Path(os.path.abspath(path))
        self.ledger = Ledger()
        self._lines = _Lines(self.ledger, settings["neighboring"])
        self.digest, self._size = "", 0  # digest and end of the last line
        self._problem: str | None = None  # why the journal refuses further lines
        self.resumed = True
        if not self.path.exists():
            self._require_contained(ours.counts)
            self.resumed = not _create(self.path, {"journal": VERSION, **settings})
        self._file = _locked(self.path)
        # Unlock the file even if the journal is garbage-collected without close().
        self._finalizer = weakref.finalize(self, os.close, self._file)
        try:
            sync_folder(self.path)  # the process that created the file may have been killed before
            self._identity = os.fstat(self._file).st_ino
            torn = self._read(settings)
            self._require_contained(ours.counts)
            self._mend(torn)
            for text in ours.notes:
                self.note(text)
        except BaseException:
            self.close()
            raise
        _OPEN.add(self)

    def enter(self, event: Event, count: int, source: Source | None) -> None:
        """Write a release. When this returns, it is on the disk.

        :raises PrivacyError: see :meth:`require_usable`.
        :raises OSError: writing failed, and the line may be on the disk or not. After that, nothing
            can be recorded.
        """
        by: dict[str, Any] = {}
        if source is not None:
            by["run"] = self._lines.name(source.origin)
            if source.bound is not None:
                by["bound"] = bound_of(source.bound)
        number = self._lines.number(event)
        first = number is None
        line = ledger.to_line(event, count) | by if first else [number, count, *by.values()]
        self._append(line, source and source.origin)

    def reserve(self, origin: Origin, releases: Mapping[Event, int]) -> None:
        """Write a run's reservation from here on; errors as for :meth:`enter`."""
        reserved = {"reserved": ledger.to_lines(releases), "run": self._lines.name(origin)}
        self._append(reserved, origin)

    def note_result(
        self, origin: Origin, clipped: tuple[float, float] | None, status: str | None
    ) -> None:
        """Write facts about a run's result; errors as for :meth:`enter`."""
        number = self._lines.number(origin)
        if number is None:  # the run's releases were made before there was a journal
            return
        if clipped is not None:
            self._append({"clipped": [number, *clipped_of(clipped)]})
        if status is not None:
            self._append({"status": [number, status]})

    def describe(self, about: Description) -> None:
        """Write the description of the data, if it has changed; errors as for :meth:`enter`."""
        if about != self.ledger.description:
            self._append({"description": about.stated()})

    def note(self, text: str) -> None:
        """Write a note, once; errors as for :meth:`enter`."""
        if text not in self.ledger.notes:
            self._append(text)

    def require_usable(self) -> None:
        """
        :raises PrivacyError: the journal is closed, belongs to the process that forked this one, or
            failed to write a line. Or something else has changed or replaced the file.
        """
        if self._problem is None:
            try:
                status = os.stat(self.path)
                same = (status.st_ino, status.st_size) == (self._identity, self._size)
            except OSError:
                same = False
            if not same:
                self._problem = "was changed, moved or replaced by something else"
        if self._problem is not None:
            raise PrivacyError(
                f"The journal {self.path} {self._problem}: nothing more is recorded or released. "
                "Open it again in one process, with a new accountant."
            )

    def close(self) -> None:
        """Unlock the file."""
        self._problem = self._problem or "is closed"
        self._finalizer()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _append(self, value: Any, origin: Origin | None = None) -> None:
        self.require_usable()
        line, digest = line_of(value, self.digest)
        # If an exception ends this early, no line may follow. This one may be incomplete, and later
        # lines refer to its number.
        self._problem = "could not be written"
        _write(self._file, line)
        self.digest, self._size = digest, self._size + len(line)
        self._lines.take(value, origin)
        self._problem = None

    def _read(self, settings: Mapping[str, Any]) -> bytes:
        """Enter all complete lines into the ledger. Returns the bytes after the last one."""
        with open(self._file, "rb", closefd=False) as file:
            *lines, torn = file.read().split(b"\n")
        if not lines:
            raise self._damaged(1, "it is not complete")
        for number, line in enumerate(lines, start=1):
            try:
                value, self.digest = value_of(line, self.digest)
                if number > 1:
                    self._lines.take(value)
                elif value.pop("journal") != VERSION or set(value) != set(settings):
                    raise ConfigurationError("it has an unknown version")
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise self._damaged(number, str(error)) from None
            if number == 1:
                ledger.require_settings(value, settings, str(self.path))
            self._size += len(line) + 1
        return torn

    def _mend(self, torn: bytes) -> None:
        """Cut off an incomplete last line. If only its newline is missing, write it again."""
        if not torn:
            return
        os.ftruncate(self._file, self._size)
        os.fsync(self._file)
        for line in (torn, torn[:-1]):
            try:
                value, _ = value_of(line, self.digest)
            except ValueError:
                continue
            self._append(value)
            return

    def _require_contained(self, counts: Mapping[Event, int]) -> None:
        event = ledger.first_missing(counts, self.ledger.counts)
        if event is not None:
            raise PrivacyError(
                f"The journal {self.path} counts {self.ledger.counts.get(event, 0)} of the "
                f"{counts[event]} releases of {event.brief} in this ledger. It belongs to "
                "another ledger, or is an older copy. Open a journal before the first release, "
                "and always the same one."
            )

    def _damaged(self, number: int, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self.path} is damaged, or no journal (line {number}: {why}). Nothing was changed. "
            "It is the record of what was released. Put back an undamaged copy that counts "
            "every release, or treat the budget of these data as spent. Do not start a new "
            "journal."
        )


def _create(path: Path, header: dict[str, Any]) -> bool:
    """Create a journal that has its header as soon as the file is visible.

    :returns: False if another process has created the file meanwhile.
    """
    line, _ = line_of(header, "")
    file, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        _write(file, line)
        os.link(name, path)  # never replaces another file
    except FileExistsError:
        return False
    finally:
        os.close(file)
        os.unlink(name)
    return True


def _locked(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_APPEND)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(file)
        if isinstance(error, BlockingIOError):
            raise ConfigurationError(
                f"The journal {path} is in use by another accountant or process: one at a time. "
                "Close that one first."
            ) from None
        raise
    return file


def _write(file: int, line: bytes) -> None:
    while line:
        line = line[os.write(file, line) :]
    os.fsync(file)


_OPEN: "weakref.WeakSet[Journal]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close the journals in a forked process. Otherwise its copies would keep the files locked."""
    for journal in list(_OPEN):
        journal._problem = "belongs to the process that forked this one"
        journal.close()


if fcntl is not None:
    os.register_at_fork(after_in_child=_leave_to_parent)
