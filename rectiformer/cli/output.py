"""What commands give out: lines and files, tables for people, and how far they are."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from rectiformer.errors import ArgumentError, DataError
from rectiformer.files import replacing
from rectiformer.terminal import Terminal


def write_all(texts: Iterable[str], path: Path | None = None) -> None:
    """Lines to standard output, each as soon as it is there, or to a file, which is replaced when all are there."""
    if path is None and sys.stdout is None:
        raise ArgumentError("cannot use standard output: it is closed; write to a file or a pipe")
    with nullcontext(sys.stdout.buffer) if path is None else replacing(path, ArgumentError) as file:
        for text in texts:
            write_line(file, text)
            file.flush()


def refuse_input(path: Path | None, inputs: Iterable[str]) -> None:
    """ArgumentError, before any work, if the file to write is one that is read."""
    for name in inputs:
        if path is not None and path.exists() and os.path.exists(name) and path.samefile(name):
            raise ArgumentError(f"--out {path} is also read; it is untouched; name another file")


@contextmanager
def open_new(names: Sequence[str]) -> Iterator[list[BinaryIO]]:
    """New files, which appear at the end, all or none of them: DataError where one exists."""
    for name in names:
        if os.path.lexists(name):
            raise DataError(f"{name} exists; nothing was written; name other files, or remove it")
    with ExitStack() as stack:
        files = [stack.enter_context(replacing(Path(name))) for name in names]
        yield files
        for file in files:  # a full disk shows before the first of them appears
            file.flush()
            os.fsync(file.fileno())


def check_outputs(files: list[Path | None], inputs: list[str]) -> None:
    """ArgumentError, before any work, where a file cannot be written or would take the place of another."""
    taken = {Path(name).resolve() for name in inputs if name}
    for path in files:
        if path is None:
            continue
        if not path.parent.is_dir() or path.is_dir():
            reason = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise ArgumentError(f"cannot write {path}: {reason}; name another file")
        if path.resolve() in taken:
            raise ArgumentError(f"{path} is named twice, or is also read; it is untouched; name another file")
        taken.add(path.resolve())


def write_line(file: BinaryIO, text: str) -> None:
    """UTF-8 and LF, whatever the locale; what is not UTF-8, as some file names are, becomes question marks."""
    file.write(text.encode("utf-8", "replace") + b"\n")


def to_json(record: Mapping[str, Any]) -> str:
    """A record on one line."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


SECONDS = 10.0
"""Between two lines, where standard error is no terminal; what takes less says nothing."""


@contextmanager
def counting(what: str, then: str = "") -> Iterator[Callable[[int, int], None]]:
    """A function that is told how many are done, and of how many; `what` begins a line, `then` is what comes after."""
    with Terminal(stderr=True) as terminal:
        begun, said = False, time.monotonic()

        def tell(done: int, total: int) -> None:
            nonlocal begun, said
            if not begun:
                terminal.begin(0, total)
                begun = True
            terminal.advance(done)
            if then and done == total:
                terminal.end()
                terminal.wait(then)
            elif not terminal.console.is_terminal and time.monotonic() - said >= SECONDS:
                terminal.note(f"{what}: {done:,} of {total:,}")
                said = time.monotonic()

        yield tell
