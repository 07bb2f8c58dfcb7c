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


class FixedRoom:
    """Room for the keys and values of all layers of `rows` hypotheses, of one size, for steps that are CUDA graphs.

    `parents` says, on the device, which hypothesis each continues. Reordering goes from one copy of the room to the
    other, all layers at once; after two reorderings everything is where it was, so a graph holds two steps.
    """

    def __init__(self, like: Tensor, layers: int, rows: int, heads: int, length: int, size: int) -> None:
        shape = (2 * layers, rows, heads, length, size)
        # Zeros, because hidden cells still pass through matrix products, and NaN times 0 is NaN.
        self.held, self.spare = (torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(2))
        self.parents = torch.arange(rows, device=like.device)

    def reorder(self) -> None:
        """Let hypothesis r continue what was hypothesis parents[r]."""
        torch.index_select(self.held, 1, self.parents, out=self.spare)
        self.held, self.spare = self.spare, self.held


class FixedCache:
    """One layer's part of a `FixedRoom`, written at a position that lives on the device.

    `append` takes one token and returns the whole room; the caller hides what is not yet written by key lengths.
    """

    def __init__(self, room: FixedRoom, layer: int, position: Tensor) -> None:
        self.room, self.layer, self.position = room, layer, position  # position [1]
        self.length = room.held.shape[3]

    @property
    def keys(self) -> Tensor:
        return self.room.held[2 * self.layer]

    @property
    def values(self) -> Tensor:
        return self.room.held[2 * self.layer + 1]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.keys, self.values
        keys.index_copy_(2, self.position, k.to(keys.dtype))
        values.index_copy_(2, self.position, v.to(values.dtype))
        return keys, values


class ReadyCache:
    """Keys and values that were projected before: those of a source."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.length = keys.shape[2]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("a source is projected once")
