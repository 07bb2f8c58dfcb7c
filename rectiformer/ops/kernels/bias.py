"""The gradient of a bias, of any shape that broadcasts to the scores, without ever holding what it is broadcast to.

A program owns a tile of the bias and walks over every batch row, head, query and key that it is broadcast to, in order:
no atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rectiformer.ops.kernels.parts import row_gain, survivors
from rectiformer.ops.kernels.tiles import find_place, load_tile, score_gradients, seen_scores


@triton.jit
def bias_gradients(
    q, k, v, g, d_bias_ptr, factor_ptr, lengths_ptr, seed_ptr,
    bias_ptr, mask_ptr, bias_strides, mask_strides, q_strides, k_strides, v_strides, g_strides,
    d_bias_strides, band, bias_sizes,
    B, H, group, M, N, D, Dv, inner, gain, exponent, threshold,
    POWER: tl.constexpr, ROW_SCALE: tl.constexpr, PER_HEAD: tl.constexpr, LATER: tl.constexpr,
    EARLIER: tl.constexpr, RAGGED: tl.constexpr, MASK: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """A tile of the bias's gradient, summed over every batch row, head, query and key that it is broadcast to."""
    BANDED: tl.constexpr = LATER or EARLIER
    cells = (bias_ptr, bias_strides, mask_ptr, mask_strides)
    bias_B, bias_H, bias_M, bias_N = bias_sizes
    slab = tl.program_id(2)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for b in range(slab // bias_H if bias_B > 1 else 0, slab // bias_H + 1 if bias_B > 1 else B):
        for h in range(slab % bias_H if bias_H > 1 else 0, slab % bias_H + 1 if bias_H > 1 else H):
            place = find_place(b, h, group, M, N, lengths_ptr, lengths_ptr, lengths_ptr, RAGGED, False)
            length, kh = place[7], place[2]
            scale = gain
            if PER_HEAD:
                scale = gain * tl.load(factor_ptr + h)
            row = tl.program_id(0) * BLOCK_M
            row_end = row + BLOCK_M if bias_M > 1 else M
            while row < row_end:
                m = row + tl.arange(0, BLOCK_M)
                queries = load_tile(q, q, q_strides, b, h, 0, row, M, D, BLOCK_M, BLOCK_D, False, False)
                d_out = load_tile(g, g, g_strides, b, h, 0, row, M, Dv, BLOCK_M, BLOCK_DV, False, False)
                rows_gain = row_gain(scale, exponent, m, M, N, length, band[0], band[1], 1, BANDED, ROW_SCALE)
                column = tl.program_id(1) * BLOCK_N
                column_end = tl.minimum(column + BLOCK_N if bias_N > 1 else N, length)
                while column < column_end:
                    n = column + tl.arange(0, BLOCK_N)
                    keys = load_tile(k, k, k_strides, b, kh, 0, column, length, D, BLOCK_N, BLOCK_D, False, False)
                    scores = tl.dot(queries, keys.T, input_precision=PRECISION)
                    scores = seen_scores(scores, m, n, place, band, cells, inner, 1, True, BANDED, True, MASK, True)
                    values = load_tile(v, v, v_strides, b, kh, 0, column, length, Dv, BLOCK_N, BLOCK_DV, False, False)
                    d_weights = tl.dot(d_out, values.T, input_precision=PRECISION)
                    if DROPS:
                        d_weights = tl.where(survivors(seed_ptr, threshold, b * H + h, m, n, 1), d_weights, 0.0)
                    total += score_gradients(scores, d_weights, POWER) * rows_gain
                    column += BLOCK_N
                row += BLOCK_M
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = d_bias_ptr + tl.cast(slab, tl.int64) * bias_M * bias_N
    if bias_M == 1 and bias_N == 1:
        tl.store(first, tl.sum(tl.sum(total, 1), 0))
    elif bias_M == 1:
        tl.store(first + n, tl.sum(total, 0), mask=n < bias_N)
    elif bias_N == 1:
        tl.store(first + m, tl.sum(total, 1), mask=m < bias_M)
    else:
        inside = (m < bias_M)[:, None] & (n < bias_N)[None, :]
        tl.store(first + m[:, None].to(tl.int64) * bias_N + n[None, :], total, mask=inside)
