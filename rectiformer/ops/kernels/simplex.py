"""Rows of scores onto the simplex, [x - tau]+ ** POWER with sum 1, forward and backward: whole rows in registers.

A program holds rows [ROWS, BLOCK_N]. No row is sorted: the sum falls as tau grows and is convex in it, so Newton's
steps from below reach the threshold without passing it, and stop where float32 has no step left.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def simplex_forward(
    scores_ptr, lengths_ptr, weights_ptr, count, queries, keys, rows_a_batch, first, left, right, scale,
    LENGTHS: tl.constexpr, POWER: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_N)[None, :]
    own = (rows % queries + first)[:, None]  # the query's place among the keys
    inside = (rows < count)[:, None] & (columns < keys)
    seen = inside & (columns >= own - left) & (columns <= own + right)
    if LENGTHS:
        seen = seen & (columns < tl.load(lengths_ptr + rows // rows_a_batch, mask=rows < count, other=0)[:, None])
    cells = rows.to(tl.int64)[:, None] * keys + columns
    scores = tl.load(scores_ptr + cells, mask=seen, other=0.0).to(tl.float32)
    seen = seen & (scores != -float("inf"))  # what the caller has hidden
    x = tl.where(seen, scores, 0.0) * (scale / POWER)
    top = tl.max(tl.where(seen, x, -float("inf")), 1)[:, None]
    x = tl.where(seen, x - top, -2.0)  # 1 below the top a weight is 0
    tau = tl.full([ROWS], -1.0, tl.float32)
    moving = True
    while moving:
        gap = tl.maximum(x - tau[:, None], 0.0)
        if POWER == 1:
            step = (tl.sum(gap, 1) - 1.0) / tl.maximum(tl.sum((gap > 0).to(tl.float32), 1), 1.0)
        else:
            step = (tl.sum(gap * gap, 1) - 1.0) / tl.maximum(2.0 * tl.sum(gap, 1), 1e-30)
        moved = tl.maximum(tau + step, tau)
        moving = tl.max((moved > tau).to(tl.int32), 0) > 0
        tau = moved
    gap = tl.maximum(x - tau[:, None], 0.0, propagate_nan=tl.PropagateNan.ALL)
    weights = gap if POWER == 1 else gap * gap
    tl.store(weights_ptr + cells, weights.to(weights_ptr.dtype.element_ty), mask=inside)


@triton.jit
def simplex_backward(
    d_weights_ptr, weights_ptr, d_scores_ptr, count, keys, scale,
    POWER: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Each weight's slope times its gradient less the row's mean of gradients, weighed by the slopes."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_N)[None, :]
    cells = rows.to(tl.int64)[:, None] * keys + columns
    inside = (rows < count)[:, None] & (columns < keys)
    weights = tl.load(weights_ptr + cells, mask=inside, other=0.0).to(tl.float32)
    slope = (weights > 0).to(tl.float32) if POWER == 1 else tl.sqrt(weights)
    passed = tl.load(d_weights_ptr + cells, mask=inside & (weights > 0), other=0.0).to(tl.float32)
    mean = tl.sum(slope * passed, 1) / tl.maximum(tl.sum(slope, 1), 1e-30)
    d_scores = scale * slope * (passed - mean[:, None])
    tl.store(d_scores_ptr + cells, d_scores.to(d_scores_ptr.dtype.element_ty), mask=inside)
