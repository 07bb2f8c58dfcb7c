"""Gradients of attention whose rows have a threshold or a normalizer, from the inputs and what rowwise.py keeps.

What all weights of a row have in common enters through one number of the row, a mean of the gradients of its weights:
see row_functions.py for normalized rows, whose mean is also the product of d_out and the output. A weight on the
simplex, [x/power - tau]+ ** power, grows with its own score by its slope: 1 for power 1, [x/2 - tau]+ for power 2, and
0 outside the support. Such a row sums to 1, so

    d_x = slope (d_weight - mean),    mean = sum(slope d_weight) / sum(slope)

`rowwise_means_kernel` finds these means (2 products per tile), `rowwise_dkdv_kernel` owns a tile of keys and walks over
queries (4 products), `rowwise_dq_kernel` owns a tile of queries and walks over keys (3 products), as in
long_backward.py: no atomics, so reruns are bitwise equal. Where keys are owned, tiles lie transposed, [keys, queries]:
no product's result has to be transposed to enter another.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rectiformer.ops.gpu.common import empty_heads_last, load_tile, locate_sequence, store_tile, visible
from rectiformer.ops.gpu.long_backward import query_range
from rectiformer.ops.gpu.row_functions import HIDDEN, row_gradients, row_weights, times_slope
from rectiformer.ops.gpu.rowwise import (
    RowwiseCall,
    empty_rows,
    key_parts,
    launch,
    load_keys,
    load_numbers,
    load_rows,
    locate_queries,
    row_pointers,
    tile_scores,
)


def rowwise_gradients(call: RowwiseCall, d_out: Tensor, out: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    q, k, v, how = call.q, call.k, call.v, call.row_function
    d_q, d_k, d_v = (empty_heads_last(tensor, tensor.shape[3]) for tensor in (q, k, v))
    rows = rows.contiguous()
    if "means" in how.kernels:
        means = empty_rows(q, 1)
        launch(rowwise_means_kernel, "means", call, [q, k, v, d_out], [rows, means], PARTS=how.parts)
    else:
        means = (d_out.float() * out.float()).sum(-1).contiguous()
    tables = [rows, means]
    launch(
        rowwise_dkdv_kernel, "keys", call, [q, k, v, d_out, d_k, d_v], tables,
        PARTS=how.parts, GRADIENT=how.gradient, GROUP=q.shape[1] // k.shape[1],
    )  # fmt: skip
    launch(rowwise_dq_kernel, "queries", call, [q, k, v, d_out, d_q], tables, GRADIENT=how.gradient)
    return d_q, d_k, d_v


@triton.jit
def add_means(
    total, slopes, first, second, d_out, tile, k_ptr, v_ptr, k_strides, v_strides, begin, end, D, Dv,
    POWER: tl.constexpr, PARTS: tl.constexpr, EDGE: tl.constexpr, BANDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Sums over rows of slope x d_weight and of slopes, plus what keys `begin` to `end` add. Weights of normalized rows
    stand for slopes, and are not summed up."""
    for column in range(begin, end, BLOCK_N):
        keys = load_keys(k_ptr, k_strides, tile[2], column, D, BLOCK_N, BLOCK_D)
        x, seen = tile_scores(tile, keys, column, EDGE, BANDED, PRECISION, BLOCK_N)
        values = load_keys(v_ptr, v_strides, tile[2], column, Dv, BLOCK_N, BLOCK_DV)
        d_weights = tl.dot(d_out, values.T, input_precision=PRECISION)
        if POWER > 0:
            products = times_slope(x - first - second, d_weights, POWER)
            slopes += tl.sum(times_slope(x - first - second, 1.0, POWER), 1)
        else:
            products = row_weights(x, first, second, POWER, PARTS) * d_weights
        if EDGE:
            products = tl.where(seen, products, 0.0)
        total += tl.sum(products, 1)
    return total, slopes


