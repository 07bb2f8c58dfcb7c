"""Lines and files that commands give out: as they are, in UTF-8, never over what is read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from rectiformer.errors import ArgumentError, DataError


def write_all(texts: Iterable[str], path: Path | None = None, inputs: Iterable[str] = ()) -> None:
    """Lines to a file or standard output, each as soon as it is there; ArgumentError if the file is an input."""
    for name in inputs:
        if path is not None and path.exists() and os.path.exists(name) and path.samefile(name):
            raise ArgumentError(f"--out {path} is also read; it is untouched; name another file")
    if path is None and sys.stdout is None:
        raise ArgumentError("cannot use standard output: it is closed; write to a file or a pipe")
    with nullcontext(sys.stdout.buffer) if path is None else path.open("wb") as file:
        for text in texts:
            write_line(file, text)
            file.flush()


@contextmanager
def open_new(names: Sequence[str]) -> Iterator[list[BinaryIO]]:
    """New files, all or none of them: DataError where one exists, and none stays where writing fails."""
    for name in names:
        if os.path.lexists(name):
            raise DataError(f"{name} exists; nothing was written; name other files, or remove it")
    try:
        with ExitStack() as stack:
            yield [stack.enter_context(open(name, "xb")) for name in names]
    except BaseException:
        for name in names:
            Path(name).unlink(missing_ok=True)
        raise


def write_line(file: BinaryIO, text: str) -> None:
    """UTF-8 and LF, whatever the locale."""
    file.write(text.encode("utf-8") + b"\n")


def to_json(record: Mapping[str, Any]) -> str:
    """A record on one line."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False)
