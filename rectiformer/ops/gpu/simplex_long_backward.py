"""Gradients of sparsemax and 1.5-entmax attention of rows of any length, from the inputs and the thresholds that
simplex_long.py keeps.

A weight [x/power - tau]+ ** power grows with its own score by its slope: 1 for power 1, [x/2 - tau]+ for power 2, and 0
outside the support. Since a row sums to 1, what all weights of a row have in common moves nothing:

    d_x = slope (d_weight - mean),    mean = sum(slope d_weight) / sum(slope)

`simplex_means_kernel` finds the means (2 products per tile), `simplex_dkdv_kernel` owns a tile of keys and walks over
queries (4 products), `simplex_dq_kernel` owns a tile of queries and walks over keys (3 products), as in
long_backward.py: no atomics, so reruns are bitwise equal. Where keys are owned, tiles lie transposed, [keys, queries]:
no product's result has to be transposed to enter another.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rectiformer.ops.gpu.common import empty_heads_last, load_tile, locate_sequence, store_tile, visible
from rectiformer.ops.gpu.long_backward import query_range
from rectiformer.ops.gpu.pointwise import relu
from rectiformer.ops.gpu.simplex_long import (
    SimplexCall,
    empty_rows,
    key_parts,
    launch,
    load_keys,
    load_rows,
    load_threshold,
    locate_queries,
    row_pointers,
    tile_scores,
)


def simplex_gradients(call: SimplexCall, d_out: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    q, k, v = call.q, call.k, call.v
    d_q, d_k, d_v = (empty_heads_last(tensor, tensor.shape[3]) for tensor in (q, k, v))
    tables = [rows.contiguous(), empty_rows(q, 1)]
    launch(simplex_means_kernel, "means", call, [q, k, v, d_out], tables)
    launch(simplex_dkdv_kernel, "keys", call, [q, k, v, d_out, d_k, d_v], tables, GROUP=q.shape[1] // k.shape[1])
    launch(simplex_dq_kernel, "queries", call, [q, k, v, d_out, d_q], tables)
    return d_q, d_k, d_v


@triton.jit
def times_slope(gap, numbers, POWER: tl.constexpr):
    """`numbers` times the slopes of weights [gap]+ ** power; 0 outside the support, whatever they are there."""
    return tl.where(gap <= 0.0, 0.0, numbers if POWER == 1 else relu(gap) * numbers)


@triton.jit
def add_means(
    total, slopes, base, rest, d_out, tile, k_ptr, v_ptr, k_strides, v_strides, begin, end, D, Dv,
    POWER: tl.constexpr, EDGE: tl.constexpr, BANDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Sums over rows of slope x d_weight and of slopes, plus what keys `begin` to `end` add."""
    for column in range(begin, end, BLOCK_N):
        keys = load_keys(k_ptr, k_strides, tile[2], column, D, BLOCK_N, BLOCK_D)
        gap = tile_scores(tile, keys, column, EDGE, BANDED, PRECISION, BLOCK_N) - base - rest
        values = load_keys(v_ptr, v_strides, tile[2], column, Dv, BLOCK_N, BLOCK_DV)
        d_weights = tl.dot(d_out, values.T, input_precision=PRECISION)
        total += tl.sum(times_slope(gap, d_weights, POWER), 1)
        slopes += tl.sum(times_slope(gap, 1.0, POWER), 1)
    return total, slopes


