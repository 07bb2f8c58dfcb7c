"""What the kernels for long sequences share: tiles of rows, tiles of scores, and where the edges of visibility lie.

A sequence's numbers travel as one tuple `place`: batch row, query head, key head, first query, first key, queries,
keys, keys that are real. Those of the scores travel as `band` = (left, right) and `cells` = pointers and strides of
bias and mask. KEYS is the axis of a tile along which keys lie: 1 forward, 0 where tiles are made transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rectiformer.ops.call import HIDING
from rectiformer.ops.kernels.parts import relu, visible

HIDDEN = tl.constexpr(HIDING)


@triton.jit
def find_place(
    sequence, head, group, M, N, lengths_ptr, q_bounds_ptr, k_bounds_ptr,
    RAGGED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Where the queries and keys of a sequence lie; packed ones share batch row 0."""
    q_start, k_start = 0, 0
    b = sequence
    if PACKED:
        q_start = tl.load(q_bounds_ptr + sequence).to(tl.int32)
        k_start = tl.load(k_bounds_ptr + sequence).to(tl.int32)
        M = tl.load(q_bounds_ptr + sequence + 1).to(tl.int32) - q_start
        N = tl.load(k_bounds_ptr + sequence + 1).to(tl.int32) - k_start
        b = sequence * 0
    length = N
    if RAGGED:
        length = tl.minimum(tl.load(lengths_ptr + sequence).to(tl.int32), N)
    return b, head, head // group, q_start, k_start, M, N, length


