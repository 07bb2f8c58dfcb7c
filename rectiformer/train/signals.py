"""Stopping on request: the first SIGTERM or Ctrl-C lets the loop save and leave, the second ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from rectiformer.errors import RectiformerError

STOPPED = 128 + signal.SIGTERM


class StoppedError(RectiformerError):
    """Training was asked to stop, and its state is saved."""

    exit_code = STOPPED


class StopRequest:
    """While open, `requested` turns true at the first SIGTERM or SIGINT."""

    def __init__(self) -> None:
        self.requested = False
        self.previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self.previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def check(self) -> None:
        """InterruptedError where this process was asked to stop."""
        if self.requested:
            raise InterruptedError

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(128 + number)
        self.requested = True
