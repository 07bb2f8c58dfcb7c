"""Long sequences, backward: from the inputs alone, with no output and no row statistics kept, and without atomics.

`key_gradients` owns a tile of keys and walks over queries (4 products a tile), `query_gradients` owns a tile of queries
and walks over keys (3 products). Where keys are owned, tiles lie transposed, [keys, queries]: no product's result has
to be transposed to enter another. Rows with scales of their own have them in d_out, from `scale_gradients`: all that is
made there is linear in it, and scores, whose signs decide, stay as they are.

With STATS the sums of rows have gradients too: those of weights grow by slopes, which are divided by what the results
are multiplied with in the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rectiformer.ops.kernels.parts import row_gain, survivors
from rectiformer.ops.kernels.tiles import (
    find_place,
    key_range,
    load_slopes,
    load_tile,
    logarithms,
    query_range,
    rectified_powers,
    score_gradients,
    seen_scores,
    store_tile,
)


@triton.jit
def scale_gradients(
    g_ptr, scaled_ptr, lengths_ptr, q_bounds_ptr, k_bounds_ptr, g_strides, scaled_strides, band, H, M, N, Dv, exponent,
    ROW_SCALE: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The gradient of the output with each row times n^-exponent."""
    sequence, h = tl.program_id(1) // H, tl.program_id(1) % H
    place = find_place(sequence, h, 1, M, N, lengths_ptr, q_bounds_ptr, k_bounds_ptr, RAGGED, PACKED)
    b, _, _, q_start, _, rows, keys, length = place
    row = tl.program_id(0) * BLOCK_M
    if row < rows:  # a packed sequence may have fewer tiles
        m = row + tl.arange(0, BLOCK_M)
        d_out = load_tile(g_ptr, g_ptr, g_strides, b, h, q_start, row, rows, Dv, BLOCK_M, BLOCK_DV, False, False)
        gain = row_gain(1.0, exponent, m, rows, keys, length, band[0], band[1], 1, True, ROW_SCALE)
        scaled = d_out.to(tl.float32) * gain
        store_tile(scaled_ptr, scaled_strides, b, h, q_start, row, rows, Dv, scaled, BLOCK_M, BLOCK_DV)


