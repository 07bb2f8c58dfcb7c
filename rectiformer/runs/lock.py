"""One process at a time in a run folder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from rectiformer.errors import CheckpointError
from rectiformer.files import write_failure


class RunLock:
    """Holds a run folder from `with` to its end; the system lets go of it if the process is killed.

    The kernel's lock on the open file `run.lock` is what counts; the JSON inside only names the holder. The file is
    emptied on release but never deleted: who opened it just before would otherwise lock a file nobody else can see.
    """

    def __init__(self, folder: Path, notice: Callable[[str], None]) -> None:
        self.folder, self.notice = folder, notice
        self._descriptor = -1

    def __enter__(self) -> RunLock:
        """Take the lock, with a notice where its last holder was killed; CheckpointError where it is held."""
        path = self.folder / "run.lock"
        try:
            # Neither through a link, into some other file, nor waiting on a FIFO.
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            try:
                self._take()
            except BaseException:
                os.close(self._descriptor)
                raise
        except OSError as error:
            raise write_failure(path, error) from error
        return self

    def __exit__(self, *exception: object) -> None:
        """Let go of the lock."""
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def _take(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = describe_holder(self._record())
            raise CheckpointError(
                f"run folder {self.folder} is in use by {holder}; wait for it, or choose another folder"
            ) from error
        left = self._record()
        if left:
            holder = describe_holder(left)
            self.notice(f"run folder {self.folder}: took over the lock of {holder}, which ended without releasing it")
        started = datetime.now(UTC).isoformat(timespec="seconds")
        record = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": started})
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, record.encode(), 0)

    def _record(self) -> bytes:
        return os.pread(self._descriptor, 4096, 0)


def describe_holder(record: bytes) -> str:
    """What a lock file says of its holder, or "another process" where it says nothing printable."""
    try:
        holder = json.loads(record)
        text = f"process {holder['pid']} on {holder['host']} since {holder['started']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another process"
    return text if text.isprintable() else "another process"
