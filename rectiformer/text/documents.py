"""Documents: where they start, speeches joined into debates, and segments of whole sentences cut out of them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, cycle, groupby, pairwise, takewhile
from operator import itemgetter

import numpy as np

from rectiformer.errors import DataError
from rectiformer.text.lines import display_name, read_lines

DOCUMENT_MARKER = "<d>"
MIN_LIMIT = 64
"""The smallest limit of `halvings`: two or three sentences."""
TABLE_COLUMNS = ("lines", "date", "section")

Row = tuple[str | None, str | None, str]  # source, target, name of the document; None where a line is not UTF-8


def is_boundary(documents: str, source: str, target: str, where: str) -> bool:
    """Whether a row is the border of two documents instead of a pair; a marker on one side only is a DataError."""
    if documents == "blank":
        return not source.strip() and not target.strip()
    if documents == "marker" and (is_marker(source) or is_marker(target)):
        if not (is_marker(source) and is_marker(target)):
            raise DataError(f"{where}: {DOCUMENT_MARKER} on one side only; put it on both sides or on none")
        return True
    return False


def is_marker(line: str) -> bool:
    """Whether a line is the marker alone, in files whose lines end with CR and LF, too."""
    return line.removesuffix("\r") == DOCUMENT_MARKER


@dataclass(frozen=True)
class DocumentLines:
    """A document of a file, and the lines before it that only mark its start."""

    borders: list[str] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)


def split_documents(lines: Iterable[str | None], documents: str) -> Iterator[DocumentLines]:
    """Lines grouped into documents, as `data.documents` = "blank" or "marker" says; concatenated, they are the lines.

    None is a line that was not UTF-8: an empty sentence, never a border. Borders at the end belong to a last document
    without sentences.
    """
    found = DocumentLines()
    for line in lines:
        if line is None or not is_boundary(documents, line, line, ""):
            found.sentences.append(line or "")
            continue
        if found.sentences:
            yield found
            found = DocumentLines()
        found.borders.append(line)
    if found.borders or found.sentences:
        yield found


def read_table(path: str) -> Iterator[tuple[int, str]]:
    """Number of lines and debate of every document of a TSV table, empty documents left out.

    The first line names the columns. A debate is a date and a section; other columns are not read.
    """
    name = display_name(path)
    rows = (line.split("\t") for text in read_lines(path) if (line := (text or "").removesuffix("\r")))
    header = next(rows, [])
    if missing := [column for column in TABLE_COLUMNS if column not in header]:
        raise DataError(f"{name}:1: no column {missing[0]!r}; the first line must name {', '.join(TABLE_COLUMNS)}")
    columns = [header.index(column) for column in TABLE_COLUMNS]
    for number, cells in enumerate(rows, 2):
        if len(cells) != len(header):
            raise DataError(f"{name}:{number}: {len(cells)} columns, but its first line has {len(header)}")
        lines, date, section = (cells[column] for column in columns)
        if not (lines.isascii() and lines.isdigit()):
            raise DataError(f"{name}:{number}: {lines!r} lines; write a whole number")
        if int(lines):
            yield int(lines), f"{date}\t{section}"


def join_debates(rows: Iterable[Row], table: str, documents: str, names: tuple[str, str]) -> Iterator[Row]:
    """The rows without borders, named by their debate, so that consecutive documents of one debate become one.

    A DataError unless table and rows have the same documents, with the same numbers of lines.
    """
    entries = read_table(table)
    number = 0
    for number, document in groupby(number_rows(rows, documents, names), key=itemgetter(0)):
        lines, debate = next(entries, (0, ""))
        found = 0
        for _, (source, target, _) in document:
            found += 1
            yield source, target, debate
        if found != lines:
            raise DataError(
                f"{display_name(table)} says document {number:,} has {lines:,} lines, but in {names[0]} it has "
                f"{found:,}; give each document of the file a row, in order"
            )
    if next(entries, None):
        raise DataError(f"{display_name(table)} has more documents than {names[0]}, which has {number:,}")


def number_rows(rows: Iterable[Row], documents: str, names: tuple[str, str]) -> Iterator[tuple[int, Row]]:
    """The rows that are not borders, each with the number of its document, from 1."""
    number, ended, name = 0, True, ""
    for line, row in enumerate(rows, 1):
        source, target, column = row
        where = f"{names[0]}:{line} and {names[1]}:{line}"
        if source is not None and target is not None and is_boundary(documents, source, target, where):
            ended = True
            continue
        number += ended or column != name
        ended, name = False, column
        yield number, row


def build_segments(
    lengths: Sequence[Sequence[int]] | np.ndarray, document_starts: Sequence[int] | np.ndarray, limits: Sequence[int]
) -> list[tuple[int, int]]:
    """Cut documents greedily into segments of whole sentences; the first and last sentence, exclusive, of each.

    A sentence is added while the longer side, one separator per sentence included, stays within the limit. A sentence
    that is longer by itself becomes a segment of its own. No segment crosses the start of a document.

    Args:
        lengths: [sentences, sides], without separators.
        document_starts: increasing, the first of them 0.
        limits: subwords per segment of the first document, of the second, and so on, cyclically.
    """
    totals = running_totals(lengths)
    segments = []
    documents = pairwise([*map(int, document_starts), len(lengths)])
    for (start, stop), limit in zip(documents, cycle(limits), strict=False):
        while start < stop:
            last = reach(totals, start, stop, limit)
            segments.append((start, last))
            start = last
    return segments


def halvings(limit: int) -> list[int]:
    """`limit`, half of it, and so on while a few sentences fit; then 1, for single sentences."""
    return [*takewhile(lambda part: part >= MIN_LIMIT, (limit >> times for times in count())), 1]


@dataclass(frozen=True)
class Window:
    """Sentences that are translated together; those from `context` to `first` were translated before."""

    context: int
    first: int
    last: int


def build_windows(lengths: Sequence[int], limit: int, overlap: int) -> list[Window]:
    """The segments of one document, each after the first with up to `overlap` sentences of context.

    Context is left out where no new sentence would fit after it.
    """
    totals = running_totals([[length] for length in lengths])
    windows: list[Window] = []
    first, stop = 0, len(lengths)
    while first < stop:
        begins = range(max(0, first - overlap), first)
        fitting = (begin for begin in begins if reach(totals, begin, stop, limit) > first)
        context = next(fitting, first)
        windows.append(Window(context, first, reach(totals, context, stop, limit)))
        first = windows[-1].last
    return windows


def running_totals(lengths: Sequence[Sequence[int]] | np.ndarray) -> list[np.ndarray]:
    """For each side, how many subwords precede each sentence, and the end, separators included."""
    sides = np.atleast_2d(np.asarray(lengths, dtype=np.int64)).T  # [sides, sentences]
    return [np.concatenate([[0], np.cumsum(side + 1)]) for side in sides]


def reach(totals: Sequence[np.ndarray], first: int, stop: int, limit: int) -> int:
    """Where a segment that begins with sentence `first` ends: at least one sentence later."""
    ends = (int(np.searchsorted(total, total[first] + limit, side="right")) - 1 for total in totals)
    return min(stop, max(first + 1, min(ends)))


def join_ids(sentences: Sequence[Sequence[int]], separator: int) -> list[int]:
    """The ids of sentences with a separator between any two."""
    return list(chain.from_iterable([separator, *ids] for ids in sentences))[1:]


def split_ids(ids: Sequence[int], separator: int) -> list[list[int]]:
    """The ids between separators: one part more than there are separators, some perhaps empty."""
    borders = [-1, *(index for index, id in enumerate(ids) if id == separator), len(ids)]
    return [list(ids[left + 1 : right]) for left, right in pairwise(borders)]
