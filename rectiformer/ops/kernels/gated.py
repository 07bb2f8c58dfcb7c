"""Backward pass of short sequences whose mixed values z leave the kernel as x = vector * z * sigmoid(gate * z).

It gets the gradients of x and of the sums of squares of z, and rebuilds z. Blocks of scores are [m, n] here. The
gradient of z enters two products, one of them transposed, but transposing a product's result into another product is a
known source of wrong code on Hopper. So the weights for d_v are made a second time, as [n, m]: one more small product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rectiformer.ops.kernels.parts import (
    grow,
    load_head,
    load_head_row,
    row_gain,
    row_weights,
    score_gradient,
    sequence_survivors,
    store_head,
    visible,
)


@triton.jit
def close_gates(z, d_x, d_squares, vector, gate, d_vector_ptr, d_gate_ptr, column, Dv, NORM: tl.constexpr):
    """The gradient of z; those of vector and, for NORM 2, gate are summed over rows and stored."""
    opened = tl.sigmoid(gate * z) if NORM == 2 else 1.0
    passed = d_x * opened
    tl.store(d_vector_ptr + column, tl.sum(passed * z, 0), mask=column < Dv)
    d_z = passed * vector
    if NORM == 2:
        closed = z * (1.0 - opened)
        tl.store(d_gate_ptr + column, tl.sum(d_z * z * closed, 0), mask=column < Dv)
        d_z *= 1.0 + gate * closed
    return d_z + z * (2.0 * d_squares)


@triton.jit(do_not_specialize=["M", "N", "left", "right", "s_batch"])
def gated_backward(
    g_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, dk_ptr, dv_ptr, d_squares_ptr,
    vector_ptr, gate_ptr, partial_ptr, d_factor_ptr, factor_ptr, lengths_ptr, seed_ptr,
    g_batch, g_head, g_row, g_column,
    q_batch, q_head, q_row, q_column,
    k_batch, k_head, k_row, k_column,
    v_batch, v_head, v_row, v_column,
    dq_batch, dq_head, dq_row, dq_column,
    dk_batch, dk_head, dk_row, dk_column,
    dv_batch, dv_head, dv_row, dv_column,
    s_batch, s_head, s_row,
    H, M, N, D, Dv, left, right, scale, gain, exponent, threshold,
    POWER: tl.constexpr, ROW_SCALE: tl.constexpr, PER_HEAD: tl.constexpr,
    BANDED: tl.constexpr, RAGGED: tl.constexpr, DROPS: tl.constexpr,
    GROUP: tl.constexpr, NORM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """partial [B, NORM, H * Dv] gets what each sequence adds to the gradients of vector and gate."""
    b = (tl.program_id(0) // (H // GROUP)).to(tl.int64)
    key_head = (tl.program_id(0) % (H // GROUP)).to(tl.int64)
    m, n, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_DV)
    length = tl.minimum(tl.load(lengths_ptr + b).to(tl.int32), N) if RAGGED else N
    k = load_head(k_ptr, k_batch, k_head, k_row, k_column, b, key_head, 0, n, length, D, BLOCK_D)
    v = load_head(v_ptr, v_batch, v_head, v_row, v_column, b, key_head, 0, n, length, Dv, BLOCK_DV)
    seen = visible(m, n, M, N, length, left, right, 1, BANDED)
    d_k = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)  # transposed, and only stored
    d_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in range(GROUP):
        h = key_head * GROUP + member
        q = load_head(q_ptr, q_batch, q_head, q_row, q_column, b, h, 0, m, M, D, BLOCK_D)
        factor = tl.load(factor_ptr + h) if PER_HEAD else 1.0
        row = row_gain(gain, exponent, m, M, N, length, left, right, 1, BANDED, ROW_SCALE)
        kept = sequence_survivors(seed_ptr, threshold, b, h, H, 0, 0, m, n, 1) if DROPS else seen
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        weights = row_weights(scores, seen, scale, 1, POWER, BANDED, BANDED or RAGGED)
        z = tl.dot(grow(weights, row * factor, kept, POWER, DROPS).to(v.dtype), v, input_precision="ieee")

        vector = load_head_row(vector_ptr, h, Dv, BLOCK_DV)
        gate = load_head_row(gate_ptr, h, Dv, BLOCK_DV)
        d_x = load_head(g_ptr, g_batch, g_head, g_row, g_column, b, h, 0, m, M, Dv, BLOCK_DV).to(tl.float32)
        d_squares = tl.load(d_squares_ptr + b * s_batch + h * s_head + m * s_row, mask=m < M, other=0.0)
        own = partial_ptr + (b * NORM * H + h) * Dv
        g = close_gates(z, d_x, d_squares[:, None], vector, gate, own, own + H * Dv, column, Dv, NORM).to(q.dtype)

        seen_t = visible(m, n, M, N, length, left, right, 0, BANDED)
        row_t = factor * row_gain(gain, exponent, m, M, N, length, left, right, 0, BANDED, ROW_SCALE)
        kept_t = sequence_survivors(seed_ptr, threshold, b, h, H, 0, 0, m, n, 0) if DROPS else seen_t
        scores_t = tl.dot(k, tl.trans(q), input_precision="ieee")
        weights_t = row_weights(scores_t, seen_t, scale, 0, POWER, BANDED, BANDED or RAGGED)
        d_v = tl.dot(grow(weights_t, row_t, kept_t, POWER, DROPS).to(g.dtype), g, d_v, input_precision="ieee")

        d_weights = grow(tl.dot(g, tl.trans(v), input_precision="ieee"), row, kept, POWER, DROPS)
        if PER_HEAD:
            tl.store(d_factor_ptr + b * H + h, tl.sum(tl.sum(weights * d_weights, 1), 0))
        d_scores = score_gradient(scores, weights, d_weights * factor, seen, scale, 1, POWER, BANDED).to(q.dtype)
        d_q = tl.dot(d_scores, k, input_precision="ieee")
        store_head(dq_ptr, dq_batch, dq_head, dq_row, dq_column, b, h, 0, m, M, D, d_q, BLOCK_D)
        d_k = tl.dot(tl.trans(q), d_scores, d_k, input_precision="ieee")
    store_head(dk_ptr, dk_batch, dk_head, dk_row, dk_column, b, key_head, 0, n, N, D, tl.trans(d_k), BLOCK_D)
    store_head(dv_ptr, dv_batch, dv_head, dv_row, dv_column, b, key_head, 0, n, N, Dv, d_v, BLOCK_DV)
