"""Files on disk: after a kill at any moment they are the old ones or the new ones, never half of either."""

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from rectiformer.errors import CheckpointError, DataError, NoSpaceError, RectiformerError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SPACE_MARGIN = 2**20  # bytes a checkpoint needs besides its tensors: state, manifest, blocks half filled
FAILPOINTS = ("mid-tensor", "before-manifest", "before-rename", "before-latest", "mid-prune")
"""The moments of saving a checkpoint at which a test can kill this process, in their order."""

WRITE_LOCK = "writing.lock"
"""The file in a folder being written that its process keeps locked; the system unlocks it however that process ends."""

_hits: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Kill this process if RECTIFORMER_FAILPOINT is `name`, or `name:n` and this is the n-th call, for tests."""
    wanted, _, turn = os.environ.get("RECTIFORMER_FAILPOINT", "").partition(":")
    if not name or wanted != name:
        return
    _hits[name] += 1
    if turn in ("", str(_hits[name])):
        os.kill(os.getpid(), signal.SIGKILL)


def write_file(path: Path, data: bytes, halfway: str = "") -> None:
    """Write a new file, on disk when this returns; `halfway` is a failpoint after half of it."""
    view = memoryview(data)
    with open(path, "xb") as file:
        file.write(view[: len(view) // 2])
        file.flush()
        failpoint(halfway)
        file.write(view[len(view) // 2 :])
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Replace `path` atomically, on disk when this returns; whoever has the old file open or mapped keeps it."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        write_file(temporary, data)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = str(path)  # an error of a full disk names no file
        raise
    sync(path.parent)


@contextmanager
def replacing(path: Path, refusal: type[RectiformerError] = DataError) -> Iterator[BinaryIO]:
    """A file to write that becomes `path` at the end; if anything fails, `path` is as it was and nothing else remains.

    A symbolic link stays, and the file it points to is replaced. Pipes, devices and open descriptors (/dev/stdout)
    are written to directly. An OSError becomes a NoSpaceError or a `refusal`.
    """
    try:
        with open(path, "wb") if must_be_written_directly(path) else open_aside(Path(os.path.realpath(path))) as file:
            yield file
            file.flush()
    except BrokenPipeError:
        raise  # the reader of a pipe has left, which is not an error
    except OSError as error:
        if error.filename is not None and str(error.filename) != str(path):
            raise  # about another file
        raise write_failure(path, error, refusal) from error


def must_be_written_directly(path: Path) -> bool:
    """Whether `path` cannot be replaced: a pipe, a device, a descriptor, a folder."""
    if not path.exists():
        return False
    if not path.is_file():
        return True
    while not path.parent.resolve().is_relative_to("/proc"):
        if not path.is_symlink():
            return False
        path = path.parent / path.readlink()
    return True  # /dev/stdout, /dev/fd/3: others may write to the same open file, which a rename would hide


@contextmanager
def open_aside(path: Path) -> Iterator[BinaryIO]:
    """A temporary file next to `path` that takes its name and permissions at the end, on disk."""
    old = path.stat() if os.path.lexists(path) else None  # for a loop of links, stat raises
    if old is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    temporary = path.with_name(f".rectiformer-{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb") as file:
            if old is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        put_over(temporary, path)
    except OSError as error:
        if str(error.filename) == str(temporary):
            error.filename = None  # a name the user never gave
        raise
    finally:
        with suppress(OSError):
            temporary.unlink()


def put_over(temporary: Path, path: Path) -> None:
    """Replace `path` by a finished file."""
    try:
        os.replace(temporary, path)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        shutil.copyfile(temporary, path)  # a single file mounted into a container cannot be renamed over
    with suppress(OSError):  # the file is complete, and not every file system can sync a folder
        sync(path.parent)


@contextmanager
def new_folder(folder: Path, note: Callable[[str], None] = lambda line: None) -> Iterator[Path]:
    """A folder to fill that becomes `folder`, on disk, at the end; if anything fails, nothing remains.

    What killed processes left of the same folder is removed first; `note` is told so.
    """
    remove_abandoned(folder, note)
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process with our process id
    try:
        temporary.mkdir(parents=True)
        with open(temporary / WRITE_LOCK, "xb") as lock:
            with suppress(OSError):  # a file system without locks, on which nothing abandoned is removed either
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield temporary
            (temporary / WRITE_LOCK).unlink()
            for path in (*temporary.rglob("*"), temporary):
                sync(path)
            os.rename(temporary, folder)
            sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_abandoned(folder: Path, note: Callable[[str], None]) -> None:
    """Remove what processes killed while writing `folder` left behind; running processes keep theirs."""
    ours = re.compile(re.escape(folder.name) + r"\.tmp-[0-9]+")
    for path in sorted(folder.parent.iterdir()) if folder.parent.is_dir() else []:
        if ours.fullmatch(path.name) and is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
            note(f"removed {path}, left by a killed process")


def is_abandoned(folder: Path) -> bool:
    """Whether nobody holds the lock in a folder; False without a lock file, since nobody can tell."""
    try:
        with open(folder / WRITE_LOCK, "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        return False


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a finished folder to `path`; an existing one is called `.old` between the two renames."""
    aside = path.with_name(f"{path.name}.old")
    if os.path.lexists(path):
        remove(aside)
        os.rename(path, aside)
    os.rename(temporary, path)
    sync(path.parent)
    remove(aside)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to disk before anything that follows."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(path: Path) -> None:
    """Delete a file, a link or a whole folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_regular(path: Path, limit: int) -> bytes:
    """The bytes of a regular file; CheckpointError, without blocking, for anything else or over `limit` bytes."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise damaged(path, "it is not a regular file")
            if status.st_size > limit:
                raise damaged(path, f"it has {status.st_size} bytes, not {limit}")
            if status.st_size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
                raise damaged(path, f"it has {status.st_size} bytes, more than this machine has memory")
            return file.read()
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from error


