"""Batches of a token budget in a few shapes; which pairs are in which batch is a pure function of (data, seed, index).

Nothing is remembered between batches, so a run that resumes at batch i reads what an uninterrupted run would have read.

A corpus of weight w contributes w times its pairs to each epoch, those of every padded length in proportion: of the n
pairs it has of one length, floor(w * n * e) are drawn before epoch e, from an endless sequence of shuffled passes.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rectiformer.text.links import CellLinks

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, the increment of SplitMix64

STEPS = tuple((2**power, 2 ** (power - 3)) for power in range(5, 13))
"""Up to 32 tokens lengths are rounded up to multiples of 4, up to 64 of 8, and so on; beyond 4,096, of 1,024."""

ROUNDED = np.zeros(STEPS[-1][0] + 1, dtype=np.int32)  # by length
for _limit, _step in reversed(STEPS):
    ROUNDED[: _limit + 1] = -(-np.arange(_limit + 1) // _step) * _step

BLOCK = 1 << 20  # pairs processed at once, to bound memory


class Part(NamedTuple):
    """One corpus of several: its first pair, its number of pairs, and its weight."""

    first: int
    pairs: int
    weight: float = 1.0


class Pairs:
    """Encoded sentence pairs, without special symbols; ids, lengths and starts are those of source and target.

    Args:
        ids: of all pairs in one array.
        starts: where each pair starts in `ids`; by default where the one before it ends.
    """

    parts: Sequence[Part] = ()
    """The weighted corpora they come from; if empty, each pair is in an epoch once."""
    links: CellLinks | None = None
    """The linked subwords of each pair, where the text has word links."""

    def __init__(
        self, ids: Sequence[np.ndarray], lengths: Sequence[np.ndarray], starts: Sequence[np.ndarray] = ()
    ) -> None:
        self._ids, self._starts = ids, starts or [np.cumsum(each) - each for each in lengths]
        self.source_lengths, self.target_lengths = lengths
        self.pairs = len(self.source_lengths)

    def source(self, index: int) -> np.ndarray:
        """Source ids of pair `index`, a view."""
        start = self._starts[0][index]
        return self._ids[0][start : start + self.source_lengths[index]]

    def target(self, index: int) -> np.ndarray:
        """Target ids of pair `index`, a view."""
        start = self._starts[1][index]
        return self._ids[1][start : start + self.target_lengths[index]]


@dataclass(frozen=True)
class Symbols:
    """The special ids that batches add."""

    source_pad: int
    source_end: int
    target_pad: int
    target_start: int
    target_end: int


@dataclass(frozen=True)
class Batch:
    """Padded ids. Rows that only fill up a static shape have length 0 and do not count."""

    pairs: np.ndarray  # [rows], indices into the corpus
    source: Tensor  # [B, N]
    source_lengths: Tensor  # [B]
    target_input: Tensor  # [B, M]: start, then the target
    target: Tensor  # [B, M]: the target, then its end
    target_lengths: Tensor  # [B]
    tokens: int
    """Target tokens, end symbols included."""
    links: Tensor | None = None  # [B, M, N], bool: whether target token m is linked to source token n
    full: bool = False
    """Whether attention needs no lengths because no source is ever padded. Never set for text, though one batch in some
    hundreds happens to be full: compiling a second program takes longer than it saves."""

    def to(self, device: torch.device) -> "Batch":
        """The same with its tensors on `device`."""
        tensors: dict[str, Any] = {
            name: part.to(device) for name, part in vars(self).items() if isinstance(part, Tensor)
        }
        return replace(self, **tensors)


def round_up(lengths: np.ndarray) -> np.ndarray:
    """Each length rounded up to one of the few padded lengths that batches have."""
    rounded = ROUNDED[np.minimum(lengths, len(ROUNDED) - 1)]
    beyond = lengths >= len(ROUNDED)
    rounded[beyond] = -(-lengths[beyond] // 1024) * 1024
    return rounded


@dataclass(frozen=True)
class Epoch:
    """One pass over the data: pairs ordered by padded length, and where each batch starts and stops among them."""

    order: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    lengths: np.ndarray


class BatchPlan:
    """An endless sequence of batches over one or more encodings of the same pairs; epoch e reads encoding e mod count.

    Args:
        corpora: the encodings.
        tokens: padded tokens of the longer side in one batch; a longer pair is a batch of its own.
        name: what the order depends on besides the epoch: data hash and seed.
        linked: whether batches have the links of their pairs.
    """

    def __init__(
        self, corpora: Sequence[Pairs], tokens: int, symbols: Symbols, name: str, linked: bool = False
    ) -> None:
        self.linked = linked
        self.corpora, self.tokens, self.symbols, self.name = corpora, tokens, symbols, name
        self._parts = [corpus.parts or (Part(0, corpus.pairs),) for corpus in corpora]
        self._sizes = [count_lengths(corpus, parts) for corpus, parts in zip(corpora, self._parts, strict=True)]
        self._firsts = [0]
        self._epoch: tuple[int, Epoch] | None = None

    @property
    def text(self) -> str:
        """What the batches are made of, for people."""
        return f"{self.corpora[0].pairs:,} pairs"

    def first(self, epoch: int) -> int:
        """The index of the first batch of an epoch."""
        while len(self._firsts) <= epoch:
            self._firsts.append(self._firsts[-1] + int(self._batches(len(self._firsts) - 1)[1].sum()))
        return self._firsts[epoch]

    def locate(self, index: int) -> tuple[int, int]:
        """The epoch of batch `index`, and its index inside that epoch."""
        while self._firsts[-1] <= index:
            self.first(len(self._firsts))
        epoch = bisect_right(self._firsts, index) - 1
        return epoch, index - self._firsts[epoch]

    def pairs_of(self, index: int) -> np.ndarray:
        """The pairs in batch `index`."""
        return self._cut(index)[1]

    def batch(self, index: int, static: bool = False) -> Batch:
        """Batch `index`; `static` pads it to the one shape of its padded length."""
        corpus, pairs, length = self._cut(index)
        size: dict[str, Any] = {"rows": self._rows(length), "length": length} if static else {}
        return collate(corpus, pairs, self.symbols, **size, linked=self.linked)

    def shapes(self) -> Iterator[tuple[int, int]]:
        """Rows and padded length of every static shape."""
        lengths = {int(length) for lengths, _ in self._sizes for length in lengths}
        return ((self._rows(length), length) for length in sorted(lengths))

    def _rows(self, length: int) -> int:
        return max(1, self.tokens // length)

    def _cut(self, index: int) -> tuple[Pairs, np.ndarray, int]:
        number, inside = self.locate(index)
        if self._epoch is None or self._epoch[0] != number:
            self._epoch = None  # free it before the next one is built
            self._epoch = number, self._plan(number)
        epoch = self._epoch[1]
        pairs = epoch.order[epoch.starts[inside] : epoch.stops[inside]]
        return self.corpora[number % len(self.corpora)], pairs, int(epoch.lengths[inside])

    def _batches(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """How many pairs of each padded length an epoch has, and how many batches."""
        turn = number % len(self.corpora)
        lengths, sizes = self._sizes[turn]
        weights = np.array([part.weight for part in self._parts[turn]])[:, None]
        pairs = (drawn_before(weights, sizes, number + 1) - drawn_before(weights, sizes, number)).sum(0)
        return pairs, -(-pairs // np.maximum(1, self.tokens // lengths))

    def _plan(self, number: int) -> Epoch:
        """Shuffle the pairs of each padded length, cut them into batches, then shuffle the batches."""
        turn = number % len(self.corpora)
        corpus, lengths = self.corpora[turn], self._sizes[turn][0]
        pairs, batches = self._batches(number)
        order = np.empty(pairs.sum(), dtype=np.uint32 if corpus.pairs < 2**32 else np.int64)
        padded = padded_lengths(corpus)
        for length, start, count in zip(lengths, np.cumsum(pairs) - pairs, pairs, strict=True):
            order[start : start + count] = draw_pairs(padded, int(length), self._parts[turn], self.name, number)
        rows = np.maximum(1, self.tokens // lengths)
        length_of = np.repeat(np.arange(len(lengths)), batches)
        inside = np.arange(len(length_of)) - np.repeat(np.cumsum(batches) - batches, batches)
        starts = (np.cumsum(pairs) - pairs)[length_of] + inside * rows[length_of]
        # Batches of a length are cut one after the other, so a batch also ends where its length does.
        stops = np.append(starts[1:], len(order))
        shuffle = shuffled(len(starts), self.name, number, "batches")
        return Epoch(order, starts[shuffle], stops[shuffle], lengths[length_of][shuffle])


def padded_lengths(corpus: Pairs) -> np.ndarray:
    """The rounded length of the longer side of every pair, its end symbol included."""
    longer = np.maximum(corpus.source_lengths, corpus.target_lengths)
    longer += 1
    return round_up(longer)


def count_lengths(corpus: Pairs, parts: Sequence[Part]) -> tuple[np.ndarray, np.ndarray]:
    """The padded lengths that occur, and how many pairs of each every part has: [parts, lengths]."""
    padded = padded_lengths(corpus)
    counts = np.zeros((len(parts), int(padded.max()) + 1), dtype=np.int64)
    for row, part in zip(counts, parts, strict=True):
        for start in range(part.first, part.first + part.pairs, BLOCK):
            block = padded[start : min(start + BLOCK, part.first + part.pairs)]
            row += np.bincount(block, minlength=len(row))  # bincount casts to 8 bytes, so in blocks
    lengths = np.flatnonzero(counts.any(0))
    return lengths, counts[:, lengths]


def collate(
    corpus: Pairs,
    pairs: np.ndarray,
    symbols: Symbols,
    rows: int | None = None,
    length: int | None = None,
    linked: bool = False,
) -> Batch:
    """Pad these pairs into one batch, as small as possible unless `rows` and `length` are given.

    Args:
        linked: whether the batch has the links of its pairs.
    """
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
        links=collate_links(corpus, pairs, target.shape, source.shape[1]) if linked else None,
    )


def collate_links(corpus: Pairs, pairs: np.ndarray, targets: tuple[int, int], source_length: int) -> Tensor:
    """The links of these pairs in a batch whose targets have the shape `targets` [B, M]: bool [B, M, N]."""
    assert corpus.links is not None
    linked = np.zeros((*targets, source_length), dtype=bool)
    for row, pair in enumerate(pairs):
        target, source = corpus.links.of(int(pair)).T
        linked[row, target, source] = True
    return torch.from_numpy(linked)


def _pad(rows: list[np.ndarray], height: int, width: int | None, pad: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.zeros(height, dtype=np.int64)
    lengths[: len(rows)] = [len(row) + 1 for row in rows]
    padded = np.full((height, int(lengths.max()) if width is None else width), pad, dtype=np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
        padded[index, len(row)] = end
    return padded, lengths


def splitmix64(words: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64, a bijective hash of 64-bit words, in place: the same on every machine."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def sort_keys(numbers: np.ndarray, *parts: object) -> np.ndarray:
    """A distinct pseudorandom key for each number; sorting by them shuffles."""
    digest = hashlib.sha256("|".join(map(str, parts)).encode()).digest()
    words = numbers.astype(np.uint64)
    with np.errstate(over="ignore"):
        words *= GOLDEN
        words += np.uint64(int.from_bytes(digest[:8], "little"))
        return splitmix64(words)


def shuffled(count: int, *parts: object) -> np.ndarray:
    """A permutation of 0 to count - 1 that depends only on `parts`."""
    return np.argsort(sort_keys(np.arange(count, dtype=np.uint64), *parts))


def drawn_before(weight: float | np.ndarray, pairs: int | np.ndarray, epoch: int) -> np.ndarray:
    """How many pairs of one length were drawn before an epoch."""
    return np.floor(np.asarray(weight) * (np.asarray(pairs) * epoch)).astype(np.int64)


def draw_pairs(padded: np.ndarray, length: int, parts: Sequence[Part], name: str, epoch: int) -> np.ndarray:
    """The pairs of one padded length in an epoch, shuffled, out of the padded lengths of all pairs."""
    found = [np.empty(0, dtype=np.int64)]
    copies = [np.empty(0, dtype=np.int64)]
    for number, part in enumerate(parts):
        members = np.flatnonzero(padded[part.first : part.first + part.pairs] == length)
        times = count_draws(len(members), part.weight, epoch, name, number, length)
        members += part.first
        if times is None:
            found.append(members)
            copies.append(np.zeros(len(members), dtype=np.int64))
            continue
        found.append(np.repeat(members, times))
        copies.append(np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times))
    pairs = np.concatenate(found)
    keys = np.concatenate(copies) * len(padded)  # a pair drawn twice has two keys
    keys += pairs
    return pairs[np.argsort(sort_keys(keys, name, epoch, "pairs"))]


def count_draws(pairs: int, weight: float, epoch: int, *name: object) -> np.ndarray | None:
    """How often each of these pairs is drawn in an epoch; None if each is drawn once."""
    if not pairs:
        return None
    start, stop = (int(drawn_before(weight, pairs, number)) for number in (epoch, epoch + 1))
    (first, skipped), (last, rest) = divmod(start, pairs), divmod(stop, pairs)
    if last == first + 1 and not skipped and not rest:
        return None
    times = np.full(pairs, last - first, dtype=np.int64)
    times[shuffled(pairs, *name, first, "corpus")[:skipped]] -= 1
    times[shuffled(pairs, *name, last, "corpus")[:rest]] += 1
    return times
