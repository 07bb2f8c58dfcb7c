"""One process at a time in a run folder."""

import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from rectiformer.errors import CheckpointError
from rectiformer.files import writing


@contextmanager
def lock_run(folder: Path, notice: Callable[[str], None]) -> Iterator[None]:
    """Hold a run folder, with a notice where its last holder was killed; CheckpointError where it is held.

    The kernel's lock on the open file `run.lock` is what counts, and ends with the process however that ends; the JSON
    inside only names the holder. The file is emptied on release but never deleted: whoever opened it just before would
    otherwise lock a file nobody else can see.
    """
    path = folder / "run.lock"
    with writing(path):  # neither through a link, into some other file, nor waiting on a FIFO
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        with writing(path):
            take_lock(descriptor, folder, notice)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def take_lock(descriptor: int, folder: Path, notice: Callable[[str], None]) -> None:
    """Lock an open `run.lock` and write into it who holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = describe_holder(os.pread(descriptor, 4096, 0))
        raise CheckpointError(
            f"run folder {folder} is in use by {holder}; wait for it, or choose another folder"
        ) from error
    if left := os.pread(descriptor, 4096, 0):
        notice(f"run folder {folder}: took over the lock of {describe_holder(left)}, which ended without releasing it")
    started = datetime.now(UTC).isoformat(timespec="seconds")
    record = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": started})
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, record.encode(), 0)


def describe_holder(record: bytes) -> str:
    """What a lock file says of its holder, or "another process" where it says nothing printable."""
    try:
        holder = json.loads(record)
        text = f"process {holder['pid']} on {holder['host']} since {holder['started']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another process"
    return text if text.isprintable() else "another process"
