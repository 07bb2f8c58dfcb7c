"""Batches of an endless stream of pairs, as OpusTrainer feeds them: `source<TAB>target` lines of standard input.

A few thousand pairs at a time are read, encoded, sorted by length and cut into batches of the same few shapes as those
of prepared text. The same lines give the same batches, however fast they arrive. To resume, two numbers are enough:
how many lines were read, and how many batches were made of them, before the current window of pairs.
"""

import os
import select
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np

from rectiformer.config import Config, DataConfig
from rectiformer.errors import ConfigError, DataError
from rectiformer.text.batches import Batch, BatchPlan, Pairs, Symbols, collate, padded_lengths, round_up, shuffled
from rectiformer.text.corpus import BATCH_PAIRS, Counts
from rectiformer.text.encoding import SIDES, Ids, cut_ids, encode_pairs, fit_lengths
from rectiformer.text.lines import BOM, MAX_LINE, replace_bad, standard_input
from rectiformer.text.prepared import Prepared
from rectiformer.text.vocabulary import Vocabulary

WINDOW_BATCHES = 64  # about
MAX_WINDOW_PAIRS = 1 << 17
REMEMBERED = 4_096  # batches whose lines can still be asked for
WAIT = 0.5  # seconds between checks while no line arrives


class StreamEndedError(Exception):
    """There are no more batches; the message says how many lines there were."""


def read_stream(descriptor: int, check: Callable[[], None]) -> Iterator[bytes]:
    """Lines of a pipe without their LF, as they arrive; `check` is called between reads, and may raise."""
    kept, number = b"", 1
    while True:
        check()
        while not select.select([descriptor], [], [], WAIT)[0]:
            check()
        block = os.read(descriptor, 1 << 16)
        *lines, kept = (kept + block).split(b"\n")
        yield from lines
        number += len(lines)
        if len(kept) > MAX_LINE:
            raise DataError(f"stdin:{number}: line is longer than {MAX_LINE:,} bytes; split or remove it")
        if not block:
            break
    if kept:
        yield kept


class Window(Pairs):
    """The current pairs, in groups as they were read, and the numbers of their lines."""

    def __init__(self, groups: Sequence[tuple[np.ndarray, Sequence[Ids]]]) -> None:
        self.lines = np.concatenate([lines for lines, _ in groups])
        parts = [[sides[index] for _, sides in groups] for index in range(len(SIDES))]
        ids = [np.concatenate([part.ids for part in side]) for side in parts]
        lengths = [np.concatenate([part.lengths for part in side]) for side in parts]
        super().__init__(ids, lengths)


