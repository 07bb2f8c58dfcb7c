"""Parallel text: sentence pairs of the configured files or of the built-in grammar, and where documents start."""

import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from rectiformer.config import DataConfig, Files
from rectiformer.errors import ConfigError, DataError
from rectiformer.text.documents import Row, is_boundary, is_marker, join_debates
from rectiformer.text.grammar import Pair, draw_documents, draw_sentences
from rectiformer.text.lines import DATASET, display_name, is_stream, parse_address, read_lines, spool
from rectiformer.text.links import MAX_LINKED_LENGTH, LinkLine, with_links

NO_LINE = "\n"  # what `zip_longest` pads with: no line is equal to it
BATCH_PAIRS, BATCH_CHARACTERS = 4_096, 4_000_000
FILE_KEYS = ("source", "target", "links", "valid_source", "valid_target", "document_tables")


def has_split(config: DataConfig, split: str) -> bool:
    """Whether there are pairs of this split, "train" or "valid"."""
    return bool(files_of(config, split)[0]) or not (config.source or config.stream)


def has_documents(config: DataConfig) -> bool:
    """Whether the text says where documents start."""
    return config.documents != "none" or (config.grammar == "documents" and not config.source)


def files_of(config: DataConfig, split: str) -> tuple[Files, Files]:
    """Source and target files of a split."""
    return (config.source, config.target) if split == "train" else (config.valid_source, config.valid_target)


def input_files(config: DataConfig) -> Files:
    """All files of all splits."""
    return tuple(chain.from_iterable(getattr(config, key) for key in FILE_KEYS))


def check_files(config: DataConfig) -> None:
    """Raise a ConfigError if the configured files cannot belong together, whatever they contain."""
    for split, prefix in (("train", "data."), ("valid", "data.valid_")):
        sources, targets = files_of(config, split)
        if config.format == "tsv" and targets:
            raise ConfigError(f'{prefix}target is given, but with data.format = "tsv" {prefix}source holds both sides')
        if config.format == "lines" and len(sources) != len(targets):
            raise ConfigError(
                f"{prefix}source names {len(sources)} and {prefix}target {len(targets)} files; name one for each"
            )
    if config.stream and config.source:
        raise ConfigError(
            f"data.stream reads the training text from standard input, but data.source names {len(config.source)} "
            "files; leave it empty, or prepare them first and name the folder with --data"
        )
    if config.weights and len(config.weights) != max(1, len(config.source)):
        raise ConfigError(
            f"data.weights has {len(config.weights)} numbers but data.source {len(config.source)} files; give one for "
            "each, or none"
        )
    if config.documents == "column" and config.format != "tsv":
        raise ConfigError(f'data.documents = "column" needs data.format = "tsv", not "{config.format}"')
    if config.document_tables and len(config.document_tables) != len(config.source):
        raise ConfigError(
            f"data.document_tables names {len(config.document_tables)} files but data.source {len(config.source)}; "
            "name one for each, or none"
        )
    if config.source and config.documents == "none" and (config.segment_length or config.document_tables):
        key = "segment_length" if config.segment_length else "document_tables"
        raise ConfigError(f'data.{key} needs documents: say where they start in data.documents, now "none"')
    check_link_files(config)
    if config.mixed and not config.segment_length:
        raise ConfigError(
            "data.mixed = true, but data.segment_length = 0: there are no lengths to mix; set the longest one"
        )
    if config.segment_length == 1:
        raise ConfigError(
            "data.segment_length = 1, but a sentence needs a subword and its separator; use 2 or more, or 0"
        )
    if config.segment_length and not config.source and config.grammar != "documents":
        raise ConfigError(
            f'data.segment_length needs documents: use data.grammar = "documents", not "{config.grammar}"'
        )
    if input_files(config).count("-") > 1:
        raise ConfigError("standard input (`-`) is named more than once in [data], but it can be read only once")
    for name in input_files(config):
        if name.startswith(DATASET):
            parse_address(name.removeprefix(DATASET))


def check_link_files(config: DataConfig) -> None:
    """Raise a ConfigError if the links cannot be those of the configured text."""
    if not config.links:
        return
    if len(config.links) != len(config.source):
        raise ConfigError(
            f"data.links names {len(config.links)} files but data.source {len(config.source)}; name one for each, or "
            "none (`rectiformer data generate` writes the built-in grammar with its links)"
        )
    for key in ("segment_length", "document_tables"):
        if getattr(config, key):
            raise ConfigError(f"data.links are of sentence pairs, so they do not go with data.{key}; leave one out")
    if config.max_length >= MAX_LINKED_LENGTH:
        raise ConfigError(
            f"data.max_length = {config.max_length:,}, but pairs with data.links have at most "
            f"{MAX_LINKED_LENGTH - 1:,} subwords a side"
        )


