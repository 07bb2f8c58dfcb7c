"""Tiles of the kernels for long sequences: one row a (kernel, head size), measured on an H200.

The length of a sequence chooses nothing, so no length makes a kernel compile again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Tiling(NamedTuple):
    """Queries and keys of a tile, warps of a program, tiles in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


# (kernel, largest head size) of 16-bit numbers -> tiling of full rows, and of rows with an edge of visibility
TILINGS = {
    ("forward", 64): (Tiling(128, 64, 4, 3), Tiling(128, 64, 4, 3)),
    ("forward", 128): (Tiling(128, 64, 4, 2), Tiling(128, 64, 4, 2)),
    ("forward", 256): (Tiling(128, 64, 8, 2), Tiling(128, 64, 8, 2)),
    # the forward pass that describes rows: chosen to fit in registers, not measured
    ("rows", 64): (Tiling(128, 64, 4, 3), Tiling(128, 64, 4, 3)),
    ("rows", 128): (Tiling(128, 64, 8, 2), Tiling(128, 64, 8, 2)),
    ("rows", 256): (Tiling(128, 64, 8, 2), Tiling(128, 64, 8, 2)),
    ("keys", 64): (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 3)),
    ("keys", 128): (Tiling(64, 128, 8, 3), Tiling(64, 64, 4, 2)),
    ("keys", 256): (Tiling(32, 64, 8, 2), Tiling(32, 64, 8, 2)),
    ("queries", 64): (Tiling(128, 64, 8, 4), Tiling(64, 64, 4, 2)),
    ("queries", 128): (Tiling(128, 64, 8, 3), Tiling(128, 64, 8, 3)),
    ("queries", 256): (Tiling(64, 32, 8, 2), Tiling(64, 32, 8, 2)),
    ("bias", 64): (Tiling(64, 64, 4, 1), Tiling(64, 64, 4, 1)),
    ("bias", 128): (Tiling(64, 64, 4, 1), Tiling(64, 64, 4, 1)),
    ("bias", 256): (Tiling(32, 32, 4, 1), Tiling(32, 32, 4, 1)),
}
EXACT = {
    "forward": Tiling(64, 32, 4, 1),
    "rows": Tiling(64, 32, 4, 1),
    "keys": Tiling(32, 16, 4, 1),
    "queries": Tiling(64, 32, 4, 1),
    "bias": Tiling(32, 32, 4, 1),
}
"""Of float32, whose products are each made of three."""

SCALING = Tiling(32, 1, 4, 1)
"""Of the kernel that scales rows of a gradient; it has no keys."""

LARGEST_TILES = 200 << 10
"""Bytes of shared memory that the largest of `TILINGS` takes, and a little more."""

SMALL = {64: Tiling(64, 64, 4, 2), 128: Tiling(64, 32, 4, 2), 256: Tiling(32, 16, 4, 1)}
"""Of 16-bit numbers on devices with little shared memory, by head size; chosen to fit, not measured."""


def find_tiling(kernel: str, q: Tensor, v: Tensor, edges: bool) -> Tiling:
    """The tiling of a kernel; `edges` says that causal order or a window hides some keys."""
    if q.element_size() != 2:
        return EXACT[kernel]
    size = next(size for size in (64, 128, 256) if max(q.shape[3], v.shape[3]) <= size)
    return TILINGS[kernel, size][edges] if has_large_tiles(q.device) else SMALL[size]


@lru_cache
def has_large_tiles(device: torch.device) -> bool:
    """Whether the shared memory of a program holds the tiles of `TILINGS`: from Hopper on, on data center devices."""
    if device.type != "cuda":
        return True
    room: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return room >= LARGEST_TILES
