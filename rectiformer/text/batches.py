"""Token-budget batches in a few shapes. Which pairs stand in which batch is a pure function of (data, seed, index).

Nothing is remembered between batches, so a run that goes on at batch i reads what an uninterrupted run would have read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

STEPS = tuple((2**power, 2 ** (power - 3)) for power in range(5, 13))
"""Up to 32 tokens lengths are rounded up to multiples of 4, up to 64 of 8, and so on; beyond 4,096, of 1,024."""


class Pairs(Protocol):
    """Encoded sentence pairs, without special symbols."""

    @property
    def pairs(self) -> int: ...

    @property
    def source_lengths(self) -> np.ndarray: ...

    @property
    def target_lengths(self) -> np.ndarray: ...

    def source(self, index: int) -> np.ndarray: ...

    def target(self, index: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Symbols:
    """The ids that batches add: padding, start and end, each side with its own padding and end."""

    source_pad: int
    source_end: int
    target_pad: int
    target_start: int
    target_end: int


@dataclass(frozen=True)
class Batch:
    """Padded ids. Rows that only fill a shape have length 0 and count nowhere."""

    pairs: np.ndarray  # [rows], which pairs of the corpus these are
    source: Tensor  # [B, N]
    source_lengths: Tensor  # [B]
    target_input: Tensor  # [B, M]: start, then the target
    target: Tensor  # [B, M]: the target, then its end
    target_lengths: Tensor  # [B]
    tokens: int
    """Target tokens, ends included."""

    @property
    def full(self) -> bool:
        """Whether no source is padded, so that attention needs no lengths."""
        return bool((self.source_lengths == self.source.shape[1]).all())


def round_up(lengths: np.ndarray) -> np.ndarray:
    """Each length rounded up to one of the few that batches have."""
    rounded = -(-lengths // 1024) * 1024
    for limit, step in reversed(STEPS):
        rounded = np.where(lengths <= limit, -(-lengths // step) * step, rounded)
    return rounded


def mix(words: np.ndarray) -> np.ndarray:
    """A bijective hash of 64-bit words (the finalizer of SplitMix64): the same on every machine and numpy."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def shuffled(count: int, *parts: object) -> np.ndarray:
    """A permutation of 0 to count - 1 that depends on `parts` and nothing else."""
    digest = hashlib.sha256("|".join(map(str, parts)).encode()).digest()
    start = np.uint64(int.from_bytes(digest[:8], "little"))
    with np.errstate(over="ignore"):
        keys = mix(np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start)
    return np.argsort(keys, kind="stable")


@dataclass(frozen=True)
class Epoch:
    """One pass over the data: pairs in batch order, where each batch starts, and the padded length of each."""

    order: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


