"""Short sequences: one program a (sequence, head) holds all of its keys, and BLOCK_M of its ROWS queries at a time.

The forward pass is two matrix products with the weights between them; the backward pass rebuilds the weights and makes
all gradients in one go. Inputs are read and results written through strides, so heads need not be moved. POWER 1 and 2
are rectified rows, POWER 0 is a softmax, there so that both can be compared like for like.

A ReLU lets every factor of a row through, so the scale of the scores, what dropout lets weights grow by and the row
scale are one number a row, multiplied once. KEYS is the axis of a block along which keys lie: 1 forward, 0 backward,
where weights are made transposed since all gradients but one want them so.

GROUP query heads read one key head: the backward pass has a program for each key head, which sums over its group.
PACKED sequences lie end to end in memory; a launch does those whose longer side is above LEAST and up to MOST.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rectiformer.ops.kernels.parts import (
    grow,
    load_head,
    place,
    row_gain,
    row_weights,
    score_gradient,
    sequence_survivors,
    store_head,
    visible,
)


@triton.jit(do_not_specialize=["M", "N", "left", "right"])
def short_forward(
    q_ptr, k_ptr, v_ptr, out_ptr,
    q_bounds_ptr, k_bounds_ptr, factor_ptr, lengths_ptr, seed_ptr,
    q_batch, q_head, q_row, q_column,
    k_batch, k_head, k_row, k_column,
    v_batch, v_head, v_row, v_column,
    o_batch, o_head, o_row, o_column,
    H, M, N, D, Dv, left, right, scale, gain, exponent, threshold,
    POWER: tl.constexpr, ROW_SCALE: tl.constexpr, PER_HEAD: tl.constexpr,
    BANDED: tl.constexpr, RAGGED: tl.constexpr, DROPS: tl.constexpr,
    GROUP: tl.constexpr, PACKED: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    h = (tl.program_id(0) % H).to(tl.int64)
    b, q_start, k_start, M, N = place(tl.program_id(0) // H, M, N, q_bounds_ptr, k_bounds_ptr, PACKED)
    if PACKED and ((tl.maximum(M, N) <= LEAST) | (tl.maximum(M, N) > MOST)):
        return
    n = tl.arange(0, BLOCK_N)
    length = tl.minimum(tl.load(lengths_ptr + b).to(tl.int32), N) if RAGGED else N
    key_head = h // GROUP
    k = load_head(k_ptr, k_batch, k_head, k_row, k_column, b, key_head, k_start, n, length, D, BLOCK_D)
    v = load_head(v_ptr, v_batch, v_head, v_row, v_column, b, key_head, k_start, n, length, Dv, BLOCK_DV)
    gain = gain * tl.load(factor_ptr + h) if PER_HEAD else gain
    for first in range(0, ROWS if ROWS == BLOCK_M else M, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        q = load_head(q_ptr, q_batch, q_head, q_row, q_column, b, h, q_start, m, M, D, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        seen = visible(m, n, M, N, length, left, right, 1, BANDED)
        weights = row_weights(scores, seen, scale, 1, POWER, BANDED, BANDED or RAGGED or PACKED)
        row = row_gain(gain, exponent, m, M, N, length, left, right, 1, BANDED, ROW_SCALE)
        kept = sequence_survivors(seed_ptr, threshold, b, h, H, q_start, k_start, m, n, 1) if DROPS else seen
        weights = grow(weights, row, kept, POWER, DROPS)
        out = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        store_head(out_ptr, o_batch, o_head, o_row, o_column, b, h, q_start, m, M, Dv, out, BLOCK_DV)


@triton.jit(do_not_specialize=["M", "N", "left", "right"])
def short_backward(
    g_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, dk_ptr, dv_ptr,
    d_factor_ptr, q_bounds_ptr, k_bounds_ptr, factor_ptr, lengths_ptr, seed_ptr,
    g_batch, g_head, g_row, g_column,
    q_batch, q_head, q_row, q_column,
    k_batch, k_head, k_row, k_column,
    v_batch, v_head, v_row, v_column,
    dq_batch, dq_head, dq_row, dq_column,
    dk_batch, dk_head, dk_row, dk_column,
    dv_batch, dv_head, dv_row, dv_column,
    H, M, N, D, Dv, left, right, scale, gain, exponent, threshold,
    POWER: tl.constexpr, ROW_SCALE: tl.constexpr, PER_HEAD: tl.constexpr,
    BANDED: tl.constexpr, RAGGED: tl.constexpr, DROPS: tl.constexpr,
    GROUP: tl.constexpr, PACKED: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Blocks of scores are [n, m]."""
    key_heads = H // GROUP
    sequence, key_head = tl.program_id(0) // key_heads, (tl.program_id(0) % key_heads).to(tl.int64)
    b, q_start, k_start, M, N = place(sequence, M, N, q_bounds_ptr, k_bounds_ptr, PACKED)
    if PACKED and ((tl.maximum(M, N) <= LEAST) | (tl.maximum(M, N) > MOST)):
        return
    n = tl.arange(0, BLOCK_N)
    length = tl.minimum(tl.load(lengths_ptr + b).to(tl.int32), N) if RAGGED else N
    k = load_head(k_ptr, k_batch, k_head, k_row, k_column, b, key_head, k_start, n, length, D, BLOCK_D)
    v = load_head(v_ptr, v_batch, v_head, v_row, v_column, b, key_head, k_start, n, length, Dv, BLOCK_DV)
    d_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    d_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in range(GROUP):
        h = key_head * GROUP + member
        d_factor = 0.0
        for first in range(0, ROWS if ROWS == BLOCK_M else M, BLOCK_M):
            m = first + tl.arange(0, BLOCK_M)
            q = load_head(q_ptr, q_batch, q_head, q_row, q_column, b, h, q_start, m, M, D, BLOCK_D)
            g = load_head(g_ptr, g_batch, g_head, g_row, g_column, b, h, q_start, m, M, Dv, BLOCK_DV)
            scores = tl.dot(k, tl.trans(q), input_precision="ieee")
            d_weights = tl.dot(v, tl.trans(g), input_precision="ieee")
            seen = visible(m, n, M, N, length, left, right, 0, BANDED)
            weights = row_weights(scores, seen, scale, 0, POWER, BANDED, BANDED or RAGGED or PACKED)
            row = row_gain(gain, exponent, m, M, N, length, left, right, 0, BANDED, ROW_SCALE)
            kept = sequence_survivors(seed_ptr, threshold, b, h, H, q_start, k_start, m, n, 0) if DROPS else seen
            d_weights = grow(d_weights, row, kept, POWER, DROPS)
            grown = grow(weights, row, kept, POWER, DROPS)
            if PER_HEAD:
                d_factor += tl.sum(tl.sum(weights * d_weights, 1), 0)
                factor = tl.load(factor_ptr + h)
                d_weights, grown = d_weights * factor, grown * factor
            d_scores = score_gradient(scores, weights, d_weights, seen, scale, 0, POWER, BANDED).to(q.dtype)
            d_q = tl.trans(tl.dot(tl.trans(k), d_scores, input_precision="ieee"))
            store_head(dq_ptr, dq_batch, dq_head, dq_row, dq_column, b, h, q_start, m, M, D, d_q, BLOCK_D)
            d_v = tl.dot(grown.to(g.dtype), g, d_v, input_precision="ieee")
            d_k = tl.dot(d_scores, q, d_k, input_precision="ieee")
        if PER_HEAD:
            tl.store(d_factor_ptr + sequence * H + h, d_factor)
    store_head(dv_ptr, dv_batch, dv_head, dv_row, dv_column, b, key_head, k_start, n, N, Dv, d_v, BLOCK_DV)
    store_head(dk_ptr, dk_batch, dk_head, dk_row, dk_column, b, key_head, k_start, n, N, D, d_k, BLOCK_D)
