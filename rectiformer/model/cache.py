"""Keys and values already projected, so that decoding projects each token once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rectiformer.ops.decode import follow


class KeyValueCache:
    """Keys and values [B, K, length, D] so far, or at once those of a whole encoded source.

    Its capacity doubles when it runs out, so appending n tokens copies O(n) of them in all. Not for training: it writes
    in place.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        self.length = 0
        self._buffers: list[Tensor] | None = None
        self._borrowed = keys is not None  # what the caller holds as well is never written to
        if keys is not None and values is not None:
            self.keys, self.values, self.length, self._buffers = keys, values, keys.shape[2], [keys, values]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add tokens [B, K, new, D] and return all keys and values so far."""
        held: Sequence[Tensor | None] = self._buffers or (None, None)
        buffers = [self._extend(buffer, new) for buffer, new in zip(held, (k, v), strict=True)]
        self.length += k.shape[2]
        self._hold(buffers)
        return self.keys, self.values

    def reorder(self, rows: Tensor) -> None:
        """Let sequence b continue what was sequence rows[b]: a beam search's choice of parents."""
        if self._buffers is not None:
            self._hold([self._moved(buffer, rows) for buffer in self._buffers])
            self._borrowed = False

    def _hold(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers
        self.keys, self.values = (buffer[:, :, : self.length] for buffer in buffers)

    def _moved(self, held: Tensor, rows: Tensor) -> Tensor:
        """In the same buffer where it suffices: copying what is held, back and forth, is cheaper than a new buffer."""
        if self._borrowed or len(rows) > len(held):
            return held.index_select(0, rows)
        written = held[:, :, : self.length].index_select(0, rows)
        held = held[: len(rows)]
        held[:, :, : self.length] = written
        return held

    def _extend(self, held: Tensor | None, new: Tensor) -> Tensor:
        needed = self.length + new.shape[2]
        if held is None or held.shape[2] < needed:
            larger = new.new_empty(*new.shape[:2], max(16, needed, 2 * self.length), new.shape[3])
            if held is not None:
                larger[:, :, : self.length] = held[:, :, : self.length]
            held = larger
        held[:, :, self.length : needed] = new
        return held


class StaticCache:
    """Keys and values of all layers and hypotheses in one buffer of fixed size, for steps that are CUDA graphs.

    `buffer` is [2 * layers, rows, heads, capacity, head_dim], and zero at first: without a kernel hidden cells still
    pass through matrix products, and NaN times 0 is NaN. What is written is never moved. `parents` says, on the device,
    which hypothesis each continues; ancestors[r, n], in which row position n of hypothesis r was written;
    sentence_positions[r], if `by_sentence`, the position of its last token in its sentence and the index of that
    sentence.
    """

    def __init__(self, buffer: Tensor, by_sentence: bool = False) -> None:
        _, rows, _, capacity, _ = buffer.shape
        self.buffer = buffer
        self.rows = torch.arange(rows, dtype=torch.int32, device=buffer.device)
        self.parents = self.rows.long()
        self.ancestors = self.rows[:, None].repeat(1, capacity)
        self.sentence_positions = before_start(rows, buffer.device) if by_sentence else None

    def reorder(self, position: Tensor) -> None:
        """Let hypothesis r continue what was hypothesis parents[r], and write at `position` [1] itself."""
        if self.sentence_positions is not None:
            self.sentence_positions.copy_(self.sentence_positions.index_select(0, self.parents))
        self.ancestors.copy_(self.ancestors.index_select(0, self.parents))
        self.ancestors.index_copy_(1, position, self.rows[:, None])

    def take(self, other: StaticCache, hypotheses: Tensor) -> None:
        """Hold what these hypotheses of another cache, whose capacity is no larger, would continue."""
        self.clear()
        parents = other.parents[hypotheses]
        if self.sentence_positions is not None and other.sentence_positions is not None:
            self.sentence_positions[: len(parents)] = other.sentence_positions[parents]
        ancestors = other.ancestors[parents]
        for mine, held in zip(self.buffer, other.buffer, strict=True):
            mine[: len(hypotheses), :, : ancestors.shape[1]] = follow(held, ancestors)

    def clear(self) -> None:
        """Hold nothing, and let every hypothesis continue itself."""
        self.buffer.zero_()  # what is hidden must be finite, whatever was there before
        self.parents.copy_(self.rows)
        self.ancestors.copy_(self.rows[:, None].expand_as(self.ancestors))
        if self.sentence_positions is not None:
            self.sentence_positions.copy_(before_start(len(self.sentence_positions), self.sentence_positions.device))


def before_start(rows: int, device: torch.device) -> Tensor:
    """Sentence positions [rows, 2] before the first id, which will be at 0 of sentence 0."""
    return torch.tensor([[-1, 0]], device=device).repeat(rows, 1)


class StaticLayer:
    """One layer's part of a `StaticCache`, to which `decode_attention` adds one position per step."""

    def __init__(self, cache: StaticCache, layer: int) -> None:
        self.ancestors = cache.ancestors
        self.keys, self.values = cache.buffer[2 * layer], cache.buffer[2 * layer + 1]
        self.length = cache.buffer.shape[3]
