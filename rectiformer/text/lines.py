"""Lines of text out of files, standard input and Hugging Face datasets.

Lines are split at LF alone, so that a file has as many lines here as for every tool that counts LFs. A column of a
dataset saved on disk, in local files or on the hub is named

    hf:NAME?column=COLUMN&split=train&config=CONFIG

NAME is a folder written by `save_to_disk`, a parquet, JSON or CSV file, or a name on the hub. COLUMN may lead into a
cell, as `translation.de` does; `split` defaults to "train", `config` to the dataset's own default.
"""

import gzip
import lzma
import os
import shutil
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import reduce
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qsl

from rectiformer.errors import ConfigError, DataError, NoSpaceError, unknown_name

DATASET = "hf:"  # before the name of a Hugging Face dataset
DECOMPRESSORS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
BOM = b"\xef\xbb\xbf"
SPOOL_BLOCK = 1 << 16  # bytes; as many as a pipe holds
REMEDY = "repair it, or let `translate --bad-utf8` or, for training, data.bad_utf8 replace or skip such lines"
MAX_LINE = 16 << 20  # bytes; its subwords as Python integers still fit into the memory of a small machine
DATASET_OPTIONS = ("column", "split", "config")
DATASET_FILES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
DATASET_ROWS = 1_000  # read at once


def read_lines(path: str, bad_utf8: str = "error") -> Iterator[str | None]:
    """The lines of a plain, .gz or .xz file, of standard input (`-`) or of a dataset (`hf:`), without their LF.

    CR, NUL, U+0085 and U+2028 stay inside a line; a byte order mark at the start of the file is dropped; the last line
    needs no LF. Files of any size are streamed, but a line longer than `MAX_LINE` raises a DataError.

    Args:
        bad_utf8: "error" raises a DataError that names file, line and byte, counted from 1; "replace" substitutes
            U+FFFD; "skip" yields None for the whole line, so that lines keep their numbers.
    """
    if path.startswith(DATASET):
        yield from read_column(path.removeprefix(DATASET))
        return
    with open_text(path) as file:
        line, number = file.readline(MAX_LINE + 1), 1
        while line:
            if len(line) > MAX_LINE and not line.endswith(b"\n"):
                raise DataError(
                    f"{display_name(path)}:{number}: line is longer than {MAX_LINE:,} bytes; split or remove it"
                )
            skipped = len(BOM) if number == 1 and line.startswith(BOM) else 0
            line = line[skipped:]
            if not line:
                return  # a byte order mark was all there was
            try:
                yield line.removesuffix(b"\n").decode()
            except UnicodeDecodeError as error:
                yield replace_bad(error, bad_utf8, f"{display_name(path)}:{number}", skipped)
            line = file.readline(MAX_LINE + 1)
            number += 1


def replace_bad(error: UnicodeDecodeError, bad_utf8: str, where: str, skipped: int = 0) -> str | None:
    """What replaces a line that is not UTF-8, as in `read_lines`; `skipped` bytes of the line came before it."""
    line: bytes = error.object
    if bad_utf8 == "replace":
        return line.decode("utf-8", errors="replace")
    if bad_utf8 == "skip":
        return None
    byte = error.start + skipped + 1
    raise DataError(f"{where}:{byte}: not UTF-8 (0x{line[error.start]:02X}); {REMEDY}") from None


@contextmanager
def open_text(path: str) -> Iterator[BinaryIO]:
    """The bytes of a text file, decompressed; a DataError names the file where it cannot be read to its end."""
    try:
        opener = DECOMPRESSORS.get(path[-3:], open)
        with nullcontext(standard_input()) if path == "-" else opener(path, "rb") as file:  # stdin is not ours to close
            yield file
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {display_name(path)}: {reason}") from error


def standard_input() -> BinaryIO:
    """The bytes of standard input; DataError if this process was started without it."""
    if sys.stdin is None:
        raise DataError("cannot read stdin: it is closed; feed it lines, or name a file")
    return sys.stdin.buffer


def local_path(path: str) -> str:
    """Where the text would be on this machine: a file, or the file or folder of a dataset."""
    return path.removeprefix(DATASET).partition("?")[0] if path.startswith(DATASET) else path


