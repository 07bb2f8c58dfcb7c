"""Short sequences: one program a (sequence, head) holds all of its scores at once.

The forward pass is two matrix products with the weights between them; the backward pass rebuilds the weights and makes
all gradients in one go. Inputs are read and results written through strides, so heads need not be moved. POWER 1 and 2
are rectified rows, POWER 0 is a softmax, there so that both can be compared like for like.

A ReLU lets every factor of a row through, so the scale of the scores, what dropout lets weights grow by and the row
scale are one number a row, multiplied once. KEYS is the axis of a block along which keys lie: 1 forward, 0 backward,
where weights are made transposed since all gradients but one want them so.
"""

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(-1640531527)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def mix(word):
    """The finalizer of MurmurHash3, as ops/dropout.py has it; the masks make shifts of signed words logical."""
    word = (word ^ ((word >> 16) & 0xFFFF)) * -2048144789
    word = (word ^ ((word >> 13) & 0x7FFFF)) * -1028477387
    return word ^ ((word >> 16) & 0xFFFF)


@triton.jit
def survivors(seed_ptr, threshold, sequence, m, n, KEYS: tl.constexpr):
    """True where dropout spares a weight: the same cells as in every other implementation."""
    seed = tl.load(seed_ptr)
    word = (seed ^ (seed >> 32)).to(tl.int32)
    row = mix(mix(word + sequence * GOLDEN) + m * GOLDEN)
    return mix(tl.expand_dims(row, KEYS) + tl.expand_dims(n * GOLDEN, 1 - KEYS)) >= threshold


@triton.jit
def load_rows(ptr, stride_row, stride_column, rows, limit, D, BLOCK_D: tl.constexpr):
    """Rows [rows, BLOCK_D] of one head, zeros beyond `limit` rows and D columns: padding may hold anything."""
    columns = tl.arange(0, BLOCK_D)
    inside = (rows[:, None] < limit) & (columns[None, :] < D)
    return tl.load(ptr + rows[:, None] * stride_row + columns[None, :] * stride_column, mask=inside, other=0.0)


