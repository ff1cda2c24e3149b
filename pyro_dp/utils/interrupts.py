"""Delay Ctrl-C until work can stop without leaving a broken state."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Interrupts:
    """Delays interrupts during work with stages and a point of no return.

    Within :meth:`within` a Ctrl-C waits for the next :meth:`check`. An exception at any other point
    could leave torch's modes or levels of vmap behind. A second Ctrl-C does not wait. From
    :meth:`hold` on, all wait until the work is done. Only the main thread gets interrupts;
    elsewhere nothing happens here.
    """

    def __init__(self) -> None:
        # The handler that ours replaces; None while ours is not installed.
        self._before: Callable[[int, Any], Any] | None = None
        self._working = self._held = self._pending = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Install the handler once for many short pieces of work."""
        before = signal.getsignal(signal.SIGINT)
        here = threading.current_thread() is threading.main_thread()
        if not here or not callable(before) or self._before is not None:
            yield
            return
        self._before = before
        try:
            signal.signal(signal.SIGINT, self._handle)
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            self._before = None

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Delay interrupts inside the block. Nested blocks belong to the outermost one."""
        if self._working:
            yield
            return
        with contextlib.nullcontext() if self._before else self.installed():
            before = self._before
            self._working, self._held, self._pending = before is not None, False, False
            try:
                yield
            finally:
                self._working = False
                if self._pending and before is not None:
                    self._pending = False
                    before(signal.SIGINT, None)

    def check(self) -> None:
        """Raise a pending interrupt: the work stops here and is not done."""
        if self._pending and not self._held and self._before is not None:
            self._pending = False
            self._before(signal.SIGINT, None)

    def hold(self) -> None:
        """The last check. From here on the work must finish."""
        self.check()
        self._held = True

    def _handle(self, number: int, frame: Any) -> None:
        if not self._working and self._before is not None:
            self._before(number, frame)
            return
        again, self._pending = self._pending, True
        if again:
            self.check()
