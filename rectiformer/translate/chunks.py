"""Lines in chunks, and one input shared by processes chunk by chunk: what one has finished stays, whichever dies.

A chunk is whose process holds the kernel's lock on its claim, which the kernel drops when that process ends, however it
does. A finished chunk is a file that appears at once. So there is nothing to clean up after a kill: the same command
again does the chunks that are missing, and so does any process that is still there.
"""

import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rectiformer.distributed.ranks import Ranks
from rectiformer.errors import ArgumentError, DataError
from rectiformer.files import failpoint, remove, replace_file, sync, write_failure
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translation, Translator

Chunk = Callable[[], Iterable[str]]
"""Translates some of the input when it is called: lines of output."""

POLL_SECONDS = 0.2
BUFFER_CHARACTERS = 2**20  # a buffer also ends here, so that long lines take no more memory than many short ones


@dataclass(frozen=True)
class LineChunk:
    """Lines that are translated together; None is one that was not UTF-8."""

    first_line: int
    lines: list[str | None]
    prefixes: list[str] | None = None


def chunk_lines(
    lines: Iterable[str | None], buffer: int = 1000, prefixes: Iterable[str] | None = None
) -> Iterator[LineChunk]:
    """The lines in chunks of up to `buffer`; DataError where prefixes are fewer or more."""
    forced = None if prefixes is None else iter(prefixes)
    done = 0
    for chunk in take_chunks(lines, buffer):
        given = None if forced is None else list(islice(forced, len(chunk)))
        if given is not None and len(given) < len(chunk):
            raise DataError(
                f"only {done + len(given)} prefixes, but line {done + len(given) + 1} follows; give one each"
            )
        yield LineChunk(done + 1, chunk, given)
        done += len(chunk)
    if forced is not None and next(forced, None) is not None:
        raise DataError(f"more than {done} prefixes for {done} lines; all lines are translated, check the prefixes")


def translate_line_chunk(
    translator: Translator, chunk: LineChunk, options: SearchOptions, *, warn: Callable[[str], None], **how: Any
) -> Iterator[Translation]:
    """A translation of each line of a chunk; `how` as in `Translator.translate`."""
    translations = translator.translate(
        [line or "" for line in chunk.lines], options, prefixes=chunk.prefixes, first_line=chunk.first_line, warn=warn,
        **how,
    )  # fmt: skip
    for line, translation in zip(chunk.lines, translations, strict=True):
        if line is None:
            note = "not UTF-8, so its translation is empty"
            warn(f"line {translation.line}: {note}")
            translation = dataclasses.replace(translation, warnings=[note])
        yield translation


def take_chunks(lines: Iterable[str | None], most: int) -> Iterator[list[str | None]]:
    """Lines in lists of up to `most`, and of up to `BUFFER_CHARACTERS` and one line."""
    chunk: list[str | None] = []
    characters = 0
    for line in lines:
        chunk.append(line)
        characters += len(line or "")
        if len(chunk) >= most or characters >= BUFFER_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def stream_lines(ranks: Ranks, lines: Iterable[str | None], buffer: int = 1000) -> Iterator[str | None]:
    """The lines that rank 0 reads, on every rank; all must take them to the same end."""
    if ranks.world_size == 1:
        yield from lines
        return
    chunks = take_chunks(lines, buffer)
    while chunk := ranks.on_rank0(lambda: next(chunks, [])):
        yield from chunk