@triton.jit
def store_rows(ptr, stride_row, stride_column, rows, limit, D, values, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    inside = (rows[:, None] < limit) & (columns[None, :] < D)
    values = values.to(ptr.dtype.element_ty)
    tl.store(ptr + rows[:, None] * stride_row + columns[None, :] * stride_column, values, mask=inside)


@triton.jit
def visible(m, n, M, N, length, left, right, KEYS: tl.constexpr, BANDED: tl.constexpr):
    """True where a query sees a key."""
    key = tl.expand_dims(n, 1 - KEYS)
    seen = key < length
    if BANDED:
        position = tl.expand_dims(m + (N - M), KEYS)
        seen = seen & (key <= position + right) & (key >= position - left)
    return seen


@triton.jit
def rectify(scores, seen, BANDED: tl.constexpr):
    """Scores above 0; only a band has to be cut out, since keys beyond the length were loaded as zeros."""
    rectified = tl.maximum(scores, 0.0)
    return tl.where(seen, rectified, 0.0) if BANDED else rectified


@triton.jit
def row_gain(
    gain, exponent, m, M, N, length, left, right,
    KEYS: tl.constexpr, BANDED: tl.constexpr, ROW_SCALE: tl.constexpr,
):  # fmt: skip
    """What a row's rectified powers are multiplied with: `gain`, times n^-exponent where the rows are scaled."""
    if ROW_SCALE > 0:
        count = length
        if BANDED:
            position = m + (N - M)
            count = tl.minimum(position + right + 1, length) - tl.maximum(position - left, 0)
        count = tl.maximum(count, 1).to(tl.float32)
        if ROW_SCALE == 1:
            gain = tl.div_rn(gain, tl.sqrt_rn(count))
        elif ROW_SCALE == 2:
            gain = tl.div_rn(gain, count)
        else:
            gain = gain * tl.exp2(-exponent * tl.log2(count))
        if BANDED:
            gain = tl.expand_dims(gain, KEYS)
    return gain


@triton.jit
def softmax(scores, seen, scale, KEYS: tl.constexpr, EMPTY: tl.constexpr):
    """Weights in base 2; `scale` holds log2(e). EMPTY: rows that see nothing may occur."""
    scores = tl.where(seen, scores * scale, float("-inf"))
    most = tl.max(scores, KEYS)
    if EMPTY:
        most = tl.where(most == float("-inf"), 0.0, most)
    weights = tl.exp2(scores - tl.expand_dims(most, KEYS))
    total = tl.sum(weights, KEYS)
    if EMPTY:
        total = tl.where(total == 0.0, 1.0, total)
    return weights * tl.expand_dims(1.0 / total, KEYS)


@triton.jit
def short_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, factor_ptr, lengths_ptr, seed_ptr,
    q_batch, q_head, q_row, q_column,
    k_batch, k_head, k_row, k_column,
    v_batch, v_head, v_row, v_column,
    o_batch, o_head, o_row, o_column,
    H, M, N, D, Dv, left, right, scale, gain, exponent, threshold,
    POWER: tl.constexpr, ROW_SCALE: tl.constexpr, PER_HEAD: tl.constexpr,
    BANDED: tl.constexpr, RAGGED: tl.constexpr, DROPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    b = (sequence // H).to(tl.int64)
    h = (sequence % H).to(tl.int64)
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    length = tl.minimum(tl.load(lengths_ptr + b).to(tl.int32), N) if RAGGED else N
    q = load_rows(q_ptr + b * q_batch + h * q_head, q_row, q_column, m, M, D, BLOCK_D)
    k = load_rows(k_ptr + b * k_batch + h * k_head, k_row, k_column, n, length, D, BLOCK_D)
    v = load_rows(v_ptr + b * v_batch + h * v_head, v_row, v_column, n, length, Dv, BLOCK_DV)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    seen = visible(m, n, M, N, length, left, right, 1, BANDED)
    if POWER == 0:
        weights = softmax(scores, seen, scale, 1, BANDED or RAGGED)
        weights = weights * gain if DROPS else weights
    else:
        weights = rectify(scores, seen, BANDED)
        weights = weights * weights if POWER == 2 else weights
        gain = gain * tl.load(factor_ptr + h) if PER_HEAD else gain
        weights = weights * row_gain(gain, exponent, m, M, N, length, left, right, 1, BANDED, ROW_SCALE)
    if DROPS:
        weights = tl.where(survivors(seed_ptr, threshold, sequence, m, n, 1), weights, 0.0)
    out = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    store_rows(out_ptr + b * o_batch + h * o_head, o_row, o_column, m, M, Dv, out, BLOCK_DV)


@triton.jit
def short_backward(
    g_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, dk_ptr, dv_ptr, d_factor_ptr, factor_ptr, lengths_ptr, seed_ptr,
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
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    b = (sequence // H).to(tl.int64)
    h = (sequence % H).to(tl.int64)
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    length = tl.minimum(tl.load(lengths_ptr + b).to(tl.int32), N) if RAGGED else N
    q = load_rows(q_ptr + b * q_batch + h * q_head, q_row, q_column, m, M, D, BLOCK_D)
    k = load_rows(k_ptr + b * k_batch + h * k_head, k_row, k_column, n, length, D, BLOCK_D)
    v = load_rows(v_ptr + b * v_batch + h * v_head, v_row, v_column, n, length, Dv, BLOCK_DV)
    g = load_rows(g_ptr + b * g_batch + h * g_head, g_row, g_column, m, M, Dv, BLOCK_DV)
    scores = tl.dot(k, tl.trans(q), input_precision="ieee")  # [n, m], like all that follows
    d_weights = tl.dot(v, tl.trans(g), input_precision="ieee")
    seen = visible(m, n, M, N, length, left, right, 0, BANDED)
    if DROPS:
        kept = survivors(seed_ptr, threshold, sequence, m, n, 0)
        d_weights = tl.where(kept, d_weights, 0.0)
    if POWER == 0:
        weights = softmax(scores, seen, scale, 0, BANDED or RAGGED)
        d_weights = d_weights * gain if DROPS else d_weights
        d_scores = weights * (d_weights - tl.expand_dims(tl.sum(weights * d_weights, 0), 0)) * (scale * LN2)
        weights = weights * gain if DROPS else weights
    else:
        rectified = rectify(scores, seen, BANDED)
        powers = rectified * rectified if POWER == 2 else rectified
        gain = row_gain(gain, exponent, m, M, N, length, left, right, 0, BANDED, ROW_SCALE)
        if PER_HEAD:
            tl.store(d_factor_ptr + sequence, tl.sum(tl.sum(powers * d_weights * gain, 1), 0))
            gain = gain * tl.load(factor_ptr + h)
        weights = powers * gain
        d_weights = d_weights * gain
        d_scores = 2.0 * rectified * d_weights if POWER == 2 else tl.where(rectified > 0.0, d_weights, 0.0)
    if DROPS:
        weights = tl.where(kept, weights, 0.0)
    d_v = tl.dot(weights.to(g.dtype), g, input_precision="ieee")
    store_rows(dv_ptr + b * dv_batch + h * dv_head, dv_row, dv_column, n, N, Dv, d_v, BLOCK_DV)
    d_scores = d_scores.to(q.dtype)
    d_k = tl.dot(d_scores, q, input_precision="ieee")
    store_rows(dk_ptr + b * dk_batch + h * dk_head, dk_row, dk_column, n, N, D, d_k, BLOCK_D)
    d_q = tl.trans(tl.dot(tl.trans(k), d_scores, input_precision="ieee"))
    store_rows(dq_ptr + b * dq_batch + h * dq_head, dq_row, dq_column, m, M, D, d_q, BLOCK_D)
