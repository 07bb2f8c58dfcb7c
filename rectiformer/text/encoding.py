"""Text to subword ids: the lines of both sides, how long they may be, and which subwords of theirs are linked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from rectiformer.config import DataConfig
from rectiformer.errors import DataError
from rectiformer.text.corpus import Counts, TextPair
from rectiformer.text.links import Cells, link_cells
from rectiformer.text.vocabulary import Vocabulary

SIDES = ("source", "target")


class Ids(NamedTuple):
    """The ids of several lines, concatenated, and how many each has."""

    ids: np.ndarray
    lengths: np.ndarray


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


def link_pairs(
    vocabularies: Sequence[Vocabulary],
    pairs: Sequence[TextPair],
    texts: Sequence[list[str]],
    alpha: float,
    seed: str,
    words: str,
) -> Cells:
    """The subwords that the word links of the pairs link, in the ids that `encode_pairs` gives them.

    Args:
        words: which words are linked, as in `link_cells`.
    """
    # To find subwords in their line takes ten times as long as encoding it. Samples are drawn for all lines in turn.
    linked = [index for index, pair in enumerate(pairs) if alpha or pair.links.text.strip()]
    counts = np.zeros(len(pairs), dtype=np.int64)
    if not linked:
        return Cells(np.empty((0, 2), dtype=np.int64), counts)
    texts = [[lines[index] for index in linked] for lines in texts]
    pieces = [
        vocabulary.pieces_all(lines, alpha, f"{seed}/{side}")
        for side, vocabulary, lines in zip(SIDES, vocabularies, texts, strict=True)
    ]
    found = link_cells([pairs[index].links for index in linked], texts, pieces, words)
    counts[linked] = found.counts
    return Cells(found.cells, counts)


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


def cut_ids(found: Ids, lengths: np.ndarray, end: int | None = None) -> Ids:
    """Lines cut to `lengths`; `end` is appended to those that are not empty."""
    ids = found.ids
    if (lengths < found.lengths).any():
        position = np.arange(len(ids)) - np.repeat(np.cumsum(found.lengths) - found.lengths, found.lengths)
        ids = ids[position < np.repeat(lengths, found.lengths)]
    if end is None:
        return Ids(ids, lengths)
    return Ids(np.insert(ids, np.cumsum(lengths)[lengths > 0], end), lengths + (lengths > 0))
