"""The encoded pairs of one split in a folder of plain arrays: written, cut into segments, memory-mapped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rectiformer.config import DataConfig
from rectiformer.errors import DataError
from rectiformer.text.batches import BLOCK, PackedPairs
from rectiformer.text.corpus import Counts, TextPair
from rectiformer.text.documents import build_segments, halvings
from rectiformer.text.vocabulary import Vocabulary

SIDES = ("source", "target")
ARRAYS = ("source.ids", "source.starts", "target.ids", "target.starts", "documents.starts")
TEXTS = ("source.txt", "target.txt")


def damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path}: {what}; remove the folder and run `rectiformer data prepare` again")


class Ids(NamedTuple):
    """The ids of several lines, concatenated, and how many each has."""

    ids: np.ndarray
    lengths: np.ndarray


class Encoded(PackedPairs):
    """The pairs of one split or copy in a folder, as views of its files, with no special symbols but separators.

    Args:
        segmented: whether pairs are segments, with a separator after each sentence; the last one is left out here.
        verify: read all ids once and check that they are in the vocabulary.
    """

    def __init__(
        self, folder: Path, source: Vocabulary, target: Vocabulary, segmented: bool = False, verify: bool = True
    ) -> None:
        ids = [map_ids(folder / f"{side}.ids", of, verify) for side, of in zip(SIDES, (source, target), strict=True)]
        paths = [folder / f"{side}.starts" for side in SIDES]
        lengths = [read_lengths(path, len(each), segmented) for path, each in zip(paths, ids, strict=True)]
        super().__init__(ids, [map_array(path, "<i8") for path in paths], lengths)
        self.document_starts = map_array(folder / "documents.starts", "<i8")
        if len(self.target_lengths) != self.pairs:
            raise damaged(folder, f"{self.pairs:,} sources but {len(self.target_lengths):,} targets")
        if self.document_starts[0] != 0 or np.diff(self.document_starts, append=self.pairs).min() < 1:
            raise damaged(folder / "documents.starts", f"its documents do not lie in {self.pairs:,} pairs")


def map_ids(path: Path, vocabulary: Vocabulary, verify: bool) -> np.ndarray:
    """The ids of a side; with `verify`, a DataError unless all of them are in the vocabulary."""
    if verify:
        highest = max(int(block.max()) for block in read_blocks(path, vocabulary.id_type))
        if highest >= vocabulary.size:
            raise damaged(path, f"id {highest} in a vocabulary of {vocabulary.size}")
    return map_array(path, vocabulary.id_type)


def read_lengths(path: Path, ids: int, segmented: bool) -> np.ndarray:
    """The lengths of all pairs; a DataError unless their offsets cut this many ids into pairs."""
    lengths = np.empty(max(0, path.stat().st_size // 8 - 1), dtype=np.int32)
    fits, done, before = True, 0, np.zeros(0, dtype=np.int64)
    for block in read_blocks(path, "<i8"):
        if not done:
            fits = block[0] == 0
        found = np.diff(block, prepend=before) - segmented
        fits = fits and (found.min(initial=1) >= 1)
        lengths[done : done + len(found)] = found
        done, before = done + len(found), block[-1:]
    if not (fits and len(lengths) and before[0] == ids):
        raise damaged(path, f"its offsets do not cut {ids:,} ids into pairs")
    return lengths


def read_blocks(path: Path, dtype: str) -> Iterator[np.ndarray]:
    """An array, block by block. A map that is read to its end counts as memory of the process; this does not."""
    with path.open("rb") as file:
        while len(block := np.fromfile(file, dtype, BLOCK)):
            yield block


def map_array(path: Path, dtype: str) -> np.ndarray:
    mapped = np.memmap(path, dtype=dtype, mode="r")
    return mapped.view(np.ndarray)  # slicing a plain array takes a tenth of the time


def concatenate(lines: list[list[int]]) -> Ids:
    """The ids of several lines in one array."""
    lengths = np.fromiter(map(len, lines), np.int64, len(lines))
    return Ids(np.fromiter(chain.from_iterable(lines), np.int32, int(lengths.sum())), lengths)


def encode_pairs(
    vocabularies: Sequence[Vocabulary], texts: Sequence[list[str]], alpha: float = 0.0, seed: str = ""
) -> tuple[list[Ids], np.ndarray]:
    """The ids of the lines of each side, and their lengths [sides, pairs]; `alpha` and `seed` sample subwords."""
    sides = [
        concatenate(vocabulary.encode_all(lines, alpha, f"{seed}/{side}"))
        for side, vocabulary, lines in zip(SIDES, vocabularies, texts, strict=True)
    ]
    return sides, np.stack([ids.lengths for ids in sides])


def fit_lengths(
    lengths: np.ndarray, max_length: int, config: DataConfig, counts: Counts, name: str, numbers: Sequence[int]
) -> np.ndarray:
    """The lengths that pairs are cut to, [sides, pairs]; 0 for a pair that is dropped.

    Messages call pair i `name.format(numbers[i])`.
    """
    empty = lengths.min(0) == 0  # blank for sentencepiece, though not for Python
    beyond = (lengths.max(0) > max_length) & ~empty
    counts.empty += int(empty.sum())
    if beyond.any() and config.too_long == "error":
        index = int(beyond.argmax())
        key = "segment_length" if config.segment_length else "max_length"
        raise DataError(
            f"{name.format(numbers[index])} has {lengths[:, index].max():,} subwords on a side, but data.{key} = "
            f'{getattr(config, key):,}; raise it, or use data.too_long = "drop" or "truncate"'
        )
    if config.too_long == "truncate":
        counts.truncated += int(beyond.sum())
        return np.where(empty, 0, np.minimum(lengths, max_length))
    counts.too_long += int(beyond.sum())
    return np.where(empty | beyond, 0, lengths)


class SplitWriter(ExitStack):
    """Appends pairs to the files of a new folder; a folder named "valid" gets their text too.

    Args:
        separated: write a separator after every sentence, for `cut_segments`.
        corpora: how many corpora the pairs come from.
    """

    def __init__(
        self, folder: Path, vocabularies: tuple[Vocabulary, Vocabulary], separated: bool, corpora: int = 1
    ) -> None:
        super().__init__()
        folder.mkdir()
        self._ends = [vocabulary.separator if separated else None for vocabulary in vocabularies]
        self.documents, self.tokens = 0, np.zeros((len(SIDES), corpora), dtype=np.int64)
        self.pairs = np.zeros(corpora, dtype=np.int64)
        self._types = [vocabulary.id_type for vocabulary in vocabularies]
        self._begun, self._document = 0, 0  # documents that began before the next pair, and before the last one kept
        self._texts = TEXTS if folder.name == "valid" else ()
        self._files = {name: self.enter_context((folder / name).open("wb")) for name in ARRAYS + self._texts}
        for side in SIDES:
            self._files[f"{side}.starts"].write(bytes(8))

    def add(self, pairs: Sequence[TextPair], sides: Sequence[Ids], lengths: np.ndarray) -> None:
        """Write pairs, cut to `lengths` [sides, pairs]; those of length 0 are left out."""
        kept = lengths[0] > 0
        self._add_documents(np.array([pair.document_start for pair in pairs]), kept)
        corpora = np.array([pair.corpus for pair in pairs])[kept]
        for index, (side, ids) in enumerate(zip(SIDES, sides, strict=True)):
            written, sizes = cut_ids(ids, lengths[index], self._ends[index])
            starts = self.tokens[index].sum() + np.cumsum(sizes[kept])
            self._files[f"{side}.ids"].write(written.astype(self._types[index]).tobytes())
            self._files[f"{side}.starts"].write(starts.astype("<i8").tobytes())
            np.add.at(self.tokens[index], corpora, sizes[kept])
        for name, side in zip(self._texts, SIDES, strict=False):
            lines = [getattr(pair, side) + "\n" for pair, is_kept in zip(pairs, kept, strict=True) if is_kept]
            self._files[name].write("".join(lines).encode())
        self.pairs += np.bincount(corpora, minlength=len(self.pairs))

    def _add_documents(self, starts: np.ndarray, kept: np.ndarray) -> None:
        """Note where documents start: one whose first pair is dropped starts with the next pair that is kept."""
        begun = self._begun + np.cumsum(starts)
        first = np.flatnonzero(np.diff(begun[kept], prepend=self._document))
        self._files["documents.starts"].write((self.pairs.sum() + first).astype("<i8").tobytes())
        self.documents += len(first)
        self._begun = int(begun[-1])
        self._document = int(begun[kept][-1]) if kept.any() else self._document


def cut_ids(found: Ids, lengths: np.ndarray, end: int | None = None) -> Ids:
    """Lines cut to `lengths`; `end` is appended to those that are not empty."""
    ids = found.ids
    if (lengths < found.lengths).any():
        position = np.arange(len(ids)) - np.repeat(np.cumsum(found.lengths) - found.lengths, found.lengths)
        ids = ids[position < np.repeat(lengths, found.lengths)]
    if end is None:
        return Ids(ids, lengths)
    return Ids(np.insert(ids, np.cumsum(lengths)[lengths > 0], end), lengths + (lengths > 0))


def cut_segments(folder: Path, limit: int, borders: np.ndarray, mixed: bool = False) -> np.ndarray:
    """Join the sentences in `folder` into segments of up to `limit` subwords; the ids stay as they are.

    Args:
        borders: the first sentences of some documents.
        mixed: cut successive documents at `limit`, half of it, and so on down to single sentences.

    Returns:
        The segments that start at `borders`.
    """
    starts = {side: np.fromfile(folder / f"{side}.starts", "<i8") for side in SIDES}
    documents = np.fromfile(folder / "documents.starts", "<i8")
    lengths = np.stack([np.diff(starts[side]) - 1 for side in SIDES], 1)
    segments = build_segments(lengths, documents, halvings(limit) if mixed else [limit])
    firsts = np.array([first for first, _ in segments])
    for side in SIDES:
        np.append(starts[side][firsts], starts[side][-1]).tofile(folder / f"{side}.starts")
    np.searchsorted(firsts, documents).astype("<i8").tofile(folder / "documents.starts")
    return np.searchsorted(firsts, borders)
