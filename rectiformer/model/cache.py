"""Keys and values already projected, so that decoding projects each token once."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Cache(Protocol):
    """What attention needs of a cache."""

    length: int

    @property
    def keys(self) -> Tensor: ...

    @property
    def values(self) -> Tensor: ...

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...


class KeyValueCache:
    """A cache that grows: room doubles when it runs out, so appending n tokens copies O(n) of them in all.

    Not for training: it writes in place.
    """

    def __init__(self) -> None:
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def keys(self) -> Tensor:
        assert self._keys is not None
        return self._keys[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        assert self._values is not None
        return self._values[:, :, : self.length]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add tokens [B, K, new, D] and return all keys and values so far."""
        self._keys = self._extend(self._keys, k)
        self._values = self._extend(self._values, v)
        self.length += k.shape[2]
        return self.keys, self.values

    def reorder(self, rows: Tensor) -> None:
        """Let sequence b continue what was sequence rows[b]: a beam search's choice of parents."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = (self._moved(held, rows) for held in (self._keys, self._values))

    def _moved(self, held: Tensor, rows: Tensor) -> Tensor:
        """In the same room where it suffices: a copy of what is written, back and forth, is cheaper than new room."""
        if len(rows) > len(held):
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


class FixedCache:
    """A cache of one size whose write position lives on the device, so that a step can be captured as a CUDA graph.

    `append` takes one token and returns the whole room; the caller hides what is not yet written by key lengths.
    `rows` says which sequence each sequence continues and is applied to the room before the token is written.
    """

    def __init__(self, keys: Tensor, values: Tensor, position: Tensor, rows: Tensor | None = None) -> None:
        self.keys, self.values = keys, values  # [B, K, room, D]
        self.position, self.rows = position, rows  # [1], [B]
        self.length = keys.shape[2]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        for room, new in ((self.keys, k), (self.values, v)):
            if self.rows is not None:
                room.copy_(room.index_select(0, self.rows))
            room.index_copy_(2, self.position, new.to(room.dtype))
        return self.keys, self.values


def empty_room(like: Tensor, rows: int, heads: int, room: int, size: int) -> Tensor:
    """Zeros [rows, heads, room, size]: finite, because hidden cells still pass through matrix products."""
    return torch.zeros(rows, heads, room, size, dtype=like.dtype, device=like.device)