class WorkFolder:
    """Where finished chunks lie until all of them are there."""

    def __init__(self, path: Path, chunks: int) -> None:
        self.path, self.chunks = path, chunks

    def file(self, index: int) -> Path:
        return self.path / f"{index:08}.txt"

    def is_done(self, index: int) -> bool:
        return self.file(index).exists()

    def save(self, index: int, lines: Iterable[str]) -> None:
        """Keep a finished chunk: on disk, and complete, when this returns."""
        data = b"".join(line.encode("utf-8") + b"\n" for line in lines)
        failpoint("chunk-translated")
        try:
            replace_file(self.file(index), data)
        except OSError as error:
            raise write_failure(self.file(index), error) from error

    def lines(self, index: int) -> list[str]:
        """Those of a finished chunk."""
        return self.file(index).read_bytes().decode("utf-8").split("\n")[:-1]

    @contextmanager
    def claim(self, index: int) -> Iterator[bool]:
        """Whether this chunk is ours to do: nobody has done it, and no other process is at it. Ours until the end."""
        try:
            descriptor = lock_file(self.path / f"{index:08}.claim")
        except FileNotFoundError:  # the folder: rank 0 has everything and has put it away
            yield False
            return
        try:
            # In this order: where the folder went in between, the chunk was done.
            yield descriptor is not None and not self.is_done(index) and self.path.is_dir()
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def abandoned(self) -> bool:
        """Whether a chunk is missing that nobody is at."""
        for index in range(self.chunks):
            if not self.is_done(index):
                with self.claim(index) as free:
                    if free:
                        return True
        return False


def lock_file(path: Path) -> int | None:
    """A descriptor that holds the lock of a file, made if it is not there; None where another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def hold_folder(path: Path) -> Iterator[None]:
    """Be the one command that works in this folder, made if it is not there."""
    try:
        path.mkdir(exist_ok=True)
        held = lock_file(path / "job.lock")
    except OSError as error:
        raise ArgumentError(f"cannot work in {path}: {error.strerror}; name another --out") from error
    if held is None:
        raise ArgumentError(f"another command is at work in {path}; wait for it, or name another --out")
    try:
        remove(finished(path))  # which a kill may have left
        yield
    finally:
        if not (path / "job.json").exists():
            remove(path)  # where no job began, or one is finished
        os.close(held)


def open_job(path: Path, key: str, notice: Callable[[str], None]) -> None:
    """Keep the finished chunks of the folder if they are of the job `key`; start anew, with a notice, if they are not.

    Args:
        key: the same for the same input, weights and options.
    """
    record = path / "job.json"
    kept = len(list(path.glob("*.txt")))
    if record.exists() and record.read_bytes() == json.dumps({"key": key}).encode():
        notice(f"{path}: {kept} finished chunks of this input are kept")
        return
    if kept:
        notice(f"{path}: {kept} finished chunks are of other input, weights or options, and are done anew")
    record.unlink(missing_ok=True)
    for old in path.glob("*.txt"):
        old.unlink()
    sync(path)  # never the new key next to old chunks
    try:
        replace_file(record, json.dumps({"key": key}).encode())
    except OSError as error:
        raise write_failure(record, error) from error


def do_chunks(folder: WorkFolder, chunks: Callable[[], Iterator[Chunk]]) -> Iterator[None]:
    """Do every chunk that is nobody's; after each that is missing, the caller may look at what is there."""
    while folder.abandoned():
        for index, chunk in enumerate(chunks()):
            if not folder.is_done(index):
                with folder.claim(index) as ours:
                    if ours:
                        folder.save(index, chunk())
                yield


def gather_chunks(folder: WorkFolder, chunks: Callable[[], Iterator[Chunk]]) -> Iterator[str]:
    """All lines of output in order, each as soon as its chunk is finished, here or elsewhere."""
    given = 0
    while given < folder.chunks:
        for _ in chain(do_chunks(folder, chunks), [None]):
            while given < folder.chunks and folder.is_done(given):
                yield from folder.lines(given)
                given += 1
        if given < folder.chunks:
            time.sleep(POLL_SECONDS)


def finish_job(folder: WorkFolder) -> None:
    """Remove the folder, once what was written from it is on disk too; for other processes it is gone at once."""
    os.rename(folder.path, finished(folder.path))
    remove(finished(folder.path))


def finished(path: Path) -> Path:
    """What a folder is called while it is being removed."""
    return path.with_name(f"{path.name}.finished")