def display_name(path: str) -> str:
    """What messages call a file."""
    return "stdin" if path == "-" else path


def is_stream(path: str) -> bool:
    """Whether this is standard input or a pipe, such as the shell's `<(command)`."""
    if path == "-":
        return True
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return False  # reading it says why
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)


def spool(path: str, folder: Path, meanwhile: Callable[[], None] = lambda: None) -> str:
    """Copy a stream into a file of the same name in `folder`, and return its path.

    The copy may take half of the free disk space, since the prepared data needs the other half. Beyond that, as for
    endless input, it is removed again and a NoSpaceError raised. `meanwhile` is called for every block.
    """
    copy, copied = folder / Path(display_name(path)).name, 0
    try:
        with nullcontext(standard_input()) if path == "-" else open(path, "rb") as source, copy.open("xb") as target:
            while data := source.read(SPOOL_BLOCK):
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


def read_column(address: str) -> Iterator[str]:
    """The cells of a column, one line each: a LF inside becomes a space, a missing cell an empty line."""
    name, options = parse_address(address)
    top, *inside = options["column"].split(".")
    number = 0
    for cells in read_cells(name, top, options):
        for cell in cells:
            number += 1
            try:
                text = reduce(lambda value, key: value[key], inside, cell)
            except (KeyError, TypeError):
                raise DataError(f"hf:{name}, row {number:,}: no {options['column']!r} in {cell!r:.80}") from None
            if not isinstance(text, str | None):
                raise DataError(f"hf:{name}, row {number:,}: {options['column']} is {text!r:.80}, not text")
            yield (text or "").replace("\n", " ")


def parse_address(address: str) -> tuple[str, dict[str, str]]:
    """The name of a dataset and its options; a ConfigError unless they name a column."""
    name, _, query = address.partition("?")
    options = dict(parse_qsl(query))
    for key in options:
        if key not in DATASET_OPTIONS:
            raise ConfigError(unknown_name("option", key, DATASET_OPTIONS, section=f"hf:{name}?"))
    if "column" not in options:
        raise ConfigError(f"hf:{address} names no column; write hf:{name}?column=NAME, such as translation.de")
    return name, options


def read_cells(name: str, column: str, options: Mapping[str, str]) -> Iterator[list[Any]]:
    """A column, some rows at a time; whatever goes wrong in the dataset is a DataError on one line."""
    try:
        table = open_table(name, options.get("split", "train"), options.get("config"))
        names = table.column_names
        if names is not None and column not in names:
            raise DataError(f"hf:{name} has no column {column!r}; it has {', '.join(names)}")
        parts: Iterable[Mapping[str, list[Any]]] = table.select_columns([column]).iter(batch_size=DATASET_ROWS)
        for part in parts:
            yield part[column]
    except (ConfigError, DataError):
        raise
    except Exception as error:  # from any of the packages behind datasets
        raise DataError(f"cannot read hf:{name}: {type(error).__name__}: {one_line(str(error))[:300]}") from error


def open_table(name: str, split: str, config: str | None) -> Any:
    """A split of a dataset, not yet read."""
    try:
        from datasets import DatasetDict, load_dataset, load_from_disk
    except ImportError as error:
        raise ConfigError(f"hf:{name} needs the package datasets; install it, or rectiformer[datasets]") from error
    if not os.path.exists(name):
        return load_dataset(name, config, split=split, streaming=True)
    if os.path.isfile(name):
        builder = DATASET_FILES.get(os.path.splitext(name)[1])
        if builder is None:
            raise ConfigError(f"hf:{name} is a file, but its name ends in none of {', '.join(DATASET_FILES)}")
        return load_dataset(builder, data_files={split: name}, split=split, streaming=True)
    found = load_from_disk(name)
    if not isinstance(found, DatasetDict):
        return found
    if split not in found:
        raise DataError(f"hf:{name} has no split {split!r}; it has {', '.join(map(str, found))}")
    return found[split]


def one_line(text: str) -> str:
    """The text with every run of white space, line ends included, as one space."""
    return " ".join(text.split())
