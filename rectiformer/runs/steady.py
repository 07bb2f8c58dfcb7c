"""Reading the checkpoints of a run that may be in training, which replaces and prunes them all the time."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from rectiformer.errors import CheckpointError

READS = 10
"""Most reads of a checkpoint while a training replaces it; one in a hundred meets a deletion if it saves every step."""
T = TypeVar("T")


def read_steadily(folder: Path, read: Callable[[Callable[[str], None]], T], notice: Callable[[str], None]) -> T:
    """What `read` gives of the run in `folder`; it is given where to send its notices.

    A read that fails or gives notice of damage is done again where the checkpoints have changed since it began: what it
    had found may be gone by now, and another be the best. Only the notices of the last read are passed on.
    """
    failure: CheckpointError | None = None
    for attempt in range(READS):
        before, notices = list_checkpoints(folder), list[str]()
        try:
            found, failure = read(notices.append), None
        except CheckpointError as error:
            failure = error
        settled = failure is None and not notices
        if settled or attempt == READS - 1 or list_checkpoints(folder) == before:
            break
    for text in notices:
        notice(text)
    if failure is not None:
        raise failure
    return found


def list_checkpoints(folder: Path) -> list[tuple[str, int, int]]:
    """What tells the checkpoints of a run, and what `best` and `latest` name, from those of another moment."""
    found = []
    with suppress(OSError), os.scandir(folder / "checkpoints") as entries:  # none there yet, or no folder
        for entry in entries:
            with suppress(FileNotFoundError):  # gone since it was listed
                state = entry.stat(follow_symlinks=False)
                found.append((entry.name, state.st_ino, state.st_mtime_ns))
    return sorted(found)