class TextPair(NamedTuple):
    """A sentence and its translation, neither of them blank."""

    source: str
    target: str
    document_start: bool
    """True for the first pair of a document; without documents, only for the very first pair."""
    corpus: int = 0
    """The index of the file, or pair of files, it comes from."""
    links: LinkLine = LinkLine()
    """Which words are linked, if a file says so."""


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
    """How many segments the pairs were joined into; 0 where each pair stands by itself."""

    def describe(self) -> str:
        """One line, such as "9 pairs in 2 documents; dropped 1 empty, 0 not UTF-8, 3 too long; truncated 0"."""
        joined = f", {self.segments:,} segments" if self.segments else ""
        return (
            f"{self.pairs:,} pairs in {self.documents:,} documents{joined}; dropped {self.empty:,} empty, "
            f"{self.bad_utf8:,} not UTF-8, {self.too_long:,} too long; truncated {self.truncated:,}"
        )


def read_pairs(config: DataConfig, split: str, counts: Counts) -> Iterator[TextPair]:
    """The pairs of `split`, "train" or "valid", in the order of the files; `counts` is updated on the way.

    Pairs with a blank side are dropped and counted, and so, where `bad_utf8` is "skip", are lines that are not UTF-8.
    Files of different lengths raise a DataError, once both have been read to the end, and so does a split without any
    pair. There are no validation pairs where files are configured for training only.
    """
    check_files(config)
    sources, targets = files_of(config, split)
    if sources:
        tables, links = (config.document_tables, config.links) if split == "train" else ((), ())
        yield from read_files(config, sources, targets, tables, links, counts)
    elif has_split(config, split):
        yield from read_grammar(config, split, counts)


def read_grammar(config: DataConfig, split: str, counts: Counts) -> Iterator[TextPair]:
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


def read_files(
    config: DataConfig, sources: Files, targets: Files, tables: Files, links: Files, counts: Counts
) -> Iterator[TextPair]:
    for number, (source, target, table, file) in enumerate(zip_longest(sources, targets or sources, tables, links)):
        rows = read_columns(source, config) if config.format == "tsv" else read_two_files(source, target, config)
        names = (display_name(source), display_name(target))
        if table is not None:
            rows = join_debates(rows, table, config.documents, names)
        yield from keep_pairs(with_links(rows, file, names[0]), config.documents, counts, names, number)
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
    """Whether two lines are unlikely to be translations: one is blank, or over four times longer than the other.

    Sixteen characters do not count, so that "Yes." may have a long translation.
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
        elif not line.strip() or (config.documents == "marker" and is_marker(line)):
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
    rows: Iterable[tuple[Row, LinkLine]], documents: str, counts: Counts, names: tuple[str, str], corpus: int = 0
) -> Iterator[TextPair]:
    """The rows that are pairs. Except where `documents` is "none", a file starts with a new document."""
    document_start, document = documents != "none" or not counts.documents, ""
    for number, ((source, target, name), links) in enumerate(rows, 1):
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
            yield TextPair(source, target, document_start, corpus, links)
            document_start = False


@contextmanager
def spool_inputs(config: DataConfig, folder: Path, meanwhile: Callable[[], None]) -> Iterator[DataConfig]:
    """The configuration with standard input and pipes copied into `folder` meanwhile, so that all can be read again.

    `meanwhile` is called for every block that is copied.
    """
    check_files(config)
    spooled = folder / "spool"
    copies = {}
    for index, path in enumerate(filter(is_stream, dict.fromkeys(input_files(config)))):
        (spooled / str(index)).mkdir(parents=True)
        copies[path] = spool(path, spooled / str(index), meanwhile)
    files: Any = {key: tuple(copies.get(path, path) for path in getattr(config, key)) for key in FILE_KEYS}
    yield replace(config, **files)
    shutil.rmtree(spooled, ignore_errors=True)


def sample_lines(config: DataConfig, size: int, characters: int) -> tuple[list[str], list[str]]:
    """Source and target lines of `size` training pairs drawn uniformly, each cut to `characters`.

    Drawn from the validation pairs where training text comes from a stream.
    """
    split = "valid" if config.stream else "train"
    generator = random.Random(config.seed)
    sample: list[tuple[str, str]] = []
    for index, pair in enumerate(read_pairs(config, split, Counts())):
        cut = pair.source[:characters], pair.target[:characters]
        if index < size:
            sample.append(cut)
        elif (slot := generator.randrange(index + 1)) < size:
            sample[slot] = cut
    return [source for source, _ in sample], [target for _, target in sample]


def in_batches(pairs: Iterable[TextPair]) -> Iterator[list[TextPair]]:
    """Pairs in groups of `BATCH_PAIRS`, or of about `BATCH_CHARACTERS` where they are long."""
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
    """The same batches, the next one read by a thread while the caller works on this one."""
    with ThreadPoolExecutor(max_workers=1) as reader:
        coming: Future[list[TextPair]] = reader.submit(next, batches, [])
        while found := coming.result():
            coming = reader.submit(next, batches, [])
            yield found