class StreamPlan:
    """Batches of a stream, requested in order, like those of a `BatchPlan`. A pair's index is its line, from 1.

    Args:
        descriptor: the file descriptor that lines are read from.
        tokens: padded tokens of the longer side in one batch; a longer pair is a batch of its own.
        name: what the order of batches depends on besides the lines.
        check: called while reading or waiting; it may raise to end that.
    """

    text = "pairs from standard input"

    def __init__(
        self,
        descriptor: int,
        vocabularies: tuple[Vocabulary, Vocabulary],
        config: DataConfig,
        tokens: int,
        symbols: Symbols,
        name: str,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.vocabularies, self.config, self.tokens, self.symbols = vocabularies, config, tokens, symbols
        self.name, self.counts = name, Counts()
        self._lines = self._skipped = 0
        self._positions = [(0, 0)]  # lines and batches before each window
        self._stream = read_stream(descriptor, check)
        self._window: Window | None = None
        self._batches: list[tuple[np.ndarray, int]] = []
        self._lines_of: dict[int, np.ndarray] = {}

    def resume(self, lines: int, batches: int) -> None:
        """Continue after this many lines, which are skipped, and the batches that were made of them."""
        self._skipped, self._positions = lines, [(lines, batches)]

    def consumed(self, index: int) -> tuple[int, int]:
        """How many lines need not be read again to continue with batch `index`, and how many batches they made."""
        return self._positions[bisect_right(self._positions, index, key=itemgetter(1)) - 1]

    def locate(self, index: int) -> tuple[int, int]:
        """A stream is one epoch."""
        return 0, index

    def pairs_of(self, index: int) -> np.ndarray:
        """The lines in batch `index`; none if that was too long ago."""
        if index >= self._positions[-1][1]:
            self._reach(index)
        return self._lines_of.get(index, np.empty(0, dtype=np.int64))

    def batch(self, index: int, static: bool = False) -> Batch:
        """Batch `index`, of the current window or later; `static` pads it to the one shape of its padded length."""
        window, rows, length = self._reach(index)
        size: dict[str, Any] = {"rows": max(1, self.tokens // length), "length": length} if static else {}
        batch = collate(window, rows, self.symbols, **size)
        return replace(batch, pairs=window.lines[rows])

    def shapes(self) -> Iterator[tuple[int, int]]:
        """Rows and padded length of every possible static shape."""
        lengths = np.unique(round_up(np.arange(2, self.config.max_length + 2)))
        return ((max(1, self.tokens // length), length) for length in lengths.tolist())

    def _reach(self, index: int) -> tuple[Window, np.ndarray, int]:
        while index >= self._positions[-1][1] + len(self._batches):
            self._advance()
        first = self._positions[-1][1]
        if index < first or self._window is None:
            raise IndexError(f"batch {index} is gone; the current window starts at {first}")
        return self._window, *self._batches[index - first]

    def _advance(self) -> None:
        """Read the next window."""
        first = self._positions[-1][1] + len(self._batches)
        self._skip()
        before = self._lines
        groups = self._read()
        self._positions.append((before if groups else self._lines, first))
        self._batches, self._window = [], None
        if not groups:
            raise StreamEndedError(f"standard input ended after {self._lines:,} lines: {self.counts.describe()}")
        self._window = Window(groups)
        self._batches = self._cut(self._window, before)
        for number, (rows, _) in enumerate(self._batches, first):
            self._lines_of[number] = self._window.lines[rows]
        for number in list(islice(self._lines_of, max(0, len(self._lines_of) - REMEMBERED - len(self._batches)))):
            del self._lines_of[number]

    def _skip(self) -> None:
        if self._lines >= self._skipped:
            return
        self._lines = sum(1 for _ in islice(self._stream, self._skipped))
        if self._lines < self._skipped:
            raise DataError(
                f"stdin has {self._lines:,} lines, but this run has read {self._skipped:,} already; feed it the same "
                "lines again, from the first"
            )

    def _read(self) -> list[tuple[np.ndarray, list[Ids]]]:
        """Encoded pairs for a window; none at the end of the stream."""
        groups: list[tuple[np.ndarray, list[Ids]]] = []
        pairs = tokens = 0
        while (
            tokens < WINDOW_BATCHES * self.tokens
            and pairs < MAX_WINDOW_PAIRS
            and (lines := list(islice(self._stream, BATCH_PAIRS)))
        ):
            if numbered := list(self._parse(lines)):
                groups.append(self._encode(numbered))
                pairs += len(groups[-1][0])
                tokens += int(round_up(np.maximum(*(ids.lengths for ids in groups[-1][1])) + 1).sum())
        return groups if pairs else []

    def _parse(self, lines: list[bytes]) -> Iterator[tuple[int, str, str]]:
        """Number, source and target of the lines that are pairs."""
        for line in lines:
            self._lines += 1
            where = f"stdin:{self._lines}"
            skipped = len(BOM) if self._lines == 1 and line.startswith(BOM) else 0
            try:
                text: str | None = line[skipped:].decode()
            except UnicodeDecodeError as error:
                text = replace_bad(error, self.config.bad_utf8, where, skipped)
            if text is None:
                self.counts.bad_utf8 += 1
                continue
            source, tab, rest = text.partition("\t")
            if text.strip() and not tab:
                raise DataError(f"{where}: 1 column, but 2 are needed; separate source and target by a tab")
            target = rest.partition("\t")[0]
            if source.strip() and target.strip():
                yield self._lines, source, target
            else:
                self.counts.empty += 1

    def _encode(self, pairs: list[tuple[int, str, str]]) -> tuple[np.ndarray, list[Ids]]:
        numbers, *texts = zip(*pairs, strict=True)
        sides, found = encode_pairs(self.vocabularies, [list(lines) for lines in texts])
        lengths = fit_lengths(found, self.config.max_length, self.config, self.counts, "stdin:{}", numbers)
        kept = lengths[0] > 0
        self.counts.pairs += int(kept.sum())
        cut = [cut_ids(ids, length) for ids, length in zip(sides, lengths, strict=True)]
        return np.array(numbers)[kept], [Ids(side.ids, side.lengths[kept]) for side in cut]

    def _cut(self, window: Window, before: int) -> list[tuple[np.ndarray, int]]:
        """Batches from the longest pairs down, so that leftovers of a length join shorter pairs; then shuffled."""
        padded = padded_lengths(window)
        order = shuffled(window.pairs, self.name, before, "pairs")
        order = order[np.argsort(-padded[order], kind="stable")]
        batches, start = [], 0
        while start < len(order):
            length = int(padded[order[start]])
            stop = start + max(1, self.tokens // length)
            batches.append((order[start:stop], length))
            start = stop
        order = shuffled(len(batches), self.name, before, "batches")
        return [batches[index] for index in order]


def plan_batches(
    config: Config, prepared: Prepared, symbols: Symbols, check: Callable[[], None], ranks: int = 1
) -> BatchPlan | StreamPlan:
    """The batches that `config` trains on, of prepared text or of a stream; `check` is that of a `StreamPlan`."""
    require_stream(config, ranks)
    name, tokens = f"{prepared.hash}|{config.training.seed}", config.training.batch_tokens
    if not config.data.stream:
        prepared.set_weights(config.data.weights)
        return BatchPlan(prepared.train, tokens, symbols, name, linked=config.training.guided_alignment > 0)
    return StreamPlan(
        standard_input().fileno(), (prepared.source, prepared.target), config.data, tokens, symbols, name, check
    )


def require_stream(config: Config, ranks: int) -> None:
    """Raise a ConfigError for what a stream cannot do."""
    if not config.data.stream:
        return
    for key, value in {"segment_length": config.data.segment_length, "weights": config.data.weights}.items():
        if value:
            raise ConfigError(f"data.{key} needs prepared text, but data.stream = true; leave one of them out")
    if config.vocabulary.sampling:
        raise ConfigError(
            f"vocabulary.sampling = {config.vocabulary.sampling} needs prepared text, but data.stream = true: a "
            "resumed stream would be sampled differently"
        )
    if config.training.guided_alignment:
        raise ConfigError(
            f"training.guided_alignment = {config.training.guided_alignment:g} needs prepared text with data.links, "
            "but data.stream = true; leave one of them out"
        )
    if ranks > 1:
        raise ConfigError(f"data.stream = true, but {ranks} ranks cannot share standard input; train on one")
