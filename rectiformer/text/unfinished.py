"""A folder being written under another name, which the next start removes if its process was killed."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = "writing.lock"
"""The file in it that its process holds locked, and the system lets go of however that process ends."""


@contextmanager
def writing_aside(folder: Path, note: Callable[[str], None]) -> Iterator[Path]:
    """A new folder that becomes `folder` in the end, or is removed; what killed processes left goes first."""
    remove_left(folder, note)
    unfinished = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a killed process whose number we have now
    try:
        unfinished.mkdir(parents=True)
        with open(unfinished / LOCK, "xb") as lock:
            with suppress(OSError):  # of a file system without locks, on which nothing that is left is removed
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield unfinished
            (unfinished / LOCK).unlink()
            os.rename(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def remove_left(folder: Path, note: Callable[[str], None]) -> None:
    """Remove what processes that were killed while they wrote `folder` have left; those still at it keep theirs."""
    ours = re.compile(re.escape(folder.name) + r"\.tmp-[0-9]+")
    for path in sorted(folder.parent.iterdir()) if folder.parent.is_dir() else []:
        if ours.fullmatch(path.name) and is_left(path):
            shutil.rmtree(path, ignore_errors=True)
            note(f"removed {path}, left by a killed process")


def is_left(path: Path) -> bool:
    """Whether nobody holds the lock in a folder; without one it is not known whose it is."""
    try:
        with open(path / LOCK, "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        return False