@triton.jit
def simplex_means_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, rows_ptr, means_ptr, lengths_ptr, q_strides, k_strides, v_strides, g_strides, window,
    H, group, M, N, D, Dv, scale,
    POWER: tl.constexpr, HIDES_LATER: tl.constexpr, HIDES_EARLIER: tl.constexpr, RAGGED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Each row's mean of the gradients of its weights, weighed by their slopes."""
    BANDED: tl.constexpr = HIDES_LATER or HIDES_EARLIER
    row, tile = locate_queries(
        q_ptr, lengths_ptr, q_strides, window, H, group, M, N, D, scale, POWER, HIDES_LATER, RAGGED, BLOCK_M, BLOCK_D
    )
    _, m, seq, _, _ = tile
    d_out = load_tile(g_ptr, g_ptr, g_strides, seq[0], seq[1], 0, row, M, Dv, BLOCK_M, BLOCK_DV, False, False)
    base, rest = load_threshold(rows_ptr, seq, H, m, 1)
    starts, stops = key_parts(row, tile, BLOCK_M, BLOCK_N, BANDED)
    total, slopes = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    for part in tl.static_range(3):  # an edge, what all queries see, another edge
        if HIDES_EARLIER or part > 0:
            total, slopes = add_means(
                total, slopes, base, rest, d_out, tile, k_ptr, v_ptr, k_strides, v_strides, starts[part], stops[part],
                D, Dv, POWER, part != 1, BANDED, PRECISION, BLOCK_N, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
    mean = total / tl.where(slopes == 0.0, 1.0, slopes)
    mean += 0.0 * tl.sum(rest, 1)  # NaN stays NaN: slopes of power 1 do not tell
    tl.store(row_pointers(means_ptr, seq, H, 0, m, 1), mean, mask=m < M)


@triton.jit
def add_queries(
    d_k, d_v, keys, values, q_ptr, g_ptr, rows_ptr, means_ptr, q_strides, g_strides, begin, end, n, seq, window, gain,
    H, D, Dv,
    POWER: tl.constexpr, EDGE: tl.constexpr, BANDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """`d_k` and `d_v` plus what queries `begin` to `end` add; EDGE: not every one may see each of the keys."""
    b, h, _, _, _, M, N, length = seq
    left, right = window
    for row in range(begin, end, BLOCK_M):
        m = row + tl.arange(0, BLOCK_M)
        queries = load_tile(q_ptr, q_ptr, q_strides, b, h, 0, row, M, D, BLOCK_M, BLOCK_D, False, False)
        base, rest = load_threshold(rows_ptr, seq, H, m, 0)
        gap = tl.dot(keys, queries.T, input_precision=PRECISION) * gain - base - rest
        if EDGE:
            gap = tl.where(visible(m, n, M, N, length, left, right, 0, BANDED, BANDED), gap, 0.0)
        d_out = load_tile(g_ptr, g_ptr, g_strides, b, h, 0, row, M, Dv, BLOCK_M, BLOCK_DV, False, False)
        d_weights = tl.dot(values, d_out.T, input_precision=PRECISION)
        weights = relu(gap)
        weights = (weights if POWER == 1 else weights * weights).to(d_out.dtype)
        d_v = tl.dot(weights, d_out, d_v, input_precision=PRECISION)
        mean = load_rows(means_ptr, seq, H, 0, m, 0.0, 1, 0)
        d_scores = times_slope(gap, d_weights - mean, POWER).to(queries.dtype)
        d_k = tl.dot(d_scores, queries, d_k, input_precision=PRECISION)
    return d_k, d_v


@triton.jit
def simplex_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, dk_ptr, dv_ptr, rows_ptr, means_ptr, lengths_ptr,
    q_strides, k_strides, v_strides, g_strides, dk_strides, dv_strides, window, H, group, M, N, D, Dv, scale,
    POWER: tl.constexpr, HIDES_LATER: tl.constexpr, HIDES_EARLIER: tl.constexpr, RAGGED: tl.constexpr,
    PRECISION: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """GROUP query heads that read one key head are walked one after the other by the program that owns its keys."""
    BANDED: tl.constexpr = HIDES_LATER or HIDES_EARLIER
    K = H // group
    column, b, kh = tl.program_id(0) * BLOCK_N, tl.program_id(1) // K, tl.program_id(1) % K
    seq = locate_sequence(b, kh * group, group, M, N, lengths_ptr, lengths_ptr, lengths_ptr, RAGGED, False)
    length = seq[7]
    n = column + tl.arange(0, BLOCK_N)
    keys = load_keys(k_ptr, k_strides, seq, column, D, BLOCK_N, BLOCK_D)
    values = load_keys(v_ptr, v_strides, seq, column, Dv, BLOCK_N, BLOCK_DV)
    begin, full_begin, full_end, end = query_range(column, BLOCK_N, seq, window, BLOCK_M, BANDED)
    if column >= length:  # nobody sees these keys
        begin, full_begin, full_end, end = 0, 0, 0, 0
    starts = (begin, full_begin, full_end)
    stops = (tl.minimum(full_begin, end), full_end if HIDES_EARLIER else end, end)
    d_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    d_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in range(GROUP):
        here = (b, kh * group + member, kh, 0, 0, M, N, length)
        for part in tl.static_range(3):  # an edge, what sees all keys, another edge
            if HIDES_LATER if part == 0 else HIDES_EARLIER or part == 1:
                d_k, d_v = add_queries(
                    d_k, d_v, keys, values, q_ptr, g_ptr, rows_ptr, means_ptr, q_strides, g_strides, starts[part],
                    stops[part], n, here, window, scale / POWER, H, D, Dv, POWER, part != 1, BANDED, PRECISION,
                    BLOCK_M, BLOCK_D, BLOCK_DV,
                )  # fmt: skip
    # Padding was not hidden above: a key's gradients are a row of the tile, and meet those of no other key.
    real = (n < length)[:, None]
    d_k, d_v = tl.where(real, d_k * scale, 0.0), tl.where(real, d_v, 0.0)
    store_tile(dk_ptr, dk_strides, b, kh, 0, column, N, D, d_k, BLOCK_N, BLOCK_D)
    store_tile(dv_ptr, dv_strides, b, kh, 0, column, N, Dv, d_v, BLOCK_N, BLOCK_DV)


@triton.jit
def add_keys(
    d_q, base, rest, mean, d_out, tile, k_ptr, v_ptr, k_strides, v_strides, begin, end, D, Dv,
    POWER: tl.constexpr, EDGE: tl.constexpr, BANDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """`d_q` plus what keys `begin` to `end` add."""
    for column in range(begin, end, BLOCK_N):
        keys = load_keys(k_ptr, k_strides, tile[2], column, D, BLOCK_N, BLOCK_D)
        gap = tile_scores(tile, keys, column, EDGE, BANDED, PRECISION, BLOCK_N) - base - rest
        values = load_keys(v_ptr, v_strides, tile[2], column, Dv, BLOCK_N, BLOCK_DV)
        d_weights = tl.dot(d_out, values.T, input_precision=PRECISION)
        d_scores = times_slope(gap, d_weights - mean, POWER).to(keys.dtype)
        d_q = tl.dot(d_scores, keys, d_q, input_precision=PRECISION)
    return d_q


@triton.jit
def simplex_dq_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, dq_ptr, rows_ptr, means_ptr, lengths_ptr,
    q_strides, k_strides, v_strides, g_strides, dq_strides, window, H, group, M, N, D, Dv, scale,
    POWER: tl.constexpr, HIDES_LATER: tl.constexpr, HIDES_EARLIER: tl.constexpr, RAGGED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    BANDED: tl.constexpr = HIDES_LATER or HIDES_EARLIER
    row, tile = locate_queries(
        q_ptr, lengths_ptr, q_strides, window, H, group, M, N, D, scale, POWER, HIDES_LATER, RAGGED, BLOCK_M, BLOCK_D
    )
    _, m, seq, _, _ = tile
    d_out = load_tile(g_ptr, g_ptr, g_strides, seq[0], seq[1], 0, row, M, Dv, BLOCK_M, BLOCK_DV, False, False)
    base, rest = load_threshold(rows_ptr, seq, H, m, 1)
    mean = load_rows(means_ptr, seq, H, 0, m, 0.0, 1, 1)
    starts, stops = key_parts(row, tile, BLOCK_M, BLOCK_N, BANDED)
    d_q = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in tl.static_range(3):  # an edge, what all queries see, another edge
        if HIDES_EARLIER or part > 0:
            d_q = add_keys(
                d_q, base, rest, mean, d_out, tile, k_ptr, v_ptr, k_strides, v_strides, starts[part], stops[part],
                D, Dv, POWER, part != 1, BANDED, PRECISION, BLOCK_N, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
    store_tile(dq_ptr, dq_strides, seq[0], seq[1], 0, row, M, D, d_q * scale, BLOCK_M, BLOCK_D)