class BatchPlan:
    """An endless sequence of batches over one or more encodings of the same pairs; epoch e reads encoding e mod count.

    Args:
        corpora: the encodings.
        tokens: padded tokens of the longer side in one batch; a longer pair makes a batch of its own.
        name: what the order depends on beside the epoch: data hash and seed.
    """

    def __init__(self, corpora: Sequence[Pairs], tokens: int, symbols: Symbols, name: str) -> None:
        self.corpora, self.tokens, self.symbols, self.name = corpora, tokens, symbols, name
        self.counts = [int(self._batches_a_length(corpus)[1].sum()) for corpus in corpora]
        self._epoch: tuple[int, Epoch] | None = None

    def locate(self, index: int) -> tuple[int, int]:
        """Epoch of batch `index`, and its number inside that epoch."""
        rounds, rest = divmod(index, sum(self.counts))
        for turn, count in enumerate(self.counts):
            if rest < count:
                return rounds * len(self.counts) + turn, rest
            rest -= count
        raise AssertionError("a batch lies in some epoch")

    def pairs_of(self, index: int) -> np.ndarray:
        """Which pairs stand in batch `index`."""
        return self._cut(index)[1]

    def batch(self, index: int, static: bool = False) -> Batch:
        """Batch `index`; `static` pads it to the shape that all batches of its length have."""
        corpus, pairs, length = self._cut(index)
        if not static:
            return collate(corpus, pairs, self.symbols)
        return collate(corpus, pairs, self.symbols, rows=max(1, self.tokens // length), length=length)

    def shapes(self) -> Iterator[tuple[int, int]]:
        """Rows and padded length of every static shape."""
        lengths = {int(length) for corpus in self.corpora for length in self._batches_a_length(corpus)[0]}
        return ((max(1, self.tokens // length), length) for length in sorted(lengths))

    def _cut(self, index: int) -> tuple[Pairs, np.ndarray, int]:
        number, inside = self.locate(index)
        if self._epoch is None or self._epoch[0] != number:
            self._epoch = number, self._plan(number)
        epoch = self._epoch[1]
        stop = epoch.starts[inside + 1] if inside + 1 < len(epoch.starts) else len(epoch.order)
        # Batches of a length are cut one after the other, so a batch also ends where its length does.
        pairs = epoch.order[epoch.starts[inside] : stop]
        return self.corpora[number % len(self.corpora)], pairs, int(epoch.lengths[inside])

    def _plan(self, number: int) -> Epoch:
        """Shuffle pairs, gather those of one padded length, cut them into batches, shuffle the batches."""
        corpus = self.corpora[number % len(self.corpora)]
        order = shuffled(corpus.pairs, self.name, number, "pairs")
        padded = padded_lengths(corpus)[order]
        by_length = np.argsort(padded, kind="stable")
        order, padded = order[by_length], padded[by_length]
        lengths, batches = self._batches_a_length(corpus)
        first_pair = np.searchsorted(padded, lengths)
        rows = np.maximum(1, self.tokens // lengths)
        length_of = np.repeat(np.arange(len(lengths)), batches)
        inside = np.arange(len(length_of)) - np.repeat(np.cumsum(batches) - batches, batches)
        starts = first_pair[length_of] + inside * rows[length_of]
        turn = shuffled(len(starts), self.name, number, "batches")
        stops = np.append(starts[1:], len(order))
        sizes = (stops - starts)[turn]
        pieces = np.repeat(starts[turn] - (np.cumsum(sizes) - sizes), sizes) + np.arange(len(order))
        return Epoch(order[pieces], np.cumsum(sizes) - sizes, lengths[length_of][turn])

    def _batches_a_length(self, corpus: Pairs) -> tuple[np.ndarray, np.ndarray]:
        """The padded lengths there are, and how many batches each fills."""
        lengths, pairs = np.unique(padded_lengths(corpus), return_counts=True)
        return lengths, -(-pairs // np.maximum(1, self.tokens // lengths))


def padded_lengths(corpus: Pairs) -> np.ndarray:
    """The rounded length of the longer side of every pair, its end symbol included."""
    return round_up(np.maximum(corpus.source_lengths, corpus.target_lengths) + 1)


def collate(
    corpus: Pairs, pairs: np.ndarray, symbols: Symbols, rows: int | None = None, length: int | None = None
) -> Batch:
    """Pad these pairs into one batch, as small as they allow unless `rows` and `length` say more."""
    sources = [corpus.source(int(pair)) for pair in pairs]
    targets = [corpus.target(int(pair)) for pair in pairs]
    rows = len(pairs) if rows is None else rows
    source, source_lengths = _pad(sources, rows, length, symbols.source_pad, symbols.source_end)
    target, target_lengths = _pad(targets, rows, length, symbols.target_pad, symbols.target_end)
    shifted = np.concatenate([np.full((rows, 1), symbols.target_start), target[:, :-1]], 1)
    return Batch(
        pairs=pairs,
        source=torch.from_numpy(source),
        source_lengths=torch.from_numpy(source_lengths),
        target_input=torch.from_numpy(shifted),
        target=torch.from_numpy(target),
        target_lengths=torch.from_numpy(target_lengths),
        tokens=int(target_lengths.sum()),
    )


def _pad(rows: list[np.ndarray], height: int, width: int | None, pad: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.zeros(height, dtype=np.int64)
    lengths[: len(rows)] = [len(row) + 1 for row in rows]
    padded = np.full((height, int(lengths.max()) if width is None else width), pad, dtype=np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
        padded[index, len(row)] = end
    return padded, lengths
