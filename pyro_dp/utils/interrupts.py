"""Ctrl-C: at once where nothing was begun, and else when it is finished."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_Handler = Callable[[int, Any], Any]


class Interrupts:
    """Of work that has a point of no return.

    Within :meth:`within` a Ctrl-C is as ever until :meth:`hold` was called, and from then on waits
    until the work is done. Only the main thread gets any; elsewhere nothing happens here.
    """

    def __init__(self) -> None:
        self._active = self._held = self._pending = False

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Work, which may have parts that are such work, too: then it is all of it."""
        before = _handler()
        if before is None or self._active:
            yield
            return

        def handle(number: int, frame: Any) -> None:
            if self._held:
                self._pending = True
            else:
                before(number, frame)

        self._active, self._held, self._pending = True, False, False
        try:
            signal.signal(signal.SIGINT, handle)
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            self._active = self._held = False
            if self._pending:
                self._pending = False
                before(signal.SIGINT, None)

    def hold(self) -> None:
        """From here on what was begun must be finished."""
        self._held = self._active


def _handler() -> _Handler | None:
    """Python's, of Ctrl-C, where it would be called here."""
    if threading.current_thread() is not threading.main_thread():
        return None
    handler = signal.getsignal(signal.SIGINT)
    return handler if callable(handler) else None