@triton.jit
def add_queries(
    d_k, d_v, keys, values, q, g, q_ptr, g_ptr, q_strides, g_strides, begin, end, n, head, pattern, place,
    band, cells, slopes, seed_ptr, threshold, inner, D, Dv,
    EDGE: tl.constexpr, POWER: tl.constexpr, BANDED: tl.constexpr, CLEAR: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, DROPS: tl.constexpr, INNER: tl.constexpr,
    STATS: tl.constexpr, TMA: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """`d_k` and `d_v` plus what queries `begin` to `end` add; EDGE: each may not see every key."""
    b, _, _, q_start, k_start, M, _, _ = place
    for row in range(begin, end, BLOCK_M):
        m = row + tl.arange(0, BLOCK_M)
        queries = load_tile(q, q_ptr, q_strides, b, head, q_start, row, M, D, BLOCK_M, BLOCK_D, TMA, EDGE and CLEAR)
        scores = tl.dot(keys, queries.T, input_precision=PRECISION)
        scores = seen_scores(scores, m, n, place, band, cells, inner, 0, EDGE, BANDED, BIAS, MASK, INNER)
        d_out = load_tile(g, g_ptr, g_strides, b, head, q_start, row, M, Dv, BLOCK_M, BLOCK_DV, TMA, EDGE and CLEAR)
        d_weights = tl.dot(values, d_out.T, input_precision=PRECISION)
        if DROPS or STATS:
            weights = rectified_powers(scores, tl.float32, POWER, False)
            logs = logarithms(weights) if STATS else 0.0
            if DROPS:
                kept = survivors(seed_ptr, threshold, pattern, q_start + m, k_start + n, 0)
                weights = tl.where(kept, weights, 0.0)
                d_weights = tl.where(kept, d_weights, 0.0)
            if STATS:
                even, steep = load_slopes(slopes, place, m, 0)
                d_weights += even + steep * logs
            weights = weights.to(queries.dtype)
        else:
            weights = rectified_powers(scores, queries.dtype, POWER, ASM)
        d_v = tl.dot(weights, d_out, d_v, input_precision=PRECISION)
        d_scores = score_gradients(scores, d_weights, POWER).to(queries.dtype)
        d_k = tl.dot(d_scores, queries, d_k, input_precision=PRECISION)
    return d_k, d_v


@triton.jit
def head_scale(
    factor_ptr, kh, exponent, place, band, PER_HEAD: tl.constexpr, BANDED: tl.constexpr, ROW_SCALE: tl.constexpr
):
    """What all rows of a head are scaled with; rows of a band have more of their own, and have it in `d_out`."""
    scale = tl.load(factor_ptr + kh) if PER_HEAD else 1.0
    if not BANDED:
        scale = row_gain(scale, exponent, 0, place[5], place[6], place[7], band[0], band[1], 0, BANDED, ROW_SCALE)
    return scale


@triton.jit
def key_gradients(
    q, k, v, g, q_ptr, k_ptr, v_ptr, g_ptr, dk_ptr, dv_ptr, factor_ptr, lengths_ptr, seed_ptr, q_bounds_ptr,
    k_bounds_ptr, slopes_ptr, bias_ptr, mask_ptr, bias_strides, mask_strides, q_strides,
    k_strides, v_strides, g_strides, dk_strides, dv_strides,
    band,
    H, group, M, N, D, Dv, inner, gain, d_gain, exponent, threshold,
    POWER: tl.constexpr, ROW_SCALE: tl.constexpr, PER_HEAD: tl.constexpr,
    LATER: tl.constexpr, EARLIER: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, DROPS: tl.constexpr, INNER: tl.constexpr,
    STATS: tl.constexpr, TMA: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """`gain` multiplies d_v and `d_gain` d_k. Heads with factors of their own (PER_HEAD) share no keys."""
    BANDED: tl.constexpr = LATER or EARLIER
    CLEAR: tl.constexpr = RAGGED or PACKED
    TESTED: tl.constexpr = BIAS or MASK
    cells = (bias_ptr, bias_strides, mask_ptr, mask_strides)
    K = H // group
    tile, sequence, kh = tl.program_id(0), tl.program_id(1) // K, tl.program_id(1) % K
    head = kh * group
    place = find_place(sequence, head, group, M, N, lengths_ptr, q_bounds_ptr, k_bounds_ptr, RAGGED, PACKED)
    b, _, _, _, k_start, rows, columns, length = place
    column = tile * BLOCK_N
    if column < columns:  # a packed sequence may have fewer tiles
        n = column + tl.arange(0, BLOCK_N)
        keys = load_tile(k, k_ptr, k_strides, b, kh, k_start, column, length, D, BLOCK_N, BLOCK_D, TMA, CLEAR)
        values = load_tile(v, v_ptr, v_strides, b, kh, k_start, column, length, Dv, BLOCK_N, BLOCK_DV, TMA, CLEAR)
        begin, full_begin, full_end, end = query_range(column, BLOCK_N, place, band, BLOCK_M, BANDED)
        if column >= length:  # nobody sees these keys
            begin, full_begin, full_end, end = 0, 0, 0, 0
        shared = gain * head_scale(factor_ptr, kh, exponent, place, band, PER_HEAD, BANDED, ROW_SCALE) if STATS else 1.0
        d_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        d_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        for member in range(GROUP):
            head = kh * group + member
            here = (b, head, kh, place[3], k_start, rows, columns, length)
            slopes = (slopes_ptr, (b * H + head) * M, shared)
            starts = (begin, full_begin, full_end)
            stops = (end if TESTED else tl.minimum(full_begin, end), full_end if PACKED or EARLIER else end, end)
            for part in tl.static_range(3):  # an edge, what sees all keys, another edge
                if LATER or TESTED if part == 0 else not TESTED and (PACKED or EARLIER or part == 1):
                    d_k, d_v = add_queries(
                        d_k, d_v, keys, values, q, g, q_ptr, g_ptr, q_strides, g_strides, starts[part], stops[part],
                        n, head, b * H + head, here, band, cells, slopes, seed_ptr, threshold, inner, D, Dv,
                        part != 1, POWER, BANDED, PACKED, BIAS, MASK, DROPS, INNER, STATS, TMA, ASM, PRECISION,
                        BLOCK_M, BLOCK_D, BLOCK_DV,
                    )  # fmt: skip
        scale = head_scale(factor_ptr, kh, exponent, place, band, PER_HEAD, BANDED, ROW_SCALE)
        store_tile(dk_ptr, dk_strides, b, kh, k_start, column, columns, D, d_k * (d_gain * scale), BLOCK_N, BLOCK_D)
        store_tile(dv_ptr, dv_strides, b, kh, k_start, column, columns, Dv, d_v * (gain * scale), BLOCK_N, BLOCK_DV)


@triton.jit
def add_keys(
    d_q, queries, d_out, k, v, k_ptr, v_ptr, k_strides, v_strides, m, begin, end, pattern, place, band, cells,
    even, steep, seed_ptr, threshold, inner, D, Dv,
    EDGE: tl.constexpr, POWER: tl.constexpr, BANDED: tl.constexpr, CLEAR: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, DROPS: tl.constexpr, INNER: tl.constexpr, STATS: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """`d_q` plus what keys `begin` to `end` add; EDGE: not every query may see each of them."""
    b, _, kh, q_start, k_start, _, N, length = place
    limit = length if EDGE else N
    for column in range(begin, end, BLOCK_N):
        n = column + tl.arange(0, BLOCK_N)
        keys = load_tile(k, k_ptr, k_strides, b, kh, k_start, column, limit, D, BLOCK_N, BLOCK_D, TMA, EDGE and CLEAR)
        scores = tl.dot(queries, keys.T, input_precision=PRECISION)
        scores = seen_scores(scores, m, n, place, band, cells, inner, 1, EDGE, BANDED, BIAS, MASK, INNER)
        values = load_tile(
            v, v_ptr, v_strides, b, kh, k_start, column, limit, Dv, BLOCK_N, BLOCK_DV, TMA, EDGE and CLEAR
        )
        d_weights = tl.dot(d_out, values.T, input_precision=PRECISION)
        if DROPS:
            kept = survivors(seed_ptr, threshold, pattern, q_start + m, k_start + n, 1)
            d_weights = tl.where(kept, d_weights, 0.0)
        if STATS:
            powers = rectified_powers(scores, tl.float32, POWER, False)
            d_weights += even + steep * logarithms(powers)
        d_scores = score_gradients(scores, d_weights, POWER).to(queries.dtype)
        d_q = tl.dot(d_scores, keys, d_q, input_precision=PRECISION)
    return d_q


@triton.jit
def query_gradients(
    q, k, v, g, q_ptr, k_ptr, v_ptr, g_ptr, dq_ptr, factor_ptr, lengths_ptr, seed_ptr, q_bounds_ptr,
    k_bounds_ptr, slopes_ptr, bias_ptr, mask_ptr, bias_strides, mask_strides, q_strides,
    k_strides, v_strides, g_strides, dq_strides, band,
    H, group, M, N, D, Dv, inner, gain, exponent, threshold,
    POWER: tl.constexpr, ROW_SCALE: tl.constexpr, PER_HEAD: tl.constexpr,
    LATER: tl.constexpr, EARLIER: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, DROPS: tl.constexpr, INNER: tl.constexpr,
    STATS: tl.constexpr, TMA: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    BANDED: tl.constexpr = LATER or EARLIER
    CLEAR: tl.constexpr = RAGGED or PACKED
    TESTED: tl.constexpr = BIAS or MASK
    cells = (bias_ptr, bias_strides, mask_ptr, mask_strides)
    tile, sequence, h = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    if LATER:
        tile = tl.num_programs(0) - 1 - tile
    place = find_place(sequence, h, group, M, N, lengths_ptr, q_bounds_ptr, k_bounds_ptr, RAGGED, PACKED)
    b, _, _, q_start, _, rows, columns, length = place
    row = tile * BLOCK_M
    if row < rows:  # a packed sequence may have fewer tiles
        m = row + tl.arange(0, BLOCK_M)
        queries = load_tile(q, q_ptr, q_strides, b, h, q_start, row, rows, D, BLOCK_M, BLOCK_D, TMA, False)
        d_out = load_tile(g, g_ptr, g_strides, b, h, q_start, row, rows, Dv, BLOCK_M, BLOCK_DV, TMA, False)
        d_q = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        even, steep = 0.0, 0.0
        if STATS:
            shared = gain * tl.load(factor_ptr + h) if PER_HEAD else gain
            shared = shared / inner if INNER else shared
            shared = row_gain(shared, exponent, m, rows, columns, length, band[0], band[1], 1, BANDED, ROW_SCALE)
            even, steep = load_slopes((slopes_ptr, (b * H + h) * M, shared), place, m, 1)
        begin, full_begin, full_end, end = key_range(row, BLOCK_M, place, band, BLOCK_N, BANDED)
        starts = (begin, full_begin, full_end)
        stops = (end if TESTED else tl.minimum(full_begin, end), full_end if CLEAR or LATER else end, end)
        for part in tl.static_range(3):  # an edge, what all queries see, another edge
            if EARLIER or TESTED if part == 0 else not TESTED and (CLEAR or LATER or part == 1):
                d_q = add_keys(
                    d_q, queries, d_out, k, v, k_ptr, v_ptr, k_strides, v_strides, m, starts[part], stops[part],
                    b * H + h, place, band, cells, even, steep, seed_ptr, threshold, inner, D, Dv,
                    part != 1, POWER, BANDED, CLEAR, BIAS, MASK, DROPS, INNER, STATS, TMA, PRECISION,
                    BLOCK_N, BLOCK_D, BLOCK_DV,
                )  # fmt: skip
        if PER_HEAD:
            gain = gain * tl.load(factor_ptr + h)
        d_q = d_q * row_gain(gain, exponent, m, rows, columns, length, band[0], band[1], 1, BANDED, ROW_SCALE)
        store_tile(dq_ptr, dq_strides, b, h, q_start, row, rows, D, d_q, BLOCK_M, BLOCK_D)
