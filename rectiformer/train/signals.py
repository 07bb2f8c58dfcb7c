"""Being asked to stop: the first SIGTERM or Ctrl-C lets the loop save and leave, the second ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType

from rectiformer.errors import RectiformerError

STOPPED = 128 + signal.SIGTERM


class StoppedError(RectiformerError):
    """Training was asked to stop, and its state is saved."""

    exit_code = STOPPED


class StopRequest:
    """While open, `requested` turns true at the first SIGTERM or SIGINT."""

    def __init__(self) -> None:
        self.requested = False
        self.held: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python lets nobody listen
            for kind in (signal.SIGTERM, signal.SIGINT):
                self.held[kind] = signal.signal(kind, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for which, handler in self.held.items():
            signal.signal(which, handler)  # type: ignore[arg-type]

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(128 + number)
        self.requested = True
