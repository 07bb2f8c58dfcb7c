"""Bytes to lines, split on LF alone, so that a file has as many lines here as for every tool that counts LFs."""

from __future__ import annotations

import gzip
import lzma
import shutil
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO, cast

from rectiformer.errors import DataError, NoSpaceError

DATASET = "hf:"  # before the name of a Hugging Face dataset
BOM = b"\xef\xbb\xbf"
SPOOLED_AT_ONCE = 1 << 16  # bytes; a pipe holds as many
LONGEST_LINE = 16 << 20  # bytes; its subwords as Python numbers still fit a small machine


def read_lines(path: str, bad_utf8: str = "error") -> Iterator[str | None]:
    """The lines of a plain, .gz or .xz file, of standard input (`-`) or of a dataset (`hf:`), without their LF.

    CR, NUL, U+0085 and U+2028 stay inside a line; a byte order mark at the start of the file is dropped; a last line
    needs no LF. Files of any size are streamed, but a line longer than `LONGEST_LINE` is a DataError.

    Args:
        bad_utf8: "error" raises a DataError naming file, line and byte of the line, all counted from 1; "replace" puts
            U+FFFD there; "skip" yields None for the whole line, so that line counts hold.
    """
    if path.startswith(DATASET):
        from rectiformer.text.datasets import read_column  # only for those who have that package

        yield from read_column(path.removeprefix(DATASET))
        return
    with open_text_in(path) as file:
        line = file.readline(LONGEST_LINE + 1)
        skipped = len(BOM) if line.startswith(BOM) else 0
        line = line[skipped:]
        number = 1
        while line:
            if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                raise DataError(
                    f"{display_name(path)}:{number}: line is longer than {LONGEST_LINE:,} bytes; split or remove it"
                )
            try:
                yield line.removesuffix(b"\n").decode()
            except UnicodeDecodeError as error:
                yield replace_bad(error, bad_utf8, f"{display_name(path)}:{number}", skipped)
            line = file.readline(LONGEST_LINE + 1)
            number, skipped = number + 1, 0


def replace_bad(error: UnicodeDecodeError, bad_utf8: str, where: str, skipped: int = 0) -> str | None:
    """What stands for a line that is not UTF-8, as in `read_lines`. `skipped` bytes of the line came before it."""
    line: bytes = error.object
    if bad_utf8 == "replace":
        return line.decode("utf-8", errors="replace")
    if bad_utf8 == "skip":
        return None
    byte = error.start + skipped + 1
    raise DataError(
        f'{where}:{byte}: not UTF-8 (0x{line[error.start]:02X}); bad_utf8 can be "replace" or "skip"'
    ) from None


@contextmanager
def open_text_in(path: str) -> Iterator[BinaryIO]:
    """The bytes of a text file, decompressed; what cannot be opened or read to its end is a DataError naming it."""
    try:
        with open_bytes(path) as file:
            yield file
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {display_name(path)}: {reason}") from error


def open_bytes(path: str) -> AbstractContextManager[BinaryIO]:
    if path == "-":
        return nullcontext(standard_input())  # not ours to close
    if path.endswith(".gz"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.endswith(".xz"):
        return cast(BinaryIO, lzma.open(path, "rb"))
    return open(path, "rb")


def standard_input() -> BinaryIO:
    """The bytes of standard input; DataError where this process was started without one."""
    if sys.stdin is None:
        raise DataError("cannot read stdin: it is closed; feed it lines, or name a file")
    return sys.stdin.buffer


def local_path(path: str) -> str:
    """Where the text is on this machine, if it is: a file, or the file or folder of a dataset."""
    return path.removeprefix(DATASET).partition("?")[0] if path.startswith(DATASET) else path


def display_name(path: str) -> str:
    """How messages call a file."""
    return "stdin" if path == "-" else path


def can_be_read_once_only(path: str) -> bool:
    """Whether this is standard input or a pipe, such as the shell's `<(command)`."""
    if path == "-":
        return True
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return False  # reading it says why
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)


def spool(path: str, folder: Path, meanwhile: Callable[[], None] = lambda: None) -> str:
    """Copy what can be read once only into a file of its name in `folder`; its path.

    It may take half of what is free on that disk, as what is made of it needs the other half: more is a NoSpaceError,
    with nothing left of the copy, so that input without end ends too. `meanwhile` is called all along.
    """
    copy, copied = folder / Path(display_name(path)).name, 0
    try:
        with nullcontext(standard_input()) if path == "-" else open(path, "rb") as source, copy.open("xb") as target:
            while data := source.read(SPOOLED_AT_ONCE):
                meanwhile()
                copied += target.write(data)
                if copied > shutil.disk_usage(folder).free:
                    raise NoSpaceError(
                        f"{display_name(path)} has more than {copied:,} bytes, half of what the disk of {folder} had "
                        "free for a copy to read twice; nothing was kept; end it sooner, or write on a larger disk"
                    )
    except BaseException:
        copy.unlink(missing_ok=True)
        raise
    return str(copy)
