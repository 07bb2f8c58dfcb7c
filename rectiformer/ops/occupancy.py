"""Which tiles of a call hold a positive score at all, exactly, and attention that visits no others.

Most rectified weights of a trained model are exactly 0, but whole tiles of zeros are rarer: `sparsity_by_shape` tells
both, so that nobody hopes for more than there is.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rectiformer.errors import ArgumentError, ShapeError
from rectiformer.ops.dispatch import check_call, transform_obstacle
from rectiformer.ops.long import long_attention, long_obstacle
from rectiformer.ops.reference import AttentionCall, reference_weights

TILE = 64
"""Queries and keys of a tile."""


@dataclass(frozen=True)
class TileMap:
    """Tiles of one call, 64 x 64 cells each."""

    active: Tensor
    """bool [B, H, tiles of queries, tiles of keys]: some cell is not 0."""
    visible: Tensor
    """Some query sees some key."""

    @property
    def sparsity(self) -> float:
        """Share of the visible tiles that are all zeros."""
        return 1 - self.active.sum().item() / max(1, self.visible.sum().item())


def tile_map(q: Tensor, k: Tensor, variant: str = "rela", **arguments: Any) -> TileMap:
    """The exact map of a call of `attention` with these arguments; scores of 64 queries are held at a time."""
    call = describe(q, k, None, variant, arguments)
    active, visible = [], []
    for start in range(0, q.shape[2], TILE):
        rows = call.rows(start, min(start + TILE, q.shape[2]))
        weights = reference_weights(q[:, :, start : start + TILE], k, rows)
        seen = rows.seen.mask(q.device)
        seen = torch.ones((), dtype=torch.bool, device=q.device) if seen is None else seen
        active.append(pool(weights != 0, TILE))
        visible.append(pool(seen.expand_as(weights), TILE))
    return TileMap(torch.stack(active, 2), torch.stack(visible, 2))


def pool(cells: Tensor, width: int) -> Tensor:
    """True for runs of `width` keys with a True cell in any row: [B, H, rows, N] to [B, H, runs]."""
    columns = cells.any(2)
    return F.pad(columns, (0, -columns.shape[-1] % width)).unflatten(-1, (-1, width)).any(-1)


def attention_by_tiles(
    q: Tensor, k: Tensor, v: Tensor, tiles: TileMap, variant: str = "rela", **arguments: Any
) -> Tensor:
    """`attention` that visits only tiles with a positive score: the same sums, forward and backward, for less work.

    The map must be that of the same q, k and arguments: what it leaves out is taken to be 0. GPUs only, rectified
    variants only; whether it is faster depends on how many tiles are empty (docs/benchmarks.md).
    """
    call = describe(q, k, v, variant, arguments)
    obstacle = long_obstacle(q, k, v, call) or transform_obstacle()
    if obstacle or max(q.shape[3], v.shape[3]) > 128:
        raise ArgumentError(f"attention_by_tiles cannot run this call: {obstacle or 'head sizes go up to 128'}")
    expected = [*q.shape[:2], -(-q.shape[2] // TILE), -(-k.shape[2] // TILE)]
    if list(tiles.active.shape) != expected:
        raise ShapeError(f"the map has {list(tiles.active.shape)} tiles, but this call has {expected}")
    return long_attention(q, k, v, call, tiles=tiles.active)


def sparsity_by_shape(q: Tensor, k: Tensor, variant: str = "rela", **arguments: Any) -> dict[str, float]:
    """Shares of what is all zeros among what is visible: single cells, pages of 16 and 64 keys a row, tiles, rows."""
    call = describe(q, k, None, variant, arguments)
    shapes = {
        "cells": (1, 1),
        "pages of 16": (1, 16),
        "pages of 64": (1, 64),
        "tiles of 16": (16, 16),
        "tiles of 64": (64, 64),
    }
    zeros, seen_counts = dict.fromkeys([*shapes, "rows"], 0), dict.fromkeys([*shapes, "rows"], 0)
    for start in range(0, q.shape[2], TILE):
        rows = call.rows(start, min(start + TILE, q.shape[2]))
        weights = reference_weights(q[:, :, start : start + TILE], k, rows)
        seen = rows.seen.mask(q.device)
        seen = torch.ones_like(weights, dtype=torch.bool) if seen is None else seen.expand_as(weights)
        used = weights != 0
        for name, (height, width) in {**shapes, "rows": (1, k.shape[2])}.items():
            for part, part_used in zip(seen.split(height, 2), used.split(height, 2), strict=True):
                visible = pool(part, width)
                seen_counts[name] += int(visible.sum())
                zeros[name] += int((visible & ~pool(part_used, width)).sum())
    return {name: zeros[name] / max(1, seen_counts[name]) for name in zeros}


def describe(q: Tensor, k: Tensor, v: Tensor | None, variant: str, arguments: dict[str, Any]) -> AttentionCall:
    """The call that `attention` would make of these arguments."""
    given = dict(arguments)
    options = {name: given.pop(name) for name in set(arguments) - set(inspect.signature(check_call).parameters)}
    call = check_call(q, k, v, variant, options=options, **given)
    if not call.variant.rectified:
        raise ArgumentError(f"variant {variant!r} has no exact zeros to leave out; take a rectified one")
    return call
