"""Long sequences, forward: a program mixes the values for one tile of queries of one head.

A rectified row has no maximum, no sum and no rescaling, so the loop is two matrix products with a ReLU between them;
all that scales a row is multiplied once at the end. Keys that all queries of the tile see are walked without any test,
those at an edge of visibility (causal order, window, key lengths) with one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rectiformer.ops.kernels.parts import row_gain, survivors
from rectiformer.ops.kernels.tiles import (
    find_place,
    key_range,
    load_tile,
    logarithms,
    rectified_powers,
    seen_scores,
    store_tile,
)


@triton.jit
def mix_keys(
    mixed, mass, logs, q, k, v, k_ptr, v_ptr, k_strides, v_strides, m, begin, end, pattern, place, band,
    cells, seed_ptr, threshold, inner, D, Dv,
    EDGE: tl.constexpr, POWER: tl.constexpr, BANDED: tl.constexpr, CLEAR: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, DROPS: tl.constexpr, INNER: tl.constexpr, STATS: tl.constexpr,
    TMA: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """`mixed` plus what keys `begin` to `end` add; EDGE: not every query may see each of them.

    STATS: their weights w, and w log w, are added to `mass` and `logs`.
    """
    b, _, kh, q_start, k_start, _, N, length = place
    limit = length if EDGE else N
    for column in range(begin, end, BLOCK_N):
        n = column + tl.arange(0, BLOCK_N)
        keys = load_tile(k, k_ptr, k_strides, b, kh, k_start, column, limit, D, BLOCK_N, BLOCK_D, TMA, EDGE and CLEAR)
        scores = tl.dot(q, keys.T, input_precision=PRECISION)
        scores = seen_scores(scores, m, n, place, band, cells, inner, 1, EDGE, BANDED, BIAS, MASK, INNER)
        weights = rectified_powers(scores, tl.float32 if STATS else q.dtype, POWER, ASM)
        if STATS:
            mass += tl.sum(weights, 1)
            logs += tl.sum(weights * logarithms(weights), 1)
            weights = weights.to(q.dtype)
        if DROPS:
            kept = survivors(seed_ptr, threshold, pattern, q_start + m, k_start + n, 1)
            weights = tl.where(kept, weights, 0.0).to(q.dtype)
        values = load_tile(
            v, v_ptr, v_strides, b, kh, k_start, column, limit, Dv, BLOCK_N, BLOCK_DV, TMA, EDGE and CLEAR
        )
        mixed = tl.dot(weights, values, mixed, input_precision=PRECISION)
    return mixed, mass, logs


@triton.jit
def forward(
    q, k, v, q_ptr, k_ptr, v_ptr, out_ptr, factor_ptr, lengths_ptr, seed_ptr, q_bounds_ptr, k_bounds_ptr,
    rows_ptr, bias_ptr, mask_ptr, bias_strides, mask_strides, q_strides, k_strides,
    v_strides, out_strides, band,
    H, group, M, N, D, Dv, inner, gain, exponent, threshold,
    POWER: tl.constexpr, ROW_SCALE: tl.constexpr, PER_HEAD: tl.constexpr,
    LATER: tl.constexpr, EARLIER: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, DROPS: tl.constexpr, INNER: tl.constexpr,
    STATS: tl.constexpr, TMA: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    BANDED: tl.constexpr = LATER or EARLIER
    CLEAR: tl.constexpr = RAGGED or PACKED  # what lies beyond a sequence's keys is not the end of the tensor
    TESTED: tl.constexpr = BIAS or MASK  # every cell is looked at anyway
    cells = (bias_ptr, bias_strides, mask_ptr, mask_strides)
    tile, sequence, h = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    if LATER:  # the longest rows first, so that none is left alone at the end
        tile = tl.num_programs(0) - 1 - tile
    place = find_place(sequence, h, group, M, N, lengths_ptr, q_bounds_ptr, k_bounds_ptr, RAGGED, PACKED)
    b, _, _, q_start, _, rows, keys, length = place
    row = tile * BLOCK_M
    if row < rows:  # a packed sequence may have fewer tiles
        m = row + tl.arange(0, BLOCK_M)
        queries = load_tile(q, q_ptr, q_strides, b, h, q_start, row, rows, D, BLOCK_M, BLOCK_D, TMA, False)
        mixed = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        mass, logs = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
        begin, full_begin, full_end, end = key_range(row, BLOCK_M, place, band, BLOCK_N, BANDED)
        starts = (begin, full_begin, full_end)
        stops = (end if TESTED else tl.minimum(full_begin, end), full_end if CLEAR or LATER else end, end)
        for part in tl.static_range(3):  # an edge, what all queries see, another edge
            if EARLIER or TESTED if part == 0 else not TESTED and (CLEAR or LATER or part == 1):
                mixed, mass, logs = mix_keys(
                    mixed, mass, logs, queries, k, v, k_ptr, v_ptr, k_strides, v_strides, m, starts[part], stops[part],
                    b * H + h, place, band, cells, seed_ptr, threshold, inner, D, Dv, part != 1, POWER,
                    BANDED, CLEAR, BIAS, MASK, DROPS, INNER, STATS, TMA, ASM, PRECISION,
                    BLOCK_N, BLOCK_D, BLOCK_DV,
                )  # fmt: skip
        if PER_HEAD:
            gain = gain * tl.load(factor_ptr + h)
        mixed = mixed * row_gain(gain, exponent, m, rows, keys, length, band[0], band[1], 1, BANDED, ROW_SCALE)
        store_tile(out_ptr, out_strides, b, h, q_start, row, rows, Dv, mixed, BLOCK_M, BLOCK_DV)
        if STATS:
            described = rows_ptr + 2 * tl.cast((b * H + h) * M + q_start + m, tl.int64)
            total = tl.where(mass > 0.0, mass, 1.0)
            tl.store(described, mass, mask=m < rows)
            tl.store(described + 1, tl.log(total) - logs / total, mask=m < rows)
