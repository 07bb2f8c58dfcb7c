"""Word links of training text as cells of subwords: which target subword is linked to which source subword.

Two subwords are linked if any of their words are. Words are those of `rectiformer align` or, where the configuration
says so, whatever stands between spaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeVar

import numpy as np

from rectiformer.errors import DataError
from rectiformer.measure.alignment import check_links, parse_links
from rectiformer.measure.words import Span, given_spans, pieces_to_words, word_spans
from rectiformer.text.lines import display_name, read_lines
from rectiformer.text.vocabulary import Piece

LINK_ARRAYS = ("links.cells", "links.starts")
CELL_TYPE = "<u2"
MAX_LINKED_LENGTH = 1 << 16
"""Subwords that a side of a linked pair may have, so that an index fits into two bytes."""
SPANS: dict[str, Callable[[str], list[Span]]] = {"words": word_spans, "spaces": given_spans}
"""By `data.link_words`."""

Row = TypeVar("Row")


class LinkLine(NamedTuple):
    """A line of a links file, and where it is, for messages."""

    text: str = ""
    where: str = ""


class Cells(NamedTuple):
    """The linked subwords of several pairs, concatenated, and how many cells each pair has."""

    cells: np.ndarray  # [cells, 2]: a target subword and a source subword, counted from 0
    counts: np.ndarray  # [pairs]

    def cut(self, lengths: np.ndarray) -> Cells:
        """Only the cells inside of pairs cut to `lengths` [sides, pairs], source first; pairs of length 0 are left."""
        pair = np.repeat(np.arange(len(self.counts)), self.counts)
        inside = (self.cells < lengths[::-1, pair].T).all(1)
        return Cells(self.cells[inside], np.bincount(pair[inside], minlength=len(self.counts)))


class CellLinks:
    """The cells of the pairs of a copy, as views of its files."""

    def __init__(self, cells: np.ndarray, starts: np.ndarray) -> None:
        self.cells, self.starts = cells.reshape(-1, 2), starts

    def of(self, pair: int) -> np.ndarray:
        """Target and source subword of each linked cell of a pair: [cells, 2], a view."""
        return self.cells[self.starts[pair] : self.starts[pair + 1]]

    def fit(self, source_lengths: np.ndarray, target_lengths: np.ndarray, block: int) -> bool:
        """Whether there are cells for just these pairs, all of them inside; looked at `block` pairs at a time."""
        pairs, counts = len(source_lengths), np.diff(self.starts)
        if len(counts) != pairs or self.starts[0] != 0 or counts.min() < 0 or self.starts[-1] != len(self.cells):
            return False
        for start in range(0, pairs, block):
            part = slice(start, min(start + block, pairs))
            cells = self.cells[self.starts[part.start] : self.starts[part.stop]]
            lengths = np.stack([target_lengths[part], source_lengths[part]], 1)
            if (cells >= np.repeat(lengths, counts[part], axis=0)).any():
                return False
        return True


def with_links(rows: Iterable[Row], file: str | None, source: str) -> Iterator[tuple[Row, LinkLine]]:
    """Each row and its line of a links file, empty without a file; DataError unless the file has a line for each row.

    Args:
        source: what messages call the file that the rows are from.
    """
    if file is None:
        yield from ((row, LinkLine()) for row in rows)
        return
    name, lines, found = display_name(file), read_lines(file), iter(rows)
    for number, (row, line) in enumerate(zip_longest(found, lines), 1):
        if row is None or line is None:
            more = number + sum(1 for _ in (lines if row is None else found))
            counts = (more, number - 1) if row is None else (number - 1, more)
            raise DataError(
                f"{name} has {counts[0]:,} lines but {source} has {counts[1]:,}; line n of a links file links the "
                "words of pair n, and is empty where there are no links"
            )
        yield row, LinkLine(line, f"{name}:{number}")


def link_cells(
    lines: Sequence[LinkLine], texts: Sequence[Sequence[str]], pieces: Sequence[Sequence[Sequence[Piece]]], words: str
) -> Cells:
    """The linked subwords of several pairs; DataError, with file and line, for a link to a word that does not exist.

    Args:
        lines: the links of each pair; possible ones count as links.
        texts: the sentences of both sides.
        pieces: the subwords of the sentences of both sides.
        words: which words are linked, a key of `SPANS`.
    """
    found, counts = [], []
    for line, sentences, subwords in zip(lines, zip(*texts, strict=True), zip(*pieces, strict=True), strict=True):
        cells = cells_of_pair(line, sentences, subwords, SPANS[words]) if line.text.strip() else []
        found.extend(cells)
        counts.append(len(cells))
    return Cells(np.array(found, dtype=np.int64).reshape(-1, 2), np.array(counts, dtype=np.int64))


def cells_of_pair(
    line: LinkLine, texts: Sequence[str], pieces: Sequence[Sequence[Piece]], spans: Callable[[str], list[Span]]
) -> list[tuple[int, int]]:
    """The linked subwords of one pair, each once and in order: (target, source)."""
    links = parse_links(line.text, line.where)
    words = [spans(text) for text in texts]
    check_links(links, len(words[0]), len(words[1]), line.where)
    source, target = (pieces_of_words(*side) for side in zip(pieces, words, strict=True))
    linked = links.sure | links.possible
    return sorted({(row, column) for i, j in linked for row in target[j] for column in source[i]})


def pieces_of_words(pieces: Sequence[Piece], words: Sequence[Span]) -> list[list[int]]:
    """The subwords that share a character with each word."""
    found: list[list[int]] = [[] for _ in words]
    for index, inside in enumerate(pieces_to_words([(piece.start, piece.end) for piece in pieces], words)):
        for word in inside:
            found[word].append(index)
    return found