@triton.jit
def rowwise_means_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, rows_ptr, means_ptr, lengths_ptr, q_strides, k_strides, v_strides, g_strides, window,
    H, group, M, N, D, Dv, gain, scale,
    POWER: tl.constexpr, PARTS: tl.constexpr, HIDES_LATER: tl.constexpr, HIDES_EARLIER: tl.constexpr,
    RAGGED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Each row's mean of the gradients of its weights, weighed by their slopes or, if normalized, by themselves."""
    BANDED: tl.constexpr = HIDES_LATER or HIDES_EARLIER
    row, tile = locate_queries(
        q_ptr, lengths_ptr, q_strides, window, H, group, M, N, D, gain, HIDES_LATER, RAGGED, BLOCK_M, BLOCK_D
    )
    _, m, seq, _, _ = tile
    d_out = load_tile(g_ptr, g_ptr, g_strides, seq[0], seq[1], 0, row, M, Dv, BLOCK_M, BLOCK_DV, False, False)
    first, second = load_numbers(rows_ptr, seq, H, m, 1)
    starts, stops = key_parts(row, tile, BLOCK_M, BLOCK_N, BANDED)
    total, slopes = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    for part in tl.static_range(3):  # an edge, what all queries see, another edge
        if HIDES_EARLIER or part > 0:
            total, slopes = add_means(
                total, slopes, first, second, d_out, tile, k_ptr, v_ptr, k_strides, v_strides, starts[part],
                stops[part], D, Dv, POWER, PARTS, part != 1, BANDED, PRECISION, BLOCK_N, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
    mean = total / tl.where(slopes == 0.0, 1.0, slopes)
    mean += 0.0 * tl.sum(second, 1)  # NaN stays NaN: slopes of power 1 do not tell
    tl.store(row_pointers(means_ptr, seq, H, 0, m, 1), mean, mask=m < M)


@triton.jit
def add_queries(
    d_k, d_v, keys, values, q_ptr, g_ptr, rows_ptr, means_ptr, q_strides, g_strides, begin, end, n, seq, window, gain,
    H, D, Dv,
    POWER: tl.constexpr, PARTS: tl.constexpr, GRADIENT: tl.constexpr, EDGE: tl.constexpr,
    BANDED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """`d_k` and `d_v` plus what queries `begin` to `end` add; EDGE: not every one may see each of the keys."""
    b, h, _, _, _, M, N, length = seq
    left, right = window
    for row in range(begin, end, BLOCK_M):
        m = row + tl.arange(0, BLOCK_M)
        queries = load_tile(q_ptr, q_ptr, q_strides, b, h, 0, row, M, D, BLOCK_M, BLOCK_D, False, False)
        first, second = load_numbers(rows_ptr, seq, H, m, 0)
        x = tl.dot(keys, queries.T, input_precision=PRECISION) * gain
        d_out = load_tile(g_ptr, g_ptr, g_strides, b, h, 0, row, M, Dv, BLOCK_M, BLOCK_DV, False, False)
        d_weights = tl.dot(values, d_out.T, input_precision=PRECISION)
        mean = load_rows(means_ptr, seq, H, 0, m, 0.0, 1, 0)
        if EDGE:
            seen = visible(m, n, M, N, length, left, right, 0, BANDED, BANDED)
            x = tl.where(seen, x, HIDDEN)
        weights = row_weights(x, first, second, POWER, PARTS)
        d_scores = row_gradients(x, first, second, d_weights, mean, POWER, GRADIENT)
        if EDGE:  # a row that is NaN must not reach the keys that it does not see
            weights, d_scores = tl.where(seen, weights, 0.0), tl.where(seen, d_scores, 0.0)
        d_v = tl.dot(weights.to(d_out.dtype), d_out, d_v, input_precision=PRECISION)
        d_k = tl.dot(d_scores.to(queries.dtype), queries, d_k, input_precision=PRECISION)
    return d_k, d_v


@triton.jit
def rowwise_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, dk_ptr, dv_ptr, rows_ptr, means_ptr, lengths_ptr,
    q_strides, k_strides, v_strides, g_strides, dk_strides, dv_strides, window, H, group, M, N, D, Dv, gain, scale,
    POWER: tl.constexpr, PARTS: tl.constexpr, GRADIENT: tl.constexpr,
    HIDES_LATER: tl.constexpr, HIDES_EARLIER: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
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
                    stops[part], n, here, window, gain, H, D, Dv, POWER, PARTS, GRADIENT, part != 1, BANDED,
                    PRECISION, BLOCK_M, BLOCK_D, BLOCK_DV,
                )  # fmt: skip
    # Padding was not hidden above: a key's gradients are a row of the tile, and meet those of no other key.
    real = (n < length)[:, None]
    d_k, d_v = tl.where(real, d_k * scale, 0.0), tl.where(real, d_v, 0.0)
    store_tile(dk_ptr, dk_strides, b, kh, 0, column, N, D, d_k, BLOCK_N, BLOCK_D)
    store_tile(dv_ptr, dv_strides, b, kh, 0, column, N, Dv, d_v, BLOCK_N, BLOCK_DV)


@triton.jit
def add_keys(
    d_q, first, second, mean, d_out, tile, k_ptr, v_ptr, k_strides, v_strides, begin, end, D, Dv,
    POWER: tl.constexpr, GRADIENT: tl.constexpr, EDGE: tl.constexpr, BANDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """`d_q` plus what keys `begin` to `end` add."""
    for column in range(begin, end, BLOCK_N):
        keys = load_keys(k_ptr, k_strides, tile[2], column, D, BLOCK_N, BLOCK_D)
        x, seen = tile_scores(tile, keys, column, EDGE, BANDED, PRECISION, BLOCK_N)
        values = load_keys(v_ptr, v_strides, tile[2], column, Dv, BLOCK_N, BLOCK_DV)
        d_weights = tl.dot(d_out, values.T, input_precision=PRECISION)
        d_scores = row_gradients(x, first, second, d_weights, mean, POWER, GRADIENT)
        if EDGE:
            d_scores = tl.where(seen, d_scores, 0.0)
        d_q = tl.dot(d_scores.to(keys.dtype), keys, d_q, input_precision=PRECISION)
    return d_q


@triton.jit
def rowwise_dq_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, dq_ptr, rows_ptr, means_ptr, lengths_ptr,
    q_strides, k_strides, v_strides, g_strides, dq_strides, window, H, group, M, N, D, Dv, gain, scale,
    POWER: tl.constexpr, GRADIENT: tl.constexpr, HIDES_LATER: tl.constexpr, HIDES_EARLIER: tl.constexpr,
    RAGGED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    BANDED: tl.constexpr = HIDES_LATER or HIDES_EARLIER
    row, tile = locate_queries(
        q_ptr, lengths_ptr, q_strides, window, H, group, M, N, D, gain, HIDES_LATER, RAGGED, BLOCK_M, BLOCK_D
    )
    _, m, seq, _, _ = tile
    d_out = load_tile(g_ptr, g_ptr, g_strides, seq[0], seq[1], 0, row, M, Dv, BLOCK_M, BLOCK_DV, False, False)
    first, second = load_numbers(rows_ptr, seq, H, m, 1)
    mean = load_rows(means_ptr, seq, H, 0, m, 0.0, 1, 1)
    starts, stops = key_parts(row, tile, BLOCK_M, BLOCK_N, BANDED)
    d_q = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in tl.static_range(3):  # an edge, what all queries see, another edge
        if HIDES_EARLIER or part > 0:
            d_q = add_keys(
                d_q, first, second, mean, d_out, tile, k_ptr, v_ptr, k_strides, v_strides, starts[part], stops[part],
                D, Dv, POWER, GRADIENT, part != 1, BANDED, PRECISION, BLOCK_N, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
    store_tile(dq_ptr, dq_strides, seq[0], seq[1], 0, row, M, D, d_q * scale, BLOCK_M, BLOCK_D)
