"""Encoded pairs of one split in a folder of plain arrays: written a sentence at a time, cut into segments, mapped back.

Pair i of a side is ids[starts[i] : starts[i + 1]], less the last separator where pairs are segments.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np

from rectiformer.errors import DataError
from rectiformer.text.corpus import TextPair
from rectiformer.text.documents import build_segments
from rectiformer.text.vocabulary import Vocabulary

SIDES = ("source", "target")
ARRAYS = ("source.ids", "source.starts", "target.ids", "target.starts", "documents.starts")
TEXTS = ("source.txt", "target.txt")


def damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path}: {what}; remove the folder and run `rectiformer data prepare` again")


class Encoded:
    """The pairs of one split or copy, as ids without special symbols but separators.

    Args:
        segmented: whether pairs are segments, of sentences each with a separator after it; the last is not given out.
        verify: read all ids once.
    """

    def __init__(
        self, folder: Path, source: Vocabulary, target: Vocabulary, segmented: bool = False, verify: bool = True
    ) -> None:
        self.segmented = segmented
        self._source = map_pairs(folder, "source", source, segmented, verify)
        self._target = map_pairs(folder, "target", target, segmented, verify)
        self.source_lengths = (np.diff(self._source[1]) - segmented).astype(np.int32)
        self.target_lengths = (np.diff(self._target[1]) - segmented).astype(np.int32)
        self.pairs = len(self.source_lengths)
        self.document_starts = map_array(folder / "documents.starts", "<i8")
        if len(self.target_lengths) != self.pairs:
            raise damaged(folder, f"{self.pairs:,} sources but {len(self.target_lengths):,} targets")
        if self.document_starts[0] != 0 or np.diff(self.document_starts, append=self.pairs).min() < 1:
            raise damaged(folder / "documents.starts", f"its documents do not lie in {self.pairs:,} pairs")

    def source(self, index: int) -> np.ndarray:
        """Source ids of pair `index`: a view of the file."""
        ids, starts = self._source
        return ids[starts[index] : starts[index + 1] - self.segmented]

    def target(self, index: int) -> np.ndarray:
        """Target ids of pair `index`: a view of the file."""
        ids, starts = self._target
        return ids[starts[index] : starts[index + 1] - self.segmented]


def map_pairs(
    folder: Path, side: str, vocabulary: Vocabulary, segmented: bool, verify: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and starts of a side; a DataError where they do not fit each other or, with `verify`, the vocabulary."""
    ids = map_array(folder / f"{side}.ids", vocabulary.id_type)
    starts = map_array(folder / f"{side}.starts", "<i8")
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != len(ids) or np.diff(starts).min() < 1 + segmented:
        raise damaged(folder / f"{side}.starts", f"its offsets do not cut {len(ids):,} ids into pairs")
    if verify and ids.max() >= vocabulary.size:
        raise damaged(folder / f"{side}.ids", f"id {ids.max()} in a vocabulary of {vocabulary.size}")
    return ids, starts


def map_array(path: Path, kind: str) -> np.ndarray:
    return np.memmap(path, dtype=kind, mode="r").view(
        np.ndarray
    )  # a slice of a plain array costs a tenth of a memmap's


class SplitWriter(ExitStack):
    """Appends pairs to the files of a new folder; those of the folder "valid" with their text.

    Args:
        separated: write a separator after every sentence, for `cut_segments`.
    """

    def __init__(self, folder: Path, vocabularies: tuple[Vocabulary, Vocabulary], separated: bool) -> None:
        super().__init__()
        folder.mkdir()
        self._ends = [[vocabulary.separator] if separated else [] for vocabulary in vocabularies]
        self.pairs, self.documents, self.tokens = 0, 0, [0, 0]
        self._types = [vocabulary.id_type for vocabulary in vocabularies]
        self._texts = TEXTS if folder.name == "valid" else ()
        self._files = {name: self.enter_context((folder / name).open("wb")) for name in ARRAYS + self._texts}
        for side in SIDES:
            self._files[f"{side}.starts"].write(bytes(8))

    def add(self, pair: TextPair, sides: list[list[int]], document_start: bool) -> None:
        if document_start:
            self._files["documents.starts"].write(self.pairs.to_bytes(8, "little"))
        for place, (side, ids) in enumerate(zip(SIDES, sides, strict=True)):
            written = np.array([*ids, *self._ends[place]], dtype=self._types[place])
            self.tokens[place] += len(written)
            self._files[f"{side}.ids"].write(written.tobytes())
            self._files[f"{side}.starts"].write(self.tokens[place].to_bytes(8, "little"))
        for name, text in zip(self._texts, (pair.source, pair.target), strict=False):
            self._files[name].write(text.encode("utf-8") + b"\n")
        self.pairs += 1
        self.documents += document_start


def cut_segments(folder: Path, limit: int) -> int:
    """Make segments of up to `limit` subwords out of the sentences in `folder`; how many. The ids stay as they are."""
    starts = {side: np.fromfile(folder / f"{side}.starts", "<i8") for side in SIDES}
    documents = np.fromfile(folder / "documents.starts", "<i8")
    lengths = np.stack([np.diff(starts[side]) - 1 for side in SIDES], 1)
    segments = build_segments(lengths, documents, limit)
    firsts = np.array([first for first, _ in segments])
    for side in SIDES:
        np.append(starts[side][firsts], starts[side][-1]).tofile(folder / f"{side}.starts")
    np.searchsorted(firsts, documents).astype("<i8").tofile(folder / "documents.starts")
    return len(segments)
