"""What several kernels share: dropout, loads and stores of rows, visibility, weights and their slopes, row scales.

KEYS is the axis of a block along which keys lie: 1 forward, 0 backward, where weights are made transposed.
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
def relu(x):
    """[x]+ in which NaN stays NaN, as in torch: the plain maximum of a GPU takes the number, 0."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rectify(scores, seen, BANDED: tl.constexpr):
    """Scores above 0; only a band has to be cut out, since keys beyond the length were loaded as zeros."""
    rectified = relu(scores)
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
def row_weights(
    scores, seen, scale,
    KEYS: tl.constexpr, POWER: tl.constexpr, BANDED: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """[scores]+ ** POWER, or a softmax for POWER 0; what else multiplies a row is left out."""
    if POWER == 0:
        weights = softmax(scores, seen, scale, KEYS, EMPTY)
    else:
        weights = rectify(scores, seen, BANDED)
        weights = weights * weights if POWER == 2 else weights
    return weights


@triton.jit
def grow(values, gain, kept, POWER: tl.constexpr, DROPS: tl.constexpr):
    """Weights or their gradients times what multiplies a row, and zero where a weight is dropped."""
    values = values * gain if POWER > 0 or DROPS else values
    return tl.where(kept, values, 0.0) if DROPS else values


@triton.jit
def score_gradient(
    scores, weights, d_weights, seen, scale,
    KEYS: tl.constexpr, POWER: tl.constexpr, BANDED: tl.constexpr,
):  # fmt: skip
    """The gradient of the scores, from that of what `row_weights` made of them."""
    if POWER == 0:
        mean = tl.sum(weights * d_weights, KEYS)
        d_scores = weights * (d_weights - tl.expand_dims(mean, KEYS)) * (scale * LN2)
    elif POWER == 1:
        d_scores = tl.where(weights <= 0.0, 0.0, d_weights)  # NaN passes, as in torch
    else:
        d_scores = 2.0 * rectify(scores, seen, BANDED) * d_weights
    return d_scores


@triton.jit
def place(sequence, M, N, q_bounds_ptr, k_bounds_ptr, PACKED: tl.constexpr):
    """A sequence's batch row, first query, first key, queries and keys; PACKED ones share batch row 0."""
    b = sequence.to(tl.int64)
    q_start, k_start = b * 0, b * 0
    if PACKED:
        q_start = tl.load(q_bounds_ptr + b).to(tl.int64)
        k_start = tl.load(k_bounds_ptr + b).to(tl.int64)
        M = (tl.load(q_bounds_ptr + b + 1) - q_start).to(tl.int32)
        N = (tl.load(k_bounds_ptr + b + 1) - k_start).to(tl.int32)
        b = b * 0
    return b, q_start, k_start, M, N


@triton.jit
def sequence_survivors(seed_ptr, threshold, b, h, H, q_start, k_start, m, n, KEYS: tl.constexpr):
    """`survivors` of one head's block that begins at query `q_start` and key `k_start` of batch row b."""
    rows, columns = (q_start + m).to(tl.int32), (k_start + n).to(tl.int32)
    return survivors(seed_ptr, threshold, (b * H + h).to(tl.int32), rows, columns, KEYS)


@triton.jit
def load_head(
    ptr, stride_batch, stride_head, stride_row, stride_column, b, h, start, rows, limit, D,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`load_rows` of head h in batch row b, counted from row `start`."""
    own = ptr + b * stride_batch + h * stride_head + start * stride_row
    return load_rows(own, stride_row, stride_column, rows, limit, D, BLOCK_D)


@triton.jit
def store_head(
    ptr, stride_batch, stride_head, stride_row, stride_column, b, h, start, rows, limit, D, values,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    own = ptr + b * stride_batch + h * stride_head + start * stride_row
    store_rows(own, stride_row, stride_column, rows, limit, D, values, BLOCK_D)
