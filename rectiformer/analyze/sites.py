"""The record of one attention call, a few queries at a time: no dense matrix of weights is ever held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from rectiformer.analyze.diversity import BLOCK_CELLS
from rectiformer.analyze.record import SiteRecord
from rectiformer.model.observation import Observation
from rectiformer.ops.weights import weight_blocks


def site_records(
    seen: Observation, kind: str, layer: int, queries: Sequence[int], keys: Sequence[int]
) -> list[SiteRecord]:
    """What an attention did with each sequence of a batch, of which the first `queries` and `keys` are no padding."""
    batch, heads, _, _ = seen.q.shape
    visible = seen.visible().expand(seen.q.shape[:3]).cpu().numpy()  # [B, H, M]
    parts: list[list[SiteRecord]] = [[] for _ in range(batch)]
    with torch.no_grad():
        for rows, block in weight_blocks(seen.q, seen.k, seen.variant, cells=BLOCK_CELLS, **seen.call):
            weights = block.float().cpu().numpy()  # [B, H, m, N]
            for index, (length, width) in enumerate(zip(queries, keys, strict=True)):
                real = slice(rows.start, min(rows.stop, length))
                if real.start < real.stop:
                    part = weights[index, :, : real.stop - real.start, :width]
                    parts[index].append(SiteRecord.from_dense(kind, layer, part, visible[index, :, real]))
    nothing = [
        SiteRecord.from_dense(kind, layer, np.zeros((heads, 0, width), np.float32), np.zeros((heads, 0), np.int64))
        for width in keys
    ]
    return [join_queries(part) if part else empty for part, empty in zip(parts, nothing, strict=True)]


def join_queries(parts: Sequence[SiteRecord]) -> SiteRecord:
    """One record of the queries of all parts, which are of the same attention and keys."""
    heads = range(parts[0].heads)

    def by_head(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name).reshape(len(heads), -1) for part in parts], 1).reshape(-1)

    def by_row(name: str) -> np.ndarray:
        return np.concatenate(
            [
                getattr(part, name)[part.row_starts[head * part.queries] : part.row_starts[(head + 1) * part.queries]]
                for head in heads
                for part in parts
            ]
        )

    counts = np.concatenate([np.diff(part.row_starts).reshape(len(heads), -1) for part in parts], 1)
    return replace(
        parts[0],
        queries=sum(part.queries for part in parts),
        row_starts=np.concatenate([[0], counts.reshape(-1).cumsum()]).astype(np.uint32),
        columns=by_row("columns"),
        weights=by_row("weights"),
        mass=by_head("mass"),
        null=by_head("null"),
        visible=by_head("visible"),
    )