def parse_object(path: Path, data: bytes) -> dict[str, Any]:
    """The JSON object in `data`, which was read from `path`; CheckpointError if there is none."""
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(path, "it is not JSON") from error
    if not isinstance(parsed, dict):
        raise damaged(path, "it is not a JSON object")
    return parsed


def damaged(path: Path, why: str) -> CheckpointError:
    """The error to raise for a file that is not as it was saved."""
    return CheckpointError(f"{path} is damaged: {why}; nothing of it was loaded")


def write_failure(path: Path, error: OSError, refusal: type[RectiformerError] = CheckpointError) -> RectiformerError:
    """The error to raise if writing `path` failed: a NoSpaceError, or a `refusal` for other reasons."""
    if error.errno in NO_SPACE:
        free = shutil.disk_usage(existing_parent(path)).free
        return NoSpaceError(
            f"no space left while writing {path} ({error.strerror}; {free} bytes are free); "
            "what was saved before is kept; free some space, then run it again (a training with --resume)"
        )
    return refusal(
        f"cannot write {path}: {error.strerror or error}; what was saved before is kept; "
        "make it writable, or name another path"
    )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError in this context into the error for a failed write of `path`."""
    try:
        yield
    except OSError as error:
        raise write_failure(path, error) from error


def require_space(path: Path, *sizes: int) -> None:
    """Raise a NoSpaceError if checkpoints of `sizes` bytes do not fit on the disk of `path`, which need not exist."""
    needed = sum(size + SPACE_MARGIN for size in sizes)
    free = shutil.disk_usage(existing_parent(path)).free
    if free < needed:
        raise NoSpaceError(
            f"no space for {path}: {needed} bytes are needed, {free} are free; "
            "what was saved before is kept; free some space, then run it again (a training with --resume)"
        )


def existing_parent(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())