@triton.jit
def load_tile(
    source, ptr, strides, b, h, start, row, limit, D,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Rows `row` on of the sequence that begins at `start`: [BLOCK, BLOCK_D], zeros beyond the tensor.

    CLEAR: zeros from `limit` on also where the tensor goes on. `source` is a descriptor if TMA. Tiles to clear are read
    by pointers: clearing what the copy engine brought becomes wrong code under Triton 3.6's own ptxas (docs/log.md).
    """
    if TMA and not CLEAR:
        tile = source.load([b, h, start + row, 0]).reshape([BLOCK, BLOCK_D])
    else:
        inside = (row + tl.arange(0, BLOCK) < limit)[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
        tile = tl.load(tile_pointers(ptr, strides, b, h, start + row, BLOCK, BLOCK_D), mask=inside, other=0.0)
    return tile


@triton.jit
def store_tile(
    ptr, strides, b, h, start, row, limit, D, values, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    inside = ((row + tl.arange(0, BLOCK)) < limit)[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    pointers = tile_pointers(ptr, strides, b, h, start + row, BLOCK, BLOCK_D)
    tl.store(pointers, values.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def tile_pointers(ptr, strides, b, h, row, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Addresses [BLOCK, BLOCK_D]; the far part of an offset is 64 bits wide, the near part 32."""
    row, b, h = tl.cast(row, tl.int64), tl.cast(b, tl.int64), tl.cast(h, tl.int64)
    first = ptr + b * strides[0] + h * strides[1] + row * strides[2]
    return first + tl.arange(0, BLOCK)[:, None] * strides[2] + tl.arange(0, BLOCK_D)[None, :] * strides[3]


@triton.jit
def load_cells(ptr, strides, place, m, n, other, KEYS: tl.constexpr):
    """A tile of bias or mask, `other` beyond the queries and keys of the sequence; broadcast axes have stride 0."""
    b, h, _, _, _, M, N, _ = place
    row, column = tl.expand_dims(m, KEYS), tl.expand_dims(n, 1 - KEYS)
    first = ptr + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
    offsets = row.to(tl.int64) * strides[2] + column * strides[3]
    return tl.load(first + offsets, mask=(row < M) & (column < N), other=other)


@triton.jit
def seen_scores(
    scores, m, n, place, band, cells, inner,
    KEYS: tl.constexpr, EDGE: tl.constexpr, BANDED: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Scores, scaled by `inner` if INNER and biased if BIAS, with zeros where a query does not see a key.

    Without EDGE, bias and mask every cell is seen, or belongs to a key that was loaded as zeros.
    """
    bias_ptr, bias_strides, mask_ptr, mask_strides = cells
    if INNER:
        scores = scores * inner
    if BIAS:
        bias = load_cells(bias_ptr, bias_strides, place, m, n, 0.0, KEYS).to(tl.float32)
        scores = tl.where(bias <= HIDDEN, 0.0, scores + bias)
    if EDGE or BIAS or MASK:
        seen = visible(m, n, place[5], place[6], place[7], band[0], band[1], KEYS, BANDED)
        if MASK:
            seen = seen & (load_cells(mask_ptr, mask_strides, place, m, n, 0, KEYS) != 0)
        scores = tl.where(seen, scores, 0.0)
    return scores


@triton.jit
def rectified_powers(scores, DTYPE: tl.constexpr, POWER: tl.constexpr, ASM: tl.constexpr):
    """[scores]+ ** POWER in DTYPE. ASM folds the ReLU into the conversion, which Triton does not find by itself;
    it keeps NaN too."""
    if ASM and POWER == 1 and tl.bfloat16 == DTYPE:
        weights = tl.inline_asm_elementwise(
            "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,r,r", [scores], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif ASM and POWER == 1 and tl.float16 == DTYPE:
        weights = tl.inline_asm_elementwise(
            "cvt.rn.relu.f16x2.f32 $0, $2, $1;", "=r,r,r", [scores], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        rectified = relu(scores)
        weights = (rectified * rectified if POWER == 2 else rectified).to(DTYPE)
    return weights


@triton.jit
def score_gradients(scores, d_weights, POWER: tl.constexpr):
    """Gradients of scores from those of their rectified powers; 0 at 0 and passed at NaN, as torch has it."""
    if POWER == 2:
        d_weights = 2.0 * relu(scores) * d_weights
    return tl.where(scores <= 0.0, 0.0, d_weights)


@triton.jit
def logarithms(weights):
    """Natural ones; finite where a weight is 0."""
    return tl.log(tl.maximum(weights, 1.2e-38))


@triton.jit
def load_slopes(slopes, place, m, KEYS: tl.constexpr):
    """What queries' weights w add to their gradient through the sums of rows: a + b log w, a and b as row vectors.

    `slopes` = pointer to both, the head's first row there, a number to divide them by.
    """
    pointers = slopes[0] + 2 * tl.cast(slopes[1] + place[3] + m, tl.int64)
    even = tl.expand_dims(tl.load(pointers, mask=m < place[5], other=0.0), KEYS)
    steep = tl.expand_dims(tl.load(pointers + 1, mask=m < place[5], other=0.0), KEYS)
    return even / slopes[2], steep / slopes[2]


@triton.jit
def key_range(row, rows, place, band, BLOCK: tl.constexpr, BANDED: tl.constexpr):
    """Keys that queries `row` to `row + rows` see: begin and end of all tiles, and of those that all of them see."""
    _, _, _, _, _, M, N, length = place
    begin, full_begin, end, full_end = 0, 0, length, length
    if BANDED:
        first = row + (N - M)
        last = tl.minimum(row + rows, M) - 1 + (N - M)
        begin = tl.minimum(tl.maximum(first - band[0], 0), length)
        full_begin = tl.minimum(tl.maximum(last - band[0], 0), length)
        end = tl.maximum(tl.minimum(last + band[1] + 1, length), begin)
        full_end = tl.maximum(tl.minimum(first + band[1] + 1, length), 0)
    begin = begin // BLOCK * BLOCK
    full_begin = tl.cdiv(full_begin, BLOCK) * BLOCK
    return begin, full_begin, tl.maximum(full_end // BLOCK * BLOCK, full_begin), end


@triton.jit
def query_range(row, rows, place, band, BLOCK: tl.constexpr, BANDED: tl.constexpr):
    """Queries that see keys `row` to `row + rows`: begin and end of all tiles, and of those that see all of them."""
    _, _, _, _, _, M, N, length = place
    begin, full_begin, end, full_end = 0, 0, M, M
    if BANDED:
        shift = N - M
        last = tl.minimum(row + rows, length) - 1
        begin = tl.minimum(tl.maximum(row - band[1] - shift, 0), M)
        full_begin = tl.minimum(tl.maximum(last - band[1] - shift, 0), M)
        end = tl.maximum(tl.minimum(last + band[0] + 1 - shift, M), begin)
        full_end = tl.maximum(tl.minimum(row + band[0] + 1 - shift, M), 0)
    begin = begin // BLOCK * BLOCK
    full_begin = tl.cdiv(full_begin, BLOCK) * BLOCK
    return begin, full_begin, tl.maximum(full_end // BLOCK * BLOCK, full_begin), end
