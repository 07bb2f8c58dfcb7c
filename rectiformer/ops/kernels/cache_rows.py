"""Scores of a cache's keys and sums of its values, read where they lie: what goes between the two is not told here.

ancestors[r, n] is the cache row that holds position n of row r (INDEXED), else it is row r. Of a row only positions
from the first that a query sees up to its length are read, since the rest may hold anything. The programs of axis 2
take blocks of positions in turn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rectiformer.ops.kernels.decode import cache_rows, load_length


@triton.jit
def seen_span(lengths_ptr, r, left, room, BLOCK_N: tl.constexpr):
    """The first position that queries of row r see, where all end, and where this program's first block begins."""
    length = load_length(lengths_ptr, 1, r, room)
    first = tl.maximum(length - 1 - left, 0)
    return first, length, (first // BLOCK_N + tl.program_id(2)) * BLOCK_N


@triton.jit
def load_positions(
    cells, stride_batch, stride_row, ancestors_ptr, r, n, wanted, inside, room,
    INDEXED: tl.constexpr,
):  # fmt: skip
    """Keys or values [BLOCK_N, BLOCK_D] of the wanted positions in float32, zeros elsewhere; `cells` are row 0's."""
    rows = cache_rows(ancestors_ptr, room, r, n, wanted, INDEXED)
    places = rows * stride_batch + n.to(tl.int64) * stride_row
    return tl.load(cells + places[:, None], mask=wanted[:, None] & inside, other=0.0).to(tl.float32)


@triton.jit
def cache_scores(
    q_ptr, k_ptr, lengths_ptr, ancestors_ptr, scores_ptr,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column, H, K, Q, room, D, left,
    INDEXED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Products of the keys of one head with all queries that read it; scores that no query sees are not written."""
    r, head, group = tl.program_id(0).to(tl.int64), tl.program_id(1), H // K
    d = tl.arange(0, BLOCK_D)[None, :]
    first, length, begin = seen_span(lengths_ptr, r, left, room, BLOCK_N)
    k_cells = k_ptr + head.to(tl.int64) * k_head + d * k_column
    own_scores = scores_ptr + (r * K + head) * group * Q * room
    for start in range(begin, length, tl.num_programs(2) * BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        seen = (n >= first) & (n < length)
        k = load_positions(k_cells, k_batch, k_row, ancestors_ptr, r, n, seen, d < D, room, INDEXED)
        for m in range(group * Q):  # query m % Q of the group's head m // Q
            q_cells = q_ptr + r * q_batch + (head * group + m // Q) * q_head + m % Q * q_row
            q = tl.load(q_cells + d * q_column, mask=d < D, other=0.0).to(tl.float32)
            tl.store(own_scores + m * room + n, tl.sum(k * q, 1), mask=seen)


@triton.jit
def cache_mix(
    weights_ptr, v_ptr, lengths_ptr, ancestors_ptr, parts_ptr,
    v_batch, v_head, v_row, v_column, o_split, o_batch, o_row, o_head, o_column, H, K, Q, room, Dv, left,
    INDEXED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The values that one query's weights sum up, in the blocks of one split; those of weight 0 are not read."""
    r, h, query = tl.program_id(0).to(tl.int64), tl.program_id(1) // Q, tl.program_id(1) % Q
    dv = tl.arange(0, BLOCK_DV)[None, :]
    first, length, begin = seen_span(lengths_ptr, r, left, room, BLOCK_N)
    v_cells = v_ptr + (h // (H // K)).to(tl.int64) * v_head + dv * v_column
    own_weights = weights_ptr + (r * H * Q + tl.program_id(1)) * room
    mixed = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)  # each place of a block has sums of its own until the end
    for start in range(begin, length, tl.num_programs(2) * BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        weights = tl.load(own_weights + n, mask=(n >= first) & (n < length), other=0.0)
        wanted = weights != 0.0
        if tl.max(wanted.to(tl.int32), 0) > 0:
            v = load_positions(v_cells, v_batch, v_row, ancestors_ptr, r, n, wanted, dv < Dv, room, INDEXED)
            mixed += weights[:, None] * v
    out = tl.sum(mixed, 0)[None, :].to(parts_ptr.dtype.element_ty)
    out_cells = parts_ptr + tl.program_id(2).to(tl.int64) * o_split + r * o_batch + query * o_row + h * o_head
    tl.store(out_cells + dv * o_column, out, mask=dv < Dv)
