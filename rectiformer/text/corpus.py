"""Parallel text: sentence pairs of the configured files or of the built-in grammar, and where documents start."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from rectiformer.config import DataConfig, Files
from rectiformer.errors import DataError
from rectiformer.text.documents import DOCUMENT_MARKER, Row, is_boundary, join_debates
from rectiformer.text.files import check_files, files_of, has_split, input_files
from rectiformer.text.lines import can_be_read_once_only, display_name, read_lines, spool

NO_LINE = "\n"  # what `zip_longest` pads with: no line can be it
BATCH_PAIRS, BATCH_CHARACTERS = 4_096, 4_000_000


class TextPair(NamedTuple):
    """A sentence and its translation, neither of them blank."""

    source: str
    target: str
    document_start: bool
    """True of the first pair of a document; without documents, of the very first pair alone."""
    corpus: int = 0
    """Which of the files it is from, or files side by side."""

    @property
    def sides(self) -> tuple[str, str]:
        """Source and target."""
        return self[:2]


@dataclass
class Counts:
    """What became of the pairs that were read."""

    pairs: int = 0
    documents: int = 0
    empty: int = 0
    bad_utf8: int = 0
    too_long: int = 0
    truncated: int = 0
    segments: int = 0
    """Into which the pairs were joined; 0 where each stands by itself."""

    def describe(self) -> str:
        """One line, such as "9 pairs in 2 documents; dropped 1 empty, 0 not UTF-8, 3 too long; truncated 0"."""
        joined = f", {self.segments:,} segments" if self.segments else ""
        return (
            f"{self.pairs:,} pairs in {self.documents:,} documents{joined}; dropped {self.empty:,} empty, "
            f"{self.bad_utf8:,} not UTF-8, {self.too_long:,} too long; truncated {self.truncated:,}"
        )


def read_pairs(config: DataConfig, split: str, counts: Counts) -> Iterator[TextPair]:
    """The pairs of `split`, "train" or "valid", in the order of the files; `counts` is brought up to date on the way.

    Pairs with a blank side and, where `bad_utf8` is "skip", with a line that is not UTF-8 are dropped and counted.
    Files of different length are a DataError, but only once both have been read to the end; so is a split without any
    pair. There are no pairs where files are given for training and none for validation.
    """
    check_files(config)
    sources, targets = files_of(config, split)
    if sources:
        tables = config.document_tables if split == "train" else ()
        yield from read_files(config, sources, targets, tables, counts)
    elif has_split(config, split):
        yield from read_grammar(config, split, counts)


def read_grammar(config: DataConfig, split: str, counts: Counts) -> Iterator[TextPair]:
    from rectiformer.text.grammar import (
        Pair,
        draw_documents,
        draw_sentences,
    )  # only for those without text of their own

    number = config.sentences if split == "train" else config.valid_sentences
    drawn: Iterable[Iterable[Pair]] = [draw_sentences(number, config.seed, split)]
    if config.grammar == "documents":
        drawn = draw_documents(number, config.seed, split)  # more than enough
    for document in drawn:
        if counts.pairs >= number:
            return
        counts.documents += 1
        for index, pair in enumerate(document):
            counts.pairs += 1
            yield TextPair(pair.source, pair.target, document_start=index == 0)


def read_files(config: DataConfig, sources: Files, targets: Files, tables: Files, counts: Counts) -> Iterator[TextPair]:
    for number, (source, target, table) in enumerate(zip_longest(sources, targets or sources, tables)):
        rows = read_columns(source, config) if config.format == "tsv" else read_two_files(source, target, config)
        names = (display_name(source), display_name(target))
        if table is not None:
            rows = join_debates(rows, table, config.documents, names)
        yield from keep_pairs(rows, config.documents, counts, names, number)
    if not counts.pairs:
        files = ", ".join(map(display_name, dict.fromkeys(sources + targets)))
        raise DataError(f"no sentence pairs in {files}: {counts.describe()}")


def read_two_files(source: str, target: str, config: DataConfig) -> Iterator[Row]:
    suspect = 0
    left_lines, right_lines = read_lines(source, config.bad_utf8), read_lines(target, config.bad_utf8)
    for number, (left, right) in enumerate(zip_longest(left_lines, right_lines, fillvalue=NO_LINE), 1):
        if left == NO_LINE or right == NO_LINE:
            longer = number + sum(1 for _ in (right_lines if left == NO_LINE else left_lines))
            lengths = (number - 1, longer) if left == NO_LINE else (longer, number - 1)
            raise DataError(
                f"{display_name(source)} has {lengths[0]:,} lines but {display_name(target)} has {lengths[1]:,}; "
                f"first suspect line: {suspect or number:,}; line n of one must translate line n of the other"
            )
        if not suspect and look_unlike(left, right):
            suspect = number
        yield left, right, ""


def look_unlike(left: str | None, right: str | None) -> bool:
    """Whether two lines are hardly translations of each other: one is blank, or over four times longer than the other.

    Sixteen characters are granted first, so that "Yes." may have a long translation.
    """
    if left is None or right is None:
        return False
    shorter, longer = len(left.strip()), len(right.strip())
    if shorter > longer:
        shorter, longer = longer, shorter
    return shorter == 0 < longer or longer > 4 * shorter + 16


def read_columns(path: str, config: DataConfig) -> Iterator[Row]:
    needed = 3 if config.documents == "column" else 2
    for number, line in enumerate(read_lines(path, config.bad_utf8), 1):
        if line is None:
            yield None, None, ""
        elif not line.strip() or (config.documents == "marker" and line == DOCUMENT_MARKER):
            yield line, line, ""
        else:
            columns = line.split("\t")
            if len(columns) < needed:
                raise DataError(
                    f"{display_name(path)}:{number}: {len(columns)} columns, but {needed} are needed; separate source, "
                    f"target{' and document name' if needed == 3 else ''} by tabs"
                )
            yield columns[0], columns[1], columns[2] if needed == 3 else ""


def keep_pairs(
    rows: Iterable[Row], documents: str, counts: Counts, names: tuple[str, str], corpus: int = 0
) -> Iterator[TextPair]:
    """The rows that are pairs. Except where `documents` is "none", a file starts with a new document."""
    document_start, document = documents != "none" or not counts.documents, ""
    for number, (source, target, name) in enumerate(rows, 1):
        if source is None or target is None:
            counts.bad_utf8 += 1
        elif is_boundary(documents, source, target, f"{names[0]}:{number} and {names[1]}:{number}"):
            document_start = True
        elif not source.strip() or not target.strip():
            counts.empty += 1
        else:
            document_start = document_start or name != document
            document = name
            counts.pairs += 1
            counts.documents += document_start
            yield TextPair(source, target, document_start, corpus)
            document_start = False


@contextmanager
def spool_inputs(config: DataConfig, folder: Path, meanwhile: Callable[[], None]) -> Iterator[DataConfig]:
    """The configuration with standard input and pipes copied into `folder` for a while, so that all can be reread.

    `meanwhile` is called all the time that copying takes.
    """
    check_files(config)
    spooled = folder / "spool"
    copies = {}
    for index, path in enumerate(filter(can_be_read_once_only, dict.fromkeys(input_files(config)))):
        (spooled / str(index)).mkdir(parents=True)
        copies[path] = spool(path, spooled / str(index), meanwhile)

    def reread(files: Files) -> Files:
        return tuple(copies.get(path, path) for path in files)

    yield replace(
        config,
        source=reread(config.source),
        target=reread(config.target),
        valid_source=reread(config.valid_source),
        valid_target=reread(config.valid_target),
        document_tables=reread(config.document_tables),
    )
    shutil.rmtree(spooled, ignore_errors=True)


def sample_lines(config: DataConfig, size: int, characters: int) -> tuple[list[str], list[str]]:
    """Source and target lines of `size` training pairs, any as likely as any other, cut to so many characters.

    Where those will come from a stream, of validation pairs.
    """
    split = "valid" if config.stream else "train"
    generator = random.Random(config.seed)
    sources: list[str] = []
    targets: list[str] = []
    for index, pair in enumerate(read_pairs(config, split, Counts())):
        source, target = pair.source[:characters], pair.target[:characters]
        if index < size:
            sources.append(source)
            targets.append(target)
        elif (place := generator.randrange(index + 1)) < size:
            sources[place], targets[place] = source, target
    return sources, targets


def in_batches(pairs: Iterable[TextPair]) -> Iterator[list[TextPair]]:
    """Pairs in groups of `BATCH_PAIRS`, or fewer where they are long: never many more than `BATCH_CHARACTERS`."""
    batch: list[TextPair] = []
    characters = 0
    for pair in pairs:
        batch.append(pair)
        characters += len(pair.source) + len(pair.target)
        if len(batch) == BATCH_PAIRS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def read_ahead(batches: Iterator[list[TextPair]]) -> Iterator[list[TextPair]]:
    """The same, each read by a thread of its own while the one before is worked on."""
    with ThreadPoolExecutor(max_workers=1) as reader:
        coming: Future[list[TextPair]] = reader.submit(next, batches, [])
        while found := coming.result():
            coming = reader.submit(next, batches, [])
            yield found
